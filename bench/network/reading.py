"""Record which files of gcnzc one step of a method runs through: what a reader of the step reads.

    python -m bench.network.reading

Two processes train a small model over gloo. A profiler of Python's function calls notes the files
that the last step enters in the main thread: a compressed step of 1-bit Adam, and a step of DiLoCo
that synchronizes. `num_lines` are those of whole files, `num_code_lines` those without blank lines,
comments and docstrings. `classes_above` are base classes of the method that are gcnzc's.

The method `TrainConfig` stands for a run of `gcnzc.train.train` on a generated graph: the files are
those with functions that receive its options as a whole, and the packages are theirs.
"""

import ast
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import gcnzc
from bench.harness import record
from bench.network import tasks
from bench.network.tasks import Line
from gcnzc import optim
from gcnzc.datasets.generate import Shape, make
from gcnzc.exchange import Group
from gcnzc.train import train
from gcnzc.train.config import TrainConfig

MODULE, PACKAGE = "bench.network.reading", Path(gcnzc.__file__).parent
WORKERS, STEPS = 2, 12
# each of them exchanges in the last step
METHODS: dict[str, Callable[[Any, Group], optim.DistributedOptimizer]] = {
    "1-bit Adam": lambda p, g: optim.OneBitAdam(p, lr=0.01, warmup=4, group=g),
    "DiLoCo": lambda p, g: optim.DiLoCo(torch.optim.AdamW(p, 0.01), local_steps=4, group=g),
}


def main() -> None:
    """Record a line for each method."""
    own = [{"method": name} for name in METHODS]
    for line in tasks.run_here(WORKERS, tasks.command(MODULE, own)):
        record("reading", {"method": line.pop("method")}, **line)
    with tempfile.TemporaryDirectory() as folder:
        graph, run = Path(folder, "graph"), Path(folder, "run")
        make(graph, "planted", Shape(1000, 5000, 16, 4))
        config = TrainConfig(data=graph, epochs=2)
        paths = files_entered_by(lambda: train(config, run), TrainConfig)
    line = describe(paths, TrainConfig)
    packages = len({name.split("/")[0] for name in line["names"]})
    record("reading", {"method": "TrainConfig"}, **line, packages=packages)


def read_step(group: Group, task: Line) -> Iterator[Line]:
    """Train, and yield what the last step enters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 3))
    optimizer = METHODS[task["method"]](model.parameters(), group)
    for _ in range(STEPS - 1):
        compute_gradients(model)
        optimizer.step()
    compute_gradients(model)
    yield task | describe(files_entered_by(optimizer.step), type(optimizer))


def describe(paths: Sequence[Path], kind: type) -> Line:
    """Return the sizes and names of files of gcnzc, and the classes above a class."""
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}
    classes = [f"{each.__module__}.{each.__name__}" for each in kind.__mro__[1:]]
    classes = [name for name in classes if name.startswith("gcnzc.")]
    return {
        "files": len(texts),
        "num_lines": sum(len(text.splitlines()) for text in texts.values()),
        "num_code_lines": sum(map(count_code, texts.values())),
        "classes_above": len(classes),
        "names": list(texts),
        "classes": classes,
    }


def compute_gradients(model: nn.Module) -> None:
    """Set the gradients of a random minibatch."""
    model.zero_grad()
    model(torch.randn(8, 20)).square().mean().backward()


def files_entered_by(function: Callable[[], object], kind: type = object) -> list[Path]:
    """Return gcnzc's files with functions that a call enters with an argument of a class.

    Only Python functions in this thread count; by default those without arguments do as well.
    """
    entered = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if event == "call" and (
            kind is object or any(isinstance(frame.f_locals.get(each), kind) for each in names)
        ):
            entered.add(Path(code.co_filename))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return sorted(path for path in entered if path.is_relative_to(PACKAGE))


def count_code(text: str) -> int:
    """Return the number of lines without blank lines, comments and docstrings."""
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    code = {number for number, line in lines if line and not line.startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            code.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code)


if __name__ == "__main__":
    if tasks.is_worker():
        tasks.serve(read_step)
    else:
        main()
