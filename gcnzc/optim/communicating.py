"""Optimizers of torch whose `step` communicates: their base class, error and warning."""

from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import torch
from torch.optim import Optimizer

from gcnzc.exchange import Algorithm, Caller, Group, run
from gcnzc.optim.group_options import option_key
from gcnzc.optim.validation import check_at_least_zero, check_options

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


class CommunicatingOptimizer(Optimizer):
    """The base class of optimizers of torch whose `step` communicates with the other ranks.

    The communication is an `Algorithm`, a generator of requests, such as collectives. `step` runs
    it with torch.distributed; `gcnzc.exchange.lockstep` runs the algorithms of all ranks in one
    process, as a simulation.
    """

    group: Group
    """the ranks that communicate"""
    identity: str
    """`name`, and the number of this optimizer among those of `group`; copies have the same"""
    checked_options = ""
    """the `option_key` of options that were checked; empty to check them in each step"""
    _weight = 1.0

    @property
    def name(self) -> str:
        """The name of the type of optimizer, in messages, states and headers of requests."""
        return type(self).__name__

    @property
    def weight(self) -> float:
        """The factor of this rank's gradients in means and in local steps.

        `step` does not reset it. If batch sizes differ between ranks, set it before each `step` to
        this rank's number of samples divided by the mean number over the ranks. The mean of the
        weights should be 1, because means divide by the number of ranks. Means of parameters are
        not weighted.

        Raises:
            ValueError: it is set to anything but a finite number of at least 0.
        """
        return self._weight

    @weight.setter
    def weight(self, value: float) -> None:
        check_at_least_zero("weight", value)
        self._weight = float(value)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take an optimizer step, and communicate with the other ranks if an exchange is due.

        Args:
            closure: evaluates the model again and returns the loss; called once if given.

        Returns:
            The closure's loss; None without a closure.

        Raises:
            WorkerLost: another rank did not respond in time, or its process has ended.
            ValueError: one of

                - Options, numbers of steps, loaded states, parameters or tables differ between
                  ranks; raised on all ranks. Each exchange of a `DistributedOptimizer` detects a
                  difference with a probability of 1/2. Its next exchange always detects different
                  `requires_grad`, and states of different steps, or loaded on some ranks only;
                  states of the same step are not compared. Options in GPU tensors are compared in
                  every 100th exchange only. Checksums of the parameters that must be equal are
                  computed about every 100 exchanges. A `RowOptimizer` compares options and numbers
                  of steps in each step, and some rows before the first step.
                - An option of a parameter group is out of its range; raised by this rank before it
                  communicates.
                - The step failed, and the shape, dtype or device of a parameter has changed; raised
                  by this rank only.
                - DistributedDataParallel has averaged the gradients; see `keep_gradients_local`.
            RequestMismatch: the ranks' collectives or messages differ; raised on all ranks.
            IndexError: a gather of rows on a GPU used an id outside the table.
        """
        key = option_key(self.param_groups)
        if not key or key != self.checked_options:
            # a scheduler, or the caller, has changed them
            for number, group in enumerate(self.param_groups):
                where = f" of parameter group {number}"
                check_options(group, self.defaults, where, with_gpu=False)
            self.checked_options = key
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.communicate()
        return loss

    def communicate(self) -> None:
        """Run `algorithm`; `step` calls it."""
        run(self.algorithm(), self.group)

    @abstractmethod
    def algorithm(self) -> Algorithm[None]:
        """Return the communication and computation of `step`, which `step` and `lockstep` run."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that are copied and pickled.

        These are all except hooks, and the wrapper that a scheduler puts around `step`. A copy
        communicates through the same group. Before unpickling an optimizer of several ranks,
        initialize torch.distributed with the same ranks; otherwise the first `step` that exchanges
        raises a RuntimeError.
        """
        return {
            name: value
            for name, value in vars(self).items()
            if name != "step" and not name.startswith(("_optimizer_", "_zero_grad"))
        }
