"""Name an optimizer in the headers of its requests."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from gcnzc.exchange import Algorithm, Caller

if TYPE_CHECKING:
    from gcnzc.optim.base import DistributedOptimizer

T = TypeVar("T")
P = ParamSpec("P")
Self = TypeVar("Self", bound="DistributedOptimizer")


def identify_caller(
    method: Callable[Concatenate[Self, P], Algorithm[T]],
) -> Callable[Concatenate[Self, P], Algorithm[T]]:
    """Decorate an algorithm of an optimizer so that the headers of its requests name the optimizer.

    Otherwise ranks that step several optimizers in different orders would exchange the gradients of
    different models.
    """

    @wraps(method)
    def algorithm(self: Self, /, *args: P.args, **options: P.kwargs) -> Algorithm[T]:
        before = yield Caller(self.identity)
        result = yield from method(self, *args, **options)
        yield Caller(before)
        return result

    return algorithm
