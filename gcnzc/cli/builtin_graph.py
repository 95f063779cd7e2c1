"""The built-in graph: generated on first use, then kept."""

import fcntl
import shutil
from pathlib import Path

from gcnzc.datasets import generate
from gcnzc.graph import prepare
from gcnzc.system.files import cache_folder
from gcnzc.train.progress import Reporter

# the name carries a version: another generator makes another folder
NAME = "planted-arxiv-1"


SHAPE = "ogbn-arxiv"


SEED = 0


def folder() -> Path:
    """Where the built-in graph is kept: in the user's cache."""
    return cache_folder() / NAME


def prepared(reporter: Reporter) -> Path:
    """The folder of the built-in graph, of ogbn-arxiv's shape; it is made if it is not there.

    Raises:
        OSError: the cache may not be written.
        RuntimeError: the disk is full.
    """
    place = folder()
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f".{NAME}.lock").open("w") as lock:
        # another process may be making it; the kernel lets go of the lock if that one dies
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            reporter.say(f"making the built-in graph in {place}, once")
            _make(place, reporter)
    return place


def _make(place: Path, reporter: Reporter) -> None:
    # by way of OGB's layout, as a graph of the user's own
    workshop = place.with_name(f"{NAME}-raw")
    shutil.rmtree(workshop, ignore_errors=True)
    workshop.mkdir()
    raw = workshop / NAME
    try:
        with reporter.stages("make") as progress:
            generate.make(raw, "planted", generate.like(SHAPE), seed=SEED, progress=progress)
        with reporter.stages("prepare") as progress:
            prepare.prepare(raw, place, progress=progress)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
