"""Codes of ascending indices in about 2 + log2(n / k) bits per index.

k distinct indices below n are encoded as by Elias and Fano, in l = floor(log2(n / k)) low bits per
index, followed by the other bits in unary: bit (index >> l) + j is set for the j-th index. So the
size depends on n and k only, and is within half a bit per index of the entropy of a random set
(Elias, "Efficient storage and retrieval by content and address of static files", 1974,
https://doi.org/10.1145/321812.321820; Vigna, "Quasi-succinct indices", 2013,
https://arxiv.org/abs/1206.4300). If k = n, the code is empty.

Notation: n elements, k indices.
"""

import numpy as np
import torch
from numba import njit, uint8, uint64
from torch import Tensor


def _sizes(num_elements: int, count: int) -> tuple[int, int, int]:
    """Return the low bits of an index, and the bytes of all low bits and of the unary bits."""
    if count in (0, num_elements):
        return 0, 0, 0
    low = (num_elements // count).bit_length() - 1
    unary = count + ((num_elements - 1) >> low) + 1
    return low, -(-count * low // 8), -(-unary // 8)


def code_bytes(num_elements: int, count: int) -> int:
    """Return the length of a code in bytes.

    Args:
        num_elements: n.
        count: k, at most n.
    """
    _, low_bytes, unary_bytes = _sizes(num_elements, count)
    return low_bytes + unary_bytes


@njit(nogil=True, cache=True)
def _pack(indices, low, low_code, unary):
    for b in range(len(unary)):
        unary[b] = 0
    mask = (uint64(1) << uint64(low)) - uint64(1)
    pending, filled, at = uint64(0), 0, 0
    for j in range(len(indices)):
        index = uint64(indices[j])
        place = (index >> uint64(low)) + uint64(j)
        unary[place >> uint64(3)] |= uint8(1) << uint8(place & uint64(7))
        # at most 7 bits are pending, and an index has at most 56 low bits
        pending |= (index & mask) << uint64(filled)
        filled += low
        while filled >= 8:
            low_code[at] = uint8(pending & uint64(255))
            pending >>= uint64(8)
            filled -= 8
            at += 1
    if filled:
        low_code[at] = uint8(pending)


@njit(nogil=True, cache=True)
def _unpack(low_code, unary, low, indices):
    mask = (uint64(1) << uint64(low)) - uint64(1)
    pending, filled, at, j = uint64(0), 0, 0, 0
    for b in range(len(unary)):
        byte = unary[b]
        bit = 0
        while byte and j < len(indices):
            if byte & uint8(1):
                while filled < low:
                    pending |= uint64(low_code[at]) << uint64(filled)
                    filled += 8
                    at += 1
                high = uint64(8 * b + bit - j)
                indices[j] = (high << uint64(low)) | (pending & mask)
                pending >>= uint64(low)
                filled -= low
                j += 1
            byte >>= uint8(1)
            bit += 1


def pack_indices(indices: Tensor, num_elements: int, out: Tensor) -> None:
    """Write the code of some indices.

    Args:
        indices: (k,) int64, ascending and distinct, in [0, n).
        num_elements: n.
        out: (code_bytes(n, k),) uint8 on the same device; overwritten.
    """
    low, low_bytes, _ = _sizes(num_elements, len(indices))
    if not len(out):
        return
    if indices.device.type != "cpu":
        pack_indices_reference(indices, num_elements, out)
        return
    code = out.numpy()
    _pack(indices.numpy(), low, code[:low_bytes], code[low_bytes:])


def unpack_indices(code: Tensor, num_elements: int, count: int) -> Tensor:
    """Return the indices (k,) int64 of a code.

    Args:
        code: (code_bytes(n, k),) uint8, as `pack_indices` writes it.
        num_elements: n.
        count: k.
    """
    if count in (0, num_elements):
        return torch.arange(count, device=code.device)
    if code.device.type != "cpu":
        return unpack_indices_reference(code, num_elements, count)
    low, low_bytes, _ = _sizes(num_elements, count)
    indices = np.empty(count, np.int64)
    view = code.numpy()
    _unpack(view[:low_bytes], view[low_bytes:], low, indices)
    return torch.from_numpy(indices)


def pack_indices_reference(indices: Tensor, num_elements: int, out: Tensor) -> None:
    """Reference for `pack_indices` in torch, also for GPUs."""
    low, low_bytes, unary_bytes = _sizes(num_elements, len(indices))
    device = indices.device
    if not len(out):
        return
    bits = torch.zeros(8 * low_bytes, dtype=torch.uint8, device=device)
    shifts = torch.arange(low, device=device)
    bits[: len(indices) * low] = (indices[:, None] >> shifts & 1).view(-1)
    unary = torch.zeros(8 * unary_bytes, dtype=torch.uint8, device=device)
    unary[(indices >> low) + torch.arange(len(indices), device=device)] = 1
    out[:] = torch.cat([pack_bits(bits), pack_bits(unary)])


def unpack_indices_reference(code: Tensor, num_elements: int, count: int) -> Tensor:
    """Reference for `unpack_indices` in torch, also for GPUs, without a device synchronization."""
    low, low_bytes, _ = _sizes(num_elements, count)
    numbers = torch.arange(count, device=code.device)
    if count in (0, num_elements):
        return numbers
    sums = unpack_bits(code[low_bytes:]).cumsum(0)
    # the j-th set bit is the first with a sum of j + 1
    high = torch.searchsorted(sums, numbers + 1) - numbers
    bits = unpack_bits(code[:low_bytes])[: count * low].view(count, low).long()
    return (high << low) + (bits << torch.arange(low, device=code.device)).sum(dim=1)


def pack_bits(bits: Tensor) -> Tensor:
    """Return (m / 8,) uint8: bytes of 8 bits each, the first one lowest; bits are (m,) uint8."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)


def unpack_bits(code: Tensor) -> Tensor:
    """Return the bits (8 m,) uint8 of (m,) bytes; the inverse of `pack_bits`."""
    return (code[:, None] >> torch.arange(8, dtype=torch.uint8, device=code.device) & 1).view(-1)
