"""The command that predicts the hit rates of feature caches."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from gcnzc.cli.output import print_json
from gcnzc.cli.plots import HitRates, hit_rates
from gcnzc.cli.reports import cache
from gcnzc.graph import load
from gcnzc.loader import presampling
from gcnzc.loader.loader import Loader
from gcnzc.train.config import MOST_THREADS
from gcnzc.train.options import Fanouts, at_least, at_most, check_fanouts, check_numbers
from gcnzc.train.progress import Reporter
from gcnzc.tune import cache_forecast


@dataclass(frozen=True, kw_only=True)
class CacheForecastConfig:
    """Predict, before training, how many rows of a minibatch a hot set on the GPU would have.

    Prints one JSON line: for hot sets of several sizes, ranked by in-degree and by pre-sampling,
    the predicted hit rate and the bytes that a minibatch still brings over the bus.
    """

    data: tyro.conf.Positional[Path]
    """folder of a graph, prepared or in OGB's layout"""
    fanouts: Fanouts = (15, 10, 5)
    """neighbours kept, one number a layer, input layer first; -1 keeps all"""
    batch_size: int = 1024
    """seeds per minibatch"""
    batches: int = 100
    """minibatches that are drawn to predict from, in two halves"""
    gpus: int = 1
    """that split the hot set; with 1 each GPU has all of it"""
    measure: bool = False
    """also draw as many fresh minibatches, as training would, and count the hits"""
    threads: int = 0
    """threads that draw minibatches; 0 leaves the number to the loader"""
    seed: int = 0
    """seed of the run that is planned"""
    out: Path | None = None
    """picture to write: hit rate by size of the hot set; none if not given"""

    def __post_init__(self) -> None:
        check_numbers(self)
        at_least(1, "batch_size", self.batch_size)
        at_least(4, "batches", self.batches)
        at_least(1, "gpus", self.gpus)
        for name in ("threads", "seed"):
            at_least(0, name, getattr(self, name))
        at_most(MOST_THREADS, "threads", self.threads)
        check_fanouts(self.fanouts)


def cache_forecast_command(config: CacheForecastConfig, reporter: Reporter) -> None:
    """`gcnzc cache-forecast`."""
    loaded = load.load(config.data, allow_nan=True)
    graph, seeds, fanouts = loaded.graph, loaded.split["train"], list(config.fanouts)
    if loaded.table is None:
        raise ValueError(
            f"{loaded.name} has no features to cache\n\n"
            f"hint: `gcnzc embed {config.data} DEST` makes some from its edges"
        )
    threads, fresh = config.threads or None, None
    with reporter.task("count") as advance:
        counted = presampling.presample(
            graph,
            seeds,
            fanouts,
            config.batch_size,
            seed=config.seed,
            batches=config.batches,
            threads=threads,
            progress=advance,
        )
    if config.measure:
        loader = Loader(
            graph, None, seeds, fanouts, config.batch_size, seed=config.seed, threads=threads
        )
        with reporter.task("measure") as advance:
            fresh = presampling.count_accesses(loader, config.batches, advance)
    found = cache_forecast.forecast(
        counted, loaded.table, graph.in_degrees(), fresh, gpus=config.gpus
    )
    for line in cache.lines(found):
        reporter.say(line)
    if config.out is not None:
        hit_rates(HitRates(loaded.name, *cache.drawn(found)), config.out)
        reporter.say(f"wrote {config.out}")
    told = {"data": loaded.name, "fanouts": fanouts, "batch_size": config.batch_size}
    print_json(told | found)
