"""DropCompute: gradient accumulation in which slow ranks drop their last micro-batches.

In synchronous training, every step takes as long as that of the slowest rank. With DropCompute,
each rank accumulates the gradients of up to M micro-batches, but begins no other forward or
backward pass after a threshold. The gradients are averaged over the micro-batches that the ranks
have computed:

    g_i <- sum of the gradients of the first k_i micro-batches of rank i, until the threshold
    g   <- mean of g_i / M over the ranks, divided by the mean of k_i / M

Niv Giladi et al., "DropCompute: simple and more robust distributed synchronous training via compute
variance reduction", https://arxiv.org/abs/2306.10598. `gcnzc.optim.compute_deadline` has the
threshold.

Notation: W ranks, M micro-batches.
"""

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from torch import Tensor, nn

from gcnzc.exchange import Algorithm
from gcnzc.exchange.engine import identify_caller
from gcnzc.optim.averaged import Averaged
from gcnzc.optim.compute_deadline import CALIBRATION, MAX_DROPPED, ComputeClock, ComputeDeadline
from gcnzc.optim.options import option
from gcnzc.optim.state import scalar
from gcnzc.optim.validation import check_above_zero, check_count, check_range

T = TypeVar("T")

# numbers that an exchange sends besides those of `Averaged`: M minus the computed sizes, and the
# number of dropped micro-batches
NUM_COUNTS = 2


def check_threshold(name: str, value: object) -> None:
    """Check a threshold in seconds, which may be "auto"; raises ValueError."""
    if value != "auto":
        hint = "seconds above 0, 'auto' to measure it, or None to drop nothing"
        check_range(name, value, lambda seconds: seconds > 0, hint)


def check_calibration(name: str, steps: tuple[int, int]) -> None:
    """Check the first and the last step of a measurement; raises ValueError."""
    check_count(f"{name}[0]", steps[0], 1)
    check_count(f"{name}[1]", steps[1], steps[0])


class DropCompute(Averaged):
    """Gradient accumulation in which slow ranks drop their last micro-batches.

    Iterate over the micro-batches of a step with `micro_batches`, which stops at the threshold::

        optimizer.zero_grad()
        for batch in optimizer.micro_batches(batches):
            optimizer.backward(loss(model, batch))
        optimizer.step()

    `backward` skips the backward pass if the threshold has passed during the forward pass. With
    `loss.backward()` in its place, a micro-batch that has begun is finished.

    Each loss is the mean over its micro-batch; do not divide it by the number of micro-batches. The
    gradient of the step is the sum of all ranks' gradients divided by the number of micro-batches
    that all ranks have computed, so dropping does not change its expectation. Each rank computes at
    least its first micro-batch. Without a threshold, the steps are bit-identical to those of
    `Averaged` with a `weight` of 1 / M.

    If `threshold` is "auto", the steps of `calibration` are timed, with nothing dropped. Then all
    ranks select the threshold that maximizes the samples computed per second, among those that drop
    at most `max_dropped` of the micro-batches. If more than 1.5 times `max_dropped` is dropped in
    the next `calibration[1]` steps, or in as many steps after them, the measurement begins again.
    It also begins again when a run is resumed, which may have other machines. A single rank selects
    no threshold.

    The model must not communicate in its forward or backward pass, since the ranks compute
    different numbers of micro-batches. BatchNorm updates its running statistics in each forward
    pass, also if `backward` skips the backward pass.

    Args:
        inner: see `Averaged`.
        group: the ranks that communicate; see `DistributedOptimizer`.
        micro_batches: M, the largest number of micro-batches of a step on one rank, at least 2.
        threshold: seconds from the beginning of a step's first micro-batch, after which no other
            forward or backward pass begins; "auto" to measure it; None or infinity to drop nothing.
        calibration: the first and the last step that "auto" times, counted from 1.
        max_dropped: the largest fraction of the micro-batches that "auto" may drop.
        clock: times the micro-batches; that of the parameters' device if None. Simulations use a
            `gcnzc.optim.compute_deadline.SimulatedClock`.
        options: see `Averaged`; `module` is also checked for `SyncBatchNorm`.

    Raises:
        TypeError: see `Averaged`.
        ValueError: an option is out of range, or `module` has `SyncBatchNorm`.
    """

    accepts_ddp = False
    # the ranks count different micro-batches
    may_share = False
    limit: int = option(check=partial(check_count, least=2), name="micro_batches")
    """M"""
    threshold: Any = option("auto", check_threshold, is_optional=True)
    calibration: tuple[int, int] = option(CALIBRATION, check_calibration)
    max_dropped: float = option(MAX_DROPPED, partial(check_above_zero, most=0.99))
    clock: ComputeClock | None = option(None, is_compared=False)

    dropped_micro_batches: int = scalar(kind="local")
    """number of micro-batches that this rank has dropped"""
    computed_micro_batches: int = scalar(kind="local")
    """number of micro-batches that this rank has computed"""
    dropped_of_all: float = scalar(0.0)
    """number of micro-batches that were dropped, the mean over the ranks"""

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        super().configure()
        clock = self.clock or ComputeClock(self.all_parameters()[0].device)
        seconds = None if self.threshold == "auto" else float(self.threshold or math.inf)
        self.deadline = ComputeDeadline(
            self.limit, seconds, self.calibration, self.max_dropped, clock
        )
        """the current threshold, and the times from which it follows"""
        for name, each in self.module.named_modules() if self.module is not None else ():
            if isinstance(each, nn.SyncBatchNorm):
                where = f"module {name!r} is" if name else "the model is"
                raise ValueError(
                    f"{where} a SyncBatchNorm, which communicates in each micro-batch, but the "
                    "ranks compute different numbers of them\n\nhint: use BatchNorm, whose "
                    "statistics `finalize` averages"
                )
        self.num_common_extras += NUM_COUNTS
        self._begin_step()

    def _begin_step(self) -> None:
        """Reset the counts of a step."""
        # whether `micro_batches` has begun the step
        self._is_accumulated = False
        self._computed = self._offered = 0
        # the sizes of the computed micro-batches
        self._size = 0.0
        # M minus the computed sizes, and the dropped micro-batches: of this rank, and the means
        self._own_counts = self._mean_counts = (0.0, 0.0)

    @property
    def dropped_share(self) -> float:
        """The fraction of the M micro-batches of all steps that was dropped, over all ranks."""
        num_steps = self.steps + self.skipped
        return self.dropped_of_all / (num_steps * self.limit) if num_steps else 0.0

    weighs_by_size = True

    def micro_batches(
        self, batches: Iterable[T], sizes: Sequence[float] | None = None
    ) -> Iterator[T]:
        """Iterate over the micro-batches of a step, until the threshold.

        A micro-batch that was yielded counts as computed, unless `backward` drops it. Those that
        are not yielded are not taken from `batches`. A second call before `step` starts the step
        again: reset the gradients too.

        Args:
            batches: at most M micro-batches, which may differ in number between ranks; from an
                iterator, the first M are used.
            sizes: for each micro-batch, the factor by which the caller multiplies its mean loss,
                such as its number of samples divided by that of a full micro-batch; 1 for all if
                None. The step divides by the sum of the sizes.

        Raises:
            ValueError: there are more than M micro-batches, or `sizes` does not fit them.
        """
        limit = self.limit
        count = len(batches) if isinstance(batches, Sized) else None
        if sizes is not None:
            if count not in (None, len(sizes)):
                raise ValueError(f"{len(sizes)} sizes for {count} micro-batches")
            if not all(0 <= size < math.inf for size in sizes):
                raise ValueError(f"sizes are {list(sizes)}, not finite numbers of at least 0")
            count = len(sizes)
        if count is not None and count > limit:
            raise ValueError(
                f"{count} micro-batches for a step of at most {limit}\n\nhint: give each step its "
                f"part, or {self.name} a larger micro_batches"
            )
        return self._iterate(batches, limit if count is None else count, sizes)

    def _iterate(
        self, batches: Iterable[T], count: int, sizes: Sequence[float] | None
    ) -> Iterator[T]:
        self._is_accumulated = True
        self._computed, self._offered, self._size = 0, count, 0.0
        self.deadline.begin_step()
        # no more than `count` micro-batches are taken from an iterator
        for number, batch in enumerate(islice(batches, count), 1):
            size = 1.0 if sizes is None else sizes[number - 1]
            self._computed, self._size = number, self._size + size
            yield batch
            if number == 1:
                # before the ranks compute different numbers of micro-batches
                self.check_ddp()
            if self._computed < number:
                # `backward` has dropped it
                self._size -= size
                return
            self.deadline.end_micro_batch()
            if number < count and self.deadline.is_over():
                return
        # an iterator may have had fewer than `count`
        self._offered = self._computed

    def backward(self, loss: Tensor) -> bool:
        """Compute the gradients of a micro-batch, or drop it if the threshold has passed.

        The first micro-batch of a step is not dropped. Call it once for each micro-batch.

        Args:
            loss: the loss of the micro-batch that `micro_batches` has yielded last; with
                GradScaler, the scaled loss.

        Returns:
            Whether the gradients were computed.
        """
        self.deadline.end_part()
        if self._computed > 1 and self.deadline.is_over():
            self._computed -= 1
            return False
        loss.backward()
        return True

    @identify_caller
    def algorithm(self) -> Algorithm[None]:
        """See `DistributedOptimizer`: a step of `Averaged`, then the selection of a threshold.

        Raises:
            ValueError: `micro_batches` was not iterated since the last step, so that the number of
                the accumulated gradients is not known.
        """
        if not self._is_accumulated:
            raise ValueError(
                f"{self.name}: `micro_batches` was not iterated since the last step, so the number "
                "of accumulated gradients is not known\n\nhint: compute the gradients in `for "
                "batch in optimizer.micro_batches(batches): optimizer.backward(loss)`, and then "
                "call `step`"
            )
        weight, limit = self.weight, self.limit
        dropped = self._offered - self._computed
        # without `sizes` these are whole numbers, whose sum is exact also in float16; with a single
        # rank, they are the means
        self._own_counts = self._mean_counts = (weight * (limit - self._size), float(dropped))
        # M is the same on all ranks, so the exchange still sums the gradients of all ranks
        self.weight = weight / limit
        try:
            yield from super().algorithm()
        finally:
            self.weight = weight
        _, mean_dropped = self._mean_counts
        self.dropped_micro_batches += dropped
        self.computed_micro_batches += self._computed
        self.dropped_of_all += mean_dropped
        self._begin_step()
        yield from self.deadline.end_step(mean_dropped / limit)

    def common_extras(self) -> list[float]:
        """Return the common extras, the missing sizes and the dropped micro-batches."""
        return [*super().common_extras(), *self._own_counts]

    def _exchange_gradients(self) -> Algorithm[str]:
        reason = yield from super()._exchange_gradients()
        *_, missing, dropped = self.shares
        self._mean_counts = (missing, dropped)
        return reason

    def _inner_step(self) -> None:
        missing, _ = self._mean_counts
        kept = 1 - missing / self.limit
        # nothing is kept if no rank had a micro-batch
        if kept > 0 and kept != 1:
            for parameter in self.trained:
                if parameter.grad is not None:
                    parameter.grad.div_(kept)
        super()._inner_step()
