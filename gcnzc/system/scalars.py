"""Copy scalars between the host and a device, with as few synchronizations as possible.

Whenever the host reads a value of a GPU, it waits for the work that is queued on the current
stream. It also does so when it copies numbers to the GPU without `non_blocking`.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor


def read_scalars(*tensors: Tensor) -> list[list[float]]:
    """Read the elements of several small tensors, with one synchronization for each device.

    Args:
        tensors: of any shape and device, and of any dtype that float64 represents exactly.

    Returns:
        For each tensor, the list of its elements.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in tensors:
        by_device.setdefault(each.device, []).append(each.reshape(-1).double())
    found = {device: iter(torch.cat(parts).tolist()) for device, parts in by_device.items()}
    return [list(islice(found[each.device], each.numel())) for each in tensors]


def scalars_like(numbers: Sequence[float], tensor: Tensor) -> Tensor:
    """Return numbers as a tensor (len(numbers),) of the dtype and device of another tensor.

    The copy to a GPU is requested with `non_blocking`. Its source is pageable memory, for which
    CUDA may nevertheless synchronize with the current stream.
    """
    return torch.tensor(numbers, dtype=tensor.dtype).to(tensor.device, non_blocking=True)
