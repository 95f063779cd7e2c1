"""The graph that is there without any data: made on first use, then kept."""

import os
import shutil
from pathlib import Path

from gcnzc import data
from gcnzc.datasets import generate
from gcnzc.progress import Reporter

# the name carries a version: another generator makes another folder
NAME = "planted-arxiv-1"
SHAPE = "ogbn-arxiv"
SEED = 0


def folder() -> Path:
    """Where the built-in graph is kept: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "gcnzc" / NAME


def prepared(reporter: Reporter) -> Path:
    """The folder of the built-in graph, of ogbn-arxiv's shape; it is made if it is not there.

    Raises:
        OSError: the cache may not be written.
        RuntimeError: the disk is full.
    """
    place = folder()
    if place.exists():
        return place
    reporter.say(f"making the built-in graph in {place}, once")
    place.parent.mkdir(parents=True, exist_ok=True)
    # by way of OGB's layout, as a graph of the user's own
    workshop = place.with_name(f"making-{os.getpid()}")
    workshop.mkdir(exist_ok=True)
    raw = workshop / NAME
    try:
        with reporter.stages("make") as progress:
            generate.make(raw, "planted", generate.like(SHAPE), seed=SEED, progress=progress)
        with reporter.stages("prepare") as progress:
            data.prepare(raw, place, progress=progress)
    except FileExistsError:
        # another process was quicker
        return place
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return place
