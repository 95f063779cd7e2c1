"""Where and with how many programs a persistent Triton kernel is launched."""

import contextlib
from functools import lru_cache

import torch

# CUDA does not specify on which multiprocessor a program runs; usually it is an idle one, so that
# up to this many multiprocessors run one program each. The default is not measured: `gcnzc check
# --tune` measures the best number for a machine.
DEFAULT_PROGRAMS = 32


def default_programs(device: torch.device) -> int:
    """Return the default number of programs on a device: at most two per multiprocessor."""
    if device.type != "cuda":
        return 2
    return min(DEFAULT_PROGRAMS, 2 * _multiprocessors(device))


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which kernels run on a tensor's device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
