"""Block-wise quantization: stated error bounds hold, and all implementations agree."""

import itertools
from functools import partial

import pytest
import torch
from bits import same_bits

from gcnzc.kernels.codec import blocks, blocks_cpu, blocks_gpu, blocks_reference
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.blocks import (
    decode_blocks,
    encode_blocks,
    mean_of_blocks,
    update_error_blocks,
)
from gcnzc.kernels.codec.number_formats import BITS, NUMBER_FORMATS

LENGTHS = [0, 1, 7, 31, 32, 33, 100, 1023, 4095, 4096, 4097]
BLOCKS = [32, 256, None]
MOST = torch.finfo(torch.float32).max
GUARD = 77
ROUNDINGS = [None, (2**40 + 17, 2**33 + 5)]
OPERATIONS = ["encode_blocks", "update_error_blocks", "decode_blocks", "mean_of_blocks"]
every_number_format = pytest.mark.parametrize("number_format", list(NUMBER_FORMATS))
every_block = pytest.mark.parametrize("block", BLOCKS)
every_rounding = pytest.mark.parametrize("seed_and_step", ROUNDINGS, ids=["nearest", "random"])


def operations(module, suffix="", **options):
    """All operations of an implementation."""
    return [partial(getattr(module, f"{name}{suffix}"), **options) for name in OPERATIONS]


REFERENCE = operations(blocks_reference, "_reference")


def empty_rows(layout, beside=8, count=None):
    """Rows that are filled with what must stay beside them."""
    shape = (layout.num_parts if count is None else count, layout.row_bytes + beside)
    return torch.full(shape, GUARD, dtype=torch.uint8)


def vectors(n, number):
    """Values, error and active of one of six kinds of arguments."""
    values = torch.randn(n) * torch.rand(n) ** 6
    # numbers in the middle between codes, if the largest of their block is 1
    middle = torch.rand(n) < 0.2
    halves = 2.0 ** -torch.randint(9, (n,)) * 0.75
    values = torch.where(middle, halves, values).clamp(-1, 1)
    values[::29] = 1.0
    error = torch.randn(n) * 0.1 if number % 2 else None
    active = [None, torch.rand(n) < 0.6, torch.zeros(n, dtype=torch.bool)][number % 3]
    return values, error, active


def results(implementation, given, layout, number_format, seed_and_step, offset, place="cpu"):
    """What all operations write: rows, the error that remains, decoded values and two means."""
    encode, update_error, decode, mean = implementation
    values, error, active = (v if v is None else v.to(place) for v in given)
    rows = empty_rows(layout).to(place)
    encode(values, error, active, layout, rows, number_format, seed_and_step, offset)
    left = torch.zeros_like(values) if error is None else error.clone()
    update_error(values, left, active, layout, rows, number_format)
    found = [rows, left, torch.full_like(values, torch.nan)]
    decode(rows, layout, active, found[-1], number_format)
    for part in {0, layout.num_parts - 1}:
        own = layout.part_layout(part)
        found.append(torch.full((own.num_elements,), torch.nan, device=place))
        # as if every part's row were a worker's
        mean(rows, own, found[-1], number_format)
    return found


def check(implementation, layout, number, number_format, seed_and_step, place="cpu"):
    """Every operation of an implementation equals its reference, beside the rows too."""
    given = vectors(layout.num_elements, number)
    options = layout, number_format, seed_and_step, 32 * (number % 5)
    expected = results(REFERENCE, given, *options)
    assert (expected[0][:, layout.row_bytes :] == GUARD).all()
    assert all(map(same_bits, results(implementation, given, *options, place), expected))


@every_number_format
@every_block
def test_the_public_functions_equal_the_reference(number_format, block):
    for number, (n, parts) in enumerate(itertools.product(LENGTHS, range(1, 10))):
        layout = BlockLayout(n, parts, BITS[number_format], block)
        check(operations(blocks), layout, number, number_format, ROUNDINGS[number // 6 % 2])


@pytest.mark.triton
@every_number_format
@every_rounding
def test_triton_equals_the_reference(number_format, seed_and_step, device):
    shapes = [(1, 1, 32), (7, 5, None), (100, 3, 32), (2300, 2, None), (1090, 1, 352)]
    for number, (n, parts, block) in enumerate(shapes):
        layout = BlockLayout(n, parts, BITS[number_format], block)
        implementation = operations(blocks_gpu, "_triton")
        check(implementation, layout, number, number_format, seed_and_step, device)


def bound(y, scales, number_format, random):
    """The error that the module states, in float64; and 2**-150 more."""
    share = 1.0 if random else 0.5
    if number_format in ("int8", "int4"):
        return scales * (share + (2.0**-16 if number_format == "int8" else 2.0**-20))
    if number_format == "int2":
        clipped = torch.zeros_like(scales) if random else y.abs() - scales
        return torch.maximum(scales * share, clipped) * (1 + 2.0**-18) + 2.0**-150
    relative, absolute = {
        ("float8_e4m3fn", False): (2.0**-4, 2.0**-10),
        ("float8_e5m2", False): (2.0**-3, 2.0**-17),
        ("float4_e3m0", False): (1 / 3, 2.0**-7),
        ("float8_e4m3fn", True): (2.0**-3, 2.0**-9),
        ("float8_e5m2", True): (2.0**-2, 2.0**-16),
        ("float4_e3m0", True): (1.0, 2.0**-6),
    }[number_format, random]
    return torch.maximum(y.abs() * relative, scales * absolute) * (1 + 2.0**-18) + 2.0**-150


def stored_scales(rows, layout):
    """(parts, blocks) float32."""
    return rows[:, layout.code_bytes : layout.row_bytes].contiguous().view(torch.float32)


def decoded(values, number_format, block, seed_and_step=None, parts=2):
    """What is decoded, and the scale of each element, in float64."""
    layout = BlockLayout(len(values), parts, BITS[number_format], block)
    rows, out = empty_rows(layout), torch.empty_like(values)
    encode_blocks(values, None, None, layout, rows, number_format, seed_and_step)
    decode_blocks(rows, layout, None, out, number_format)
    scales = stored_scales(rows, layout).repeat_interleave(layout.block_elements, 1)
    return out, scales[:, : layout.part_elements].reshape(-1)[: len(values)].double()


def of_all_sizes():
    """Blocks of 32 whose largest is anywhere from the smallest float32 to the largest."""
    largest = torch.cat([torch.logspace(-44.8, 38.5, 200), torch.tensor([MOST, 2.0**-149])])
    share = torch.rand(len(largest), 32) ** 3 * torch.randn(len(largest), 32).sign()
    share[:, 5] = -1
    return (largest[:, None] * share).clamp(-MOST, MOST).reshape(-1)


@every_number_format
@every_rounding
@every_block
def test_the_error_is_within_the_stated_bound(number_format, seed_and_step, block):
    nearly = 0.0
    for values in (torch.randn(20000), torch.rand(5000) ** 8 * 1e-3, of_all_sizes()):
        found, scales = decoded(values, number_format, block, seed_and_step)
        assert found.isfinite().all()
        exact = values.double()
        error = (found.double() - exact).abs()
        allowed = bound(exact, scales, number_format, seed_and_step is not None)
        assert (error <= allowed).all(), float((error / allowed).max())
        nearly = max(nearly, float((error / allowed).nan_to_num().max()))
        # a sign never turns
        assert (found.sign() * exact.sign() >= 0).all()
    assert nearly > 0.85


@every_number_format
def test_stochastic_rounding_is_unbiased(number_format):
    lone = torch.tensor([0.003, 0.011, 0.1, 0.26, 0.33, 0.4999, 0.62, 0.77, 0.9, 0.9999])
    count = 40000
    for sign in (1, -1):
        values = (sign * lone).repeat_interleave(count)
        values[::32] = 1.0
        kept = torch.ones(len(values), dtype=torch.bool)
        kept[::32] = False
        found, _ = decoded(values, number_format, None, (3, 1), parts=1)
        for i in range(len(lone)):
            part = slice(i * count, (i + 1) * count)
            drawn = found[part][kept[part]].double()
            # five standard errors, and what quotients are rounded by
            allowed = 5 * float(drawn.std()) / len(drawn) ** 0.5 + 2.0**-22
            assert abs(float(drawn.mean()) - sign * float(lone[i])) <= allowed
            # between two numbers that follow each other, both are drawn
            assert len(drawn.unique()) <= 2


def codes_of(values, number_format, seed_and_step=None, offset=0):
    """The bytes of the codes of one part and block."""
    layout = BlockLayout(len(values), 1, BITS[number_format], None)
    rows = empty_rows(layout)
    encode_blocks(values, None, None, layout, rows, number_format, seed_and_step, offset)
    return rows[0, : layout.code_bytes]


def test_random_words_depend_on_seed_step_and_position():
    values = torch.full((32000,), 0.3)
    values[::32] = 1
    codes = codes_of(values, "int4", (1, 1))
    assert torch.equal(codes_of(values, "int4", (1, 1)), codes)
    others = [((2, 1), 0), ((1 + 2**32, 1), 0), ((1, 2), 0), ((1, 1 + 2**32), 0), ((1, 1), 64000)]
    for seed_and_step, offset in others:
        other = codes_of(values, "int4", seed_and_step, offset)
        # of two choices of 0.1 and 0.9, and of pairs of them
        same = float((other & 15 == codes & 15).double().mean())
        assert same == pytest.approx(0.1**2 + 0.9**2, abs=0.03)
    # what begins later seed_and_step what is drawn there
    later = codes_of(values[640:], "int4", (1, 1), 640)
    assert torch.equal(later, codes[320:])
    # and further than 32 bits
    far = codes_of(values, "int4", (1, 1), 2**36)
    assert not torch.equal(far, codes)


@every_number_format
@every_block
def test_the_result_does_not_depend_on_the_number_of_threads(number_format, block, monkeypatch):
    monkeypatch.setattr(blocks_cpu, "GRAIN_ELEMENTS", 1)
    given = vectors(9001, 1)
    options = BlockLayout(9001, 3, BITS[number_format], block), number_format, ROUNDINGS[1], 0
    first, *others = (
        results(operations(blocks_cpu, "_numba", threads=threads), given, *options)
        for threads in (1, 2, 5)
    )
    for other in others:
        assert all(map(same_bits, other, first))


ENCODERS = [
    blocks_reference.encode_blocks_reference,
    blocks_cpu.encode_blocks_numba,
    pytest.param(blocks_gpu.encode_blocks_triton, marks=pytest.mark.triton),
]


def encoded(encode, device, values, error, active, layout, *options):
    """Rows of an implementation, on the host."""
    place = device if encode is blocks_gpu.encode_blocks_triton else "cpu"
    rows = empty_rows(layout).to(place)
    there = (v if v is None else v.to(place) for v in (values, error, active))
    encode(*there, layout, rows, *options)
    return rows.cpu()


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@every_number_format
@every_rounding
@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan"), "sum"])
def test_non_finite_values_decode_to_nan(number_format, seed_and_step, encode, bad, device):
    values, error = torch.randn(200), torch.randn(200)
    values[70] = error[70] = MOST if bad == "sum" else bad
    layout, out = BlockLayout(200, 2, BITS[number_format], 32), torch.empty(200)
    options = layout, number_format, seed_and_step
    rows = encoded(encode, device, values, error, None, *options)
    scales = stored_scales(rows, layout).view(-1)
    assert scales.isnan().nonzero().tolist() == [[2]]
    assert scales.isfinite().sum() == len(scales) - 1
    decode_blocks(rows, layout, None, out, number_format)
    assert out.isnan().nonzero().flatten().tolist() == list(range(64, 96))
    # where it is not active it does not matter
    active = torch.arange(200) != 70
    rows = encoded(encode, device, values, error, active, *options)
    assert stored_scales(rows, layout).isfinite().all()
    update_error_blocks(values, error, active, layout, rows, number_format)
    decode_blocks(rows, layout, active, out, number_format)
    assert out.isfinite().all()
    assert out[70] == 0


@every_number_format
@every_rounding
@pytest.mark.parametrize("encode", ENCODERS)
def test_blocks_of_zeros_or_without_active_elements_have_zero_scales(
    number_format, seed_and_step, encode, device
):
    layout = BlockLayout(100, 3, BITS[number_format], 32)
    values, active = torch.zeros(100), torch.ones(100, dtype=torch.bool)
    values[1], values[40], active[40] = -0.0, 5.0, False
    values[64:] = -0.0
    rows = encoded(encode, device, values, None, active, layout, number_format, seed_and_step)
    # all bytes, of codes and scales
    assert (rows[:, : layout.row_bytes] == 0).all()


@pytest.mark.parametrize("number_format", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_rounded_as_torch_rounds(number_format):
    dtype = getattr(torch, number_format)
    number = float(NUMBER_FORMATS[number_format].magnitudes[-1])
    assert number == torch.finfo(dtype).max
    values = torch.cat([torch.randn(5000) * 2.0 ** torch.randint(-20, 4, (5000,)), torch.zeros(1)])
    # all that lie in the middle
    sizes = NUMBER_FORMATS[number_format].magnitudes
    values = torch.cat([values, (sizes[1:] + sizes[:-1]) / 2, sizes, -sizes]).clamp(-number, number)
    values[0] = number
    expected = values.to(dtype).view(torch.uint8)
    # of zeros there is one
    expected = torch.where(expected == 0x80, 0, expected)
    assert torch.equal(codes_of(values, number_format)[: len(values)], expected)
    # and what codes stand for is torch's
    table = NUMBER_FORMATS[number_format].values
    torchs = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    known = table.isfinite()
    assert torch.equal(table[known], torchs[known])
    assert torch.equal(known, torchs.isfinite() & (torch.arange(256) != 0x80))


def test_integer_formats_round_ties_as_documented():
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0, -127.0])
    codes = codes_of(values, "int8")[:8].view(torch.int8)
    assert codes.tolist() == [0, 2, 2, 0, -2, 126, 127, -127]
    values = torch.tensor([7.0, -7, 0.5, 1.5, -2.5, -6.5, 6.4, -1])
    # the first of two codes is in the low half
    halves = [7, 9, 0, 2, 14, 10, 6, 15]
    expected = [low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True)]
    assert codes_of(values, "int4")[:4].tolist() == expected
    # the scale is half of the largest, and the first of four codes is in the lowest bits
    values = torch.tensor([2.0, -2, 0.5, -0.5, 0.51, -0.51, 0, 1.5])
    fours = [1, 3, 0, 0, 1, 3, 0, 1]
    expected = [sum(code << 2 * k for k, code in enumerate(fours[b : b + 4])) for b in (0, 4)]
    assert codes_of(values, "int2")[:2].tolist() == expected


def test_e3m0_rounds_ties_as_documented():
    sizes = [0, *(2.0**-k for k in range(6, -1, -1))]
    assert NUMBER_FORMATS["float4_e3m0"].magnitudes.tolist() == sizes
    middle = [(a + b) / 2 for a, b in itertools.pairwise(sizes)]
    below = [m * (1 - 2.0**-20) for m in middle]
    for values, codes in (
        (sizes, range(8)),
        (middle, range(1, 8)),
        (below, range(7)),
        ([-m for m in middle], [8 + c for c in range(1, 8)]),
        ([-m for m in below], [0, *(8 + c for c in range(1, 7))]),
    ):
        found = codes_of(torch.tensor([*values, 1.0, 1.0]), "float4_e3m0")
        halves = torch.stack([found & 15, found >> 4], 1).view(-1)[: len(codes)]
        assert halves.tolist() == list(codes)


@every_number_format
@every_rounding
def test_other_dtypes_are_supported(number_format, seed_and_step):
    values = torch.randn(300, dtype=torch.float64)
    layout = BlockLayout(300, 2, BITS[number_format], 64)
    rows, expected = empty_rows(layout), empty_rows(layout)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float32):
        error = torch.randn(300).to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        y = values.to(dtype).to(wide) + error.to(wide)
        encode_blocks(values.to(dtype), error, None, layout, rows, number_format, seed_and_step)
        encode_blocks(y.float(), None, None, layout, expected, number_format, seed_and_step)
        assert torch.equal(rows, expected)
        out, narrow = torch.empty(300), torch.empty(300, dtype=dtype)
        decode_blocks(rows, layout, None, out, number_format)
        decode_blocks(rows, layout, None, narrow, number_format)
        assert torch.equal(narrow, out.to(dtype))
        update_error_blocks(values.to(dtype), error, None, layout, rows, number_format)
        assert torch.equal(error, (y - out).to(dtype))
        # a parameter's gradient is not asked for
        leaf = values.to(dtype).requires_grad_()
        left = torch.zeros(300, dtype=dtype)
        encode_blocks(leaf, left, None, layout, rows, number_format, seed_and_step)
        update_error_blocks(leaf, left, None, layout, rows, number_format)
        assert not left.requires_grad
    # what is not contiguous
    encode_blocks(y.float(), None, None, layout, rows, number_format, seed_and_step)
    decode_blocks(rows, layout, None, out, number_format)
    strided = torch.zeros(600)[::2]
    decode_blocks(rows, layout, None, strided, number_format)
    assert torch.equal(strided, out)


def test_a_mean_is_summed_in_the_order_of_the_rows():
    layout = BlockLayout(3, 1, 8, None)
    rows = empty_rows(layout, count=3)
    for row, number in zip(rows.split(1), (3e38, -3e38, 1.0), strict=True):
        encode_blocks(torch.full((3,), number), None, None, layout, row, "int8")
    out = torch.empty(3)
    mean_of_blocks(rows, layout, out, "int8")
    assert torch.allclose(out, torch.full((3,), 1 / 3), rtol=2.0**-20)
    mean_of_blocks(rows[[0, 2, 1]], layout, out, "int8")
    assert (out == 0).all()
