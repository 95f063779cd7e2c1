"""Count how often one step of an optimizer moves from one file of gcnzc to another.

`PYTHONPATH=.:tests python -m optim.file_switches` prints the counts of a compressed step of 1-bit
Adam on rank 0 of two processes. The number of processes is an optional argument.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from processes import results
from torch import nn

import gcnzc
from gcnzc.exchange import init_group
from gcnzc.optim import OneBitAdam

ROOT = Path(gcnzc.__file__).parent
STEPS = 8

Switches = Counter[tuple[str, str]]
"""how often execution enters a file, by the file that runs before and the one that is entered"""


def find_file(frame: FrameType | None) -> str:
    """The file of gcnzc that a frame runs, or that has called it from outside of gcnzc."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{ROOT}/"):
            return name.removeprefix(f"{ROOT}/")
        frame = frame.f_back
    return ""


def count_switches(function: Callable[[], object]) -> tuple[Switches, Counter[str]]:
    """Run a function, and count how often it enters another file of gcnzc, and its calls.

    A file is entered by a call of one of its functions, and by each turn of one of its generators.
    The return to the file before is not counted.

    Returns:
        The switches, and the number of calls of Python functions by file, of any package; each turn
        of a generator is a call.
    """
    switches: Switches = Counter()
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        calls[frame.f_code.co_filename.removeprefix(f"{ROOT}/")] += 1
        before, entered = find_file(frame.f_back), find_file(frame)
        if before and entered != before:
            switches[before, entered] += 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return switches, calls


def count_outside(switches: Switches, *packages: str) -> int:
    """The number of switches, except those from one file of a package to another of the same."""
    return sum(
        count
        for (before, entered), count in switches.items()
        if not any(
            before.startswith(f"{each}/") and entered.startswith(f"{each}/") for each in packages
        )
    )


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(2 * step + rank)
    model(torch.randn(16, 5, generator=generator)).square().sum().backward()


def trace_compressed_step() -> tuple[Switches, Counter[str]]:
    """The counts of a step of 1-bit Adam whose variance is frozen; run by each process."""
    with init_group() as group:
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup=3, refresh=0, group=group)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, group.rank, step)
            if step < STEPS - 1:
                optimizer.step()
        assert not optimizer.is_gradient_step
        return count_switches(optimizer.step)


def trace_on_processes(world_size: int, folder: Path) -> tuple[Switches, Counter[str]]:
    """The counts of `trace_compressed_step` on rank 0."""
    switches, calls = results(world_size, folder, trace_compressed_step)[0]
    return switches, calls


def lines_of(switches: Switches, calls: Counter[str]) -> Iterable[str]:
    own = sum(count for name, count in calls.items() if not name.startswith(("/", "<")))
    yield f"{switches.total()} switches of files"
    yield f"{count_outside(switches, 'exchange')} without those inside of gcnzc/exchange"
    yield f"{count_outside(switches, 'exchange', 'kernels')} also without those of gcnzc/kernels"
    yield f"{calls.total()} calls of Python functions, {own} of them of gcnzc"
    for (before, entered), count in switches.most_common():
        yield f"{count:5} {before} -> {entered}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        counts = trace_on_processes(int((*sys.argv[1:], 2)[0]), Path(folder))
    sys.stdout.write("\n".join(lines_of(*counts)) + "\n")
