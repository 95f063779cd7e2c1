"""Number formats of the values in sparse messages.

A code of "int2" has a sign bit, and a bit that selects one of two levels of the value's segment.
One level is the mean magnitude of the values above the segment's mean magnitude, and the other one
is that of the other values.

Notation: K values, S segments.
"""

import torch
from torch import Tensor

from gcnzc.kernels.codec.index_codes import pack_bits, unpack_bits

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
VALUE_FORMATS = (*DTYPES, "int2")


def value_bytes(value_format: str, count: int, segments: int) -> int:
    """Return the bytes of K encoded values of S segments, a multiple of 4."""
    if value_format == "int2":
        return 8 * segments + -(-count // 16) * 4
    return -(-count * DTYPES[value_format].itemsize // 4) * 4


def encode_values(values: Tensor, value_format: str, counts: Tensor, out: Tensor) -> None:
    """Encode values.

    Args:
        values: (K,) floating point, segment by segment.
        value_format: one of `VALUE_FORMATS`.
        counts: (S,) int64 on the same device, the number of values of each segment.
        out: (value_bytes,) uint8, contiguous and aligned to 4 bytes; overwritten.
    """
    if value_format in DTYPES:
        dtype = DTYPES[value_format]
        used = len(values) * dtype.itemsize
        out[:used] = values.to(dtype).view(torch.uint8)
        out[used:] = 0
        return
    # in float64, sums of finite magnitudes do not overflow
    magnitudes = values.double().abs()
    means = _sum_segments(magnitudes, counts) / counts
    is_large = magnitudes > means.repeat_interleave(counts, output_size=len(values))
    num_large = _sum_segments(is_large.double(), counts)
    large = _sum_segments(magnitudes * is_large, counts) / num_large.clamp(min=1)
    small = _sum_segments(magnitudes * ~is_large, counts) / (counts - num_large)
    levels = torch.stack([small, large], dim=1).float()
    begin = 4 * levels.numel()
    out[:begin] = levels.view(-1).view(torch.uint8)
    bits = values.new_zeros(8 * (len(out) - begin), dtype=torch.uint8)
    pairs = bits[: 2 * len(values)].view(-1, 2)
    pairs[:, 0], pairs[:, 1] = values < 0, is_large
    out[begin:] = pack_bits(bits)


def decode_values(code: Tensor, value_format: str, counts: Tensor, count: int) -> Tensor:
    """Return the values (K,) of a code, in float32 or the dtype of the format.

    Args:
        code: as written by `encode_values`.
        value_format: one of `VALUE_FORMATS`.
        counts: (S,) int64 on the same device, the number of values of each segment.
        count: K.
    """
    if value_format in DTYPES:
        dtype = DTYPES[value_format]
        return code[: count * dtype.itemsize].view(dtype)
    begin = 8 * len(counts)
    levels = code[:begin].view(torch.float32)
    pairs = unpack_bits(code[begin:])[: 2 * count].view(count, 2)
    numbers = torch.arange(len(counts), device=code.device).repeat_interleave(
        counts, output_size=count
    )
    magnitudes = levels[2 * numbers + pairs[:, 1]]
    return torch.where(pairs[:, 0] > 0, -magnitudes, magnitudes)


def _sum_segments(values: Tensor, counts: Tensor) -> Tensor:
    """Return (S,): the sums of (K,) values, segment by segment."""
    return torch.segment_reduce(values, "sum", lengths=counts, unsafe=True)
