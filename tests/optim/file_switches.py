"""Count how often one step of an optimizer moves from one file of gcnzc to another.

`PYTHONPATH=.:tests python -m optim.file_switches` prints the counts of a compressed step of 1-bit
Adam on rank 0 of four processes.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from optim.replicas import gradients_of
from optim.models import Everything, batches
from processes import results

import gcnzc
from gcnzc.exchange import init_group
from gcnzc.optim import OneBitAdam

ROOT = Path(gcnzc.__file__).parent
WARMUP, TRACED = 3, 8


def file_of(frame: FrameType | None) -> str:
    """The file of gcnzc that a frame runs, or that has called it from outside of gcnzc."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT)):
            return name.removeprefix(f"{ROOT}/")
        frame = frame.f_back
    return ""


def count_switches(function: Callable[[], object]) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """Run a function, and count its switches between files of gcnzc, and its calls.

    A switch is a call, a return, or the start or end of a generator's turn, after which another
    file runs.

    Returns:
        The number of switches by the files before and after, and the number of calls by function,
        also of functions outside of gcnzc. Each turn of a generator is a call.
    """
    switches: Counter[tuple[str, str]] = Counter()
    calls: Counter[str] = Counter()
    last = ""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal last
        if event not in ("call", "return"):
            return
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        now = file_of(frame if event == "call" else frame.f_back)
        if now and last and now != last:
            switches[last, now] += 1
        last = now or last

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return switches, calls


def trace_compressed_step() -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """The counts of a step of 1-bit Adam whose variance is frozen; run by each process."""
    with init_group() as group:
        model = Everything().float()
        optimizer = OneBitAdam(
            model.parameters(), lr=0.01, warmup=WARMUP, refresh=0, reactivate="refresh", group=group
        )
        *before, last = batches(TRACED)
        for rows in before:
            gradients_of(model, optimizer, rows)
            optimizer.step()
        gradients_of(model, optimizer, last)
        assert not optimizer.is_gradient_step
        return count_switches(optimizer.step)


def main() -> None:
    """Print the counts of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        switches, calls = results(4, Path(folder), trace_compressed_step)[0]
    own = sum(count for name, count in calls.items() if name.startswith(str(ROOT)))
    print(f"{switches.total()} switches, {calls.total()} calls, {own} of them in gcnzc")
    for (before, after), count in switches.most_common():
        print(f"{count:5} {before} -> {after}")
    for name, count in calls.most_common():
        print(f"{count:5} {name.removeprefix(f'{ROOT.parent}/')}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
