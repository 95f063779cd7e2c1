"""Measure gathers, copies and epochs on a GPU, in under nine minutes.

    python -m bench.gpu.suite all                       everything, recorded in results/gpu_*.jsonl
    python -m bench.gpu.suite gather --results FOLDER   one part, recorded elsewhere
    python -m bench.gpu.suite link gather --quick       fewer widths and rounds, in about a minute
    python -m bench.gpu.suite all --small               tiny, recorded only with --results

`python -m bench.gpu.session --dry-run` runs the suite on a fake device, without a GPU.

`link` measures the PCIe bus; `gather` layouts, widths, dtypes, numbers of ids and of programs;
`tlb` tables beyond the reach of the GPU's TLB; `cache` cached rows by their hit rate; `codes`
quantized rows; `bulk` asynchronous bulk copies from host memory into shared memory; `two-engine`,
`overlap`, `epoch` and `epoch-large` whole minibatches, see bench/gpu/epochs.py.

Each gather is first run once, and its rows are compared with the expected ones. Times are measured
by CUDA events; each is the median of rounds in which all tasks of a case alternate. Rates are also
recorded relative to a dense read, of a contiguous range by the GPU's threads, in the same rounds.
Each line has the GPU, its driver and its clocks; `bench/gpu/comparison.py` compares them with the
model of PCIe traffic and with published rates.

On a machine without git, the environment variable GCNZC_COMMIT sets the commit that is recorded.
"""

import argparse
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench import harness
from bench.gpu import epochs
from bench.gpu.bulk import bulk_gather
from gcnzc.features.pcie_traffic import traffic
from gcnzc.features.pinning import pinned
from gcnzc.features.registrations import copy_into, copy_to
from gcnzc.kernels.gather import cached_rows, gather_numba, gpu
from gcnzc.kernels.gather.bench_reads import read_dense
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES
from gcnzc.kernels.gpu_launch import default_programs
from gcnzc.tune import pcie_bench

GIB = 1 << 30
ROUNDS = 11
# rows of public datasets in float32 or float16, and widths near those of vectors, lines and warps
WIDTHS_BYTES = (
    *(4, 16, 32, 64, 100, 128, 132, 200, 256, 400, 512, 516),
    *(768, 1024, 1204, 1412, 1536, 2000, 2408, 4096, 5732, 14812, 27220),
)
PROGRAMS = (4, 8, 16, 32, 64, 132, 264)
NUM_IDS = (1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class Scale:
    """Sizes and numbers of the measurements."""

    table_bytes: int = 8 * GIB
    payload_bytes: int = 1 << 26
    rounds: int = ROUNDS
    widths: tuple[int, ...] = WIDTHS_BYTES
    num_ids: tuple[int, ...] = NUM_IDS
    programs: tuple[int, ...] = PROGRAMS
    tlb_gib: tuple[float, ...] = (1, 4, 16, 64)
    other_widths: tuple[int, ...] = (400, 1204, 2408)  # for all but the layouts
    # warps, and vectors in flight per lane
    launches: tuple[tuple[int, int], ...] = ((4, 4), (8, 2), (8, 4), (8, 8), (16, 4))


SMALL = Scale(
    *(1 << 20, 1 << 12, 1, (132, 1204), (40,), (4,), (1 / 1024,)),
    other_widths=(1204,),
    launches=((4, 2), (8, 4)),
)
QUICK = Scale(
    2 * GIB, 1 << 25, 3, (400, 512, 1412, 2408, 5732), (10_000, 100_000), (8, 32, 132), (1, 2)
)


class Bench:
    """The device, the scale of the measurements, and how results are recorded."""

    def __init__(self, where: pcie_bench.Gpu, scale: Scale, recorded: bool) -> None:
        self.where = where
        self.device, self.scale, self.recorded = self.where.device, scale, recorded

    def record(self, part: str, case: dict[str, object], **derived: object) -> None:
        """Record one line of `results/gpu_<part>.jsonl`, or only print it."""
        if self.recorded:
            harness.record(f"gpu_{part}", case, **derived)
        else:
            print(part, case, derived, flush=True)

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


def rows_of(memory: Tensor, row_bytes: int, stride_bytes: int, dtype: torch.dtype) -> Tensor:
    """Return as many rows as the memory has space for."""
    num_rows = (len(memory) - row_bytes) // stride_bytes + 1
    size = dtype.itemsize
    words = memory[: len(memory) // size * size].view(dtype)
    return words.as_strided((num_rows, row_bytes // size), (stride_bytes // size, 1))


def check_gather(
    gather: Callable[[], object], out: Tensor, rows: Tensor, ids: Tensor, name: str
) -> None:
    """Run a gather into `out` once, and check its rows."""
    out.fill_(7)
    gather()
    check_equal(out, rows, ids, name)


def check_equal(found: Tensor, rows: Tensor, ids: Tensor, name: str) -> None:
    """Check that a gather returned the right rows, converted to the dtype of `found`.

    Raises:
        RuntimeError: it did not.
    """
    some = torch.linspace(0, len(ids) - 1, min(len(ids), 20_000)).long()
    expected = rows[ids[some.to(ids.device)].cpu()].to(found.dtype).contiguous()
    got = found[some.to(found.device)].cpu().contiguous()
    if rows.dtype != found.dtype:
        # Triton's interpreter converts NaN of float8 to infinity
        finite = expected.isfinite()
        got, expected = got[finite], expected[finite]
    is_equal = torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    if not is_equal:
        raise RuntimeError(f"{name} returned wrong rows")


def measure_link(bench: Bench) -> None:
    """Measure the PCIe bus: copies, dense reads and latency."""
    with random_bytes(max(bench.scale.payload_bytes * 8, 1 << 18)) as memory:
        bench.record("link", {"what": "link"}, **pcie_bench.measure_bus(bench.where, memory))


def measure_gather(bench: Bench) -> None:
    """Measure layouts by row width; then dtypes, numbers of ids, and programs, at some widths."""
    with random_bytes(bench.scale.table_bytes) as memory:
        for row_bytes in bench.scale.widths:
            measure_layouts(bench, memory, row_bytes)
        for row_bytes in bench.scale.other_widths:
            measure_others(bench, memory, row_bytes)
            measure_programs(bench, memory, row_bytes)
        for columns in (128, 602):
            measure_dtypes(bench, memory, columns)


def measure_layouts(bench: Bench, memory: Tensor, row_bytes: int) -> None:
    """Measure every layout, with packed rows except for `pitched`."""
    item = torch.float32 if row_bytes % 4 == 0 else torch.float16
    num_ids = max(1, bench.scale.payload_bytes // row_bytes)
    pitch = -(-row_bytes // LINE_BYTES) * LINE_BYTES
    tasks, models = bench.bounds(memory), {}
    for layout in LAYOUTS:
        stride = pitch if layout == "pitched" else row_bytes
        rows = rows_of(
            memory, row_bytes, stride, torch.int32 if item.itemsize == 4 else torch.int16
        )
        ids = torch.randint(len(rows), (num_ids,), device=bench.device)
        out = torch.empty(num_ids, rows.shape[1], dtype=rows.dtype, device=bench.device)

        gather = partial(gather_rows, rows, ids, out, layout=layout)
        check_gather(gather, out, rows, ids, f"{layout}, {row_bytes} B")
        tasks[layout] = (num_ids * row_bytes, gather)
        models[layout] = traffic(
            row_bytes, layout=layout, item_bytes=item.itemsize, stride_bytes=stride
        )
    record_shares(bench, "gather", {"row_bytes": row_bytes, "num_ids": num_ids}, tasks, models)


def measure_others(bench: Bench, memory: Tensor, row_bytes: int) -> None:
    """Measure zero-copy and its alternatives by number of ids."""
    rows = rows_of(memory, row_bytes, row_bytes, torch.float32)
    small = rows[: max(1, len(rows) // 8)]
    on_gpu = copy_to(small, bench.device)
    for num_ids in bench.scale.num_ids:
        ids = torch.randint(len(small), (num_ids,), device=bench.device)
        host_ids, num_bytes = ids.cpu(), num_ids * row_bytes
        out = torch.empty(num_ids, rows.shape[1], device=bench.device)
        staging = torch.empty(num_ids, rows.shape[1], pin_memory=True)
        gathers: dict[str, Callable[[], object]] = {
            "zero-copy": partial(gather_rows, small, ids, out),
            "zero-copy, ids sorted": partial(gather_in_order, small, ids, out),
            "zero-copy, ids checked": partial(gather_rows, small, ids, out, checked=True),
            "CPU gather, staged copy": partial(staged_gather, small, host_ids, staging, out),
            "CPU index, pageable copy": partial(plain_gather, small, host_ids, out),
            "features on the GPU": partial(torch.index_select, on_gpu, 0, ids, out=out),
        }
        for name, gather in gathers.items():
            check_gather(gather, out, small, ids, name)
        tasks = bench.bounds(memory) | {
            name: (num_bytes, gather) for name, gather in gathers.items()
        }
        record_shares(bench, "gather_beside", {"row_bytes": row_bytes, "num_ids": num_ids}, tasks)


def gather_in_order(rows: Tensor, ids: Tensor, out: Tensor) -> None:
    """Zero-copy in the order of the rows' addresses, including the time to sort the ids."""
    gather_rows(rows, ids, out, order=ids.argsort())


def staged_gather(rows: Tensor, ids: Tensor, staging: Tensor, out: Tensor) -> None:
    """Gather with CPU threads into page-locked memory, and copy it to the GPU."""
    gather_numba(rows, ids, staging)
    out.copy_(staging, non_blocking=True)


def plain_gather(rows: Tensor, ids: Tensor, out: Tensor) -> None:
    """Gather with torch on the host, and copy to the GPU, as most training loops do."""
    out.copy_(rows[ids])


def measure_programs(bench: Bench, memory: Tensor, row_bytes: int) -> None:
    """Measure rates by number of programs, warps, and vectors in flight per lane."""
    rows = rows_of(memory, row_bytes, row_bytes, torch.int32)
    num_ids = max(1, bench.scale.payload_bytes // row_bytes)
    ids = torch.randint(len(rows), (num_ids,), device=bench.device)
    out = torch.empty(num_ids, rows.shape[1], dtype=rows.dtype, device=bench.device)
    chosen = gpu.WARPS, gpu.VECTORS
    try:
        for warps, vectors in bench.scale.launches:
            gpu.WARPS, gpu.VECTORS = warps, vectors
            gathers = {
                str(programs): partial(gather_rows, rows, ids, out, programs=programs)
                for programs in bench.scale.programs
            }
            for name, gather in gathers.items():
                check_gather(gather, out, rows, ids, f"{name} programs, {row_bytes} B")
            tasks = bench.bounds(memory) | {
                name: (num_ids * row_bytes, gather) for name, gather in gathers.items()
            }
            case = {"row_bytes": row_bytes, "warps": warps, "vectors": vectors}
            record_shares(bench, "gather_programs", case, tasks)
    finally:
        gpu.WARPS, gpu.VECTORS = chosen


def measure_dtypes(bench: Bench, memory: Tensor, columns: int) -> None:
    """Measure gathers by stored dtype, unchanged and converted to float16."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e5m2]
    num_ids = max(1, bench.scale.payload_bytes // (4 * columns))
    tasks = bench.bounds(memory)
    for dtype in dtypes:
        rows = rows_of(memory, columns * dtype.itemsize, columns * dtype.itemsize, dtype)
        ids = torch.randint(len(rows), (num_ids,), device=bench.device)
        for target in dict.fromkeys((dtype, torch.float16)):
            out = torch.empty(num_ids, columns, dtype=target, device=bench.device)

            gather = partial(gather_rows, rows, ids, out)
            check_gather(gather, out, rows, ids, f"{dtype} to {target}")
            tasks[f"{dtype} to {target}"] = (num_ids * columns * dtype.itemsize, gather)
    record_shares(bench, "gather_dtypes", {"columns": columns, "num_ids": num_ids}, tasks)


def record_shares(
    bench: Bench,
    part: str,
    case: dict[str, object],
    tasks: dict[str, tuple[int, Callable[[], object]]],
    models: dict[str, object] | None = None,
) -> None:
    """Record one line for each task, relative to the dense read and to the copy engine."""
    rates = bench.rates(tasks)
    dense_rate = max(rates[name] for name in rates if name.startswith("dense read"))
    for name, rate in rates.items():
        derived = {
            "payload_bytes_per_s": rate,
            "share_of_dense_read": rate / dense_rate,
            "share_of_copy_engine": rate / rates["copy engine"],
        }
        model = (models or {}).get(name)
        if model is not None:
            derived["model_requests_per_row"] = float(model.requests_per_row)
            derived["model_efficiency"] = float(model.efficiency)
        bench.record(part, {"method": name} | case, **derived)


def measure_tlb(bench: Bench) -> None:
    """Measure random rows of 512 B from tables of growing size, with sorted and unsorted ids."""
    row_bytes, largest = 512, max(bench.scale.tlb_gib)
    num_ids = max(1, bench.scale.payload_bytes // row_bytes)
    for huge in (True, False):
        # locking small pages takes a minute for the largest
        most = largest if huge else min(largest, 16)
        with random_bytes(int(most * GIB), huge=huge) as memory:
            for gib in (size for size in bench.scale.tlb_gib if size <= most):
                rows = rows_of(memory[: int(gib * GIB)], row_bytes, row_bytes, torch.int32)
                ids = torch.randint(len(rows), (num_ids,), device=bench.device)
                ordered = ids.sort().values
                out = torch.empty(num_ids, rows.shape[1], dtype=rows.dtype, device=bench.device)
                gathers = {
                    "ids in random order": (partial(gather_rows, rows, ids, out), ids),
                    "ids sorted": (partial(gather_rows, rows, ordered, out), ordered),
                }
                for name, (gather, expected) in gathers.items():
                    check_gather(gather, out, rows, expected, f"{gib} GiB, {name}")
                num_bytes = num_ids * row_bytes
                tasks = bench.bounds(memory) | {
                    name: (num_bytes, gather) for name, (gather, _) in gathers.items()
                }
                pages = "2 MiB" if huge else "4 KiB"
                record_shares(bench, "tlb", {"table_gib": gib, "table_pages": pages}, tasks)


def measure_cache(bench: Bench) -> None:
    """Measure gathers with a feature cache, by hit rate."""
    with random_bytes(bench.scale.table_bytes) as memory:
        for row_bytes in (400, 512, 2408):
            rows = rows_of(memory, row_bytes, row_bytes, torch.int32)
            num_ids = max(1, bench.scale.payload_bytes // row_bytes)
            # as many cached rows as ids, so that the GPU's L2 cache holds no more of them than of
            # uncached rows
            chosen = torch.randperm(len(rows))[: min(num_ids, len(rows) // 2)]
            cached = cached_rows.make_cached_rows(rows, chosen, bench.device)
            uncached = (cached.slots < 0).nonzero().flatten()
            out = torch.empty(num_ids, rows.shape[1], dtype=rows.dtype, device=bench.device)
            for hit_rate in (0.0, 0.2, 0.5, 0.8, 1.0):
                hits = torch.rand(num_ids, device=bench.device) < hit_rate
                hit_ids = chosen.to(bench.device)[torch.randint(len(chosen), (num_ids,))]
                missed_ids = uncached[torch.randint(len(uncached), (num_ids,))]
                ids = torch.where(hits, hit_ids, missed_ids)
                gathers = {
                    "without a cache": partial(gather_rows, rows, ids, out),
                    "with a cache": partial(gather_rows, rows, ids, out, cached=cached),
                }
                for name, gather in gathers.items():
                    check_gather(gather, out, rows, ids, f"{name}, hit rate {hit_rate}")
                num_bytes = num_ids * row_bytes
                tasks = bench.bounds(memory) | {
                    name: (num_bytes, gather) for name, gather in gathers.items()
                }
                record_shares(bench, "cache", {"row_bytes": row_bytes, "hit_rate": hit_rate}, tasks)


def measure_codes(bench: Bench) -> None:
    """Measure gathers of quantized rows to float32 and float16, compared with unquantized rows."""
    columns = 128
    num_ids = max(1, bench.scale.payload_bytes // (4 * columns))
    with random_bytes(bench.scale.table_bytes) as memory:
        tasks = bench.bounds(memory)
        plain = rows_of(memory, 4 * columns, 4 * columns, torch.float32)
        ids = torch.randint(len(plain), (num_ids,), device=bench.device)
        out = torch.empty(num_ids, columns, device=bench.device)
        gather = partial(gather_rows, plain, ids, out)
        check_gather(gather, out, plain, ids, "float32")
        tasks["float32"] = (num_ids * 4 * columns, gather)
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
            codes = rows_of(memory, columns, columns, dtype)
            scales = torch.rand(len(codes), device=bench.device)
            ids = torch.randint(len(codes), (num_ids,), device=bench.device)
            for target in (torch.float32, torch.float16):
                out = torch.empty(num_ids, columns, dtype=target, device=bench.device)
                gather = partial(gather_rows, codes, ids, out, scales=scales)
                out.fill_(7)
                gather()
                check_dequantized(out, codes, scales, ids)
                tasks[f"{dtype} as {target}"] = (num_ids * columns, gather)
        # rates count the bytes of codes, which are transferred over the bus
        record_shares(bench, "codes", {"columns": columns, "num_ids": num_ids}, tasks)


def check_dequantized(out: Tensor, codes: Tensor, scales: Tensor, ids: Tensor) -> None:
    """Check that a gather returned the products of codes and scales."""
    some = torch.arange(min(len(ids), 2000))
    at = ids[some.to(ids.device)].cpu()
    expected = (codes[at].float() * scales.cpu()[at][:, None]).to(out.dtype)
    torch.testing.assert_close(
        out[some.to(out.device)].cpu(), expected, rtol=0, atol=0, equal_nan=True
    )


def measure_bulk(bench: Bench) -> None:
    """Measure gathers by bulk asynchronous copies, on GPUs that have them."""
    with random_bytes(bench.scale.table_bytes) as memory:
        for row_bytes in (400, 512, 1024, 4096):
            rows = rows_of(memory, row_bytes, row_bytes, torch.int32)
            num_ids = max(1, bench.scale.payload_bytes // row_bytes)
            ids = torch.randint(len(rows), (num_ids,), device=bench.device)
            out = torch.empty(num_ids, rows.shape[1], dtype=rows.dtype, device=bench.device)
            case: dict[str, object] = {"row_bytes": row_bytes, "num_ids": num_ids}
            try:
                check_gather(partial(bulk_gather, rows, ids, out), out, rows, ids, "bulk")
            except (RuntimeError, OSError, AttributeError) as error:
                outcome = str(error).strip().splitlines()[0]
                bench.record("bulk", {"method": "bulk"} | case, outcome=outcome)
                continue
            num_bytes = num_ids * row_bytes
            tasks = bench.bounds(memory) | {
                "threads": (num_bytes, partial(gather_rows, rows, ids, out)),
                "bulk": (num_bytes, partial(bulk_gather, rows, ids, out)),
            }
            record_shares(bench, "bulk", case, tasks)


PARTS = {
    "link": measure_link,
    "gather": measure_gather,
    "tlb": measure_tlb,
    "cache": measure_cache,
    "codes": measure_codes,
    "bulk": measure_bulk,
}


def main() -> None:
    """Measure the parts that are named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    every = [*PARTS, *epochs.parts(random_bytes, small=False)]
    parser.add_argument("parts", nargs="+", choices=[*every, "all"])
    parser.add_argument("--results", type=Path, help="folder in which results are recorded")
    scales = parser.add_mutually_exclusive_group()
    scales.add_argument("--small", action="store_true")
    scales.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.results:
        harness.RESULTS = options.results
    where = pcie_bench.current_gpu()
    if where is None:
        parser.exit(
            1,
            "error: torch finds no CUDA device\n\n"
            "hint: `python -m bench.gpu.session --dry-run` runs without a GPU\n",
        )
    scale = SMALL if options.small else QUICK if options.quick else Scale()
    bench = Bench(where, scale, recorded=options.results is not None or not options.small)
    for name, part in (PARTS | epochs.parts(random_bytes, small=options.small)).items():
        if name in options.parts or "all" in options.parts:
            began_s = time.perf_counter()
            part(bench)
            print(f"{name}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
