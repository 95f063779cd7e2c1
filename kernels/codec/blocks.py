"""Encode vectors as 8-, 4- or 2-bit codes with one scale per block, and decode means.

The encoded vector is y = values + error. The scale of a block is the largest |y| of its active
elements divided by the largest number of the format (int2: by 2, see below). It is at least
2**-126; 0 if the block has only zeros or no active element; and NaN if any active y is not finite,
so that the whole block decodes to NaN. Finite vectors always decode to finite numbers. Code 0 is
the only zero. Codes that are never written decode to NaN.

    format          codes                                        largest number
    float8_e4m3fn   torch's                                      448
    float8_e5m2     torch's                                      57344
    int8            two's complement, -127 to 127                127
    int4            two's complement, -7 to 7                    7
    int2            two's complement, -1 to 1                    1
    float4_e3m0     a sign, then m of 3 bits: 0, or 2**(m - 7)   1

The 8-bit floats are those of Micikevicius et al., "FP8 formats for deep learning" (2022,
https://arxiv.org/abs/2209.05433); the 4-bit float with three exponent bits is from Douillard et
al., "Streaming DiLoCo" (2025, https://arxiv.org/abs/2501.18512). A byte holds two 4-bit or four
2-bit codes, the first one in the lowest bits.

Rounded to nearest, int2 divides the largest |y| by 2 instead of 1, so that elements above the scale
are clipped to it. The largest error is half of the largest |y| in either case, but most elements
are much smaller than the largest: the squared error of a normal vector in blocks of 256 is a third
of that without clipping. With stochastic rounding, it does not clip.

Rounding is to the nearest number, with ties to the even code (float4_e3m0: to the larger number),
or stochastic: the expected value of a decoded number is then y, to 2**-24 of the distance between
two neighbouring numbers. With s for the scale and y' for the decoded number, and with 2**-150 more
where that is subnormal,

    |y - y'| at most   to nearest                                stochastic
    float8_e4m3fn      max(|y| * 2**-4, s * 2**-10)              max(|y| * 2**-3, s * 2**-9)
    float8_e5m2        max(|y| * 2**-3, s * 2**-17)              max(|y| * 2**-2, s * 2**-16)
    int8               s * (1/2 + 2**-16)                        s * (1 + 2**-16)
    int4               s * (1/2 + 2**-20)                        s * (1 + 2**-20)
    int2               max(s / 2, |y| - s)                       s
    float4_e3m0        max(|y| / 3, s * 2**-7)                   max(|y|, s * 2**-6)

where every bound with a maximum is multiplied by 1 + 2**-18, for the rounding of scales, quotients
and products.

Random bits come from Philox: element e of the vector uses word e' % 4 of counter e' // 4 of the
seed and the step, where e' = e + offset. Each rank has its own seed. A rank that encodes a single
part in the same step passes the elements of all parts, `layout.num_parts * layout.part_elements`,
as offset, so that no random word is used twice.

Contiguous float32 vectors use numba on the CPU and Triton on a GPU; all other vectors use the torch
references, in float64 where the inputs have it. All implementations give the same bits.

Notation: n elements of the vector, W ranks, m elements of one part.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gcnzc.kernels.codec.block_layout import BlockLayout
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
from gcnzc.kernels.codec.number_formats import SeedAndStep


def _choose_kernel(
    kernels: tuple[Callable[..., None], Callable[..., None], Callable[..., None]],
    *vectors: Tensor | None,
) -> Callable[..., None]:
    """Return the reference, numba's or Triton's implementation, by layout, dtype and device."""
    given = [vector for vector in vectors if vector is not None]
    if not all(vector.is_contiguous() for vector in given) or any(
        vector.dtype not in (torch.float32, torch.bool) for vector in given
    ):
        return kernels[0]
    return kernels[2] if given[0].is_cuda else kernels[1]


def encode_blocks(
    values: Tensor,
    error: Tensor | None,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    number_format: str,
    seed_and_step: SeedAndStep | None = None,
    offset: int = 0,
) -> None:
    """Write the codes of `values + error` and their scales to `rows`.

    Args:
        values: (n,) floating point, on the CPU or a GPU; all tensors are on one device.
        error: (n,) floating point, added to values; zeros if None.
        active: (n,) bool: the other elements have code 0 and no weight in a scale; all are active
            if None.
        layout: of the vector, with the bits of the number format.
        rows: (W, stride) uint8, each row contiguous and aligned to 4 bytes. The first
            `layout.row_bytes` of each row are written, and no others.
        number_format: one of `NUMBER_FORMATS`.
        seed_and_step: for stochastic rounding, a 64-bit seed and a step in [0, 2**63); None rounds
            to nearest.
        offset: a multiple of 32, added to the index of an element in the random stream.
    """
    if layout.part_elements:
        kernels = (encode_blocks_reference, encode_blocks_numba, encode_blocks_triton)
        encode = _choose_kernel(kernels, values, error, active)
        encode(values, error, active, layout, rows, number_format, seed_and_step, offset)


def update_error_blocks(
    values: Tensor,
    error: Tensor,
    active: Tensor | None,
    layout: BlockLayout,
    rows: Tensor,
    number_format: str,
) -> None:
    """Set `error` to the rounding error of `encode_blocks`: `values + error` less the decoded rows.

    Args:
        values: (n,) floating point, as encoded.
        error: (n,) floating point, as encoded; overwritten, with 0 where not active.
        active: (n,) bool, or None, as encoded.
        layout: of the vector.
        rows: (W, stride) uint8, as written by `encode_blocks`.
        number_format: of the codes.
    """
    if layout.num_elements:
        kernels = (
            update_error_blocks_reference,
            update_error_blocks_numba,
            update_error_blocks_triton,
        )
        update_error = _choose_kernel(kernels, values, error, active)
        update_error(values, error, active, layout, rows, number_format)


def mean_of_blocks(rows: Tensor, layout: BlockLayout, out: Tensor, number_format: str) -> None:
    """Decode one part's rows from W ranks and write their mean, summed in float32 in rank order.

    Args:
        rows: (W, stride) uint8: the part's row of each rank.
        layout: of the part, see `BlockLayout.part_layout`.
        out: (m,) floating point, written: the sum times 1 / W, both rounded to float32.
        number_format: of the codes.
    """
    if layout.num_elements:
        kernels = (mean_of_blocks_reference, mean_of_blocks_numba, mean_of_blocks_triton)
        _choose_kernel(kernels, out)(rows, layout, out, number_format)


def decode_blocks(
    rows: Tensor, layout: BlockLayout, active: Tensor | None, out: Tensor, number_format: str
) -> None:
    """Write the decoded numbers of all parts to `out`.

    Args:
        rows: (W, stride) uint8, one row for each part.
        layout: of the vector.
        active: (n,) bool: the other elements are set to 0, whatever their codes and scales; all are
            active if None.
        out: (n,) floating point, written.
        number_format: of the codes.
    """
    if layout.num_elements:
        kernels = (decode_blocks_reference, decode_blocks_numba, decode_blocks_triton)
        _choose_kernel(kernels, out, active)(rows, layout, active, out, number_format)
