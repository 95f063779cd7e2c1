import pytest
import torch
from compress.cases import mean_of, reducers, vectors

from gcnzc.compress import Blocks, Dense, Rounded
from gcnzc.compress.blocks import NUMBER_FORMATS

# error bounds of rounding to the nearest, relative to the largest element of the block
ROOM = {
    # half a step of 32, of 448
    "float8_e4m3fn": 16 / 448,
    # half a step of 8192, of 57344
    "float8_e5m2": 4096 / 57344,
    "int8": 0.5 / 127,
    "int4": 0.5 / 7,
    # from the middle of 0 and 1; clipped elements have no larger error
    "int2": 0.5,
    # from the middle of 1/2 and 1
    "float4_e3m0": 0.25,
}
COUNT = 1000


def largest_of_blocks(vector, codec, world_size):
    """Return (n,): for each element the largest magnitude of its block."""
    layout = codec.block_layout(len(vector), world_size)
    found = torch.zeros(len(vector), dtype=torch.float64)
    for part in range(world_size):
        begin, end = layout.bounds(part)
        for first in range(begin, end, layout.block_elements):
            here = slice(first, min(first + layout.block_elements, end))
            found[here] = vector[here].abs().max()
    return found


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("block", "world_size"), [(32, 2), (256, 3), (None, 5)])
@pytest.mark.parametrize("number_format", NUMBER_FORMATS)
def test_the_error_of_a_mean_is_at_most_two_rounding_errors(
    number_format, block, world_size, stochastic
):
    codec = Blocks(number_format, block, stochastic)
    given = vectors(COUNT, world_size)
    found = mean_of(reducers(codec, COUNT, world_size), given)[0].double()
    # no mean of a block is larger
    first = sum(largest_of_blocks(each, codec, world_size) for each in given) / world_size
    room = ROOM[number_format] * (2 if stochastic else 1)
    wrong = (found - torch.stack(given).double().mean(dim=0)).abs()
    assert bool((wrong <= 2 * room * first * (1 + 1e-5)).all())
    # the bound is not far too wide
    assert bool((wrong > 0.2 * room * first).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_of_a_rounded_mean_is_at_most_two_rounding_errors(dtype):
    given = [vector.clamp(-100, 100) for vector in vectors(COUNT, 3)]
    found = mean_of(reducers(Rounded(dtype), COUNT, 3), given)[0].double()
    stacked = torch.stack(given).double()
    wrong = (found - stacked.mean(dim=0)).abs()
    room = torch.finfo(dtype).eps / 2 * 2.1 * stacked.abs().mean(dim=0) + 1e-7
    assert bool((wrong <= room).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_rounded_elements_are_not_rounded(dtype):
    given = [vector.abs().clamp(max=100) for vector in vectors(COUNT, 9)]
    exact = torch.stack(given).double().mean(dim=0)
    rounded, dense = (
        (mean_of(reducers(codec, COUNT, 9), given)[0] - exact).norm()
        for codec in (Rounded(dtype), Dense(dtype))
    )
    assert rounded < 0.95 * dense


def test_int2_sends_two_bits_and_a_scale_of_256_elements():
    sent = Blocks("int2").bytes_sent(2**20, 4)
    # in two stages, of three quarters each
    assert sent == pytest.approx(1.5 * 2**20 * (2 + 32 / 256) / 8, rel=0.01)
