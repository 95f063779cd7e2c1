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
from gcnzc.train.option_groups import MAX_THREADS
from gcnzc.train.options import Fanouts, at_least, at_most, check_fanouts, check_options
from gcnzc.train.progress import Reporter
from gcnzc.tune import cache_forecast


@dataclass(frozen=True, kw_only=True)
class CacheForecastConfig:
    """Predict the hit rate of a feature cache on the GPU, before training.

    Prints one JSON line: for caches of several sizes, filled by in-degree and by presampling, the
    predicted hit rate, and the bytes of a minibatch that still cross the bus.
    """

    data: tyro.conf.Positional[Path]
    """folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file"""
    fanouts: Fanouts = (15, 10, 5)
    """neighbours sampled per node, one number per layer, input layer first; -1 samples all"""
    batch_size: int = 1024
    """seed nodes per minibatch"""
    batches: int = 100
    """minibatches to sample for the prediction, in two equal halves"""
    gpus: int = 1
    """GPUs that the cache is sharded over, as with `gcnzc train --cache-sharded`; with 1, each GPU
    has a copy of all cached rows"""
    measure: bool = False
    """also sample this number of other minibatches, as training does, and measure the hit rate"""
    threads: int = 0
    """threads that sample minibatches; 0: one per core, at most 4"""
    seed: int = 0
    """random seed of the run to predict for"""
    out: Path | None = None
    """image to write: hit rate by cache size; none if not given"""

    def __post_init__(self) -> None:
        check_options(self)
        at_least(1, "batch_size", self.batch_size)
        at_least(4, "batches", self.batches)
        if self.batches % 2:
            raise ValueError(
                f"--batches must be even, got {self.batches}\n\n"
                "hint: the minibatches form two equal halves; the default is 100"
            )
        at_least(1, "gpus", self.gpus)
        for name in ("threads", "seed"):
            at_least(0, name, getattr(self, name))
        at_most(MAX_THREADS, "threads", self.threads)
        check_fanouts(self.fanouts)


def cache_forecast_command(config: CacheForecastConfig, reporter: Reporter) -> None:
    """`gcnzc cache-forecast`."""
    loaded = load.load(config.data, allow_nan=True)
    graph, seeds, fanouts = loaded.graph, loaded.split["train"], list(config.fanouts)
    if loaded.table is None:
        raise ValueError(
            f"{loaded.name} has no features to cache\n\n"
            f"hint: `gcnzc embed {config.data} DEST` computes features from the edges"
        )
    threads, fresh = config.threads or None, None
    with reporter.task("count feature accesses") as advance:
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
        with reporter.task("measure the hit rate") as advance:
            fresh = presampling.count_accesses(loader, config.batches, advance)
    found = cache_forecast.forecast(
        counted, loaded.table, graph.in_degrees(), fresh, gpus=config.gpus
    )
    for line in cache.format_forecast(found):
        reporter.say(line)
    if config.out is not None:
        hit_rates(HitRates(loaded.name, *cache.hit_rate_points(found)), config.out)
        reporter.say(f"wrote {config.out}")
    options = {"data": loaded.name, "fanouts": fanouts, "batch_size": config.batch_size}
    print_json(options | found)
