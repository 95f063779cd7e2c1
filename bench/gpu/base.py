"""What all parts of the GPU benchmarks use: sizes, records, rates, and page-locked memory."""

import mmap
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench import harness
from gcnzc.features.pinning import pinned
from gcnzc.features.registrations import copy_into
from gcnzc.kernels.gather.bench_reads import read_dense
from gcnzc.kernels.gather.lanes import LINE_BYTES
from gcnzc.kernels.gpu_launch import default_programs
from gcnzc.tune import pcie_bench

GIB = 1 << 30


@dataclass(frozen=True)
class Scale:
    """Sizes and numbers of the measurements."""

    table_bytes: int = 8 * GIB
    payload_bytes: int = 1 << 26
    rounds: int = 11
    num_ids: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    tlb_gib: tuple[float, ...] = (1, 4, 16, 64)
    columns: tuple[int, ...] = (100, 128, 602, 1024, 1433)


SCALES = {
    "full": Scale(),
    # 300,000 ids are about those of a minibatch. 8 GiB in pages of 4 KiB are predicted to take 8 s:
    # half for the page faults, half for locking them at 2 GB/s. Published rates fall between 0.5
    # and 10 GiB, see `PUBLISHED_FALL` in claims.py.
    "quick": Scale(
        table_bytes=2 * GIB,
        rounds=3,
        num_ids=(300_000,),
        tlb_gib=(2, 8),
    ),
    "small": Scale(1 << 20, 1 << 12, 1, (40,), (1 / 1024,), columns=(602,)),
}


class Bench:
    """The device, the scale of the measurements, and how results are recorded."""

    def __init__(self, where: pcie_bench.Gpu, scale: str, recorded: bool) -> None:
        self.where, self.device = where, where.device
        self.scale_name, self.scale, self.recorded = scale, SCALES[scale], recorded
        self.failed: list[str] = []  # methods that raised an exception

    def record(self, part: str, case: dict[str, object], **derived: object) -> None:
        """Record one line of `results/gpu_<part>.jsonl`, or only print it."""
        if self.recorded:
            harness.record(f"gpu_{part}", case, **derived)
        else:
            print(part, case, derived, flush=True)

    @contextmanager
    def attempt(self, part: str, case: dict[str, object]) -> Iterator[None]:
        """Record an exception in this context as the outcome of its case, and suppress it."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed.append(str(case.get("method", part)))
            outcome = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            self.record(part, case, outcome=outcome)

    def rates(self, tasks: dict[str, tuple[int, Callable[[], object]]]) -> dict[str, float]:
        """Measure the bytes per second of each task in interleaved rounds."""
        return pcie_bench.measure_rates(tasks, self.where.seconds, self.scale.rounds)

    def bounds(self, memory: Tensor) -> dict[str, tuple[int, Callable[[], object]]]:
        """Return tasks that bound a gather: dense reads by few and by many programs, and a copy."""
        source = memory[: max(self.scale.payload_bytes, LINE_BYTES)]
        out = torch.empty_like(source, device=self.device)
        few = default_programs(self.device)
        return {
            "dense read": (len(source), lambda: read_dense(source, out)),
            "dense read, many programs": (
                len(source),
                lambda: read_dense(source, out, programs=16 * few),
            ),
            "copy engine": (len(source), partial(copy_into, out, source, non_blocking=True)),
        }


@contextmanager
def random_bytes(num_bytes: int, *, huge: bool = True) -> Iterator[Tensor]:
    """Page-locked random bytes on the host, beginning on a page."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.int8)
    # a random pattern is repeated; no row's stride divides its length, so that rows differ
    random = np.random.default_rng(0).integers(0, 256, min(num_bytes, 99_991_111), np.uint8)
    pattern = torch.from_numpy(random).view(torch.int8)
    for begin in range(0, num_bytes, len(pattern)):
        part = whole[begin : begin + len(pattern)]
        part.copy_(pattern[: len(part)])
    with pinned(whole.view(1, -1)) as table:
        yield table.rows.view(-1)


def huge_pages_share(memory: Tensor) -> float:
    """Return the fraction of huge pages in the mapping that contains the memory."""
    size_kb, inside = 1, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, value = line.split()[:2]
        if found := re.fullmatch(r"([0-9a-f]+)-([0-9a-f]+)", name):
            inside = int(found[1], 16) <= memory.data_ptr() < int(found[2], 16)
        elif inside and name == "Size:":
            size_kb = int(value)
        elif inside and name == "AnonHugePages:":
            return int(value) / size_kb
    return 0.0
