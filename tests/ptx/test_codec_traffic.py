"""Sectors that the compiled kernels of sign compression touch: each byte is moved once."""

import pytest
import torch

from gcnzc.kernels.codec import signs_gpu
from gcnzc.kernels.codec.block_layout import BlockLayout

SECTOR_BYTES = 32
BLOCK = 4096


def on_line(tensor):
    memory = torch.zeros(tensor.nbytes + 256, dtype=torch.uint8)
    view = memory[-memory.data_ptr() % 128 :][: tensor.nbytes].view(tensor.dtype)
    return view.view(tensor.shape).copy_(tensor)


class Vectors:
    """The arguments of all operations, on lines."""

    def __init__(self, num_elements, num_parts=1):
        self.layout = BlockLayout(num_elements, num_parts, 1, BLOCK)
        self.values, self.error = (on_line(torch.randn(num_elements)) for _ in range(2))
        self.active, self.out = on_line(torch.rand(num_elements) < 0.6), on_line(self.values)
        self.rows = on_line(torch.zeros(num_parts, self.layout.row_bytes, dtype=torch.uint8))

    def run(self, name, executor, with_active, with_error=True):
        """Run an operation; return the sectors by verb and argument."""
        active = self.active if with_active else None
        executor.counters.clear()
        if name == "encode":
            error = self.error if with_error else None
            signs_gpu.encode(self.values, error, active, self.layout, self.rows, squares=True)
        elif name == "update_error":
            signs_gpu.update_error(self.values, self.error, active, self.layout, self.rows)
        elif name == "decode":
            signs_gpu.decode(self.rows, self.layout, active, self.out)
        else:
            signs_gpu.mean(self.rows, self.layout, self.out)
        return {key: counters.sectors for key, counters in executor.counters.items()}


def sectors(num_bytes):
    return -(-num_bytes // SECTOR_BYTES)


VECTOR_ARGUMENTS = {
    "encode": [("load", "values"), ("load", "error")],
    "update_error": [("load", "values"), ("load", "error"), ("store", "error")],
    "decode": [("store", "out")],
    "mean": [("store", "out")],
}


@pytest.mark.triton
@pytest.mark.parametrize("name", VECTOR_ARGUMENTS)
@pytest.mark.parametrize("with_active", [False, True])
@pytest.mark.parametrize("num_elements", [BLOCK, 3 * BLOCK, 2 * BLOCK + 96])
def test_each_sector_of_a_vector_is_touched_once(name, with_active, num_elements, ptx):
    found = Vectors(num_elements).run(name, ptx, with_active)
    for key in VECTOR_ARGUMENTS[name]:
        assert found.pop(key) == sectors(4 * num_elements), key
    if with_active and name != "mean":
        assert found.pop(("load", "active")) == sectors(num_elements)
    assert not {"values", "error", "active", "out"} & {argument for _, argument in found}


@pytest.mark.triton
@pytest.mark.parametrize("with_active", [False, True])
def test_an_encoder_without_error_reads_none(with_active, ptx):
    found = Vectors(BLOCK).run("encode", ptx, with_active, with_error=False)
    assert ("load", "error") not in found
    assert found["load", "values"] == sectors(4 * BLOCK)


@pytest.mark.triton
@pytest.mark.parametrize("with_active", [False, True])
def test_each_sector_of_bits_is_touched_once(with_active, ptx):
    blocks = 3
    vectors = Vectors(blocks * BLOCK)
    bits = sectors(blocks * BLOCK // 8)
    # and those of the scales
    assert vectors.run("encode", ptx, with_active)["store", "words"] == bits + sectors(4 * blocks)
    for name in ("decode", "mean") if not with_active else ("decode",):
        found = vectors.run(name, ptx, with_active)
        # each of the 4 warps of a program reads the scale of its block
        assert found["load", "words"] == bits + 4 * blocks, name
    # the signs are not read again
    assert vectors.run("update_error", ptx, with_active)["load", "words"] == 8 * blocks


@pytest.mark.triton
@pytest.mark.parametrize("name", VECTOR_ARGUMENTS)
@pytest.mark.parametrize("with_active", [False, True])
def test_only_the_last_chunk_of_a_ragged_vector_is_read_by_elements(name, with_active, ptx):
    num_elements, tail = 4 * BLOCK + 105, 105
    found = Vectors(num_elements).run(name, ptx, with_active)
    for key in VECTOR_ARGUMENTS[name]:
        # a lane has four elements, of which each instruction accesses one
        whole, ragged = sectors(4 * (num_elements - tail)), 4 * sectors(4 * tail)
        assert whole < found[key] <= whole + ragged, key


@pytest.mark.triton
def test_sums_of_chunks_are_read_once(ptx):
    # one block of several programs, whose sums a second kernel adds
    vectors = Vectors(16 * BLOCK)
    vectors.layout = BlockLayout(16 * BLOCK, 1, 1, None)
    vectors.rows = on_line(torch.zeros(1, vectors.layout.row_bytes, dtype=torch.uint8))
    found = vectors.run("encode", ptx, with_active=True)
    # 16 of 8 B, and the sum
    assert found["load", "totals"] == found["load", "counts"] == sectors(16 * 8) + 1
