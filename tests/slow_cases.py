"""Cases of a test that only `make test-all` runs.

They verify with more values, or with more combinations of values, what the other cases of the same
test verify. Further values have the marker `slow`; `--cover` leaves out further combinations.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def mark_slow(cases: Iterable[tuple[Any, ...]], is_slow: Callable[..., bool]) -> list[Any]:
    """Return the cases as parameter sets; those for which `is_slow(*case)` is true are slow."""
    return [pytest.param(*case, marks=pytest.mark.slow if is_slow(*case) else ()) for case in cases]


def seeds(count: int, num_quick: int) -> list[Any]:
    """Return the seeds 0 to `count` - 1, of which the first `num_quick` are not slow."""
    return mark_slow(((seed,) for seed in range(count)), lambda seed: seed >= num_quick)


def covering(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return few cases of each test that together have each value of each of its parameters.

    Values that one `parametrize` lists together are one value. Cases with the marker `slow` do not
    count.
    """
    tests: dict[str, dict[pytest.Item, set[tuple[int, str]]]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            # the texts of the values, one for each `parametrize`
            texts = item.callspec._idlist if hasattr(item, "callspec") else ("",)
            tests.setdefault(item.nodeid.partition("[")[0], {})[item] = set(enumerate(texts))
    kept: list[pytest.Item] = []
    for cases in tests.values():
        missing = set().union(*cases.values())
        while missing:
            most = max(cases, key=lambda item: len(missing & cases[item]))
            missing -= cases[most]
            kept.append(most)
    return kept
