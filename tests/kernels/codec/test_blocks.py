"""Codes of blocks err no more than is stated, and every way to make and read them agrees."""

import itertools
import os
import subprocess
import sys

import pytest
import torch

from gcnzc.kernels.codec import blocks_cpu
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.blocks import (
    decode_blocks,
    encode_blocks,
    mean_of_blocks,
    update_error_blocks,
)
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
from gcnzc.kernels.codec.number_formats import BITS, NUMBER_FORMATS
from gcnzc.kernels.gather.quantize import SMALLEST_SCALE

LENGTHS = [0, 1, 7, 31, 32, 33, 100, 1023, 4095, 4096, 4097]
BLOCKS = [32, 256, None]
MOST = torch.finfo(torch.float32).max
GUARD = 77
DRAWS = [None, (2**40 + 17, 2**33 + 5)]
every_form = pytest.mark.parametrize("form", list(NUMBER_FORMATS))
every_block = pytest.mark.parametrize("block", BLOCKS)
every_draws = pytest.mark.parametrize("draws", DRAWS, ids=["nearest", "random"])


def empty_rows(cut, beside=8, count=None):
    """Rows that are filled with what must stay beside them."""
    shape = (cut.parts if count is None else count, cut.row_bytes + beside)
    return torch.full(shape, GUARD, dtype=torch.uint8)


def same_bits(found, expected):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return torch.equal(found.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


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


def check_ways(form, cut, number, draws, encode, update_error, decode, mean, device):
    """Every operation of one way equals its reference, beside the rows too."""
    values, error, active = vectors(cut.num_elements, number)
    offset = 32 * (number % 5)
    there = [None if v is None else v.to(device) for v in (values, error, active)]
    expected, found = empty_rows(cut), empty_rows(cut).to(device)
    encode_blocks_reference(values, error, active, cut, expected, form, draws, offset)
    encode(*there, cut, found, form, draws, offset)
    assert same_bits(found, expected)
    assert (found[:, cut.row_bytes :] == GUARD).all()
    left = torch.zeros_like(values) if error is None else error.clone()
    found_left = left.clone().to(device)
    update_error_blocks_reference(values, left, active, cut, expected, form)
    update_error(there[0], found_left, there[2], cut, found, form)
    assert same_bits(found_left, left)
    out = torch.full((cut.num_elements,), torch.nan)
    found_out = out.clone().to(device)
    decode_blocks_reference(expected, cut, active, out, form)
    decode(found, cut, there[2], found_out, form)
    assert same_bits(found_out, out)
    for part in {0, cut.parts - 1}:
        own = cut.of_part(part)
        # as if every part's row were a worker's
        out = torch.full((own.num_elements,), torch.nan)
        found_out = out.clone().to(device)
        mean_of_blocks_reference(expected, own, out, form)
        mean(found, own, found_out, form)
        assert same_bits(found_out, out)


@every_form
@every_block
def test_the_public_way_equals_the_reference(form, block):
    ways = (encode_blocks, update_error_blocks, decode_blocks, mean_of_blocks)
    for number, (n, parts) in enumerate(itertools.product(LENGTHS, range(1, 10))):
        cut = BlockLayout(n, parts, BITS[form], block)
        check_ways(form, cut, number, DRAWS[number // 6 % 2], *ways, "cpu")


@every_form
@every_draws
def test_triton_equals_the_reference(form, draws, device):
    ways = (
        encode_blocks_triton,
        update_error_blocks_triton,
        decode_blocks_triton,
        mean_of_blocks_triton,
    )
    shapes = [(1, 1, 32), (7, 5, None), (100, 3, 32), (2300, 2, None), (1090, 1, 352)]
    for number, (n, parts, block) in enumerate(shapes):
        check_ways(form, BlockLayout(n, parts, BITS[form], block), number, draws, *ways, device)


def bound(y, scales, form, random):
    """The error that the module states, in float64; and 2**-150 more."""
    if form in ("int8", "int4"):
        return scales * ((1 if random else 0.5) + (2.0**-16 if form == "int8" else 2.0**-20))
    relative, absolute = {
        ("float8_e4m3fn", False): (2.0**-4, 2.0**-10),
        ("float8_e5m2", False): (2.0**-3, 2.0**-17),
        ("float4_e3m0", False): (1 / 3, 2.0**-7),
        ("float8_e4m3fn", True): (2.0**-3, 2.0**-9),
        ("float8_e5m2", True): (2.0**-2, 2.0**-16),
        ("float4_e3m0", True): (1.0, 2.0**-6),
    }[form, random]
    return torch.maximum(y.abs() * relative, scales * absolute) * (1 + 2.0**-18) + 2.0**-150


def stored_scales(rows, cut):
    """(parts, blocks) float32."""
    return rows[:, cut.code_bytes : cut.row_bytes].contiguous().view(torch.float32)


def decoded(values, form, block, draws=None, parts=2):
    """What is decoded, and the scale of each element, in float64."""
    cut = BlockLayout(len(values), parts, BITS[form], block)
    rows, out = empty_rows(cut), torch.empty_like(values)
    encode_blocks(values, None, None, cut, rows, form, draws)
    decode_blocks(rows, cut, None, out, form)
    scales = stored_scales(rows, cut).repeat_interleave(cut.block_elements, 1)[:, : cut.part]
    return out, scales.reshape(-1)[: len(values)].double()


def of_all_sizes():
    """Blocks of 32 whose largest is anywhere from the smallest float32 to the largest."""
    largest = torch.cat([torch.logspace(-44.8, 38.5, 200), torch.tensor([MOST, 2.0**-149])])
    share = torch.rand(len(largest), 32) ** 3 * torch.randn(len(largest), 32).sign()
    share[:, 5] = -1
    return (largest[:, None] * share).clamp(-MOST, MOST).reshape(-1)


@every_form
@every_draws
@every_block
def test_errs_no_more_than_stated(form, draws, block):
    nearly = 0.0
    for values in (torch.randn(20000), torch.rand(5000) ** 8 * 1e-3, of_all_sizes()):
        found, scales = decoded(values, form, block, draws)
        assert found.isfinite().all()
        exact = values.double()
        error = (found.double() - exact).abs()
        allowed = bound(exact, scales, form, draws is not None)
        assert (error <= allowed).all(), float((error / allowed).max())
        nearly = max(nearly, float((error / allowed).nan_to_num().max()))
        # a sign never turns
        assert (found.sign() * exact.sign() >= 0).all()
    assert nearly > 0.85


@every_form
@every_draws
def test_the_largest_of_a_block_comes_back(form, draws):
    for largest in (1.0, 3.7e-5, MOST, 2.0**-100):
        values = torch.tensor([0.0, -largest, largest / 3])
        found, scales = decoded(values, form, None, draws, parts=1)
        assert float(found[1]) == pytest.approx(-largest, rel=2.0**-20)
        assert found[0] == 0
        number = float(NUMBER_FORMATS[form].sizes[-1])
        assert float(scales[0]) == pytest.approx(largest / number, rel=2.0**-20)


def test_no_draw_is_beyond_the_largest_code():
    largest = torch.rand(100) + 1
    # divided by its scale it is more than 127, by 2**-17
    above = largest[largest / (largest / torch.full_like(largest, 127)) > 127][0]
    codes = codes_of(above.expand(1 << 20).clone(), "int8", (1, 1))
    assert (codes == 127).all()


@every_form
def test_rounded_at_random_the_mean_stays(form):
    lone = torch.tensor([0.003, 0.011, 0.1, 0.26, 0.33, 0.4999, 0.62, 0.77, 0.9, 0.9999])
    count = 40000
    for sign in (1, -1):
        values = (sign * lone).repeat_interleave(count)
        values[::32] = 1.0
        kept = torch.ones(len(values), dtype=torch.bool)
        kept[::32] = False
        found, _ = decoded(values, form, None, (3, 1), parts=1)
        for i in range(len(lone)):
            part = slice(i * count, (i + 1) * count)
            drawn = found[part][kept[part]].double()
            # five standard errors, and what quotients are rounded by
            allowed = 5 * float(drawn.std()) / len(drawn) ** 0.5 + 2.0**-22
            assert abs(float(drawn.mean()) - sign * float(lone[i])) <= allowed
            # between two numbers that follow each other, both are drawn
            assert len(drawn.unique()) <= 2


def codes_of(values, form, draws=None, offset=0):
    """The bytes of the codes of one part and block."""
    cut = BlockLayout(len(values), 1, BITS[form], None)
    rows = empty_rows(cut)
    encode_blocks(values, None, None, cut, rows, form, draws, offset)
    return rows[0, : cut.code_bytes]


def test_what_is_drawn_is_of_the_seed_the_step_and_the_place():
    values = torch.full((32000,), 0.3)
    values[::32] = 1
    codes = codes_of(values, "int4", (1, 1))
    assert torch.equal(codes_of(values, "int4", (1, 1)), codes)
    others = [((2, 1), 0), ((1 + 2**32, 1), 0), ((1, 2), 0), ((1, 1 + 2**32), 0), ((1, 1), 64000)]
    for draws, offset in others:
        other = codes_of(values, "int4", draws, offset)
        # of two choices of 0.1 and 0.9, and of pairs of them
        same = float((other & 15 == codes & 15).double().mean())
        assert same == pytest.approx(0.1**2 + 0.9**2, abs=0.03)
    # what begins later draws what is drawn there
    later = codes_of(values[640:], "int4", (1, 1), 640)
    assert torch.equal(later, codes[320:])
    # and further than 32 bits
    far = codes_of(values, "int4", (1, 1), 2**36)
    assert not torch.equal(far, codes)


@every_form
@every_block
@every_draws
def test_a_part_on_its_own_has_the_row_it_has_among_others(form, block, draws):
    for n, parts in ((4097, 3), (33, 5), (100, 1)):
        cut = BlockLayout(n, parts, BITS[form], block)
        values, error, active = vectors(n, 1)
        rows = empty_rows(cut)
        encode_blocks(values, error, active, cut, rows, form, draws)
        for part in range(parts):
            own = empty_rows(cut, count=1)
            of = slice(*cut.bounds(part))
            encode_blocks(
                *(values[of], error[of], active[of], cut.of_part(part)),
                *(own, form, draws, part * cut.part),
            )
            assert torch.equal(own[0], rows[part])


@every_form
@every_block
def test_threads_do_not_matter(form, block, monkeypatch):
    monkeypatch.setattr(blocks_cpu, "LEAST_ELEMENTS", 1)
    cut = BlockLayout(9001, 3, BITS[form], block)
    values, error, active = vectors(9001, 1)
    made = []
    for threads in (1, 2, 5):
        rows, left, out, mean = empty_rows(cut), error.clone(), *torch.empty(2, 9001)
        mean = mean[: cut.of_part(1).num_elements]
        share = {"threads": threads}
        encode_blocks_numba(values, error, active, cut, rows, form, DRAWS[1], **share)
        update_error_blocks_numba(values, left, active, cut, rows, form, **share)
        decode_blocks_numba(rows, cut, active, out, form, **share)
        mean_of_blocks_numba(rows, cut.of_part(1), mean, form, **share)
        made.append((rows, left, out, mean))
    for other in made[1:]:
        assert all(same_bits(a, b) for a, b in zip(other, made[0], strict=True))


ENCODERS = [encode_blocks_reference, encode_blocks_numba, encode_blocks_triton]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@every_form
@every_draws
@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan"), "sum"])
def test_what_is_not_finite_is_never_hidden(form, draws, encode, bad, device):
    place = device if encode is encode_blocks_triton else torch.device("cpu")
    values, error = torch.randn(200), torch.randn(200)
    values[70] = error[70] = MOST if bad == "sum" else bad
    cut = BlockLayout(200, 2, BITS[form], 32)
    rows, out = empty_rows(cut).to(place), torch.empty(200, device=place)
    encode(values.to(place), error.to(place), None, cut, rows, form, draws)
    scales = stored_scales(rows, cut).cpu().view(-1)
    assert scales.isnan().nonzero().tolist() == [[2]]
    assert scales.isfinite().sum() == len(scales) - 1
    decode_blocks(rows, cut, None, out, form)
    assert out.isnan().nonzero().flatten().tolist() == list(range(64, 96))
    # where it is not active it does not matter
    active = torch.arange(200) != 70
    encode(values.to(place), error.to(place), active.to(place), cut, rows, form, draws)
    assert stored_scales(rows, cut).isfinite().all()
    update_error_blocks(values.to(place), error.to(place), active.to(place), cut, rows, form)
    decode_blocks(rows, cut, active.to(place), out, form)
    assert out.isfinite().all()
    assert out[70] == 0


@every_form
@every_draws
@pytest.mark.parametrize("encode", ENCODERS)
def test_blocks_of_zeros_and_of_nothing(form, draws, encode, device):
    place = device if encode is encode_blocks_triton else torch.device("cpu")
    cut = BlockLayout(100, 3, BITS[form], 32)
    values, active = torch.zeros(100), torch.ones(100, dtype=torch.bool)
    values[1], values[40], active[40] = -0.0, 5.0, False
    values[64:] = -0.0
    rows = empty_rows(cut).to(place)
    encode(values.to(place), None, active.to(place), cut, rows, form, draws)
    # all bytes, of codes and scales
    assert (rows[:, : cut.row_bytes] == 0).all()


@every_form
def test_the_smallest_numbers_have_the_smallest_scale(form):
    for largest in (2.0**-149, 2.0**-130):
        _, scales = decoded(torch.tensor([largest, 0]), form, None)
        assert scales[0] == SMALLEST_SCALE


@pytest.mark.parametrize("form", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_rounded_as_torch_rounds(form):
    dtype = getattr(torch, form)
    number = float(NUMBER_FORMATS[form].sizes[-1])
    assert number == torch.finfo(dtype).max
    values = torch.cat([torch.randn(5000) * 2.0 ** torch.randint(-20, 4, (5000,)), torch.zeros(1)])
    # all that lie in the middle
    sizes = NUMBER_FORMATS[form].sizes
    values = torch.cat([values, (sizes[1:] + sizes[:-1]) / 2, sizes, -sizes]).clamp(-number, number)
    values[0] = number
    expected = values.to(dtype).view(torch.uint8)
    # of zeros there is one
    expected = torch.where(expected == 0x80, 0, expected)
    assert torch.equal(codes_of(values, form)[: len(values)], expected)
    # and what codes stand for is torch's
    table, torchs = (
        NUMBER_FORMATS[form].values,
        torch.arange(256, dtype=torch.uint8).view(dtype).float(),
    )
    known = table.isfinite()
    assert torch.equal(table[known], torchs[known])
    assert torch.equal(known, torchs.isfinite() & (torch.arange(256) != 0x80))


def test_integers_and_their_ties():
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0, -127.0])
    codes = codes_of(values, "int8")[:8].view(torch.int8)
    assert codes.tolist() == [0, 2, 2, 0, -2, 126, 127, -127]
    values = torch.tensor([7.0, -7, 0.5, 1.5, -2.5, -6.5, 6.4, -1])
    # the first of two codes is in the low half
    halves = [7, 9, 0, 2, 14, 10, 6, 15]
    expected = [low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True)]
    assert codes_of(values, "int4")[:4].tolist() == expected


def test_e3m0_and_its_ties():
    sizes = [0, *(2.0**-k for k in range(6, -1, -1))]
    assert NUMBER_FORMATS["float4_e3m0"].sizes.tolist() == sizes
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


@every_form
def test_codes_that_are_never_written_are_not_numbers(form):
    values = NUMBER_FORMATS[form].values
    assert int(values.isnan().sum()) == len(values) - (2 * NUMBER_FORMATS[form].most + 1)
    assert (values == 0).nonzero().tolist() == [[0]]
    finite = values[values.isfinite()]
    assert torch.equal(finite.sort().values, -finite.sort(descending=True).values)


@every_form
@every_draws
def test_other_types_of_vectors(form, draws):
    values = torch.randn(300, dtype=torch.float64)
    cut = BlockLayout(300, 2, BITS[form], 64)
    rows, expected = empty_rows(cut), empty_rows(cut)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float32):
        error = torch.randn(300).to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        y = values.to(dtype).to(wide) + error.to(wide)
        encode_blocks(values.to(dtype), error, None, cut, rows, form, draws)
        encode_blocks(y.float(), None, None, cut, expected, form, draws)
        assert torch.equal(rows, expected)
        out, narrow = torch.empty(300), torch.empty(300, dtype=dtype)
        decode_blocks(rows, cut, None, out, form)
        decode_blocks(rows, cut, None, narrow, form)
        assert torch.equal(narrow, out.to(dtype))
        update_error_blocks(values.to(dtype), error, None, cut, rows, form)
        assert torch.equal(error, (y - out).to(dtype))
        # a parameter's gradient is not asked for
        leaf = values.to(dtype).requires_grad_()
        left = torch.zeros(300, dtype=dtype)
        encode_blocks(leaf, left, None, cut, rows, form, draws)
        update_error_blocks(leaf, left, None, cut, rows, form)
        assert not left.requires_grad
    # what is not contiguous
    encode_blocks(y.float(), None, None, cut, rows, form, draws)
    decode_blocks(rows, cut, None, out, form)
    strided = torch.zeros(600)[::2]
    decode_blocks(rows, cut, None, strided, form)
    assert torch.equal(strided, out)


def test_a_mean_is_summed_in_the_order_of_the_rows():
    cut = BlockLayout(3, 1, 8, None)
    rows = empty_rows(cut, count=3)
    for row, number in zip(rows.split(1), (3e38, -3e38, 1.0), strict=True):
        encode_blocks(torch.full((3,), number), None, None, cut, row, "int8")
    out = torch.empty(3)
    mean_of_blocks(rows, cut, out, "int8")
    assert torch.allclose(out, torch.full((3,), 1 / 3), rtol=2.0**-20)
    mean_of_blocks(rows[[0, 2, 1]], cut, out, "int8")
    assert (out == 0).all()


def test_arguments_that_do_not_fit():
    cut = BlockLayout(100, 2, 8, 32)
    values, rows = torch.zeros(100), empty_rows(cut)
    for form in ("int4", "int7"):
        with pytest.raises(ValueError, match="cannot be of form"):
            encode_blocks(values, None, None, cut, rows, form)
    wide = torch.zeros(2, 200, dtype=torch.uint8)
    odd = torch.zeros(2, 202, dtype=torch.uint8)[:, :200]
    for other in (rows[:1], rows[:, : cut.row_bytes - 4], rows.char(), wide[:, 1:], odd, rows[0]):
        with pytest.raises(ValueError, match="cannot be the rows of 2 parts"):
            decode_blocks(other, cut, None, values, "int8")
    for other in (values[1:], values[None]):
        with pytest.raises(ValueError, match="does not go with 100 elements"):
            update_error_blocks(other, values, None, cut, rows, "int8")
    for draws, offset in (((0, -1), 0), ((0, 2**63), 0), ((0, 0), 16), ((0, 0), -32)):
        with pytest.raises(ValueError, match="nothing can be drawn"):
            encode_blocks(values, None, None, cut, rows, "int8", draws, offset)
    with pytest.raises(ValueError, match="does not fit 64 bits"):
        encode_blocks(values, None, None, cut, rows, "int8", (2**64, 0))
    for other, of in ((rows, cut), (rows[:0], cut.of_part(0))):
        with pytest.raises(ValueError, match="have no mean"):
            mean_of_blocks(other, of, values[:64], "int8")


PROGRAM = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from gcnzc.kernels.codec import blocks_gpu as gpu
from gcnzc.kernels.codec.number_formats import FORMS
from gcnzc.kernels.codec.blocks_gpu import code_constants

TYPES = {"codes": "*u8", "active": "*u8", "largest": "*i32", "share": "fp32", "seed": "i64",
         "step": "i64", "offset": "i64", "part": "i64", "num_elements": "i64", "stride": "i64"}
VECTORS = ["values", "error", "scales", "table", "out"]

def ptx(kernel, **constants):
    names = kernel.arg_names
    kinds = dict.fromkeys(names, "i32") | TYPES | dict.fromkeys(VECTORS, "*fp32")
    given = {"TILE": 1024, "ROWS": 4, "COLUMNS": 256, "HAS_ERROR": True, "HAS_ACTIVE": True}
    given |= constants
    given = {name: given[name] for name in names if name in given}
    signature = {name: "constexpr" if name in given else kinds[name] for name in names}
    made = compile(ASTSource(kernel, signature, given), GPUTarget("cuda", ARCH, 32),
                   options={"enable_fp_fusion": False})
    text = made.asm["ptx"]
    assert "ld.global" in text and "st.global" in text
    # nothing is approximate, flushed to zero, or rounded once where a CPU rounds twice
    for words in ("fma.rn.f32", ".ftz", ".approx", "div.full", "atom.", "red.global"):
        assert words not in text, (kernel, words)
    return text

made = [ptx(gpu.largest_gpu)]
# both ways of rounding, of halves and of whole bytes
for number, form in enumerate(FORMS.values()):
    random = number % 2 == 0
    text = ptx(gpu.encode_gpu, STOCHASTIC=random, **code_constants(form))
    assert "div.rn.f32" in text and ("mul.hi.u32" in text or not random)
    made.append(text)
for bits in (4, 8):
    made += [ptx(kernel, BITS=bits) for kernel in (gpu.settle_gpu, gpu.mean_gpu, gpu.decode_gpu)]
print(len(made), "kernels")
"""


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_compiles(arch, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # compiled here and now, whatever was compiled before
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("ARCH", str(arch))],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "12 kernels\n"
