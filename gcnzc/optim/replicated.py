"""The base classes of gradient methods: exchange before the update, so the replicas stay equal.

If a gradient element is not finite on any rank, or its square would overflow, all ranks skip a step
with an exchange, and their state does not change.

Notation: n elements, the first d of them in groups with `compress=False`, P parameters, k extras:
numbers that are exchanged with a vector, such as signals.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gcnzc.compress import Compression, Dense
from gcnzc.compress.registry import check_compression
from gcnzc.exchange import Algorithm, AllGather, Group
from gcnzc.kernels.finite import mark_large, square_limit
from gcnzc.optim.flat import Segment
from gcnzc.optim.method import DistributedOptimizer, SkipStep
from gcnzc.optim.options import option
from gcnzc.optim.state import Errors, Field, vector
from gcnzc.optim.validation import check_above_zero
from gcnzc.system.scalars import scalars_like


class Replicated(DistributedOptimizer):
    """The base class of optimizers whose parameters and state are equal on all ranks.

    Parameters that have not had a gradient on any rank do not change. A subclass implements
    `update`, which computes means over the ranks with `mean_gradients` or `mean`.

    With torch's GradScaler, all ranks skip an exchanged step that overflows on one rank, and all
    lower their scales. In a step without an exchange, as 0/1 Adam has, only that rank ignores its
    gradients: it steps with its unchanged momentum, and its scale may then differ from those of the
    others.

    Args:
        params: an iterable of parameters or parameter groups, as for torch's optimizers. The
            gradients of a group with `compress=False` are exchanged at every step.
        defaults: default options of the parameter groups.
        group: the ranks that communicate; see `DistributedOptimizer`.
        gradient_compression: compression of exchanged gradients, without error feedback; None for
            none.
        clip_norm: the maximum gradient norm; None does not clip, and steps with gradients above
            `gcnzc.kernels.finite.square_limit` are skipped. A step that exchanges
            gradients clips their mean. In a compressed step all ranks scale their gradients by the
            same factor, which follows from the root mean square of their norms.
        options: see `DistributedOptimizer`.
    """

    gradient_compression: Compression = option(None, check_compression)
    clip_norm: float | None = option(None, check_above_zero)

    had_gradient: Tensor = vector(lambda own: len(own.flat.segments), torch.bool, on_host=True)
    """(P,) bool on the host: the parameters that have had a gradient"""
    _extras: Sequence[float] = ()

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        group: Group | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            params, {"compress": True, "maximize": False, **defaults}, group, **options
        )

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        compression = self.gradient_compression
        if getattr(compression, "has_feedback", False):
            raise ValueError(f"gradient_compression is {compression}, which uses error feedback")
        self.gradient_compression = compression or Dense()

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`."""
        compress, count = self.gradient_compression, self.flat.num_elements
        errors = Errors(owner=self, name="gradients", compress=compress, size=count)
        return [*super().declare(), errors]

    def take_step(self) -> Algorithm[None]:
        """See `DistributedOptimizer`."""
        # in each step, also in local ones: only before them are the parameters of 0/1 Adam in sync
        self._extras = self.common_extras()
        values = self.flat.scratch(self.num_common_extras + len(self.flat.segments) + 1)
        self.flat.read_gradients(values, self.gradient_factor())
        # clipped gradients cannot overflow the state
        if self.clip_norm is None or self.clip_norm > square_limit(self.flat.dtype):
            mark_large(values[: self.flat.num_elements])
        for here, options in self.flat.slices():
            if options["maximize"]:
                values[here].neg_()
        return self.update(values)

    @abstractmethod
    def update(self, values: Tensor) -> Algorithm[None]:
        """Exchange and update the parameters.

        Args:
            values: the gradients (n,) of this rank, and memory for extras; may be overwritten, and
                is valid until the end of the step.

        Raises:
            SkipStep: all ranks skip the step; raised before any state has changed.
        """

    def mean(
        self, values: Tensor, reducer: str, extras: Sequence[float] | Tensor = (), begin: int = 0
    ) -> Algorithm[Sequence[float]]:
        """Replace elements `begin` to n of a vector by their means over the ranks.

        Args:
            values: the vector, and memory for extras, as `update` gets it.
            reducer: the name in `reducers`.
            extras: numbers to sum over the ranks in the same message, at most P + 1.
            begin: the first element.

        Returns:
            The sums of the extras.

        Raises:
            SkipStep: an element is not finite on some rank, or the mean overflows.
        """
        common, count = self._extras, self.flat.num_elements
        first = count + len(common)
        payload = values[begin : first + len(extras)]
        values[count:first] = scalars_like(common, values)
        if len(extras):
            own = extras if isinstance(extras, Tensor) else scalars_like(extras, values)
            values[first : first + len(extras)] = own
        if reason := (yield from self.reducers[reducer].mean(payload, len(common) + len(extras))):
            raise SkipStep(reason)
        sums = self.reducers[reducer].extra_sums
        self.receive_common(sums)
        return sums[len(common) :]

    def mean_gradients(self, values: Tensor) -> Algorithm[None]:
        """Replace gradients (n,), followed by memory for extras, by their clipped means."""
        flags = scalars_like(self.flat.have_gradients(), values)
        sums = yield from self.mean(values, "gradients", self.add_pending(values, flags))
        self.had_gradient |= torch.tensor(sums) > 0
        self.clip_own_gradients(values)

    def add_pending(self, values: Tensor, flags: Tensor) -> Tensor:
        """Add gradients of earlier steps to those of this rank, if there are any.

        Args:
            values: the gradients (n,), changed in place.
            flags: (P,), above 0 where a parameter has a gradient.

        Returns:
            The flags with those of the added gradients.
        """
        return flags

    def clip_gradients(self, values: Tensor) -> Algorithm[None]:
        """Clip this rank's gradients (n,) for a compressed step, by one factor for all ranks.

        The norm is the root mean square of the ranks' gradient norms. It bounds the norm of the
        mean gradient, which is not computed in compressed steps. Each rank sends 8 bytes to each
        other rank.
        """
        if self.clip_norm is not None:
            squares = yield AllGather(self._square_norm(values)[None])
            self._clip(values, (sum(squares.unbind()) / len(squares)).reshape(()), self.clip_norm)

    def clip_own_gradients(self, values: Tensor) -> None:
        """Clip gradients (n,) by their own norm, without communication."""
        if self.clip_norm is not None:
            self._clip(values, self._square_norm(values), self.clip_norm)

    def _square_norm(self, values: Tensor) -> Tensor:
        return values[: self.flat.num_elements].double().square().sum()

    def _clip(self, values: Tensor, square: Tensor, largest: float) -> None:
        """Scale gradients (n,) in place, whose squared norm is () float64, to a norm of `largest`.

        If the norm is not finite, they are unchanged: the exchange that follows detects elements
        that are not finite, and names the rank.
        """
        gradients = values[: self.flat.num_elements]
        square = square.where(square.isfinite(), 0.0)
        if square.device.type == "cpu":
            norm = float(square) ** 0.5
            if norm > largest:
                gradients *= largest / (norm + 1e-6)
            return
        # a norm on a GPU is not read, because reading it synchronizes with the GPU
        norms = square.sqrt()
        gradients *= (largest / (norms + 1e-6)).where(norms > largest, 1.0)

    def trained(self) -> Iterator[Segment]:
        """Iterate over the parameters that had a gradient on any rank."""
        for segment, had in zip(self.flat.segments, self.had_gradient.tolist(), strict=True):
            if had:
                yield segment
