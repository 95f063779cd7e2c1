"""Compare the predicted hit rates of feature caches with those of training runs.

Graphs of the generators and real ones, two kinds of minibatches, both rankings. What is measured
are the minibatches of a run's first epochs. Lines tell what counting 20, 100 or 400 minibatches
before training predicts and brings; those with `rows` what a CPU's gather pays for counting hits.

usage: python -m bench.loading.feature_cache [--real FOLDER]
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench import harness
from gcnzc.datasets.generate import Shape, make
from gcnzc.features import access_counts
from gcnzc.features import cache as features_cache
from gcnzc.features.table import FeatureTable
from gcnzc.graph import load
from gcnzc.graph.graph import Graph
from gcnzc.loader import presampling
from gcnzc.loader.loader import Loader
from gcnzc.tune import cache_forecast
from gcnzc.tune.search import interleave

ROOT = Path(__file__).parents[2]
MADE = {"planted": Shape(200_000, 2_000_000, 4, 10), "rmat": Shape(200_000, 2_000_000, 4, 10)}
REAL = ("amazon_computers", "coauthor_physics", "ogbn_arxiv_structure", "tolokers")
DRAWS = (((15, 10, 5), 1024), ((10, 5), 256))  # fan-outs and seeds of a minibatch
SHARES = (0.01, 0.05, 0.2)
COUNTED = (20, 400)  # besides the usual number
LEAST_MEASURED = 100  # minibatches, and at least an epoch
TABLES = ((100, torch.float32), (10, torch.float32), (128, torch.float16), (602, torch.float32))
TABLE_ROWS, BATCH_ROWS = 1_000_000, 200_000
ROUNDS, WARMUP = 80, 5


def main() -> None:
    """Measure, and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--real", type=Path, default=ROOT.parent / "shared" / "data")
    options = parser.parse_args()
    for name, graph, seeds in graphs(options.real):
        for fanouts, batch_size in DRAWS:
            compare(name, graph, seeds, fanouts, batch_size)
    cost()


def graphs(real: Path) -> Iterator[tuple[str, Graph, Tensor]]:
    """Names, graphs and training nodes."""
    for name, shape in MADE.items():
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder) / name, name, shape)
            loaded = load.load(Path(folder) / name)
        yield name, loaded.graph, loaded.split["train"]
    for name in REAL:
        path = real / name / f"{name}.npz"
        if path.exists():
            loaded = load.load(path, allow_nan=True)
            yield name, loaded.graph, loaded.split["train"]


def compare(
    name: str, graph: Graph, seeds: Tensor, fanouts: tuple[int, ...], batch_size: int
) -> None:
    """Record one line for each ranking, cache size, and number of counted minibatches."""
    loader = Loader(graph, None, seeds, fanouts, batch_size)
    measured = max(len(loader), LEAST_MEASURED)
    fresh, degrees = presampling.count_accesses(loader, measured), graph.in_degrees()
    # rates do not depend on what the rows hold
    table = FeatureTable(torch.empty(graph.num_nodes, 1))
    draw = {"graph": name, "fanouts": ",".join(map(str, fanouts)), "batch_size": batch_size}
    for batches in (*COUNTED, presampling.BATCHES):
        begin = time.perf_counter()
        counted = presampling.presample(graph, seeds, fanouts, batch_size, batches=batches)
        seconds = time.perf_counter() - begin
        found = cache_forecast.forecast(counted, table, degrees, fresh, SHARES)
        for line in found["sizes"]:
            for ranking in access_counts.RANKINGS:
                figures = line[ranking]
                rates = {key: figures[f"{key}_hit_rate"] for key in ("predicted", "measured")}
                harness.record(
                    "hot",
                    draw | {"counted": batches, "ranking": ranking, "share": line["share"]},
                    **rates,
                    difference=rates["predicted"] - rates["measured"],
                    count_s=seconds,
                    measured_batches=measured,
                    nodes=graph.num_nodes,
                    nodes_per_batch=counted.nodes_per_batch,
                )


def cost() -> None:
    """Record one line for each table: a gather by one thread of newly sampled ids."""
    shuffler, chosen = random.Random(0), torch.Generator().manual_seed(0)
    for columns, dtype in TABLES:
        table = FeatureTable(torch.ones(TABLE_ROWS, columns, dtype=dtype))
        cached = features_cache.cached(table, 0.2, torch.rand(TABLE_ROWS), device="cpu")
        out = torch.empty(BATCH_ROWS, columns, dtype=dtype)
        ways = {"plain": table, "cached": cached}

        def seconds(way: str, ways=ways, out=out) -> float:
            ids = torch.randint(TABLE_ROWS, (BATCH_ROWS,), generator=chosen)
            begin = time.perf_counter()
            ways[way].gather(ids, out, threads=1)
            return time.perf_counter() - begin

        taken = interleave(ways, seconds, ROUNDS, warm_up=WARMUP, shuffler=shuffler)
        timings = {way: harness.timing_of(taken[way]) for way in ways}
        for way, timing in timings.items():
            harness.record(
                "hot",
                {"rows": BATCH_ROWS, "columns": columns, "dtype": str(dtype), "way": way},
                timing,
                of_plain=timing.median_s / timings["plain"].median_s,
            )


if __name__ == "__main__":
    main()
