"""View a table as bytes that begin at a multiple of the vector size."""

import ctypes

import torch
from torch import Tensor

from gcnzc.kernels.gather.lanes import VECTOR_BYTES


def aligned_bytes(table: Tensor, row_bytes: int, stride_bytes: int) -> Tensor:
    """Return the table's bytes, from the multiple of 16 B at or below its address.

    The result does not keep the table's memory alive.
    """
    misalignment = table.data_ptr() % VECTOR_BYTES
    num_bytes = misalignment + (table.shape[0] - 1) * stride_bytes + row_bytes
    # whole vectors, so that any word divides the size, but no further vector
    num_bytes += -num_bytes % VECTOR_BYTES
    if table.device.type == "cpu":
        memory = (ctypes.c_byte * num_bytes).from_address(table.data_ptr() - misalignment)
        return torch.frombuffer(memory, dtype=torch.int8)
    return _device_bytes(table, misalignment, num_bytes)


def _device_bytes(table: Tensor, misalignment: int, num_bytes: int) -> Tensor:
    # GPU allocations begin and end on lines, so the bytes below a view's first byte belong to the
    # allocation, even if the storage is shorter
    storage = table.untyped_storage()
    begin = table.data_ptr() - misalignment - storage.data_ptr()
    allocation = torch.empty(0, dtype=torch.int8, device=table.device).set_(storage)
    end = min(begin + num_bytes, len(allocation))
    return allocation[begin : end - (end - begin) % 8]
