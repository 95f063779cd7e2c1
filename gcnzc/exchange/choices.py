"""The choice of a collective algorithm for each request.

The answer of a request does not depend on the algorithm, except for the order of additions in sums.
`builtin` is the process group's own collective; simulations use the algorithm that gloo uses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gcnzc.exchange.algorithms import ALGORITHMS, DEFAULT, default_algorithm
from gcnzc.exchange.collectives import COLLECTIVES
from gcnzc.exchange.requests import BUILTIN, Collective

Steps = tuple[tuple[int | None, str], ...]

# a started request is executed by a thread that shares the GIL with the training thread. The
# messages of gcnzc's algorithms need it, so that on busy cores sums above BACKGROUND_BYTES, all
# gathers and all all-to-alls cost more time than these algorithms save
BACKGROUND_BYTES = 16 * 1024
_IN_BACKGROUND: dict[str, Steps] = {
    "Sum": ((BACKGROUND_BYTES, DEFAULT), (None, BUILTIN)),
    "AllGather": ((None, BUILTIN),),
    "AllToAll": ((None, BUILTIN),),
}


@dataclass(frozen=True)
class Choices:
    """The collective algorithm for each kind and size of request.

    Raises:
        ValueError: an algorithm does not exist, or the steps of a kind do not cover all sizes.
    """

    steps: Mapping[str, Steps] = field(default_factory=dict)
    """by kind, pairs (largest size in bytes, name of the algorithm), ascending; the last size is
    None, for no limit. The name "default", and kinds that are missing, select the default algorithm
    for the size and the number of ranks, by `default_algorithm`"""

    def __post_init__(self) -> None:
        for kind, steps in self.steps.items():
            for _, name in steps:
                _check_known(kind, name)
            limits = [math.inf if limit is None else limit for limit, _ in steps]
            if limits != sorted(set(limits)) or limits[-1:] != [math.inf]:
                raise ValueError(
                    f"{kind}: steps {tuple(steps)} do not cover all sizes\n\n"
                    "hint: sort the steps by size, and end with None"
                )
            # ranks may send parts of different sizes, and would choose different algorithms
            if kind == "AllToAll" and len(steps) > 1:
                raise ValueError(
                    f"AllToAll: steps {tuple(steps)} depend on the size\n\n"
                    "hint: use one algorithm for all sizes, since each rank knows only its own"
                )

    def find(self, request: Collective, world_size: int) -> str:
        """Return the name of the algorithm for a request of that many ranks."""
        kind = request.kind
        steps = self.steps.get(kind)
        if steps is not None and len(steps) == 1 and steps[0][1] != DEFAULT:
            return steps[0][1]
        return self.find_for_size(kind, request.num_bytes, world_size)

    def find_for_size(self, kind: str, num_bytes: int, world_size: int) -> str:
        """Return the name of the algorithm for requests of a kind and a size in bytes."""
        steps = self.steps.get(kind, ((None, DEFAULT),))
        name = next(name for limit, name in steps if limit is None or num_bytes <= limit)
        return default_algorithm(kind, num_bytes, world_size) if name == DEFAULT else name

    @cached_property
    def in_background(self) -> "Choices":
        """The choices for started requests, which another thread executes."""
        sums = self.steps.get("Sum", _IN_BACKGROUND["Sum"])
        return Choices({**self.steps, **_IN_BACKGROUND, "Sum": sums})

    @classmethod
    def always(cls, **names: str) -> "Choices":
        """Create choices with one algorithm for all sizes of some kinds, as `always(Sum="ring")`.

        Other kinds have the default algorithms.

        Raises:
            ValueError: there is no such algorithm for that kind.
        """
        return cls().replace(**names)

    def replace(self, **names: str) -> "Choices":
        """Return a copy with one algorithm for all sizes of some kinds; see `always`."""
        return Choices({**self.steps, **{kind: ((None, name),) for kind, name in names.items()}})


def _check_known(kind: str, name: str) -> None:
    request = COLLECTIVES.get(kind)
    if request is None or not (name == DEFAULT or request.has_algorithm(name)):
        known = ", ".join(ALGORITHMS.get(kind, ALGORITHMS))
        raise ValueError(f"no algorithm {name!r} for {kind}\n\nhint: use one of {known}")
