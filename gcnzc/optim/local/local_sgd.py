"""Local SGD: average the parameters of all ranks every H steps.

    x_i <- x_i - InnerOpt(gradient of worker i)      H times, each worker on its own
    x_i <- mean_j x_j

as in Stich, "Local SGD converges fast and communicates little" (2019,
https://arxiv.org/abs/1805.09767). Where the mean is compressed, that of how far each worker has
come is taken, which is small where parameters are not:

    x_i <- a - mean_j (a - x_j)                      a: the last mean, the same on all workers

Letters: n elements, k notes, H local steps.
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
    """An optimizer that steps on this worker alone, and takes means of the parameters.

    Args:
        inner: of the parameters, on this worker; any of torch's.
        group: of all workers; those for which torch.distributed was initialised if None.
        local_steps: H; or "auto", so many that exchange takes `target` of the time of
            steps, and a fortieth of their work (`SyncInterval`).
        compress: how means are taken.
        signals: how many things, such as a wish to stop, are told with a mean.
        total_steps: of the run, for a warning if the first exchange comes late in it; None if that
            is not known.
        module: see `DistributedOptimizer`.
        target: the share of exchange for "auto".
        clocks: seconds, for "auto".
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
        pace = SyncInterval(local_steps, target, clocks)
        super().__init__(
            inner, group, signals=signals, total_steps=total_steps, pace=pace, module=module
        )
        self.compress = compress
        self.anchor: Tensor | None = None
        """(n,): the last mean, if means are compressed"""
        self.mean = self.reducer("parameters", compress, self.space.num_elements)
        self.connect()

    def words(self) -> str:
        """See `LocalUpdates`."""
        return f"LocalSGD(local_steps={self.pace.wanted}, compress={self.compress})"

    def started(self) -> None:
        """See `LocalUpdates`."""
        if self.compress != Dense():
            self.anchor = self.vector()

    def restarted(self) -> None:
        """See `LocalUpdates`."""
        self.started()

    def synchronised(self) -> Algorithm[None]:
        """See `LocalUpdates`."""
        values = self.space.read_parameters(self.space.empty(self.notes))
        mean = values[: self.space.num_elements]
        if self.anchor is not None:
            mean.neg_().add_(self.anchor)
        if not (yield from self.averaged(self.mean, values)):
            return
        if self.anchor is not None:
            mean = self.anchor.sub_(mean)
        self.adopt(mean)

    @property
    def state_bytes(self) -> int:
        """Memory from one step to the next, besides that of the inner optimizer."""
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
