"""Measure the rate of gathers on the host, compared with a large copy.

    python -m bench.loading.gather [ROUNDS]

Bytes are those of the rows asked for, once: B * D * itemsize. The roof is a copy of one large block
with two threads, timed in the same rounds as the gathers that are held against it: the faster of
torch's `copy_` and the C library's `memcpy` on two halves. A copy by streaming stores, which is
what our gather makes of rows that follow each other, is faster still, and has a share of its own.

Ids are random and the table is far larger than the caches. It lies in pages of 4 KiB, as what torch
allocates does, or of 2 MiB; the processor must look up where a page lies for nearly every row of
the former. Every way writes into memory it has written before, but for the one that is there to
show what fresh memory costs. On a machine that others use too, `chrt -f 10` before the command
keeps the cores to it.
"""

import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Read when torch is imported: its threads would go on spinning for milliseconds after their work,
# on the cores of whatever is timed next.
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
# a minibatch of the usual fan-outs
MOST_IDS = 400_000
THREADS = 2
PAGES = {"4 KiB": mmap.MADV_NOHUGEPAGE, "2 MiB": mmap.MADV_HUGEPAGE}
LIBRARY_COPIES = ("copy: torch", "copy: memcpy")
OUR_COPY = "copy: streaming stores"


def main() -> None:
    """Measure every way on every width, in both kinds of pages."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    torch.set_num_threads(THREADS)
    out_memory = memory_of(COPY_BYTES, "2 MiB")
    for pages in PAGES:
        memory = memory_of(TABLE_BYTES, pages)
        for row_bytes in ROW_BYTES:
            measure_width(memory, out_memory, row_bytes, pages, rounds)


def measure_width(
    memory: Tensor, out_memory: Tensor, row_bytes: int, pages: str, rounds: int
) -> None:
    """Measure every way on rows of one width."""
    cols = row_bytes // 4
    num_rows = len(memory) // cols
    rows = memory[: num_rows * cols].view(num_rows, cols)
    num_ids = min(MOST_IDS, COPY_BYTES // row_bytes)
    ids = torch.randint(num_rows, (num_ids,))
    out = out_memory[: num_ids * cols].view(num_ids, cols)
    copies = copy_ways(memory, out_memory)
    timings = side_by_side(copies | gather_ways(rows, ids, out), rounds)
    roof = max(COPY_BYTES / timings[way].median_s for way in LIBRARY_COPIES)
    our_roof = COPY_BYTES / timings[OUR_COPY].median_s
    for way, timing in timings.items():
        num_bytes = COPY_BYTES if way in copies else num_ids * row_bytes
        case = {"way": way, "row_bytes": row_bytes, "num_ids": num_ids, "table_pages": pages}
        speed = num_bytes / timing.median_s
        shares = {"share_of_copy": speed / roof, "share_of_streaming_copy": speed / our_roof}
        record("gather_cpu", case, timing, bytes_per_s=speed, **shares)


def memory_of(num_bytes: int, pages: str) -> Tensor:
    """Return float32 memory that was written once."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(PAGES[pages])
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1)


def gather_ways(rows: Tensor, ids: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
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


def copy_ways(memory: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    """Return ways to copy `COPY_BYTES` with two threads."""
    source = memory[: len(out)]
    source_numpy, out_numpy = source.numpy(), out.numpy()
    half = len(out) // 2
    halves = ThreadPoolExecutor(THREADS)

    def memcpy() -> None:
        parts = [slice(half), slice(half, None)]
        list(halves.map(lambda part: np.copyto(out_numpy[part], source_numpy[part]), parts))

    # a gather of whole pages in their order is a copy by streaming stores
    pages = torch.arange(source.nbytes // 4096)
    return {
        "copy: torch": lambda: out.copy_(source),
        "copy: memcpy": memcpy,
        OUR_COPY: lambda: gather(source.view(-1, 1024), pages, out.view(-1, 1024), threads=2),
    }


if __name__ == "__main__":
    main()
