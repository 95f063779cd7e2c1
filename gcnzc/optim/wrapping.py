"""The base class of methods around an optimizer of torch."""

from typing import Any
from weakref import ref

from torch.optim import Optimizer

from gcnzc.exchange import Group
from gcnzc.optim.method import DistributedOptimizer
from gcnzc.optim.validation import check_inner


class WrappingOptimizer(DistributedOptimizer):
    """The base class of methods around an optimizer of torch, which updates the parameters.

    The wrapper shares the inner optimizer's parameter groups and state, so learning rate schedulers
    work.

    Args:
        inner: the optimizer of torch.
        group: see `DistributedOptimizer`.
        options: see `DistributedOptimizer`.

    Raises:
        TypeError: the inner optimizer communicates itself or needs a closure.
    """

    def __init__(self, inner: Optimizer, group: Group | None = None, **options: Any) -> None:
        check_inner(self.name, inner)
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults, group, **options)

    def start(self) -> None:
        """See `DistributedOptimizer`."""
        self.follow_inner()
        super().start()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `DistributedOptimizer`; a copy of the inner optimizer has no hooks."""
        super().__setstate__(state)
        self.follow_inner()

    def follow_inner(self) -> None:
        """Share the inner optimizer's parameter groups and state, also after it loads a state."""
        own = ref(self)

        def share(inner: Optimizer) -> None:
            if (wrapper := own()) is not None:
                wrapper.share_inner_state()

        # a load replaces them, and the caller may load a state into the inner optimizer at any time
        self.inner.register_load_state_dict_post_hook(share)
        self.share_inner_state()

    def share_inner_state(self) -> None:
        """Share the current parameter groups and state of the inner optimizer."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.fill_state()

    def on_load(self) -> None:
        """See `DistributedOptimizer`; optimizers of other libraries may not call hooks."""
        self.share_inner_state()

    def compared_options(self) -> dict[str, Any]:
        """See `DistributedOptimizer`; includes the class of the inner optimizer."""
        return super().compared_options() | {"inner": type(self.inner).__name__}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self.inner.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return f"{self.describe_options()} of {self.inner!r}, workers={self.group.world_size}"
