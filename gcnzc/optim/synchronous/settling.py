"""Exchange the gradients of elements that begin late, until their variance has settled.

A compressed exchange needs variances that are averages over many steps: with one from a single
gradient, which may be close to 0, an element takes large steps, and so do elements that share a
scale with a momentum that is still large. Elements whose first gradient comes after the variance of
the others is frozen therefore have a warm-up of their own, in which they are settling: as in Adam,
the ranks exchange their gradients, uncompressed, and update their momentum and variance in every
step. It takes as many steps as there were updates of the other variances, at most
`MAX_SETTLING_STEPS`.

With g the mean gradient and u = 1, 2, ... the number of the step of this warm-up:

    m <- b1 m + (1 - b1) g     V <- V + (g^2 - V) (1 - b2) / (1 - b2^u)

Notation: n elements, the first d of them in groups with `compress=False`, c = n - d, s settling
elements, k extras.
"""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcnzc.compress import Compression, Reducer
from gcnzc.exchange import Algorithm
from gcnzc.optim.flat_parameters import GroupSlice
from gcnzc.optim.synchronous.base import Replicated

# Adam's step with momenta that are in sync, for optimizers that exchange momenta or updates.
#
#     m <- b1 m + (1 - b1) g     v <- b2 v + (1 - b2) g^2
#     x <- x - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^u)) + eps) + weight_decay x)
#
# Here t is the number of the step, and u the number of updates of the variance v.
#
# Notation: n elements, P parameters, k extras.


class AdamStep(Replicated):
    """The base class of optimizers with Adam's momentum and variance.

    `vectors` has `momentum` and `variance` (n,), and `had_gradient` (P,) bool on the host: the
    parameters that have had a gradient. The others do not change.

    Args:
        params: see `Replicated`.
        defaults: see `Replicated`; they include `lr`, `betas`, `eps` and `weight_decay`.
        options: other options of `Replicated`.
    """

    bias_correction: bool
    """whether momentum and variance are corrected for their bias"""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], **options: Any) -> None:
        super().__init__(params, defaults, **options)
        flat_params = self.flat_params
        self.vectors = {"momentum": flat_params.zeros(), "variance": flat_params.zeros()}
        self.vectors["had_gradient"] = torch.zeros(len(flat_params.segments), dtype=torch.bool)

    def _update_moments(self, part: GroupSlice, values: Tensor, *, with_variance: bool) -> None:
        """Update the momenta, and the variance if `with_variance`, with the mean gradients."""
        here, (beta1, beta2) = slice(part.begin, part.end), part.group["betas"]
        gradient = values[here]
        self.vectors["momentum"][here].lerp_(gradient, 1 - beta1)
        if with_variance:
            variance = self.vectors["variance"][here]
            variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

    def _step_size(self, part: GroupSlice) -> float:
        """Return the learning rate of the next step, with the bias correction of the momentum."""
        size = float(part.group["lr"])
        if self.bias_correction:
            size /= 1 - part.group["betas"][0] ** (self.steps + 1)
        return size

    def _compute_denominator(self, part: GroupSlice, num_updates: int | None, out: Tensor) -> None:
        """Write the denominator of Adam's update, sqrt(V) + eps, of a group slice into `out`.

        Args:
            part: the group slice.
            num_updates: the number of updates of its variance; None if `variance` is corrected for
                its bias already.
            out: (elements of the slice,), overwritten.
        """
        torch.sqrt(self.vectors["variance"][part.begin : part.end], out=out)
        if self.bias_correction and num_updates is not None:
            out /= (1 - part.group["betas"][1] ** num_updates) ** 0.5
        out += part.group["eps"]

    def _take_adam_step(self, part: GroupSlice, num_updates: int | None, values: Tensor) -> None:
        """Update the parameters of a group slice.

        Args:
            part: the group slice.
            num_updates: see `_compute_denominator`.
            values: (n + k,), overwritten.
        """
        options, momentum = part.group, self.vectors["momentum"]
        step_size, lr, decay = self._step_size(part), float(options["lr"]), options["weight_decay"]
        self._compute_denominator(part, num_updates, values[part.begin : part.end])
        had_gradient = self.vectors["had_gradient"].tolist()
        for index in range(part.first, part.last):
            if had_gradient[index]:
                segment = self.flat_params.segments[index]
                here, shape = slice(segment.begin, segment.end), segment.parameter.shape
                pair = momentum[here].view(shape), values[here].view(shape)
                self._move(segment.parameter, *pair, step_size, lr, decay)

    def _move(
        self,
        parameter: Tensor,
        momentum: Tensor,
        root: Tensor,
        step_size: float,
        lr: float,
        decay: float,
    ) -> None:
        parameter.mul_(1 - lr * decay)
        if parameter.dtype == momentum.dtype:
            parameter.addcdiv_(momentum, root, value=-step_size)
        else:
            parameter -= (momentum / root * step_size).to(parameter.dtype)


# 1 / (1 - b2) for the default b2: the steps after which an average forgets older gradients
MAX_SETTLING_STEPS = 1000


@dataclass(eq=False)
class SettlingElements:
    """The settling elements before a step, (s,) each."""

    gradients: Tensor
    momenta: Tensor
    variances: Tensor
    """corrected for their bias"""


class Settling(AdamStep):
    """The base class of optimizers with elements that are settling.

    While there are any, `vectors` has their indices `settling` (s,) in (c,), int64 and ascending,
    and `settling_since` (s,) int64, the number of the first step of each. In `numbers`,
    `settles_at` is the step in which the first of them have settled, 0 if there are none.
    """

    gradient_compression: Compression

    _slices: list[tuple[GroupSlice, int, slice]] | None = None
    _uncompressed_reducer: Reducer | None = None

    @property
    @abstractmethod
    def num_warmup_updates(self) -> int:
        """The number of updates of the variances of other elements in the warm-up."""

    @property
    def num_settling_steps(self) -> int:
        """The number of steps in which an element is settling."""
        return min(self.num_warmup_updates, MAX_SETTLING_STEPS)

    def variance_correction(self, part: GroupSlice) -> float:
        """Return the factor by which the variance of a compressed group slice is biased."""
        return 1.0

    @property
    def settling(self) -> Tensor:
        """The indices (s,) int64 of the settling elements in (c,), ascending."""
        none = torch.empty(0, dtype=torch.int64, device=self.flat_params.device)
        return self.vectors.get("settling", none)

    def set_settling(self, indices: Tensor, since: Tensor) -> None:
        """Set the settling elements: their indices (s,) in (c,), and their first steps (s,)."""
        self._slices = self._uncompressed_reducer = None
        earliest, self.numbers["settles_at"] = self.numbers["settles_at"], 0
        for name in ("settling", "settling_since"):
            self.vectors.pop(name, None)
        if len(indices):
            indices, order = indices.sort()
            self.vectors |= {"settling": indices, "settling_since": since[order]}
            # those that were settling before began earlier
            self.numbers["settles_at"] = earliest or int(since.min()) + self.num_settling_steps - 1

    def settling_slices(self) -> list[tuple[GroupSlice, int, slice]]:
        """Return for each tensor with settling elements its group slice, index, and slice of (s,).

        They are kept while the same elements are settling, since they are read from the device.
        """
        if "settling" not in self.vectors:
            return []
        if self._slices is None:
            offset, segments = self.flat_params.num_uncompressed, self.flat_params.segments
            ends = torch.tensor([each.end - offset for each in segments], dtype=torch.int64)
            bounds = torch.searchsorted(self.settling, ends.to(self.settling.device)).tolist()
            self._slices = [
                (part, index, slice(begin, bounds[index]))
                for part in self.flat_params.compressed_parts
                for index in range(part.first, part.last)
                if (begin := bounds[index - 1] if index else 0) < bounds[index]
            ]
        return self._slices

    def read_settling(self, gradients: Tensor) -> SettlingElements | None:
        """Return copies of what the settling elements have before a step; None if there are none.

        Args:
            gradients: (n + k,), this rank's gradients.
        """
        if "settling" not in self.vectors:
            return None
        positions = self.settling + self.flat_params.num_uncompressed
        variances = self.vectors["variance"][positions]
        for part, _, here in self.settling_slices():
            variances[here] /= self.variance_correction(part)
        momenta = self.vectors["momentum"][positions]
        return SettlingElements(gradients[positions], momenta, variances)

    def _mean_uncompressed(
        self, values: Tensor, settling: SettlingElements | None
    ) -> Algorithm[str]:
        """Replace the gradients that are not compressed, if any, by their means over the ranks.

        Args:
            values: (n + k,); the first d are replaced.
            settling: the gradients are replaced.

        Returns:
            Why all ranks skip the step; empty if they take it.
        """
        offset = self.flat_params.num_uncompressed
        sent = values[:offset]
        if settling is not None:
            sent = torch.cat([sent, settling.gradients])
        if self._uncompressed_reducer is None:
            self._uncompressed_reducer = self.gradient_reducer(self.gradient_compression, len(sent))
        if skip_reason := (yield from self._uncompressed_reducer.mean(sent)):
            return skip_reason
        if settling is not None:
            values[:offset] = sent[:offset]
            settling.gradients = sent[offset:]
        return ""

    def average_settling(self, settling: SettlingElements) -> None:
        """Update momenta and variances, in place, with the mean gradients of a step."""
        step = self.steps + 1
        ages = (step + 1 - self.vectors["settling_since"]).double()
        for part, _, here in self.settling_slices():
            gradients, (beta1, beta2) = settling.gradients[here], part.group["betas"]
            settling.momenta[here].lerp_(gradients, 1 - beta1)
            rates = ((1 - beta2) / (1 - torch.pow(beta2, ages[here]))).to(gradients.dtype)
            settling.variances[here].lerp_(gradients.square(), rates)

    def update_settling(self, settling: SettlingElements | None, means: Tensor) -> None:
        """Update the settling elements, if any, with the mean gradients (n + k,) of all."""
        if settling is not None:
            settling.gradients = means[self.settling + self.flat_params.num_uncompressed]
            self.average_settling(settling)
            self.write_settling(settling)

    def write_settling(self, settling: SettlingElements) -> None:
        """Write momenta and variances of the settling elements back; `settling` is overwritten."""
        positions = self.settling + self.flat_params.num_uncompressed
        for part, _, here in self.settling_slices():
            settling.variances[here] *= self.variance_correction(part)
        self.vectors["momentum"][positions] = settling.momenta
        self.vectors["variance"][positions] = settling.variances
