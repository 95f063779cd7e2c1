"""Exclude inactive elements, those with zero variance, from the compression.

With a constant variance, an element with zero variance, such as of an embedding row that was never
looked up, would take steps of lr * scale / eps. It is inactive: excluded from the compression and
its errors, and updated by weight decay only. Each rank sums its gradients of inactive elements, the
pending gradients. Once a rank has such a gradient, all ranks take a gradient step that includes the
sums, and that reactivates the elements. The distance from one such step to the next is at least 1,
2, 4, ... 256 steps.

A compressed exchange needs variances that are averages over many steps: with one from a single
gradient, which may be close to 0, an element takes large steps, and so do elements that share a
scale with a momentum that is still large. Reactivated elements therefore have a warm-up of their
own, in which they are settling: as in Adam, the ranks exchange their gradients, uncompressed, and
update their momentum and variance in every step. It takes as many steps as there were updates of
the other variances, at most `MAX_SETTLING_STEPS`. With g the mean gradient and u = 1, 2, ... the
number of the step of this warm-up:

    m <- b1 m + (1 - b1) g     V <- V + (g^2 - V) (1 - b2) / (1 - b2^u)

An element with a small variance, such as of a row that was looked up long ago, would take large
steps. Its variance is raised to a fraction of the mean variance of its parameter, the floor.

A parameter may have a much smaller variance than adjacent ones with which it shares scales: the
gradients of a bias before batch normalization are rounding errors. Because they share a scale, its
compression errors are as large as those of its neighbours, so its variances are raised to
`NEIGHBOUR_SHARE` of the mean of adjacent elements.

The base class of these methods also has Adam's moments and step, which they share.

Notation: n elements, the first d of them in groups with `compress=False`, which are never inactive;
P parameters, s settling elements, i inactive elements. A gradient step exchanges gradients, not
momenta.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gcnzc.compress import Compression, Sign
from gcnzc.compress.registry import check_compression
from gcnzc.exchange import Algorithm, Group
from gcnzc.kernels.finite import are_finite, square_limit
from gcnzc.optim.flat import Segment
from gcnzc.optim.method import SkipStep
from gcnzc.optim.options import option
from gcnzc.optim.replicated import Replicated
from gcnzc.optim.state import OWN, Errors, Field, Kind, scalar, vector
from gcnzc.optim.validation import check_at_least_zero
from gcnzc.system.arguments import check_choice, check_flag

# upper limit of the minimum distance, in steps, between gradient steps that reactivate elements;
# the minimum distance starts at 1 and doubles
MAX_REACTIVATION_INTERVAL = 256

# 1 / (1 - b2) for the default b2: the steps after which an average forgets older gradients
MAX_SETTLING_STEPS = 1000

# If the mean variance of a parameter is below this fraction of the mean of adjacent elements, its
# variances are raised to this fraction. Then an element's compression error is at most about 10
# times the square root of its variance.
NEIGHBOUR_SHARE = 0.01

# The variance floor of elements that begin late. When the others have converged, some of their
# gradients are much smaller than those of a warm-up, whereas compression errors are not.
LATE_VARIANCE_FLOOR = 0.2

# values of the option `reactivate`
REACTIVATE_CHOICES = ("step", "refresh")


@dataclass(eq=False)
class SettlingElements:
    """The settling elements before a step, (s,) each."""

    gradients: Tensor
    momenta: Tensor
    variances: Tensor
    """corrected for their bias"""


class InactiveElements(Replicated):
    """The base class of methods with Adam's moments that exclude inactive elements from exchanges.

        m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2
        x <- x - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^u)) + eps) + weight_decay x)

    Here t is the number of the step, and u the number of updates of the variance v.

    Args:
        params: see `Replicated`.
        lr: the learning rate.
        betas: coefficients of the running averages of the gradient and its square.
        eps: added to the square root of the variance.
        weight_decay: coefficient of the decoupled weight decay, as in AdamW.
        group: see `DistributedOptimizer`.
        maximize: whether to maximize the objective instead of minimizing it.
        bias_correction: whether momentum and variance are corrected for their bias.
        compress: compression of the exchanged momenta or updates; signs if None.
        reactivate: "step" or "refresh": whether inactive elements with a gradient cause a
            gradient step.
        variance_floor: the smallest variance of an active element, as a fraction of the mean
            variance of the active elements of its parameter. With a floor, the variances of a
            parameter are also raised to `NEIGHBOUR_SHARE` of the mean of adjacent elements; 0
            disables both.
        options: see `Replicated`.
    """

    bias_correction: bool = option(True, check_flag)
    compress: Compression = option(None, check_compression)
    reactivate: str = option("step", partial(check_choice, choices=REACTIVATE_CHOICES))
    variance_floor: float = option(1e-4, check_at_least_zero)

    momentum: Tensor = vector(kind=lambda own: own.momentum_kind, resize="mean")
    variance: Tensor = vector()
    active: Tensor | None = vector(dtype=torch.bool, is_optional=True)
    """(n,) bool: the elements that are compressed; None for all"""
    settling: Tensor = vector(None, torch.int64)
    """(s,) int64: the indices of the settling elements, ascending"""
    settling_since: Tensor = vector(None, torch.int64)
    """(s,) int64: the number of the first step of each"""
    pending_gradients: Tensor | None = vector(None, is_optional=True, **OWN)
    """(i,): sums of this rank's gradients since the last gradient step; None if not needed"""
    settles_at: int = scalar()
    """the step in which the first of the settling elements have settled; 0 if there are none"""
    has_inactive_gradient: bool = scalar(False)
    """whether inactive elements have a gradient on any rank"""
    pending_since: int = scalar()
    """the first step in which they may have had one; 0 if they have none"""
    reactivate_from: int = scalar()
    """the first step that may then reactivate them; 0 if none has done so yet"""
    reactivation_interval: int = scalar(1)
    """the steps by which `reactivate_from` increases next"""
    reducer_name = "momentum"
    """the name of the compressed mean in `reducers`"""
    _inactive: Tensor | None
    _slices: list[tuple[Segment, slice]] | None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        group: Group | None = None,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "maximize": maximize}, group, **options)

    def configure(self) -> None:
        """See `DistributedOptimizer`."""
        super().configure()
        self.compress = self.compress or Sign()
        self._forget_indices()

    def declare(self) -> list[Field]:
        """See `DistributedOptimizer`."""
        first = self.flat.num_uncompressed
        errors = Errors(
            owner=self,
            name=self.reducer_name,
            compress=self.compress,
            size=self.flat.num_elements - first,
            exists=self.is_compressing,
            layers=self.flat.layers(first),
        )
        return [*super().declare(), errors]

    def is_compressing(self, own: Any) -> bool:
        """Whether there is a reducer for the compressed mean, given this optimizer or a state."""
        return True

    @property
    @abstractmethod
    def num_warmup_updates(self) -> int:
        """The number of updates of the variances of other elements in the warm-up."""

    def variance_correction(self, options: Mapping[str, Any]) -> float:
        """Return the factor by which the variance of a compressed group is biased."""
        return 1.0

    @property
    def scale_elements(self) -> int | None:
        """The number of adjacent elements that share a scale, see `Compression`."""
        return self.compress.scale_elements

    @property
    def state_bytes(self) -> int:
        """See `DistributedOptimizer`; includes the indices of inactive elements."""
        return super().state_bytes + (0 if self._inactive is None else self._inactive.nbytes)

    def on_load(self) -> None:
        """See `DistributedOptimizer`."""
        super().on_load()
        self._forget_indices()
        if self.active is not None:
            if (reducer := self.reducers.get(self.reducer_name)) is not None:
                reducer.active = self.active[self.flat.num_uncompressed :]
            if self.pending_gradients is None:
                self._allocate_pending_gradients()
            else:
                # the mean over other ranks may be larger than a sum of this one may be
                self._bound(self.pending_gradients)

    # --- Adam's step

    @property
    def momentum_kind(self) -> Kind:
        """Whether the momenta are equal on all ranks now."""
        return "shared"

    @abstractmethod
    def num_updates(self, here: slice) -> int | None:
        """Return the number of updates of the variance of a group's elements.

        None if `variance` is corrected for its bias already.
        """

    def update_moments(
        self, here: slice, options: Mapping[str, Any], values: Tensor, *, with_variance: bool
    ) -> None:
        """Update a group's momenta with mean gradients (n,), and the variance if wanted."""
        (beta1, beta2), gradient = options["betas"], values[here]
        self.momentum[here].lerp_(gradient, 1 - beta1)
        if with_variance:
            self.variance[here].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def step_size(self, options: Mapping[str, Any]) -> float:
        """Return the learning rate of the next step, with the bias correction of the momentum."""
        size = float(options["lr"])
        if self.bias_correction:
            size /= 1 - options["betas"][0] ** (self.steps + 1)
        return size

    def write_roots(self, here: slice, options: Mapping[str, Any], out: Tensor) -> None:
        """Write the denominator of Adam's update, sqrt(V) + eps, of a group's elements."""
        torch.sqrt(self.variance[here], out=out)
        if self.bias_correction and (count := self.num_updates(here)) is not None:
            out /= (1 - options["betas"][1] ** count) ** 0.5
        out += options["eps"]

    def move_parameters(self, work: Tensor, end: int | None = None) -> None:
        """Take Adam's step with the first `end` elements, by default all; `work` is overwritten."""
        end = self.flat.num_elements if end is None else end
        for here, options in self.flat.slices():
            if here.stop <= end:
                self.write_roots(here, options, work[here])
        for segment in self.trained():
            if segment.here.stop <= end:
                shape, options = segment.parameter.shape, segment.options
                momentum = self.momentum[segment.here].view(shape)
                self.move(segment.parameter, momentum, work[segment.here].view(shape), options)

    def move(
        self, parameter: Tensor, momentum: Tensor, root: Tensor, options: Mapping[str, Any]
    ) -> None:
        """Take Adam's step with one parameter."""
        size = self.step_size(options)
        parameter.mul_(1 - float(options["lr"]) * options["weight_decay"])
        if parameter.dtype == momentum.dtype:
            parameter.addcdiv_(momentum, root, value=-size)
        else:
            parameter -= (momentum / root * size).to(parameter.dtype)

    # --- exchanges

    def add_pending(self, values: Tensor, flags: Tensor) -> Tensor:
        """See `Replicated`."""
        if self.pending_gradients is None:
            return flags
        inactive = self.find_inactive()
        values.index_add_(0, inactive, self.pending_gradients)
        ends = torch.tensor([each.here.stop for each in self.flat.segments])
        owners = torch.bucketize(inactive, ends.to(flags.device, non_blocking=True), right=True)
        counts = torch.zeros_like(flags)
        has_pending = (self.pending_gradients != 0).to(flags.dtype)
        return flags + (counts.index_add_(0, owners, has_pending) > 0)

    def mean_uncompressed(
        self, values: Tensor, settling: SettlingElements | None
    ) -> Algorithm[None]:
        """Replace the gradients that are not compressed, if any, by their means over the ranks.

        Args:
            values: the gradients (n,), of which the first d are replaced.
            settling: the gradients are replaced.

        Raises:
            SkipStep: see `mean`.
        """
        first = self.flat.num_uncompressed
        sent = values[:first]
        if settling is not None:
            sent = torch.cat([sent, settling.gradients])
        if not len(sent):
            return
        reducer = self.gradient_compression.reducer(len(sent), self.describe_worker())
        # it has no state, since the number of elements changes; the step determines random draws
        reducer.num_means.fill_(self.steps)
        if reason := (yield from reducer.mean(sent)):
            raise SkipStep(reason)
        if settling is not None:
            values[:first] = sent[:first]
            settling.gradients = sent[first:]

    def update_uncompressed(self, means: Tensor, settling: SettlingElements | None) -> None:
        """Update momenta and variances with the mean gradients that are not compressed."""
        self.update_settling(settling)
        for here, options in self.flat.slices():
            if here.start < self.flat.num_uncompressed:
                self.update_moments(here, options, means, with_variance=True)

    # --- inactive elements

    def find_inactive(self) -> Tensor:
        """Return the indices (i,) int64 of the inactive elements, cached while they are the same.

        Finding them synchronizes with a GPU.
        """
        if self._inactive is None:
            assert self.active is not None, "callers check it"
            is_inactive = ~self.active
            is_inactive[self.settling] = False
            self._inactive = is_inactive.nonzero().flatten()
        return self._inactive

    def _forget_indices(self) -> None:
        self._inactive = self._slices = None

    def count_reactivated(self, gradients: Tensor) -> Tensor:
        """Count the inactive elements (i,) whose gradient is large enough for a variance above 0.

        NaN if a gradient is not finite. A compressed exchange checks only active elements. This
        count is sent with the exchange; NaN makes all ranks skip the step before such a gradient is
        added to the pending ones.
        """
        # an element whose square is rounded to 0 would remain inactive after each gradient step
        count = (gradients.square() > torch.finfo(gradients.dtype).tiny).sum()
        return torch.where(are_finite(gradients), count.to(gradients.dtype), torch.nan)

    def note_inactive_gradients(self, count: float, since: int) -> None:
        """Note the first step of the pending gradients.

        Args:
            count: the sum of `count_reactivated` over the ranks.
            since: the first step in which a rank may have had these gradients.
        """
        if count > 0 and not self.pending_since:
            self.pending_since = since

    def add_pending_gradients(self, gradients: Tensor) -> None:
        """Add gradients (i,) to the sums for the next gradient step."""
        if self.pending_gradients is not None:
            self._bound(self.pending_gradients.add_(gradients))

    def _bound(self, sums: Tensor) -> None:
        """Clamp sums of gradients in place so that their exchange cannot overflow.

        Pending sums survive a skipped step. If their mean or a norm overflowed, every later
        gradient step would be skipped too.
        """
        sent = getattr(self.reducers["gradients"], "dtype", self.flat.dtype)
        largest = torch.finfo(sent).max / (2 * self.group.world_size)
        largest = min(largest, square_limit(self.flat.dtype) / 2)
        sums.clamp_(-largest, largest)

    def _allocate_pending_gradients(self) -> None:
        if self.reactivate == "step" and self.group.world_size > 1:
            self.pending_gradients = self.variance.new_zeros(self.find_inactive().shape)

    def reactivate_elements(self, gradients: Tensor) -> None:
        """Let the inactive elements with a mean gradient begin to settle.

        Args:
            gradients: (n,); those of inactive elements include the pending ones.
        """
        step, first = self.steps + 1, self.flat.num_uncompressed
        if self.active is not None:
            inactive, num_steps = self.find_inactive(), 1
            if self.pending_gradients is not None and self.pending_since:
                # the sum of several steps' gradients is larger than their root mean square
                num_steps = step + 1 - self.pending_since
            squares = torch.zeros_like(self.variance)
            squares[inactive] = gradients[inactive].square() / num_steps
            for here, options in self.flat.slices(first):
                squares[here] *= self.variance_correction(options)
            self.variance[inactive] = squares[inactive]
            new = inactive[squares[inactive] > 0]
            self.set_settling(
                torch.cat([self.settling, new]),
                torch.cat([self.settling_since, torch.full_like(new, step)]),
            )
        self.pending_since = 0
        if self.has_inactive_gradient:
            # even if elements are reactivated continually, gradient steps become rare
            gap = self.reactivation_interval
            self.reactivate_from = step + gap
            self.reactivation_interval = min(2 * gap, MAX_REACTIVATION_INTERVAL)
            self.has_inactive_gradient = False

    def update_active(self) -> None:
        """Make the elements with zero variance inactive; clear the pending gradients."""
        self.raise_small_variances()
        active = self.variance > 0
        active[: self.flat.num_uncompressed] = True
        active[self.settling] = False
        self.set_active(active)

    def set_active(self, active: Tensor | None) -> None:
        """Set the mask (n,) of active elements, None for all; clear the pending gradients."""
        self._inactive, self.pending_gradients, self.active = None, None, active
        if active is not None:
            inactive = self.find_inactive()
            if len(inactive) or len(self.settling):
                self.momentum[inactive] = 0
                self._allocate_pending_gradients()
            else:
                self._inactive = self.active = None
        self._restrict()

    def _restrict(self) -> None:
        active = None if self.active is None else self.active[self.flat.num_uncompressed :]
        self.reducers[self.reducer_name].restrict_to(active)

    # --- settling elements

    @property
    def num_settling_steps(self) -> int:
        """The number of steps in which an element is settling."""
        return min(self.num_warmup_updates, MAX_SETTLING_STEPS)

    def set_settling(self, indices: Tensor, since: Tensor) -> None:
        """Set the settling elements: their indices (s,), and their first steps (s,)."""
        self._slices = None
        earliest, self.settles_at = self.settles_at, 0
        self.settling, order = indices.sort()
        self.settling_since = since[order]
        if len(indices):
            # those that were settling before began earlier
            self.settles_at = earliest or int(since.min()) + self.num_settling_steps - 1

    def settling_slices(self) -> list[tuple[Segment, slice]]:
        """Return the tensors with settling elements, each with its slice of (s,).

        They are kept while the same elements are settling, since they are read from the device.
        """
        if not len(self.settling):
            return []
        if self._slices is None:
            ends = torch.tensor([each.here.stop for each in self.flat.segments])
            ends = torch.searchsorted(self.settling, ends.to(self.settling.device))
            bounds = [0, *ends.tolist()]
            pairs = zip(self.flat.segments, map(slice, bounds[:-1], bounds[1:]), strict=True)
            self._slices = [(segment, here) for segment, here in pairs if here.start < here.stop]
        return self._slices

    def read_settling(self, gradients: Tensor) -> SettlingElements | None:
        """Return copies of what the settling elements have before a step; None if there are none.

        Args:
            gradients: (n,), this rank's gradients.
        """
        if not len(self.settling):
            return None
        variances = self.variance[self.settling]
        for segment, here in self.settling_slices():
            variances[here] /= self.variance_correction(segment.options)
        return SettlingElements(gradients[self.settling], self.momentum[self.settling], variances)

    def update_settling(
        self, settling: SettlingElements | None, means: Tensor | None = None
    ) -> None:
        """Update momenta and variances of the settling elements, if any, with mean gradients.

        Args:
            settling: what they had before the step.
            means: (n,); None if `settling` has the mean gradients.
        """
        if settling is None:
            return
        if means is not None:
            settling.gradients = means[self.settling]
        ages = (self.steps + 2 - self.settling_since).double()
        for segment, here in self.settling_slices():
            gradients, (beta1, beta2) = settling.gradients[here], segment.options["betas"]
            settling.momenta[here].lerp_(gradients, 1 - beta1)
            rates = ((1 - beta2) / (1 - torch.pow(beta2, ages[here]))).to(gradients.dtype)
            settling.variances[here].lerp_(gradients.square(), rates)
        self.write_settling(settling)

    def write_settling(self, settling: SettlingElements) -> None:
        """Write momenta and variances of the settling elements back."""
        variances = settling.variances.clone()
        for segment, here in self.settling_slices():
            variances[here] *= self.variance_correction(segment.options)
        self.momentum[self.settling], self.variance[self.settling] = settling.momenta, variances

    def join_settled(self) -> None:
        """Compress the elements that have settled."""
        if not 0 < self.settles_at <= self.steps + 1:
            return
        is_settled = self.settling_since <= self.steps + 2 - self.num_settling_steps
        # each search synchronizes with a GPU
        settled, others = (each.nonzero().flatten() for each in (is_settled, ~is_settled))
        joined, self.settles_at = self.settling[settled], 0
        self.set_settling(self.settling[others], self.settling_since[others])
        self.join(joined)

    def join(self, joined: Tensor) -> None:
        """Compress elements, given by their indices, from now on."""
        # a variance of 0 would make it inactive again
        self.variance[joined] = self.variance[joined].clamp(min=torch.finfo(self.flat.dtype).tiny)
        self.raise_small_variances(joined)
        assert self.active is not None, "there were settling elements"
        self.active = self.active.index_fill(0, joined, True)
        if bool(self.active.all()):
            self.set_active(None)
        else:
            # inactive elements keep their pending gradients
            self._restrict()

    def raise_small_variances(self, late: Tensor | None = None) -> None:
        """Apply the variance floor.

        Later gradients may be larger than earlier ones, and so may compression errors.

        Args:
            late: indices of the elements with at least the floor `LATE_VARIANCE_FLOOR`.
        """
        if not self.variance_floor:
            return
        first, settling_variances = self.flat.num_uncompressed, self.variance[self.settling]
        self.variance[self.settling] = 0
        means, floors = torch.empty_like(self.variance), None
        if late is not None:
            floors = torch.full_like(self.variance, self.variance_floor)
            floors[late] = max(self.variance_floor, LATE_VARIANCE_FLOOR)
        for segment in self.flat.segments:
            here = segment.here
            if here.start >= first:
                variance, is_active = self.variance[here], self.variance[here] > 0
                means[here] = mean = variance.sum() / is_active.sum().clamp(min=1)
                least = (self.variance_floor if floors is None else floors[here]) * mean
                variance.copy_(torch.where(is_active, torch.maximum(variance, least), variance))
        if self.scale_elements != 1:
            raise_to_neighbours(self.variance[first:], means[first:], self.scale_elements)
        self.variance[self.settling] = settling_variances


def raise_to_neighbours(variance: Tensor, means: Tensor, width: int | None) -> None:
    """Raise, in place, the active variances of parameters that are much smaller than adjacent ones.

    Windows of `width` elements divide the vector. The limit of an element is `NEIGHBOUR_SHARE` of
    the largest of three means of active elements: of its own window, of the previous and of the
    next one. Together, the three windows cover every block of `width` elements that contains the
    element.

    Args:
        variance: (c,), at least 0; elements above 0 are active.
        means: (c,), for each element the mean variance of the active elements of its parameter.
            Variances are only raised if this mean is below the limit.
        width: elements that share a scale; None if the blocks may be larger, for a single window.
    """
    count = len(variance)
    if not count:
        return
    width = min(width or count, count)
    padded = functional.pad(variance, (0, -count % width)).view(-1, width)
    local = padded.sum(1) / (padded > 0).sum(1).clamp(min=1)
    local = functional.max_pool1d(local[None], 3, stride=1, padding=1)[0]
    least = NEIGHBOUR_SHARE * local.repeat_interleave(width)[:count]
    is_raised = (variance > 0) & (means < least)
    variance.copy_(torch.where(is_raised, torch.maximum(variance, least), variance))
