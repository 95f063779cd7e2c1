"""Measure the memory of all workers of one machine, compared with a single worker.

    python -m bench.data.shared_memory [--megabytes 200] [--workers 1 2 4] [--folder FOLDER]

It generates a graph whose features take the given number of megabytes, in OGB's layout and
prepared. Each worker is a process. All workers first compute the outputs of a model on a small
graph, so that the memory of Python, torch and compiled kernels (`idle_bytes`) can be subtracted.
Then they load the graph and read all of it (`loaded_bytes`), and compute and keep the outputs of a
model for all nodes (`evaluated_bytes`). Each figure is the sum over the workers of the proportional
set size (Pss of /proc/PID/smaps_rollup), in which a page shared by several processes counts once.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch

from bench.harness import record
from bench.network.tasks import run_here
from gcnzc.datasets.generate import Shape, make
from gcnzc.exchange import Group, init_group, run
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.graph.dataset import Dataset
from gcnzc.graph.prepare import prepare
from gcnzc.models.gnn import SAGE
from gcnzc.train.inference import inference
from gcnzc.train.shared_data import load_shared

NUM_FEATURES, HIDDEN, CLASSES = 512, 64, 16
# largest memory of several workers, relative to that of one worker, minus 1
LIMIT = 0.1


def main() -> None:
    """Measure every layout with every number of workers, and record each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--folder", type=Path, default=Path("data/shared_memory"))
    parser.add_argument("--work", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    shutil.rmtree(options.folder, ignore_errors=True)
    nodes = int(options.megabytes * 1e6 / (4 * NUM_FEATURES))
    for name, count in {"small": 1000, "ogb": nodes}.items():
        shape = Shape(count, 5 * count, NUM_FEATURES, CLASSES)
        make(options.folder / name, "rmat", shape, seed=0)
    prepare(options.folder / "ogb", options.folder / "prepared")
    for layout in ("ogb", "prepared"):
        first = 0
        for workers in options.workers:
            memory = measure(workers, options.folder / "small", options.folder / layout)
            first = first or memory["loaded_bytes"]
            more = memory["loaded_bytes"] / first - 1
            case = {"layout": layout, "workers": workers, "nodes": nodes}
            case["feature_bytes"] = nodes * NUM_FEATURES * 4
            record("shared_memory", case, None, **memory, more_than_first=more)
            if more > LIMIT:
                print(f"{workers} workers use {more:.0%} more memory than {options.workers[0]}")
    shutil.rmtree(options.folder)


def measure(workers: int, *folders: Path) -> dict[str, int]:
    """Start workers, and return the sums of the memory that they measured."""
    words = [sys.executable, "-m", "bench.data.shared_memory", "--work", *map(str, folders)]
    return next(run_here(workers, words))


def work(small: Path, folder: Path) -> None:
    """Run one worker; rank 0 prints the memory of all workers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with init_group() as group:
        data = load_shared(small, group)
        read(data)
        compute_outputs(data, group)
        del data
        idle = total_bytes(group)
        data = load_shared(folder, group)
        read(data)
        loaded = total_bytes(group)
        outputs = compute_outputs(data, group)
        evaluated = total_bytes(group)
        assert len(outputs) == data.graph.num_nodes
        if group.rank == 0:
            added = {"loaded_bytes": loaded - idle, "evaluated_bytes": evaluated - idle}
            print(json.dumps({"idle_bytes": idle} | added))


def total_bytes(group: Group) -> int:
    """Return the bytes of all workers, which are read when all workers have called this."""
    run(all_gather_scalar(0), group)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kilobytes = int(next(line.split()[1] for line in lines if line.startswith("Pss:")))
    return 1024 * sum(run(all_gather_scalar(kilobytes), group))


def read(data: Dataset) -> None:
    """Read every page of a graph."""
    assert data.table is not None, "the graph is generated with features"
    for array in (data.graph.indptr, data.graph.indices, data.labels, data.table.rows):
        array.sum()


def compute_outputs(data: Dataset, group: Group) -> torch.Tensor:
    """Compute the outputs of a model for all nodes."""
    assert data.table is not None, "the graph is generated with features"
    model = SAGE(NUM_FEATURES, HIDDEN, data.num_classes, num_layers=2)
    return inference(model, data.graph, data.table, group=group)


if __name__ == "__main__":
    main()
