"""Local SGD: average the parameters of all ranks every H steps.

    x_i <- x_i - InnerOpt(gradient of rank i)        H local steps
    x_i <- mean_j x_j                                synchronization

as in Stich, "Local SGD converges fast and communicates little" (2019,
https://arxiv.org/abs/1805.09767). With compression the ranks average the differences from the last
mean, which are smaller than the parameters:

    x_i <- a - mean_j (a - x_j)                      a: the last mean, equal on all ranks

Notation: n elements, k extras, H local steps.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gcnzc.compress import Compression, Dense
from gcnzc.exchange import Algorithm, Group
from gcnzc.optim.defaults import LOCAL_SGD
from gcnzc.optim.local.base import LocalUpdates
from gcnzc.optim.local.sync_interval import Clocks, SyncInterval


class LocalSGD(LocalUpdates):
    """Local SGD: take local steps, and average the parameters of all ranks every H steps.

    Args:
        inner: the optimizer of torch that takes the local steps.
        group: the ranks that communicate; see `DistributedOptimizer`.
        local_steps: H; or "auto", the smallest H for which exchanges take at most `target` of the
            wall time and add at most 1/40 to the CPU time of the steps (`SyncInterval`).
        compress: compression of the exchanged differences.
        signals: the number of flags, such as a request to stop, that each synchronization combines
            over the ranks.
        total_steps: the number of steps of the run; None if it is not known. Rank 0 warns if the
            first exchange is late in the run.
        module: see `DistributedOptimizer`.
        target: the largest fraction of exchanges in the wall time for "auto".
        clocks: the clocks that measure for "auto".
    """

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None = None,
        *,
        local_steps: int | str = LOCAL_SGD.local_steps,
        compress: Compression = Dense(),  # noqa: B008 - it cannot change
        signals: int = 0,
        total_steps: int | None = None,
        module: nn.Module | None = None,
        target: float = 0.05,
        clocks: Clocks = Clocks(),  # noqa: B008 - it cannot change
    ) -> None:
        sync_interval = SyncInterval(local_steps, target, clocks)
        super().__init__(
            inner,
            group,
            signals=signals,
            total_steps=total_steps,
            sync_interval=sync_interval,
            module=module,
        )
        self.compress = compress
        self.anchor: Tensor | None = None
        """(n,): the last mean, if means are compressed"""
        self.mean = self.reducer("parameters", compress, self.flat_params.num_elements)
        self.connect()

    def describe_options(self) -> str:
        """See `LocalUpdates`."""
        return f"LocalSGD(local_steps={self.sync_interval.requested}, compress={self.compress})"

    def initialize(self) -> None:
        """See `LocalUpdates`."""
        if self.compress != Dense():
            self.anchor = self.vector()

    def reinitialize(self) -> None:
        """See `LocalUpdates`."""
        self.initialize()

    def synchronize(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        values = self.flat_params.read_parameters(self.flat_params.empty(self.extras))
        mean = values[: self.flat_params.num_elements]
        if self.anchor is not None:
            mean.neg_().add_(self.anchor)
        if not (yield from self.average(self.mean, values)):
            return
        if self.anchor is not None:
            mean = self.anchor.sub_(mean)
        self.set_parameters(mean)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state between steps, without that of the inner optimizer."""
        anchor = 0 if self.anchor is None else self.anchor.nbytes
        return anchor + self.mean.state_bytes

    def shared_state(self) -> dict[str, Any]:
        """See `LocalUpdates`."""
        return {} if self.anchor is None else {"anchor": self.anchor}

    def load_own(
        self, shared: Mapping[str, Any], local: Mapping[str, Any], shards: Mapping[str, Any]
    ) -> None:
        """See `LocalUpdates`."""
        if self.compress != Dense():
            self.anchor = self.vector(shared["anchor"])
