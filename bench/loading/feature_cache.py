"""Measure how well presampling predicts the hit rate of the feature cache.

    python -m bench.loading.feature_cache [--real FOLDER]

The graphs are generated ones and real ones, with two minibatch settings and both rankings of nodes.
The hit rate is predicted from 20, 100 or 400 minibatches that are sampled before training, and
measured on the minibatches of the first epochs of a run. Lines with `rows` have the time of a
gather on the CPU from a table with a feature cache, relative to the plain table: the cost of
counting hits.
"""

import argparse
import itertools
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench import harness
from gcnzc.datasets.generate import Shape, make
from gcnzc.features import cache as features_cache
from gcnzc.features.access_counts import compute_hit_rates, rank_by_score
from gcnzc.features.table import FeatureTable
from gcnzc.graph import load
from gcnzc.graph.graph import Graph
from gcnzc.loader import presampling
from gcnzc.loader.loader import Loader
from gcnzc.tune.search import interleave

ROOT = Path(__file__).parents[2]
GENERATED = {"planted": Shape(200_000, 2_000_000, 4, 10), "rmat": Shape(200_000, 2_000_000, 4, 10)}
REAL = ("amazon_computers", "coauthor_physics", "ogbn_arxiv_structure", "tolokers")
SETTINGS = (((15, 10, 5), 1024), ((10, 5), 256))  # fan-outs and seeds of a minibatch
SHARES = (0.01, 0.05, 0.2)
COUNTED = (20, 400)  # presampled minibatches, besides the default number
LEAST_MEASURED = 100  # minibatches; more if an epoch has more
TABLES = ((100, torch.float32), (10, torch.float32), (128, torch.float16), (602, torch.float32))
TABLE_ROWS, BATCH_ROWS = 1_000_000, 200_000
ROUNDS, WARMUP = 80, 5


def main() -> None:
    """Measure all graphs and settings, and record the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--real", type=Path, default=ROOT.parent / "shared" / "data", help="of graphs"
    )
    options = parser.parse_args()
    for name, graph, seeds in graphs(options.real):
        for fanouts, batch_size in SETTINGS:
            compare(name, graph, seeds, fanouts, batch_size)
    measure_cost()


def graphs(real: Path) -> Iterator[tuple[str, Graph, Tensor]]:
    """Yield the name, the graph and the training nodes of each dataset."""
    for name, shape in GENERATED.items():
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
    """Record a line for each ranking, cache size and number of presampled minibatches."""
    loader = Loader(graph, None, seeds, fanouts, batch_size)
    measured = max(len(loader), LEAST_MEASURED)
    fresh, degrees = count_accesses(loader, measured), graph.in_degrees()
    sizes = [round(share * graph.num_nodes) for share in SHARES]
    setting = {"graph": name, "fanouts": ",".join(map(str, fanouts)), "batch_size": batch_size}
    for batches in (*COUNTED, presampling.BATCHES):
        begin = time.perf_counter()
        counted = presampling.presample(graph, seeds, fanouts, batch_size, batches=batches)
        seconds = time.perf_counter() - begin
        by_degree = rank_by_score(degrees)
        predicted = {
            "in-degree": compute_hit_rates(by_degree, sum(counted.halves), sizes),
            "presampled": counted.hit_rates(sizes),
        }
        rankings = {"in-degree": by_degree, "presampled": rank_by_score(counted.scores)}
        for name_of_ranking, ranking in rankings.items():
            rates = predicted[name_of_ranking], compute_hit_rates(ranking, fresh, sizes)
            for share, one, other in zip(SHARES, *rates, strict=True):
                harness.record(
                    "hot",
                    setting | {"counted": batches, "ranking": name_of_ranking, "share": share},
                    predicted=one,
                    measured=other,
                    difference=one - other,
                    count_s=seconds,
                    measured_batches=measured,
                    nodes=graph.num_nodes,
                    nodes_per_batch=counted.nodes_per_batch,
                )


def count_accesses(loader: Loader, batches: int) -> Tensor:
    """Return how many of the next minibatches of a loader contain each node, (N,) int32."""
    counts = torch.zeros(loader.graph.num_nodes, dtype=torch.int32)
    epochs = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    for batch in itertools.islice(epochs, batches):
        counts[batch.nodes] += 1
    return counts


def measure_cost() -> None:
    """Record gathers of random ids with one thread, with and without a cache, for each table."""
    shuffler, generator = random.Random(0), torch.Generator().manual_seed(0)
    for columns, dtype in TABLES:
        table = FeatureTable(torch.ones(TABLE_ROWS, columns, dtype=dtype))
        cached = features_cache.cached(table, 0.2, torch.rand(TABLE_ROWS), device="cpu")
        out = torch.empty(BATCH_ROWS, columns, dtype=dtype)
        tables = {"plain": table, "cached": cached}

        def seconds(name: str, tables=tables, out=out) -> float:
            ids = torch.randint(TABLE_ROWS, (BATCH_ROWS,), generator=generator)
            begin = time.perf_counter()
            tables[name].gather(ids, out, threads=1)
            return time.perf_counter() - begin

        taken = interleave(tables, seconds, ROUNDS, warm_up=WARMUP, shuffler=shuffler)
        timings = {name: harness.timing_of(taken[name]) for name in tables}
        for name, timing in timings.items():
            harness.record(
                "hot",
                {"rows": BATCH_ROWS, "columns": columns, "dtype": str(dtype), "way": name},
                timing,
                of_plain=timing.median_s / timings["plain"].median_s,
            )


if __name__ == "__main__":
    main()
