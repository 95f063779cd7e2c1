"""Conversions of bfloat16 and float16 in numba kernels equal torch's."""

import pytest
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from gcnzc.kernels import half_precision
from gcnzc.kernels.half_precision import as_array, kind_of, narrowed, widened

ALL_BITS = torch.arange(2**16, dtype=torch.int32).to(torch.int16)


def for_all(function):
    """Compile a loop over elements."""

    @njit
    def run(given, out, *kind):
        for i in range(len(given)):
            out[i] = function(given[i], *kind)

    return run


def _widened_by_integers(_typing, element):
    def codegen(_context, builder, _signature, args):
        bits = builder.zext(args[0], half_precision.BITS32)
        return half_precision.widen_by_integers(builder, bits)

    return types.float32(element), codegen


def _narrowed_by_integers(_typing, value, kind):
    def codegen(_context, builder, _signature, args):
        bits = builder.bitcast(args[0], half_precision.BITS32)
        found = half_precision.narrow_by_integers(builder, bits)
        return builder.trunc(found, ir.IntType(16))

    return types.int16(value, kind), codegen


def float32_values():
    """Every pattern of the upper half with several lower halves, and neighbours of ties."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] + lower).flatten()
    # halfway between two float16, and one bit to each side
    halves = ALL_BITS.view(torch.float16).float()
    halves = halves[halves.isfinite()]
    steps = torch.cat([halves.view(torch.int32).long() + step for step in (-1, 0, 1)])
    ties = torch.cat([bits, steps, (steps & ~0x1FFF) + 0x1000, (steps & ~0x1FFF) + 0x0FFF])
    return ties.to(torch.int32).view(torch.float32)


def assert_same(found, expected):
    """The same bits, or both NaN."""
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    bits = torch.int16 if expected.itemsize == 2 else torch.int32
    assert torch.equal(found[~nan].view(bits), expected[~nan].view(bits))


@pytest.mark.parametrize(
    ("dtype", "widen", "narrow"),
    [
        (torch.bfloat16, widened, narrowed),
        (torch.float16, widened, narrowed),
        # for processors without instructions for float16
        (torch.float16, intrinsic(_widened_by_integers), intrinsic(_narrowed_by_integers)),
    ],
)
def test_all_elements_are_widened_and_float32_is_rounded_as_by_torch(dtype, widen, narrow):
    elements = ALL_BITS.view(dtype)
    found = torch.empty(len(elements))
    for_all(widen)(as_array(elements), found.numpy())
    assert_same(found, elements.float())
    values = float32_values()
    rounded = torch.empty(len(values), dtype=dtype)
    for_all(narrow)(values.numpy(), as_array(rounded), kind_of(dtype))
    assert_same(rounded, values.to(dtype))
