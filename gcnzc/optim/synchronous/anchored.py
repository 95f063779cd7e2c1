"""Steps that a worker takes on its own from parameters that are the same on all workers.

    m_i <- b1 m_i + (1 - b1) g_i     u_i <- u_i + lr m_i     x_i = a - u_i / (sqrt(V) + eps)

The anchor a is x as all workers last had it, and the update u_i is what this worker did since. The
variance V does not move meanwhile. Weight decay applies to a and u_i in the same way.

Letters: n elements, d of them dense, c = n - d in codes.
"""

import torch
from torch import Tensor

from gcnzc.compress import Dense
from gcnzc.exchange import Algorithm
from gcnzc.optim.base import identified
from gcnzc.optim.flat_parameters import GroupSlice
from gcnzc.optim.synchronous.base import Replicated


class Anchored(Replicated):
    """The base of optimizers whose workers take steps on their own from a common anchor.

    Workers are apart while `vectors` has an `anchor` (c,). Of each part, `lengths` in `numbers` is
    the sum of the step sizes since then; `refreshes` there counts how often the variance moved.
    """

    bias_correction: bool
    """whether momentum and variance are corrected for their bias"""

    @property
    def is_apart(self) -> bool:
        """Whether workers have taken steps alone since they last agreed."""
        return "anchor" in self.vectors

    def replicated_parameters(self) -> list[tuple[str, Tensor]] | None:
        """See `DistributedOptimizer`."""
        return None if self.is_apart else super().replicated_parameters()

    def _go_on(self, momentum: Tensor, update: Tensor, gradient: Tensor | None) -> None:
        """Take a step of the coded parameters, of which momenta and updates (c,) are told here.

        Without a gradient the momentum is taken for it. A step of size 0 changes nothing, so that
        momenta are the same on all workers if nothing else was.
        """
        for part in self._coded_parts():
            here, size, kept = self._of_coded(part), self._size(part), self._kept(part)
            if size == 0:
                continue
            if gradient is not None:
                momentum[here].lerp_(gradient[here], 1 - part.group["betas"][0])
                if "active" in self.vectors:
                    momentum[here].masked_fill_(~self.vectors["active"][here], 0)
            update[here].mul_(kept).add_(momentum[here], alpha=size)

    def _count_step(self) -> None:
        """Let the anchor decay, and count the size of a step, as updates do in `_go_on`."""
        anchor, lengths = self.vectors["anchor"], list(self.numbers["lengths"])
        awake, dense = self.vectors["awake"].tolist(), self.space.num_dense
        for number, part in self._numbered_coded_parts():
            kept = self._kept(part)
            lengths[number] = lengths[number] * kept + self._size(part)
            for place in range(part.first, part.last):
                segment = self.space.segments[place]
                if awake[place] and kept != 1:
                    anchor[segment.begin - dense : segment.end - dense] *= kept
        self.numbers["lengths"] = lengths

    def _place(self, anchor: Tensor, update: Tensor, out: Tensor) -> None:
        """Set the coded parameters to anchor - update / root; `out` (c,) may be the update."""
        roots = torch.empty_like(anchor)
        for part in self._coded_parts():
            self._root(part, roots[self._of_coded(part)])
        torch.addcdiv(anchor, update, roots, value=-1, out=out)
        self._write_coded(out)

    def _size(self, part: GroupSlice) -> float:
        """How far a momentum of 1 moves an element whose variance is 1, at the next step."""
        size = float(part.group["lr"])
        if self.bias_correction:
            size /= 1 - part.group["betas"][0] ** (self.steps + 1)
        return size

    def _kept(self, part: GroupSlice) -> float:
        """What weight decay leaves of a parameter, at the next step."""
        return 1 - float(part.group["lr"]) * part.group["weight_decay"]

    def _root(self, part: GroupSlice, out: Tensor) -> None:
        """What momenta of a part are divided by."""
        torch.sqrt(self.vectors["variance"][part.begin : part.end], out=out)
        if self.bias_correction:
            is_dense = part.begin < self.space.num_dense
            count = self.steps + 1 if is_dense else self.numbers["refreshes"]
            out /= (1 - part.group["betas"][1] ** count) ** 0.5
        out += part.group["eps"]

    def _coded_parts(self) -> list[GroupSlice]:
        return [part for _, part in self._numbered_coded_parts()]

    def _numbered_coded_parts(self) -> list[tuple[int, GroupSlice]]:
        dense = self.space.num_dense
        return [pair for pair in enumerate(self.space.parts) if pair[1].begin >= dense]

    def _of_coded(self, part: GroupSlice) -> slice:
        dense = self.space.num_dense
        return slice(part.begin - dense, part.end - dense)

    def _read_coded(self) -> Tensor:
        """(c,): a copy of the coded parameters."""
        whole = self.space.read_parameters(self.space.empty())
        return whole[self.space.num_dense :].clone() if self.space.num_dense else whole

    def _write_coded(self, values: Tensor) -> None:
        dense = self.space.num_dense
        for segment in self.space.segments:
            if segment.begin >= dense:
                here = values[segment.begin - dense : segment.end - dense]
                segment.parameter.copy_(here.view(segment.parameter.shape))

    @identified
    def parameters_averaged(self) -> Algorithm[Tensor | None]:
        """See `Replicated`.

        Returns:
            (n,): this worker's own parameters, if workers are apart.
        """
        if not self.is_apart:
            return None
        own = self.space.read_parameters(self.space.empty())
        mean = own.clone()
        if not (yield from self.reducer(Dense(), self.space.num_elements).mean(mean)):
            self.space.write_parameters(mean)
        return own

    def parameters_restored(self, own: Tensor | None) -> Algorithm[None]:
        """See `Replicated`; nothing is asked."""
        if own is not None:
            self.space.write_parameters(own)
        return
        yield
