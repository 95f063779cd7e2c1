"""The built-in graph: generated on first use, and stored in the user's cache folder."""

import shutil
from pathlib import Path

from gcnzc._files import locked_file
from gcnzc.datasets import generate
from gcnzc.graph import prepare
from gcnzc.system.files import cache_folder
from gcnzc.train.progress import Reporter

# the name ends in a version, which changes with the generator
NAME = "planted-arxiv-1"


SHAPE = "ogbn-arxiv"


SEED = 0


def folder() -> Path:
    """Return the folder of the built-in graph, in the user's cache folder."""
    return cache_folder() / NAME


def prepared(reporter: Reporter) -> Path:
    """Return the folder of the built-in graph, which has the sizes of ogbn-arxiv.

    The graph is generated if the folder does not exist.

    Raises:
        OSError: the cache folder is not writable.
        RuntimeError: the disk is full.
    """
    graph = folder()
    if graph.exists():
        return graph
    graph.parent.mkdir(parents=True, exist_ok=True)
    # another process may be generating it
    with locked_file(graph.parent / f".{NAME}.lock"):
        if not graph.exists():
            reporter.say(f"generating the built-in graph in {graph}; this happens only once")
            _generate(graph, reporter)
    return graph


def _generate(graph: Path, reporter: Reporter) -> None:
    # generated in OGB's layout and then prepared, as a graph of the user is
    temporary = graph.with_name(f"{NAME}-raw")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    raw = temporary / NAME
    try:
        with reporter.stages("generate") as progress:
            generate.make(raw, "planted", generate.like(SHAPE), seed=SEED, progress=progress)
        with reporter.stages("prepare") as progress:
            prepare.prepare(raw, graph, progress=progress)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
