"""Tests of this folder have the fixtures of quick runs, and a graph and a run of commands."""

from command_runs import graph, raw, run
from quick_runs import draws_curves, quick_runs

__all__ = ["draws_curves", "graph", "quick_runs", "raw", "run"]
