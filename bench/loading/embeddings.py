"""Time the training of embeddings in host memory, and measure its memory, next to torch's.

    python -m bench.loading.embeddings [--rows 10000000] [--adam-rows 5000000] [--rounds 40]

A step gathers the different rows of a minibatch in random order, computes a linear layer and a loss
and their gradients, and updates the rows. torch's case is `torch.nn.Embedding(sparse=True)` with
the same rule. The cases of a rule run in processes of their own, which alternate, so that a
temporary slowdown of the machine affects both.

`beside_bytes` is the peak of the resident memory of the process without the bytes of the table and
of the state. It includes Python and the libraries, `start_bytes`. The state of Adagrad begins at
0.1, so that all of its pages are resident.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import harness
from gcnzc.features import EmbeddingTable
from gcnzc.optim import SparseAdagrad, SparseAdam
from gcnzc.tune.search import interleave

COLUMNS, CLASSES = 64, 16
DRAWS = 120_000  # of rows for a minibatch
BATCHES = 16
THREADS = 2
INITIAL = 0.1
STATES = {"adagrad": 1, "adam": 2}  # tensors like the table
WARM_UP = 3


def main() -> None:
    """Measure both rules, or run one case for a parent process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the tables of Adagrad")
    parser.add_argument("--adam-rows", type=int, default=5_000_000, help="of the tables of Adam")
    parser.add_argument("--rounds", type=int, default=40, help="timed steps of each case")
    parser.add_argument("--folder", type=Path, help="for a saved table and state; deleted")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        library, rule, rows = options.case
        serve(library, rule, int(rows), options.folder)
        return
    # the lines state the threads of this process
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        compare("adagrad", options.rows, options.rounds, Path(folder))
        compare("adam", options.adam_rows, options.rounds, Path(folder))


def compare(rule: str, rows: int, rounds: int, folder: Path) -> None:
    """Record a line for each library, and the ratio of their times."""
    words = [sys.executable, "-m", "bench.loading.embeddings", "--folder", str(folder), "--case"]
    children = {}
    for library in ("gcnzc", "torch"):
        children[library] = subprocess.Popen(
            [*words, library, rule, str(rows)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # one after the other, so that each initialization has both cores
        ask(children[library], "start")
    seconds = interleave(
        children,
        lambda library: float(ask(children[library], "step")["seconds"]),
        rounds,
        warm_up=WARM_UP,
        shuffler=random.Random(0),
    )
    medians = {}
    for library, child in children.items():
        found = ask(child, "end")
        child.wait()
        timing = harness.timing_of(seconds[library])
        medians[library] = timing.median_s
        rate = found.pop("rows_per_step") / timing.median_s
        of = {"library": library, "rule": rule, "rows": rows, "columns": COLUMNS}
        harness.record("embeddings", of, timing, rows_per_s=rate, **found)
    times = medians["torch"] / medians["gcnzc"]
    harness.record(
        "embeddings", {"ratio": "torch / gcnzc", "rule": rule, "rows": rows}, times=times
    )


def ask(child: subprocess.Popen[str], what: str) -> dict[str, Any]:
    """Send a line to a process, and return its answer."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{what}\n")
    child.stdin.flush()
    return dict(json.loads(child.stdout.readline()))


def serve(library: str, rule: str, rows: int, folder: Path) -> None:
    """Build a case, and answer the lines of the parent process."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    batches = [draw_ids(rows) for _ in range(BATCHES)]
    start_bytes = resident_bytes("VmRSS")
    begin = time.perf_counter()
    layer = nn.Linear(COLUMNS, CLASSES)
    take_step, save = CASES[library](rule, rows, layer)
    numbers = {"start_s": time.perf_counter() - begin}
    number = 0
    for line in sys.stdin:
        answer: dict[str, Any] = {}
        if line == "step\n":
            ids = batches[number % BATCHES]
            number += 1
            begin = time.perf_counter()
            take_step(ids)
            answer = {"seconds": time.perf_counter() - begin}
        elif line == "end\n":
            beside = 4 * rows * COLUMNS * (1 + STATES[rule])
            answer = {
                **numbers,
                **save(folder),
                "rows_per_step": sum(map(len, batches)) / BATCHES,
                "table_and_state_bytes": beside,
                "start_bytes": start_bytes,
                "peak_bytes": resident_bytes("VmHWM"),
                "beside_bytes": resident_bytes("VmHWM") - beside,
            }
        print(json.dumps(answer), flush=True)
        if line == "end\n":
            return


def draw_ids(rows: int) -> torch.Tensor:
    """Return the different rows of a minibatch in random order; some rows are more frequent."""
    ids = (torch.rand(DRAWS, dtype=torch.float64) ** 2 * rows).long().unique()
    return ids[torch.randperm(len(ids))]


def loss_of(layer: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    """Return the loss of a minibatch."""
    return layer(rows).square().mean()


def build_own(
    rule: str, rows: int, layer: nn.Linear
) -> tuple[Callable[[torch.Tensor], None], Callable[[Path], dict[str, float]]]:
    """Return the step of gcnzc, and a function that times saving and loading."""
    table = EmbeddingTable(rows, COLUMNS)
    optimizer = (
        SparseAdagrad(table, initial_accumulator_value=INITIAL)
        if rule == "adagrad"
        else SparseAdam(table)
    )

    def take_step(ids: torch.Tensor) -> None:
        loss_of(layer, table.gather(ids)).backward()
        optimizer.step()
        layer.zero_grad()

    def save(folder: Path) -> dict[str, float]:
        path = folder / f"{rule}.npz"
        begin = time.perf_counter()
        optimizer.save(path)
        saved = time.perf_counter()
        optimizer.load(path)
        loaded = time.perf_counter()
        path.unlink()
        return {"save_s": saved - begin, "load_s": loaded - saved}

    return take_step, save


def build_torch(
    rule: str, rows: int, layer: nn.Linear
) -> tuple[Callable[[torch.Tensor], None], Callable[[Path], dict[str, float]]]:
    """Return the step of torch, and a function that measures nothing."""
    table = nn.Embedding(rows, COLUMNS, sparse=True)
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adagrad(table.parameters(), initial_accumulator_value=INITIAL)
        if rule == "adagrad"
        else torch.optim.SparseAdam(table.parameters())
    )

    def take_step(ids: torch.Tensor) -> None:
        loss_of(layer, table(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
        layer.zero_grad()

    return take_step, lambda folder: {}


CASES = {"gcnzc": build_own, "torch": build_torch}


def resident_bytes(which: str) -> int:
    """Return the resident memory, "VmRSS", or its peak, "VmHWM"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))


if __name__ == "__main__":
    main()
