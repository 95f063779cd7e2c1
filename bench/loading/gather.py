"""Measure the bandwidth of gathers on the CPU, compared with a large copy.

    python -m bench.loading.gather [ROUNDS]

Bandwidth counts each gathered row once: B * D * itemsize bytes. The upper bound is the bandwidth of
copying one large block with two threads: the faster of torch's `copy_` and `memcpy` on two halves.
It is measured in the same rounds as the gathers. A copy with streaming stores, which gcnzc's gather
does for consecutive rows, is reported separately (`share_of_streaming_copy`).

Ids are random, and the table is much larger than the CPU caches. It is in pages of 4 KiB, as
torch's allocator returns them, or of 2 MiB. With 4 KiB pages almost every row is a TLB miss. All
methods write into memory that has been written before, except the one that measures the cost of
newly allocated memory. On a shared machine, `chrt -f 10` before the command reserves the cores.
"""

import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Set before torch is imported: otherwise its OpenMP threads busy-wait for milliseconds after their
# work, on the cores of the next measurement.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from torch import Tensor

from bench.harness import record, side_by_side
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.gather import gather

TABLE_BYTES = 2 << 30
COPY_BYTES = 128 << 20
# ogbn-products has rows of 400 B, ogbn-papers100M of 512 B, coauthor_cs of 27220 B
ROW_BYTES = [64, 128, 256, 400, 512, 1024, 2048, 4096, 8192, 27220]
# about the nodes of a minibatch with the default fan-outs
MOST_IDS = 400_000
THREADS = 2
PAGES = {"4 KiB": mmap.MADV_NOHUGEPAGE, "2 MiB": mmap.MADV_HUGEPAGE}
LIBRARY_COPIES = ("copy: torch", "copy: memcpy")
OUR_COPY = "copy: streaming stores"


def main() -> None:
    """Measure every method and row size, with both page sizes."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    torch.set_num_threads(THREADS)
    out_memory = allocate(COPY_BYTES, "2 MiB")
    for pages in PAGES:
        memory = allocate(TABLE_BYTES, pages)
        for row_bytes in ROW_BYTES:
            measure_width(memory, out_memory, row_bytes, pages, rounds)


def measure_width(
    memory: Tensor, out_memory: Tensor, row_bytes: int, pages: str, rounds: int
) -> None:
    """Measure every method on rows of one size."""
    cols = row_bytes // 4
    num_rows = len(memory) // cols
    rows = memory[: num_rows * cols].view(num_rows, cols)
    num_ids = min(MOST_IDS, COPY_BYTES // row_bytes)
    ids = torch.randint(num_rows, (num_ids,))
    out = out_memory[: num_ids * cols].view(num_ids, cols)
    copies = copy_methods(memory, out_memory)
    timings = side_by_side(copies | gather_methods(rows, ids, out), rounds)
    copy_bandwidth = max(COPY_BYTES / timings[method].median_s for method in LIBRARY_COPIES)
    streaming_bandwidth = COPY_BYTES / timings[OUR_COPY].median_s
    for method, timing in timings.items():
        num_bytes = COPY_BYTES if method in copies else num_ids * row_bytes
        case = {"way": method, "row_bytes": row_bytes, "num_ids": num_ids, "table_pages": pages}
        bandwidth = num_bytes / timing.median_s
        record(
            "gather_cpu",
            case,
            timing,
            bytes_per_s=bandwidth,
            share_of_copy=bandwidth / copy_bandwidth,
            share_of_streaming_copy=bandwidth / streaming_bandwidth,
        )


def allocate(num_bytes: int, pages: str) -> Tensor:
    """Return a float32 vector of `num_bytes` bytes in pages of a size, already written once."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(PAGES[pages])
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1)


def gather_methods(rows: Tensor, ids: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    """Return gcnzc's gather and those of torch and NumPy, by name."""
    table = FeatureTable(rows)
    rows_numpy, ids_numpy, out_numpy = rows.numpy(), ids.numpy(), out.numpy()
    return {
        "gather, two threads": lambda: table.gather(ids, out, threads=2),
        "gather, one thread": lambda: table.gather(ids, out, threads=1),
        "torch.index_select(out=)": lambda: torch.index_select(rows, 0, ids, out=out),
        "torch.index_select, fresh memory": lambda: torch.index_select(rows, 0, ids),
        "numpy.take(out=)": lambda: np.take(rows_numpy, ids_numpy, 0, out_numpy, "clip"),
    }


def copy_methods(memory: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    """Return methods to copy `COPY_BYTES` with two threads, by name."""
    source = memory[: len(out)]
    source_numpy, out_numpy = source.numpy(), out.numpy()
    half = len(out) // 2
    halves = ThreadPoolExecutor(THREADS)

    def memcpy() -> None:
        parts = [slice(half), slice(half, None)]
        list(halves.map(lambda part: np.copyto(out_numpy[part], source_numpy[part]), parts))

    # a gather of consecutive rows of 4096 B is a copy with streaming stores
    pages = torch.arange(source.nbytes // 4096)
    return {
        "copy: torch": lambda: out.copy_(source),
        "copy: memcpy": memcpy,
        OUR_COPY: lambda: gather(source.view(-1, 1024), pages, out.view(-1, 1024), threads=2),
    }


if __name__ == "__main__":
    main()
