"""Quantized rows: stated error bounds hold, and all implementations agree bit for bit."""

import itertools

import pytest
import torch
from bits import same_bits

from gcnzc.kernels.gather import DEQUANTIZED_DTYPES, cpu, gather, gather_reference, gather_triton
from gcnzc.kernels.gather import quantize as module
from gcnzc.kernels.gather.cached_rows import make_cached_rows
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.kernels.gather.lanes import LAYOUTS

# the interpreter tells of NaNs, also among the bytes beside a row, which are dropped
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

WIDTHS = [1, 3, 16, 33, 100, 602]
BLOCKS = [None, 1, 7, 16, 1000]  # None: a scale for each row
MOST = torch.finfo(torch.float32).max
codes_of_one_byte = pytest.mark.parametrize("dtype", list(module.MAX_CODE), ids=str)


def adversarial(num_columns):
    """Rows of zeros, ties, single large or tiny values, and of every magnitude."""
    j = torch.arange(num_columns)
    ties = [(j % 255 - 127).float(), j % 254 - 126.5, j % 5 * 0.5 - 1]
    lone = torch.zeros(4, num_columns)
    lone[:, 0] = torch.tensor([MOST, -MOST, 2.0**-149, -(2.0**-126)])
    mixed = torch.randn(4, num_columns)
    mixed[:, -1] = torch.tensor([1e38, 1e6, 1e-30, 126.5])
    # steps of the codes with an exponent, and what lies in the middle between them
    halves = 2.0 ** (j % 30 - 20) * (1 + (j % 17) / 16)
    of_all_sizes = torch.randn(60, num_columns) * torch.logspace(-44, 37, 60)[:, None]
    zeros = torch.zeros(2, num_columns)
    zeros[1] = -0.0
    return torch.cat([zeros, torch.stack([*ties, halves]), lone, mixed, of_all_sizes])


def quantized(rows, dtype, scale_columns=None):
    scales = module.compute_scales(module.largest(rows, scale_columns), dtype)
    return module.quantize(rows, scales, dtype, scale_columns), scales


@codes_of_one_byte
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("block", BLOCKS)
def test_codes_equal_the_reference(dtype, width, block):
    rows = adversarial(width)
    found = module.largest(rows, block)
    assert same_bits(found, module.largest_reference(rows, block))
    scales = module.compute_scales(found, dtype)
    given = rows, scales, dtype, block
    assert same_bits(module.quantize(*given), module.quantize_reference(*given))
    # whoever shares the work
    assert same_bits(module.largest(rows, block, threads=3), found)
    wide = torch.randn(2000, 131)[:, :130]
    scales = module.compute_scales(module.largest(wide), dtype)
    one, many = (module.quantize(wide, scales, dtype, threads=n) for n in (1, 3))
    assert same_bits(one, many)


def bound(rows, scales, dtype):
    """The error that the module states, in float64."""
    if dtype == torch.int8:
        return (scales * (0.5 + 2.0**-16)).expand_as(rows)
    fraction, least = {torch.float8_e4m3fn: (3, 10), torch.float8_e5m2: (2, 17)}[dtype]
    return torch.maximum(rows.abs() * 0.5**fraction / 2, scales * 0.5**least) * (1 + 2.0**-18)


@codes_of_one_byte
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_error_is_within_the_stated_bound(dtype, width, block):
    for rows in (adversarial(width), torch.randn(300, width), torch.rand(300, width) ** 8 * 1e-3):
        codes, scales = quantized(rows, dtype, block)
        found = module.dequantize_reference(codes, scales, block)
        assert found.isfinite().all()
        exact = rows.double()
        error = (found.double() - exact).abs()
        allowed = bound(exact, module.broadcast_scales(scales.double(), width, block), dtype)
        assert (error <= allowed).all(), float((error / allowed).max())
        # a sign never turns
        assert (found.sign() * exact.sign() >= 0).all()


def test_ties_go_to_even():
    rows = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0]])
    assert quantized(rows, torch.int8)[0].tolist() == [[0, 2, 2, 0, -2, 126, 127]]
    # 17 and 19 lie in the middle of 16, 18 and 20
    rows = torch.tensor([[17.0, 19.0, 448.0, -17.0, -19.0, 0.0]])
    codes = quantized(rows, torch.float8_e4m3fn)[0].float()
    assert codes.tolist() == [[16, 20, 448, -16, -20, 0]]


@codes_of_one_byte
@pytest.mark.parametrize("width", WIDTHS)
def test_gathers_dequantized_rows(dtype, width, implementation, place):
    rows = adversarial(width)
    for block, id_dtype in itertools.product(BLOCKS, (torch.int32, torch.int64)):
        codes, scales = (part.to(place) for part in quantized(rows, dtype, block))
        ids = torch.randint(len(rows), (90,), dtype=id_dtype, device=codes.device)
        scaled = {"scales": scales, "scale_columns": block}
        found = implementation(codes, ids, **scaled)
        assert same_bits(found, gather_reference(codes, ids, scales, block))
        assert same_bits(found, module.dequantize_reference(codes, scales, block)[ids.long()])
        none = implementation(codes, ids[:0], **scaled)
        assert (none.shape, none.dtype) == ((0, width), torch.float32)


@codes_of_one_byte
def test_every_code_is_dequantized(dtype, implementation, place):
    codes = torch.arange(256, dtype=torch.uint8, device=place).view(dtype)[:, None]
    scales = torch.rand(256, device=codes.device)
    ids = torch.randperm(256, device=codes.device)
    found = implementation(codes, ids, scales=scales)
    # a NaN's payload may differ, and nothing else
    expected = gather_reference(codes, ids, scales)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@codes_of_one_byte
@pytest.mark.parametrize("target", DEQUANTIZED_DTYPES, ids=str)
def test_writes_to_tensors_and_dtypes_of_the_caller(dtype, implementation, target, place):
    codes, scales = (part.to(place) for part in quantized(torch.randn(40, 33), dtype))
    ids = torch.randint(40, (60,), device=codes.device)
    wide = torch.full((62, 37), 7.0, dtype=target, device=codes.device)
    out = wide[1:-1, 2:-2]
    assert implementation(codes, ids, out, scales=scales) is out
    expected = gather_reference(codes, ids, scales).to(target)
    if target == torch.bfloat16 and implementation is gather_triton and place.type == "cpu":
        # the interpreter cuts where processors round
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=0)
    else:
        assert same_bits(out, expected)
    out.fill_(7)
    assert (wide == 7).all()


@codes_of_one_byte
def test_views_of_wider_tables_are_gathered(dtype, implementation, place):
    codes = torch.randint(120, (20, 128), dtype=torch.uint8, device=place).view(dtype)
    ids = torch.tensor([3, 3, 19, 0], device=codes.device)
    for table in (codes[:, :50], codes[:, 77:], codes[::2][:10, 1:128], codes[:1].expand(20, 128)):
        count, width = table.shape
        for block in (None, 16):
            scales = torch.rand(-(-width // 16) if block else count, device=codes.device)
            found = implementation(table, ids % count, scales=scales, scale_columns=block)
            assert same_bits(found, gather_reference(table, ids % count, scales, block))


def test_the_result_does_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(cpu, "GRAIN_BYTES", 1)
    codes, scales = quantized(torch.randn(50, 70), torch.int8)
    ids = torch.randint(50, (71,))
    expected = gather_reference(codes, ids, scales)
    for threads in (1, 2, 5):
        assert same_bits(gather(codes, ids, scales=scales, threads=threads), expected)


@pytest.mark.triton
@codes_of_one_byte
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("block", [None, 16])
def test_cached_rows_may_be_quantized(dtype, share, block, device):
    """Bit for bit; and from nowhere else: the codes themselves are gone."""
    for width in (1, 33, 100, 602):
        codes, scales = quantized(torch.randn(120, width), dtype, block)
        ids = torch.randperm(120)[: int(share * 120)]
        asked = torch.randint(120, (400,))
        expected = gather_reference(codes, asked, scales, block)
        cached = make_cached_rows(codes, ids, device)
        codes.view(torch.int8)[ids] = 0x7F
        readable = codes if device.type == "cpu" else codes.pin_memory()
        at = asked.to(device)
        found = gather_rows(
            readable,
            at,
            cached=cached,
            scales=scales.to(device),
            scale_columns=block,
            order=at.argsort(),
        )
        assert same_bits(found.cpu(), expected)


@pytest.mark.triton(slow=True)
@codes_of_one_byte
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [None, 3, 16])
def test_every_layout_and_offset_of_a_row_is_read(dtype, layout, block, device):
    for width, stride in ((5, 7), (33, 33), (100, 128), (130, 256), (602, 602)):
        memory = torch.randint(120, (30 * stride + 256,), dtype=torch.uint8, device=device)
        memory = memory[-memory.data_ptr() % 128 :]
        for inset in (0, 1, 24):
            if layout == "pitched" and (stride % 128 or inset):
                continue
            codes = memory[inset:].as_strided((30, width), (stride, 1)).view(dtype)
            scales = torch.rand(-(-width // block) if block else 30, device=device)
            ids = torch.randperm(30, device=device)
            found = gather_rows(codes, ids, layout=layout, scales=scales, scale_columns=block)
            assert same_bits(found, gather_reference(codes, ids, scales, block))


@pytest.mark.parametrize("outside", [-1, 40, 2**31 - 1])
def test_an_id_out_of_range_is_rejected(implementation, outside, place):
    codes, scales = (part.to(place) for part in quantized(torch.ones(40, 9), torch.int8))
    ids = torch.tensor([1, outside, 2], device=codes.device)
    with pytest.raises(IndexError, match=rf"id {outside} (.|\n)*table of 40 rows"):
        implementation(codes, ids, scales=scales)


def test_any_id_is_out_of_range_in_an_empty_table():
    with pytest.raises(IndexError, match="table of 0 rows"):
        gather(torch.zeros(0, 4).to(torch.int8), torch.tensor([0]), scales=torch.ones(0))
