"""Run torch's optimizers without importing torch.compile's tracer.

A `torch.optim.Optimizer` imports `torch._dynamo` when it is constructed and when it takes a step,
only to exclude its methods from compilation. That loads about 1,500 modules and takes a third of
the start of `gcnzc train`, which compiles nothing with torch.compile.
"""

import sys
from contextlib import suppress
from typing import Any

import torch
from torch.optim import SGD, Adam, Optimizer

# methods with the decorator `torch._disable_dynamo`
_EXCLUDED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def skip_compiler_import() -> None:
    """Let Adam, AdamW, SGD and gcnzc's optimizers run without importing `torch._dynamo`.

    This is for a process that does not use torch.compile: it would trace the optimizers' methods.
    Results do not change. Without effect if `torch._dynamo` is loaded, and on a version of torch
    whose decorators differ, which then imports it.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in _EXCLUDED:
        with suppress(AttributeError):
            method = getattr(Optimizer, name).__wrapped__
            # the decorator calls this attribute of the method, and imports the tracer to set it
            method.__dynamo_disable = method
    for kind in (Adam, SGD):  # AdamW is a subclass of Adam
        with suppress(AttributeError):
            # the decorator implements `differentiable=True`, too, which gcnzc does not use
            step: Any = kind.step
            setattr(kind, "step", torch.no_grad()(step.__wrapped__))  # noqa: B010
