"""Encode vectors as 8- or 4-bit codes with one scale per block, and decode means.

What is sent is y = values + error. The scale of a block is the largest |y| among its elements that
are active, divided by the form's largest number; it is at least 2**-126, 0 for a block of zeros or
of nothing, and NaN if any y there is not finite, and then the whole block decodes to NaN. Finite
numbers never decode to anything else. A code of 0 is the only zero. Codes that are never written
stand for NaN.

    form            codes                                        largest number
    float8_e4m3fn   torch's                                      448
    float8_e5m2     torch's                                      57344
    int8            two's complement, -127 to 127                127
    int4            two's complement, -7 to 7                    7
    float4_e3m0     a sign, then m of 3 bits: 0, or 2**(m - 7)   1

The types of one byte with an exponent are those of Micikevicius et al., "FP8 formats for deep
learning" (2022, https://arxiv.org/abs/2209.05433); to send a sign and three bits of exponent is
from Douillard et al., "Streaming DiLoCo" (2025, https://arxiv.org/abs/2501.18512). Of two codes in
a byte the first has the low four bits.

Numbers are rounded to the nearest, ties to the even code, and of float4_e3m0 to the larger number;
or up or down at random, so that the mean of what is decoded is y, to 2**-24 of the step between two
numbers. With s for the scale, y' for what is decoded, and 2**-150 more where that is subnormal,

    |y - y'| at most   to nearest                                at random
    float8_e4m3fn      max(|y| * 2**-4, s * 2**-10)              max(|y| * 2**-3, s * 2**-9)
    float8_e5m2        max(|y| * 2**-3, s * 2**-17)              max(|y| * 2**-2, s * 2**-16)
    int8               s * (1/2 + 2**-16)                        s * (1 + 2**-16)
    int4               s * (1/2 + 2**-20)                        s * (1 + 2**-20)
    float4_e3m0        max(|y| / 3, s * 2**-7)                   max(|y|, s * 2**-6)

those with a maximum times 1 + 2**-18, for the rounding of scales, quotients and products.

What is random is drawn by Philox: element e of the vector takes word e' % 4 of counter e' // 4 of
the seed and the step, where e' = e + offset. Each worker has a seed of its own. A worker that
encodes a part by itself, in the same step, takes as offset the elements of all parts, `cut.parts *
cut.part`, and so draws what it has not drawn yet.

The CPU takes its way by numba and a GPU by Triton, for contiguous float32; all other vectors are
left to the references, in float64 if they have it. All ways give the same bits.

Letters: n elements of the vector, W workers, m elements of one part.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gcnzc.kernels.codec.block_layout import PART_MULTIPLE, BlockLayout
from gcnzc.kernels.codec.blocks_cpu import (
    decode_blocks_numba,
    encode_blocks_numba,
    mean_of_blocks_numba,
    update_error_blocks_numba,
)
from gcnzc.kernels.codec.blocks_gpu import (
    decode_blocks_triton,
    encode_blocks_triton,
    mean_of_blocks_triton,
    update_error_blocks_triton,
)
from gcnzc.kernels.codec.blocks_reference import (
    decode_blocks_reference,
    encode_blocks_reference,
    mean_of_blocks_reference,
    update_error_blocks_reference,
)
from gcnzc.kernels.codec.number_formats import BITS, NUMBER_FORMATS, Draws
from gcnzc.kernels.philox import split_key


def _demand(
    form: str, cut: BlockLayout, rows: Tensor, num_rows: int, *vectors: Tensor | None
) -> None:
    """Raise if arguments do not fit each other.

    Raises:
        ValueError: they do not.
    """
    if form not in NUMBER_FORMATS or cut.bits != BITS[form]:
        raise ValueError(
            f"codes of {cut.bits} bits cannot be of form {form!r}\n\nhint: one of "
            + ", ".join(f"{name} ({bits} bits)" for name, bits in BITS.items())
        )
    long = rows.dim() == 2 and len(rows) == num_rows and rows.shape[1] >= cut.row_bytes
    if (
        not long
        or rows.dtype != torch.uint8
        or (cut.row_bytes and (rows.stride(1) != 1 or rows.stride(0) % 4 or rows.data_ptr() % 4))
    ):
        raise ValueError(
            f"{rows.dtype} {tuple(rows.shape)} of strides {rows.stride()} cannot be the rows of "
            f"{num_rows} parts\n\nhint: uint8, {cut.row_bytes} bytes or more, and each row begins "
            "at a multiple of 4 bytes"
        )
    for vector in vectors:
        if vector is not None and (
            vector.shape != (cut.num_elements,) or vector.device != rows.device
        ):
            raise ValueError(
                f"{tuple(vector.shape)} on {vector.device} does not go with {cut.num_elements} "
                f"elements and rows on {rows.device}\n\nhint: vectors of as many elements as the "
                "cut, where the rows are"
            )


def _way(
    ways: tuple[Callable[..., None], Callable[..., None], Callable[..., None]],
    *vectors: Tensor | None,
) -> Callable[..., None]:
    """Which way to take: the reference, numba's or Triton's."""
    there = [vector for vector in vectors if vector is not None]
    if not all(vector.is_contiguous() for vector in there) or any(
        vector.dtype not in (torch.float32, torch.bool) for vector in there
    ):
        return ways[0]
    return ways[2] if there[0].is_cuda else ways[1]


def encode_blocks(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    cut: BlockLayout,
    rows: Tensor,
    form: str,
    draws: Draws | None = None,
    offset: int = 0,
) -> None:
    """Write the codes of `values + error` and their scales.

    Args:
        values: (n,) floating point, on the CPU or a GPU; so is all else.
        error: (n,) floating point, added to values; None for zeros.
        active: (n,) bool: what counts for scales, and has a code other than 0; all if None.
        cut: of the vector, with the bits of the form.
        rows: (parts, stride) uint8, each row contiguous and beginning at a multiple of 4 bytes.
            Of each one the first `cut.row_bytes` are written, and no others.
        form: one of `NUMBER_FORMATS`.
        draws: to round at random, a seed of 64 bits and a step in [0, 2**63); None for to nearest.
        offset: a multiple of 32, added to an element's number in what is drawn for it.

    Raises:
        ValueError: arguments do not fit each other.
    """
    _demand(form, cut, rows, cut.parts, values, error, active)
    if draws is not None:
        split_key(draws[0])
        if not 0 <= draws[1] < 2**63 or offset < 0 or offset % PART_MULTIPLE:
            raise ValueError(
                f"nothing can be drawn for step {draws[1]} from offset {offset}\n\n"
                f"hint: a step of 0 to 2**63 - 1, and an offset that is a multiple of "
                f"{PART_MULTIPLE}"
            )
    if cut.part:
        ways = (encode_blocks_reference, encode_blocks_numba, encode_blocks_triton)
        way = _way(ways, values, error, active)
        way(values, error, active, cut, rows, form, draws, offset)


def update_error_blocks(
    values: Tensor, error: Tensor, active: Tensor | None, cut: BlockLayout, rows: Tensor, form: str
) -> None:
    """Leave in `error` what `encode_blocks` of the same arguments did not say.

    Args:
        values: (n,) floating point, as encoded.
        error: (n,) floating point, as encoded; `values + error` less what is decoded is written to
            it, and 0 where not active.
        active: (n,) bool, or None, as encoded.
        cut: of the vector.
        rows: (parts, stride) uint8, as written.
        form: of the codes.

    Raises:
        ValueError: arguments do not fit each other.
    """
    _demand(form, cut, rows, cut.parts, values, error, active)
    if cut.num_elements:
        ways = (
            update_error_blocks_reference,
            update_error_blocks_numba,
            update_error_blocks_triton,
        )
        _way(ways, values, error, active)(values, error, active, cut, rows, form)


def mean_of_blocks(rows: Tensor, cut: BlockLayout, out: Tensor, form: str) -> None:
    """The mean of what W workers sent of one part, summed in float32 in the order of the rows.

    Args:
        rows: (W, stride) uint8: the part's row of each worker.
        cut: of the part, see `BlockLayout.of_part`.
        out: (m,) floating point, written: the sum times one over W, both rounded to float32.
        form: of the codes.

    Raises:
        ValueError: arguments do not fit each other, or the cut is of several parts.
    """
    if cut.parts != 1 or len(rows) == 0:
        raise ValueError(
            f"{len(rows)} rows of {cut.parts} parts have no mean\n\n"
            "hint: rows of one part, from one worker or more, and its own cut: cut.of_part(number)"
        )
    _demand(form, cut, rows, len(rows), out)
    if cut.num_elements:
        ways = (mean_of_blocks_reference, mean_of_blocks_numba, mean_of_blocks_triton)
        _way(ways, out)(rows, cut, out, form)


def decode_blocks(
    rows: Tensor, cut: BlockLayout, active: Tensor | None, out: Tensor, form: str
) -> None:
    """What codes stand for.

    Args:
        rows: (parts, stride) uint8, one row for each part.
        cut: of the vector.
        active: (n,) bool: others get 0, whatever their codes and scales are; all if None.
        out: (n,) floating point, written.
        form: of the codes.

    Raises:
        ValueError: arguments do not fit each other.
    """
    _demand(form, cut, rows, cut.parts, active, out)
    if cut.num_elements:
        ways = (decode_blocks_reference, decode_blocks_numba, decode_blocks_triton)
        _way(ways, out, active)(rows, cut, active, out, form)
