"""Exclude inactive elements, those with zero variance, until they have a gradient.

With a constant variance, an element with zero variance, such as of an embedding row that was never
looked up, would take steps of lr * scale / eps. It is inactive: excluded from the compression and
its errors, and updated by weight decay only. Each rank sums its gradients of inactive elements, the
pending gradients. Once a rank has such a gradient, all ranks take a gradient step that includes the
sums, and that reactivates the elements: they begin a warm-up of their own, see
`gcnzc.optim.synchronous.settling`. The distance from one such step to the next is at least 1, 2,
4, ... 256 steps.

An element with a small variance, such as of a row that was looked up long ago, would take large
steps. Its variance is raised to a fraction of the mean variance of its parameter, the floor.

A parameter may have a much smaller variance than adjacent ones with which it shares scales: the
gradients of a bias before batch normalization are rounding errors. Because they share a scale, its
compression errors are as large as those of its neighbours, so its variances are raised to
`NEIGHBOUR_SHARE` of the mean of adjacent elements.

Notation: n elements, the first d of them in groups with `compress=False`, c = n - d compressed,
P parameters, s settling elements, k extras. A gradient step exchanges gradients, not momenta.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gcnzc.compress import Compression, Dense
from gcnzc.compress.reducer import DAMAGED_HINT
from gcnzc.exchange import Algorithm
from gcnzc.kernels.finite import are_finite
from gcnzc.optim.state_layout import SavedTensor, check_tensor, check_value
from gcnzc.optim.synchronous.settling import Settling
from gcnzc.optim.validation import check_at_least_zero
from gcnzc.system.scalars import scalars_like

# upper limit of the minimum distance, in steps, between gradient steps that reactivate elements;
# the minimum distance starts at 1 and doubles
MAX_REACTIVATION_INTERVAL = 256

# If the mean variance of a parameter is below this fraction of the mean of adjacent elements, its
# variances are raised to this fraction. Then an element's compression error is at most about 10
# times the square root of its variance.
NEIGHBOUR_SHARE = 0.01

# The variance floor of elements that begin late. When the others have converged, some of their
# gradients are much smaller than those of a warm-up, whereas compression errors are not.
LATE_VARIANCE_FLOOR = 0.2

# values of the option `reactivate`
REACTIVATE_CHOICES = ("step", "refresh")


class Masked(Settling):
    """The base class of optimizers that exclude inactive elements from the compression.

    While any element is inactive or settling, `vectors` also has the mask `active` (c,) of the
    others. In `numbers`, `has_inactive_gradient` is whether inactive elements have a gradient,
    `pending_since` the first step in which they may have had one, 0 if they have none, and
    `reactivate_from` the first step that may then reactivate them; that step then increases by
    `reactivation_interval`.

    Args:
        params: see `Replicated`.
        defaults: see `Replicated`.
        reactivate: "step" or "refresh": whether inactive elements with a gradient cause a
            gradient step.
        variance_floor: the smallest variance of an active element, as a fraction of the mean
            variance of the active elements of its parameter. With a floor, the variances of a
            parameter are also raised to `NEIGHBOUR_SHARE` of the mean of adjacent elements; 0
            disables both.
        gradient_compression: compression of exchanged gradients, without error feedback; None for
            none.
        options: see `Replicated`.
    """

    compress: Compression
    """of the exchanged momenta or updates"""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        reactivate: str,
        variance_floor: float,
        gradient_compression: Compression | None,
        **options: Any,
    ) -> None:
        if not isinstance(reactivate, str) or reactivate not in REACTIVATE_CHOICES:
            raise ValueError(
                f"reactivate is {reactivate!r}\n\nhint: give {' or '.join(REACTIVATE_CHOICES)}"
            )
        check_at_least_zero("variance_floor", variance_floor)
        self.reactivate, self.variance_floor = reactivate, variance_floor
        self.gradient_compression = gradient_compression or Dense()
        super().__init__(params, defaults, **options)
        self.numbers = {
            "settles_at": 0,
            "has_inactive_gradient": False,
            "pending_since": 0,
            "reactivate_from": 0,
            "reactivation_interval": 1,
        }
        self.pending_gradients: Tensor | None = None
        """(inactive elements,): sums of this rank's gradients since the last gradient step; None if
        they are not needed"""
        self._inactive: Tensor | None = None
        self._gradient_reducer = self.gradient_reducer(
            self.gradient_compression, self.flat_params.num_elements
        )
        # a flag for each parameter in gradient steps
        self.max_extras = self.num_common_extras + len(self.flat_params.segments)

    # --- gradient steps

    def exchange_gradients(self, values: Tensor) -> Algorithm[str]:
        """Replace all gradients, plus the pending ones, by their clipped means over the ranks.

        Args:
            values: (n + k,); its extras are the common ones, and one flag per parameter; this
                method sets it if the parameter has a gradient.

        Returns:
            Why all ranks skip the step; empty if they take it.
        """
        flat_params, common = self.flat_params, self.num_common_extras
        flags = values[flat_params.num_elements + common :]
        flags.copy_(scalars_like(flat_params.have_gradients(), values))
        if self.pending_gradients is not None:
            coded = values[flat_params.num_uncompressed : flat_params.num_elements]
            coded.index_add_(0, self.find_inactive(), self.pending_gradients)
            flags += self._have_pending_gradients(flags)
        if skip_reason := (yield from self.mean_gradients(values)):
            return skip_reason
        sums = self.extra_sums = self._gradient_reducer.extra_sums
        self.vectors["had_gradient"] |= torch.tensor(sums[common:]) > 0
        return ""

    def _have_pending_gradients(self, flags: Tensor) -> Tensor:
        """Return for each parameter (P,) whether it has pending gradients, like `flags`."""
        assert self.pending_gradients is not None, "callers check it"
        ends = torch.tensor([each.end for each in self.flat_params.segments])
        ends = ends.to(flags.device, non_blocking=True)
        owners = torch.bucketize(
            self.find_inactive() + self.flat_params.num_uncompressed, ends, right=True
        )
        counts = torch.zeros_like(flags)
        return counts.index_add_(0, owners, (self.pending_gradients != 0).to(flags.dtype)) > 0

    def _reactivate(self, gradients: Tensor) -> None:
        """Let the inactive elements with a mean gradient begin to settle.

        Args:
            gradients: (n + k,); those of inactive elements include the pending ones.
        """
        step, offset = self.steps + 1, self.flat_params.num_uncompressed
        if "active" in self.vectors:
            inactive = self.find_inactive()
            num_steps = 1
            if self.pending_gradients is not None and self.numbers["pending_since"]:
                # the sum of several steps' gradients is larger than their root mean square
                num_steps = step + 1 - self.numbers["pending_since"]
            squares = torch.zeros_like(self.vectors["variance"][offset:])
            squares[inactive] = gradients[offset + inactive].square() / num_steps
            for part in self.flat_params.compressed_parts:
                squares[part.begin - offset : part.end - offset] *= self.variance_correction(part)
            self.vectors["variance"][offset + inactive] = squares[inactive]
            new = inactive[squares[inactive] > 0]
            since = self.vectors.get("settling_since", new[:0])
            self.set_settling(
                torch.cat([self.settling, new]), torch.cat([since, torch.full_like(new, step)])
            )
        self.numbers["pending_since"] = 0
        self._delay_next_reactivation()

    def _delay_next_reactivation(self) -> None:
        """Let steps pass before the next gradient step that reactivates elements."""
        if self.numbers["has_inactive_gradient"]:
            # even if elements are reactivated continually, gradient steps become rare
            step, gap = self.steps + 1, self.numbers["reactivation_interval"]
            self.numbers |= {
                "reactivate_from": step + gap,
                "reactivation_interval": min(2 * gap, MAX_REACTIVATION_INTERVAL),
            }
            self.numbers["has_inactive_gradient"] = False

    # --- the mask

    @property
    def has_late_elements(self) -> bool:
        """Whether inactive elements were reactivated since the variance was frozen."""
        return bool(self.numbers["reactivate_from"])

    @property
    def scale_elements(self) -> int | None:
        """The number of adjacent elements that share a scale, see `Compression`."""
        return self.compress.scale_elements

    def _raise_small_variances(self, late: Tensor | None = None) -> None:
        """Apply the variance floor.

        Later gradients may be larger than earlier ones, and so may compression errors.

        Args:
            late: indices in (c,) of the elements with at least the floor `LATE_VARIANCE_FLOOR`.
        """
        if not self.variance_floor:
            return
        offset = self.flat_params.num_uncompressed
        compressed, settling = self.vectors["variance"][offset:], self.settling
        settling_variances = compressed[settling]
        compressed[settling] = 0
        means, floors = torch.empty_like(compressed), None
        if late is not None:
            floors = torch.full_like(compressed, self.variance_floor)
            floors[late] = max(self.variance_floor, LATE_VARIANCE_FLOOR)
        for segment in self.flat_params.segments:
            if segment.begin >= offset:
                here = slice(segment.begin - offset, segment.end - offset)
                variance, is_active = compressed[here], compressed[here] > 0
                means[here] = mean = variance.sum() / is_active.sum().clamp(min=1)
                least = (self.variance_floor if floors is None else floors[here]) * mean
                variance.copy_(torch.where(is_active, torch.maximum(variance, least), variance))
        if self.scale_elements != 1:
            raise_to_neighbours(compressed, means, self.scale_elements)
        compressed[settling] = settling_variances

    def _update_active(self) -> None:
        """Make the elements with zero variance inactive; clear the pending gradients."""
        self._raise_small_variances()
        active = self.vectors["variance"][self.flat_params.num_uncompressed :] > 0
        active[self.settling] = False
        self._set_active(active)

    def _set_active(self, active: Tensor | None) -> None:
        """Set the mask (c,) of active elements, None for all; clear the pending gradients."""
        self.vectors.pop("active", None)
        self.pending_gradients = self._inactive = None
        if active is not None:
            inactive = self._find_inactive(active)
            if len(inactive) or "settling" in self.vectors:
                self._inactive, self.vectors["active"] = inactive, active
                self.vectors["momentum"][inactive + self.flat_params.num_uncompressed] = 0
                self._allocate_pending_gradients()
        for reducer in self.reducers.values():
            reducer.restrict_to(self.vectors.get("active"))

    def _join_settled(self) -> None:
        """Compress the elements that have settled."""
        if not 0 < self.numbers["settles_at"] <= self.steps + 1:
            return
        settling, since = self.settling, self.vectors["settling_since"]
        is_settled = since <= self.steps + 2 - self.num_settling_steps
        self.numbers["settles_at"] = 0
        settled, others = (each.nonzero().flatten() for each in (is_settled, ~is_settled))
        self.set_settling(settling[others], since[others])
        self._join(settling[settled])

    def _join(self, joined: Tensor) -> None:
        """Compress elements from now on.

        Args:
            joined: their indices (joined elements,) in (c,).
        """
        variance = self.vectors["variance"][self.flat_params.num_uncompressed :]
        # a variance of 0 would make it inactive again
        variance[joined] = variance[joined].clamp(min=torch.finfo(variance.dtype).tiny)
        self._raise_small_variances(joined)
        active = self.vectors["active"].index_fill(0, joined, True)
        if bool(active.all()):
            self._set_active(None)
            return
        # inactive elements keep their pending gradients
        self.vectors["active"] = active
        for reducer in self.reducers.values():
            reducer.restrict_to(active)

    def _allocate_pending_gradients(self) -> None:
        if self.reactivate == "step" and self.group.world_size > 1:
            shape = self.find_inactive().shape
            self.pending_gradients = self.vectors["variance"].new_zeros(shape)

    def find_inactive(self) -> Tensor:
        """Return the indices (inactive elements,) int64 of the inactive elements in (c,).

        They are cached while the same elements are inactive, because finding them synchronizes with
        a GPU.
        """
        if self._inactive is None:
            self._inactive = self._find_inactive(self.vectors["active"])
        return self._inactive

    def _find_inactive(self, active: Tensor) -> Tensor:
        is_inactive = ~active
        is_inactive[self.settling] = False
        return is_inactive.nonzero().flatten()

    # --- gradients of inactive elements

    def read_inactive(self, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's gradients of inactive elements, and how many of them reactivate one.

        Args:
            gradients: (c,), this rank's gradients.

        Returns:
            A copy (inactive elements,), and the result of `count_reactivated`.
        """
        found = gradients[self.find_inactive()]
        return found, self.count_reactivated(found)

    def count_reactivated(self, gradients: Tensor) -> Tensor:
        """Count the inactive elements whose gradient is large enough for a variance above 0.

        NaN if a gradient is not finite. A compressed exchange checks only active elements. This
        count is sent with the exchange; NaN makes all ranks skip the step before such a gradient is
        added to the pending ones.

        Args:
            gradients: (inactive elements,).
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
        if count > 0 and not self.numbers["pending_since"]:
            self.numbers["pending_since"] = since

    def add_pending_gradients(self, gradients: Tensor) -> None:
        """Add gradients (inactive elements,) to the sums for the next gradient step."""
        if self.pending_gradients is not None:
            self.bound_sums(self.pending_gradients.add_(gradients))

    # --- checkpoints

    @property
    def state_bytes(self) -> int:
        """See `Replicated`; includes the sums and indices of inactive elements."""
        kept = [each for each in (self.pending_gradients, self._inactive) if each is not None]
        return super().state_bytes + sum(each.nbytes for each in kept)

    def snapshot(self) -> dict[str, Any]:
        """See `Replicated`; `local` has the pending gradients of inactive elements."""
        local = (
            {} if self.pending_gradients is None else {"pending_gradients": self.pending_gradients}
        )
        return {**super().snapshot(), "local": local}

    def check_state(self, snapshot: Mapping[str, Any]) -> None:
        """See `Replicated`."""
        super().check_state(snapshot)
        flat_params, shared = self.flat_params, snapshot["shared"]
        numbers, vectors, dtype = shared["numbers"], shared["vectors"], flat_params.dtype
        check_value(numbers, "has_inactive_gradient", kind=bool)
        check_value(numbers, "reactivate_from")
        check_value(numbers, "reactivation_interval", 1)
        check_value(numbers, "pending_since")
        check_value(numbers, "settles_at")
        count, offset = flat_params.num_elements, flat_params.num_uncompressed
        momentum = SavedTensor((self.count_momentum_elements(snapshot),), dtype=dtype)
        check_tensor(vectors, "momentum", momentum)
        check_tensor(vectors, "variance", SavedTensor((count,), dtype=dtype, least=0))
        flags = SavedTensor((len(flat_params.segments),), dtype=torch.bool)
        check_tensor(vectors, "had_gradient", flags)
        if not {"active", "settling", "settling_since"} & set(vectors):
            return
        num_compressed, num_settling = count - offset, 0
        check_tensor(vectors, "active", SavedTensor((num_compressed,), dtype=torch.bool))
        if isinstance(settling := vectors.get("settling"), Tensor):
            num_settling = settling.numel()
        if "settling" in vectors or "settling_since" in vectors:
            steps = numbers["steps"]
            check_value(numbers, "settles_at", 1)
            for name, most in (("settling", num_compressed - 1), ("settling_since", steps)):
                expected = SavedTensor((num_settling,), dtype=torch.int64, least=0, most=most)
                check_tensor(vectors, name, expected)
            indices = vectors["settling"]
            if bool((indices.diff() <= 0).any() or vectors["active"][indices].any()):
                raise ValueError(
                    "settling of the state has elements that are active or not in ascending order"
                    f"\n\n{DAMAGED_HINT}"
                )
        if snapshot["local"].get("pending_gradients") is not None:
            inactive = int((~vectors["active"]).sum()) - num_settling
            check_tensor(snapshot["local"], "pending_gradients", SavedTensor((inactive,)))

    def count_momentum_elements(self, snapshot: Mapping[str, Any]) -> int:
        """Return the number of elements of `momentum` among the vectors of a snapshot."""
        return self.flat_params.num_elements

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """See `Replicated`."""
        super().restore(snapshot)
        self.pending_gradients = self._inactive = None
        self._slices = self._uncompressed_reducer = None
        if "active" not in self.vectors:
            return
        saved = snapshot["local"].get("pending_gradients")
        if saved is None:
            self._allocate_pending_gradients()
            return
        self.pending_gradients = self.restore_sums(saved)


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
