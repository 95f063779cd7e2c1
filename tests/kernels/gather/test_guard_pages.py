"""Gathers read no byte before or after the table: pages there may not be read."""

import pytest
from programs import output_of

# one byte, or vector, too many ends this process
PROGRAM = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import ctypes, mmap, torch
from gcnzc.kernels.gather import cpu, gather, gather_reference
from gcnzc.kernels.gather.gpu import gather_rows
from tests.fast_interpreter import accept_new_numpy

accept_new_numpy()
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 6 * page)
everything = torch.frombuffer(memory, dtype=torch.uint8)
everything.random_(120)
rows = everything[page:-page].clone()
libc = ctypes.CDLL(None, use_errno=True)
for guard in (everything.data_ptr(), everything.data_ptr() + 5 * page):
    assert libc.mprotect(ctypes.c_void_p(guard), page, 0) == 0


def tables(*widths):
    for row_bytes in widths:
        num_rows = 4 * page // row_bytes
        for at in (0, 4 * page - num_rows * row_bytes):
            place = slice(at, at + num_rows * row_bytes)
            yield [m[place].view(num_rows, row_bytes) for m in (everything[page:-page], rows)]


for cpu.STREAM_BYTES in (0, 1 << 40):
    for part, want in tables(1, 3, 17, 31, 63, 64, 65, 100, 127, 400, 1000):
        assert torch.equal(gather(part, torch.arange(len(part))), want), part.shape
print("gather")
for part, want in tables(1, 3, 31, 64, 65, 100, 1000):
    for dtype in (torch.int8, torch.float8_e4m3fn):
        ids, scales = torch.arange(len(part)), torch.rand(len(part))
        found = gather(part.view(dtype), ids, scales=scales)
        assert torch.equal(found, gather_reference(want.view(dtype), ids, scales)), part.shape
print("quantized")
for layout in ("scalar", "vector", "wrapped", "shifted"):
    for part, want in tables(1, 17, 64, 100, 127, 2001):
        ids = torch.tensor([0, len(part) - 1, len(part) // 2])
        assert torch.equal(gather_rows(part, ids, layout=layout), want[ids]), part.shape
print("Triton")
"""


@pytest.mark.processes
def test_no_gather_reads_before_or_after_the_table():
    assert output_of("-c", PROGRAM).split() == ["gather", "quantized", "Triton"]
