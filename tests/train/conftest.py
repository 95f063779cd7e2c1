"""All tests of this folder have the fixtures of quick runs."""

from quick_runs import draws_curves, quick_runs

__all__ = ["draws_curves", "quick_runs"]
