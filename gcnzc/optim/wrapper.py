"""The base class of distributed optimizers that wrap an optimizer of torch."""

from torch import nn
from torch.optim import Optimizer

from gcnzc.exchange import Group
from gcnzc.optim.checkpointed import Checkpointed
from gcnzc.optim.validation import check_inner


class Wrapper(Checkpointed):
    """The base class of optimizers that wrap an optimizer of torch, which updates the parameters.

    The wrapper shares the inner optimizer's parameter groups and state, so learning rate schedulers
    work.

    Args:
        inner: the optimizer of torch.
        group: see `DistributedOptimizer`.
        signals: see `DistributedOptimizer`.
        module: see `DistributedOptimizer`.
        total_steps: see `DistributedOptimizer`.

    Raises:
        TypeError: the inner optimizer communicates itself or needs a closure.
    """

    def __init__(
        self,
        inner: Optimizer,
        group: Group | None,
        signals: int,
        module: nn.Module | None = None,
        total_steps: int | None = None,
    ) -> None:
        check_inner(self.name, inner)
        super().__init__(inner.param_groups, inner.defaults, group, signals, module, total_steps)
        self.inner = inner

    def share_inner_state(self) -> None:
        """Set the parameter groups and the state to the inner optimizer's."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        if not self.is_shared:
            self.fill_state()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self.inner.zero_grad(set_to_none)
