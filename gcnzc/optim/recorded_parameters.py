"""The parameters of an optimizer, and what they were when it was constructed."""

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gcnzc.optim.checkpointed import Checkpointed
from gcnzc.optim.ddp import check_no_average, find_ddp
from gcnzc.optim.group_options import check_same_flags


class RecordedParameters(Checkpointed):
    """The part of `DistributedOptimizer` that detects changed parameters, and DDP.

    Subclasses call `record_parameters` in their constructors.
    """

    initial_requires_grad: list[bool]
    """`requires_grad` of all parameters when the optimizer was constructed; `Averaged` updates it
    when all ranks have changed the same parameters"""
    initial_dtypes: list[torch.dtype]
    """the dtype of each parameter, recorded together with `initial_layouts`"""
    initial_layouts: list[tuple[torch.Size, torch.dtype, torch.device]]
    """the shape, dtype and device of each parameter when `record_parameters` was called last"""
    accepts_ddp = True
    """whether DistributedDataParallel with `keep_gradients_local` may wrap the model"""
    # objects of `find_ddp` in the first step, and what `check_no_average` returned for them
    _ddps: WeakKeyDictionary[DistributedDataParallel, list[int] | None] | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all groups, including frozen ones, named by their positions."""
        for number, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield f"group {number}, parameter {index}", parameter

    def requires_grad_flags(self) -> list[bool]:
        """The current `requires_grad` of each parameter of `named_parameters`, in that order."""
        return [each.requires_grad for group in self.param_groups for each in group["params"]]

    def record_parameters(self) -> None:
        """Record `requires_grad` and the layout of the current parameters."""
        self.initial_requires_grad = self.requires_grad_flags()
        self.initial_layouts = [
            (each.shape, each.dtype, each.device) for _, each in self.named_parameters()
        ]
        self.initial_dtypes = [dtype for _, dtype, _ in self.initial_layouts]

    def check_trainable(self) -> None:
        """Check that the parameters have the same `requires_grad` as at the construction.

        With several ranks it is called after a comparison, so that all ranks raise the error.

        Raises:
            ValueError: a parameter was frozen, unfrozen, added or removed.
        """
        names = [name for name, _ in self.named_parameters()]
        check_same_flags(self.name, self.requires_grad_flags(), self.initial_requires_grad, names)

    def check_layouts(self) -> None:
        """Check that the parameters have the same layouts as at the construction.

        It would take time in each step, so it is called only if a dtype has changed, as by
        `model.half()`, or after an error.

        Raises:
            ValueError: the shape, dtype or device of a parameter has changed.
        """
        pairs = zip(self.named_parameters(), self.initial_layouts, strict=False)
        for (name, parameter), before in pairs:
            now = parameter.shape, parameter.dtype, parameter.device
            if now != before:
                found, expected = (
                    f"{tuple(shape)} {dtype} on {device}" for shape, dtype, device in (now, before)
                )
                raise ValueError(
                    f"{name} is {found} now, but was {expected} when {self.name} was constructed"
                    "\n\nhint: change the shape, dtype and device of parameters before "
                    "constructing the optimizer, and their values in place, as with copy_"
                )

    def check_ddp(self) -> None:
        """Check that DistributedDataParallel has not averaged this rank's gradients.

        Raises:
            ValueError: it has, or `DropCompute` trains such a model.
        """
        if self._ddps is None:
            parameters = (each for _, each in self.named_parameters())
            self._ddps = WeakKeyDictionary(dict.fromkeys(find_ddp(parameters, self.group)))
        for ddp, times in self._ddps.items():
            self._ddps[ddp] = check_no_average(ddp, times, self.name, accepts_hook=self.accepts_ddp)
