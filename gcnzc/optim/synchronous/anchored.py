"""Local Adam steps from an anchor, the parameters at the last synchronization.

    m_i <- b1 m_i + (1 - b1) g_i     u_i <- u_i + lr m_i     x_i = a - u_i / (sqrt(V) + eps)

The anchor a is equal on all ranks. The update u_i accumulates the local steps of rank i since then.
The variance V is constant between synchronizations. Weight decay applies to a and u_i in the same
way.

Notation: n elements, of which d are not compressed (those of groups with `compress=False`) and
c = n - d are.
"""

import torch
from torch import Tensor

from gcnzc.compress import Dense
from gcnzc.exchange import Algorithm
from gcnzc.optim.flat_parameters import GroupSlice
from gcnzc.optim.method import identify_caller
from gcnzc.optim.synchronous.masked import Masked
from gcnzc.optim.synchronous.settling import SettlingElements


class Anchored(Masked):
    """The base class of optimizers whose ranks take local steps from a common anchor.

    While the ranks are out of sync, `vectors` has an `anchor` (c,). In `numbers`, `lr_sums` has for
    each group slice the sum of the step sizes since the last synchronization, and
    `num_variance_updates` is the number of variance updates.
    """

    @property
    def is_out_of_sync(self) -> bool:
        """Whether the ranks have taken local steps since the last synchronization."""
        return "anchor" in self.vectors

    def replicated_parameters(self) -> list[tuple[str, Tensor]] | None:
        """See `DistributedOptimizer`."""
        return None if self.is_out_of_sync else super().replicated_parameters()

    def _accumulate_update(self, momentum: Tensor, update: Tensor, gradient: Tensor | None) -> None:
        """Take a local step of the compressed parameters: update momenta and updates in place.

        Args:
            momentum: (c,), this rank's momenta.
            update: (c,), this rank's accumulated update.
            gradient: (c,), this rank's gradients; None to step with the unchanged momenta. With a
                learning rate of 0 nothing changes, so that momenta in sync remain in sync.
        """
        for part in self.flat_params.compressed_parts:
            here, size, decay = (
                self._coded_slice(part),
                self._step_size(part),
                self._decay_factor(part),
            )
            if size == 0:
                continue
            if gradient is not None:
                momentum[here].lerp_(gradient[here], 1 - part.group["betas"][0])
            if "active" in self.vectors:
                momentum[here].masked_fill_(~self.vectors["active"][here], 0)
            update[here].mul_(decay).add_(momentum[here], alpha=size)

    def _count_step(self) -> None:
        """Apply weight decay to the anchor, and add the step size to `lr_sums`.

        `_accumulate_update` does the same to the update.
        """
        anchor, lr_sums = self.vectors["anchor"], list(self.numbers["lr_sums"])
        had_gradient, offset = (
            self.vectors["had_gradient"].tolist(),
            self.flat_params.num_uncompressed,
        )
        for number, part in self._numbered_coded_parts():
            decay = self._decay_factor(part)
            lr_sums[number] = lr_sums[number] * decay + self._step_size(part)
            for index in range(part.first, part.last):
                segment = self.flat_params.segments[index]
                if had_gradient[index] and decay != 1:
                    anchor[segment.begin - offset : segment.end - offset] *= decay
        self.numbers["lr_sums"] = lr_sums

    def _set_parameters(self, anchor: Tensor, update: Tensor, out: Tensor) -> None:
        """Set the compressed parameters to anchor - update / (sqrt(V) + eps).

        Args:
            anchor: (c,).
            update: (c,).
            out: (c,), receives the parameters; may be `update`.
        """
        roots = torch.empty_like(anchor)
        for part in self.flat_params.compressed_parts:
            here = roots[self._coded_slice(part)]
            self._compute_denominator(part, self._count_updates(part), here)
        torch.addcdiv(anchor, update, roots, value=-1, out=out)
        self._write_coded(out)

    def variance_correction(self, part: GroupSlice) -> float:
        """See `Settling`."""
        if not self.bias_correction:
            return 1.0
        return float(1 - part.group["betas"][1] ** self.numbers["num_variance_updates"])

    def _move_settling(self, settling: SettlingElements) -> None:
        """Take a step of Adam with the settling elements; others are set from anchor and update.

        Args:
            settling: the elements after the step.
        """
        offset, anchor = self.flat_params.num_uncompressed, self.vectors.get("anchor")
        for part, index, here in self.settling_slices():
            segment, positions = self.flat_params.segments[index], self.settling[here]
            roots = settling.variances[here].sqrt() + part.group["eps"]
            moves = settling.momenta[here] / roots * self._step_size(part)
            own, flat = positions - (segment.begin - offset), segment.parameter.flatten()
            moved = (flat[own] if anchor is None else anchor[positions]).to(moves.dtype) - moves
            if anchor is not None:
                anchor[positions] = moved
            flat[own] = moved.to(flat.dtype)
            segment.parameter.copy_(flat.view_as(segment.parameter))

    def _decay_factor(self, part: GroupSlice) -> float:
        """Return the factor of the parameters by weight decay in the next step."""
        return 1 - float(part.group["lr"]) * part.group["weight_decay"]

    def _count_updates(self, part: GroupSlice) -> int:
        """Return the number of updates of a group slice's variance, after the next step."""
        is_uncompressed = part.begin < self.flat_params.num_uncompressed
        count: int = self.numbers["num_variance_updates"]
        return self.steps + 1 if is_uncompressed else count

    def _numbered_coded_parts(self) -> list[tuple[int, GroupSlice]]:
        offset = self.flat_params.num_uncompressed
        return [pair for pair in enumerate(self.flat_params.parts) if pair[1].begin >= offset]

    def _coded_slice(self, part: GroupSlice) -> slice:
        offset = self.flat_params.num_uncompressed
        return slice(part.begin - offset, part.end - offset)

    def _read_coded(self) -> Tensor:
        """Return a copy (c,) of the compressed parameters."""
        whole = self.flat_params.read_parameters(self.flat_params.empty())
        return (
            whole[self.flat_params.num_uncompressed :].clone()
            if self.flat_params.num_uncompressed
            else whole
        )

    def _write_coded(self, values: Tensor) -> None:
        offset = self.flat_params.num_uncompressed
        for segment in self.flat_params.segments:
            if segment.begin >= offset:
                here = values[segment.begin - offset : segment.end - offset]
                segment.parameter.copy_(here.view(segment.parameter.shape))

    @identify_caller
    def average_parameters_algorithm(self) -> Algorithm[Tensor | None]:
        """See `DistributedOptimizer`.

        Returns:
            This rank's own parameters (n,) if the ranks are out of sync; else None.
        """
        if not self.is_out_of_sync:
            return None
        own = self.flat_params.read_parameters(self.flat_params.empty())
        mean = own.clone()
        if not (yield from self.reducer(Dense(), self.flat_params.num_elements).mean(mean)):
            self.flat_params.write_parameters(mean)
        return own

    def restore_parameters(self, own: Tensor | None) -> None:
        """See `DistributedOptimizer`."""
        if own is not None:
            self.flat_params.write_parameters(own)
