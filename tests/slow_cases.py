"""Cases of a test that only `make test-all` runs, with the marker `slow`.

They verify with more values what the other cases of the same test verify.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mark_slow(cases: Iterable[tuple[Any, ...]], is_slow: Callable[..., bool]) -> list[Any]:
    """Return the cases as parameter sets; those for which `is_slow(*case)` is true are slow."""
    return [pytest.param(*case, marks=pytest.mark.slow if is_slow(*case) else ()) for case in cases]


def seeds(count: int, num_quick: int) -> list[Any]:
    """Return the seeds 0 to `count` - 1, of which the first `num_quick` are not slow."""
    return mark_slow(((seed,) for seed in range(count)), lambda seed: seed >= num_quick)
