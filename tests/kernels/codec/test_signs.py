"""Sign compression: all implementations agree, and nothing is lost with error feedback."""

import itertools

import pytest
import torch
from bits import same_bits

from gcnzc.kernels.codec import signs_cpu, signs_gpu, signs_reference
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.signs import decode_signs, encode_signs, mean_of_signs, update_error_signs

LENGTHS = [0, 1, 7, 31, 32, 33, 100, 4095, 4096, 4097, 10000, 20005]
BLOCKS = [32, 96, 128, 4096, None]
GUARD = 0xAB


def layouts(lengths=LENGTHS, parts=range(1, 10), blocks=BLOCKS):
    given = itertools.product(lengths, parts, blocks)
    return [BlockLayout(n, count, 1, block) for n, count, block in given]


# the interpreter takes milliseconds a program, and a block has one at least
FEW = [
    *layouts([0, 1, 33], [1, 3], [32]),
    *layouts([100, 200], [2], [96, 128]),
    *layouts([1, 4097], [3], [4096, None]),
    *layouts([8300], [1], [4128, None]),
    BlockLayout(1003, 9, 1, 4096),
]


def name_of(layout):
    return f"{layout.num_elements}-{layout.num_parts}-{layout.block}"


def guarded_rows(layout, num_rows=None):
    """Rows with bytes of the caller's behind each of them, and what they lie in."""
    shape = ((num_rows or layout.num_parts) + 2, layout.row_bytes + 8)
    memory = torch.full(shape, GUARD, dtype=torch.uint8)
    return memory[1:-1], memory


def guards_are_whole(layout, memory):
    return bool((memory[[0, -1]] == GUARD).all() and (memory[:, layout.row_bytes :] == GUARD).all())


def guarded(vector):
    """The same values amid others, and what they lie in."""
    memory = torch.full((len(vector) + 8,), 7, dtype=vector.dtype)
    memory[4:-4] = vector
    return memory[4:-4], memory


def inputs(n, with_error, actives):
    values = torch.randn(n) * 10.0 ** torch.randint(-3, 4, (n,))
    error = torch.randn(n) if with_error else None
    active = {"all": None, "some": torch.rand(n) < 0.6, "none": torch.zeros(n, dtype=torch.bool)}
    return values, error, active[actives]


def agree(layout, rows, expected):
    """Bits exactly, scales nearly: the order of a sum is each way's own."""
    assert torch.equal(rows[:, : layout.code_bytes], expected[:, : layout.code_bytes])
    if layout.row_bytes:
        found, wanted = (
            signs_reference.scales_view(rows, layout),
            signs_reference.scales_view(expected, layout),
        )
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0, equal_nan=True)


def check_all(layout, values, error, active, scale, operations, place="cpu"):
    """Each operation against its reference, from what the references made."""
    encode, update_error, decode = operations
    expected, _ = guarded_rows(layout)
    signs_reference.encode_signs_reference(values, error, active, layout, expected, scale)
    rows, memory = guarded_rows(layout)
    rows = rows.to(place)
    vectors = [v if v is None else v.to(place) for v in (values, error, active)]
    before = [None if v is None else v.clone() for v in vectors]
    encode(*vectors, layout, rows, scale)
    agree(layout, rows.cpu(), expected)
    assert rows.is_cuda or guards_are_whole(layout, memory)
    for one, other in zip(vectors, before, strict=True):
        assert one is None or torch.equal(one, other)
    rows.copy_(expected)
    wanted = values * 0 if error is None else error.clone()
    left, memory = guarded(wanted)
    left = left.to(place)
    signs_reference.update_error_signs_reference(values, wanted, active, layout, expected)
    update_error(vectors[0], left, vectors[2], layout, rows)
    assert same_bits(left.cpu(), wanted)
    assert set(memory[:4].tolist() + memory[-4:].tolist()) == {7}
    wanted = torch.empty_like(values)
    out, memory = guarded(torch.full_like(values, float("nan")))
    out = out.to(place)
    signs_reference.decode_signs_reference(expected, layout, active, wanted)
    decode(rows, layout, vectors[2], out)
    assert same_bits(out.cpu(), wanted)
    assert set(memory[:4].tolist() + memory[-4:].tolist()) == {7}


@pytest.mark.parametrize("n", LENGTHS)
def test_numba_equals_the_reference(n):
    kinds = itertools.cycle(
        itertools.product(signs_reference.SCALES, [False, True], ["all", "some", "none"])
    )
    operations = encode_signs, update_error_signs, decode_signs
    for layout in layouts([n]):
        for scale, with_error, actives in itertools.islice(kinds, 3 if n < 10000 else 1):
            check_all(layout, *inputs(n, with_error, actives), scale, operations)


# no kernel is launched for an empty vector
@pytest.mark.triton
@pytest.mark.parametrize("layout", [each for each in FEW if each.num_elements], ids=name_of)
def test_triton_equals_the_reference(layout, device):
    def encode(*given):
        signs_gpu.encode(*given[:-1], squares=given[-1] == "rms")

    operations = (encode, signs_gpu.update_error, signs_gpu.decode)
    kinds = [("rms", False, "all"), ("l1", True, "some")]
    if layout.part_elements < 4096:
        kinds.append(("rms", True, "none"))
    for scale, with_error, actives in kinds:
        vectors = inputs(layout.num_elements, with_error, actives)
        check_all(layout, *vectors, scale, operations, device)


@pytest.mark.parametrize("scale", signs_reference.SCALES)
@pytest.mark.parametrize("with_error", [False, True])
def test_sent_and_remaining_error_add_up(scale, with_error):
    """What was sent and what stays are what there was, and the next error has only the rest."""
    for layout in layouts([1, 33, 4097, 10000], [1, 3, 9], [32, 4096, None]):
        for actives in ("all", "some", "none"):
            values, error, active = inputs(layout.num_elements, with_error, actives)
            rows = torch.zeros(layout.num_parts, layout.row_bytes, dtype=torch.uint8)
            encode_signs(values, error, active, layout, rows, scale)
            error = torch.zeros_like(values) if error is None else error
            y = values + error
            update_error_signs(values, error, active, layout, rows)
            sent = torch.full_like(values, float("nan"))
            decode_signs(rows, layout, active, sent)
            live = torch.ones_like(y, dtype=torch.bool) if active is None else active
            # a difference is rounded once, and so is the sum
            limit = 2.0**-23 * (y.abs() + sent.abs())
            assert ((sent + error - y).abs() <= limit)[live].all()
            assert (sent[~live] == 0).all()
            assert (error[~live] == 0).all()


def mean_of_workers(layout, workers):
    rows, _ = guarded_rows(layout, num_rows=workers)
    for row in rows.split(1):
        vectors = inputs(layout.num_elements, False, "some")
        signs_reference.encode_signs_reference(*vectors, layout, row)
    return rows


@pytest.mark.triton
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_means_are_equal_bit_for_bit(workers, device):
    for whole in [*FEW, *layouts([1, 100, 10000], [1, 3], [32, 96, 4096, None])]:
        for part in range(whole.num_parts):
            layout = whole.part_layout(part)
            rows = mean_of_workers(layout, workers)
            expected = torch.full((layout.num_elements,), float("nan"))
            signs_reference.mean_of_signs_reference(rows, layout, expected)
            out, memory = guarded(torch.full_like(expected, float("nan")))
            mean_of_signs(rows, layout, out)
            assert same_bits(out, expected)
            assert set(memory[:4].tolist() + memory[-4:].tolist()) == {7}
            if layout.num_elements and whole in FEW:
                found, memory = guarded(torch.full_like(expected, float("nan")))
                found = found.to(device)
                signs_gpu.mean(rows.to(device), layout, found)
                assert same_bits(found.cpu(), expected)
                assert set(memory[:4].tolist() + memory[-4:].tolist()) == {7}


@pytest.mark.parametrize("block", [32, 4096, 5024, None])
@pytest.mark.parametrize("scale", signs_reference.SCALES)
def test_the_result_does_not_depend_on_the_number_of_threads(block, scale, monkeypatch):
    # so that a small vector is worth several threads
    monkeypatch.setattr(signs_cpu, "GRAIN_ELEMENTS", 1)
    n = 50_001
    layout, results = BlockLayout(n, 3, 1, block), []
    values, error, active = torch.randn(n), torch.randn(n), torch.rand(n) < 0.5
    for threads in (1, 2, 5):
        rows = torch.zeros(3, layout.row_bytes, dtype=torch.uint8)
        left, out, mean = error.clone(), torch.empty(n), torch.empty(layout.bounds(0)[1])
        encode_signs(values, left, active, layout, rows, scale, threads=threads)
        update_error_signs(values, left, active, layout, rows, threads=threads)
        decode_signs(rows, layout, active, out, threads=threads)
        mean_of_signs(rows, layout.part_layout(0), mean, threads=threads)
        results.append((rows, left, out, mean))
    for result in results[1:]:
        for one, first in zip(result, results[0], strict=True):
            assert same_bits(one, first)


def every_encoding(values, error, active, layout, device, scale):
    """Rows of the reference, of numba and of Triton."""
    rows = torch.zeros(3, layout.num_parts, layout.row_bytes, dtype=torch.uint8)
    signs_reference.encode_signs_reference(values, error, active, layout, rows[0], scale)
    encode_signs(values, error, active, layout, rows[1], scale)
    there = [v if v is None else v.to(device) for v in (values, error, active)]
    on_gpu = rows[2].to(device)
    signs_gpu.encode(*there, layout, on_gpu, squares=scale == "rms")
    rows[2] = on_gpu.cpu()
    return rows


@pytest.mark.triton
@pytest.mark.parametrize("scale", signs_reference.SCALES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block", [32, None])
def test_non_finite_values_make_the_scale_of_their_block_non_finite(scale, bad, block, device):
    layout = BlockLayout(150, 2, 1, block)
    for place, in_error in ((0, False), (100, True), (149, False)):
        values, error = torch.randn(150), torch.randn(150)
        (error if in_error else values)[place] = bad
        active = torch.ones(150, dtype=torch.bool)
        row, at = divmod(place, layout.part_elements)
        number = at // layout.block_elements
        for rows in every_encoding(values, error, active, layout, device, scale):
            finite = signs_reference.scales_view(rows, layout).isfinite()
            assert not finite[row, number]
            finite[row, number] = True
            assert finite.all()
            bit = rows[row, at // 8] >> (at % 8) & 1
            assert bit == (bad > 0)
        active[place] = False
        for rows in every_encoding(values, error, active, layout, device, scale):
            assert signs_reference.scales_view(rows, layout).isfinite().all()


@pytest.mark.triton
def test_zeros_are_positive_and_blocks_of_them_have_no_scale(device):
    values = torch.tensor([0.0, -0.0] * 32)
    layout = BlockLayout(64, 1, 1, 32)
    for rows in every_encoding(values, None, None, layout, device, "rms"):
        assert (rows[:, : layout.code_bytes] == 255).all()
        assert (signs_reference.scales_view(rows, layout) == 0).all()
    error, out = torch.zeros(64), torch.full((64,), 7.0)
    update_error_signs(values, error, None, layout, rows[None, 0])
    decode_signs(rows[None, 0], layout, None, out)
    assert (error == 0).all()
    assert (out == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_are_supported(dtype):
    layout = BlockLayout(300, 2, 1, 64)
    values, error = torch.randn(300, dtype=dtype), torch.randn(300, dtype=dtype)
    y, rows = values + error, torch.zeros(2, layout.row_bytes, dtype=torch.uint8)
    encode_signs(values, error, None, layout, rows)
    update_error_signs(values, error, None, layout, rows)
    sent, mean = torch.empty(300, dtype=dtype), torch.empty(layout.part_elements, dtype=dtype)
    decode_signs(rows, layout, None, sent)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(sent + error, y, rtol=tolerance, atol=4 * tolerance)
    mean_of_signs(rows[:1], layout.part_layout(0), mean)
    torch.testing.assert_close(mean, sent[: layout.part_elements], rtol=tolerance, atol=tolerance)
