"""Steps of an optimizer: the sender in the headers of their requests, errors and warnings."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from gcnzc.exchange import Algorithm, Caller

T = TypeVar("T")
P = ParamSpec("P")
Algorithms = Callable[Concatenate[Any, P], Algorithm[T]]


class LatePhaseWarning(UserWarning):
    """A phase of an optimizer, such as compression or local steps, begins late in the run or never.

    Rank 0 warns. `warnings.simplefilter("ignore", gcnzc.optim.LatePhaseWarning)` silences it.
    """


class SkipStep(Exception):
    """Raised on all ranks by an exchange that must not be used; its text is the reason."""


def identify_caller(method: Algorithms[P, T]) -> Algorithms[P, T]:
    """Decorate an algorithm of an optimizer so that the headers of its requests name the optimizer.

    Otherwise ranks that step several optimizers in different orders would exchange the gradients of
    different models.
    """

    @wraps(method)
    def algorithm(self: Any, /, *args: P.args, **options: P.kwargs) -> Algorithm[T]:
        before = yield Caller(self.identity)
        result = yield from method(self, *args, **options)
        yield Caller(before)
        return result

    return algorithm
