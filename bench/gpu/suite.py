"""Measure gathers, copies and epochs on a GPU, in under nine minutes.

    python -m bench.gpu.suite all                       everything, recorded in results/gpu_*.jsonl
    python -m bench.gpu.suite gather --results FOLDER   one part, recorded elsewhere
    python -m bench.gpu.suite link gather --quick       fewer widths and rounds, in about a minute
    python -m bench.gpu.suite claims epoch epoch-large --quick    what bench/gpu/claims.py tabulates
    python -m bench.gpu.suite all --small               tiny, recorded only with --results

`python -m bench.gpu.session --dry-run` runs the suite on a fake device, without a GPU.

`link` measures the PCIe bus; `methods` zero-copy and its alternatives; `widths` dtypes, columns and
offsets; `tlb` small and huge pages, of tables beyond the reach of the GPU's TLB; `claims` these
three; `gather` layouts, dtypes, and numbers of programs; `cache` cached rows by their hit rate;
`codes` quantized rows;
`epoch`, `epoch-large`, `overlap` and `two-engine` whole minibatches, see bench/gpu/epochs.py.
`claims --quick` is predicted to take 60 s, half of it for the compilation of 30 gathers.

Each gather is first run once, and its rows are compared with the expected ones. Times are measured
by CUDA events; each is the median of rounds in which all tasks of a case alternate. Rates are also
recorded relative to a dense read, of a contiguous range by the GPU's threads, in the same rounds.
A line is recorded as soon as its case is measured. A gather that fails has an `outcome` instead of
a rate, and the others are measured. Each line has the GPU, its driver and its clocks.
`bench/gpu/claims.py` tabulates the headline claims.

On a machine without git, the environment variable GCNZC_COMMIT sets the commit that is recorded.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench import harness
from bench.gpu import epochs
from bench.gpu.base import GIB, Bench, huge_pages_share, random_bytes
from gcnzc.features.pcie_traffic import Traffic, traffic
from gcnzc.features.registrations import copy_to
from gcnzc.kernels.gather import cached_rows, gather_numba, gpu
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES, Layout
from gcnzc.tune import pcie_bench

Task = tuple[int, Callable[[], object]]  # the bytes that it moves, and what moves them


@dataclass(frozen=True)
class Gather:
    """A gather of `rows[ids]` into `out`."""

    rows: Tensor
    ids: Tensor
    out: Tensor
    run: Callable[[], object]
    model: Traffic | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the gathered rows."""
        return len(self.ids) * self.rows.shape[1] * self.rows.element_size()


def zero_copy(
    rows: Tensor, num_ids: int, device: torch.device, *, layout: Layout | None = None
) -> Gather:
    """Return a gather of random rows by the GPU, with its model of PCIe traffic."""
    ids = torch.randint(len(rows), (num_ids,), device=device)
    out = torch.empty(num_ids, rows.shape[1], dtype=rows.dtype, device=device)
    size = rows.element_size()
    stride_bytes = rows.stride(0) * size
    model = traffic(
        rows.shape[1] * size,
        layout=layout,
        item_bytes=size,
        stride_bytes=stride_bytes,
        base=rows.data_ptr() % LINE_BYTES,
    )
    return Gather(rows, ids, out, partial(gather_rows, rows, ids, out, layout=layout), model)


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


def measure(
    bench: Bench, part: str, case: dict[str, object], memory: Tensor, gathers: dict[str, Gather]
) -> None:
    """Check gathers, measure those that succeed beside `Bench.bounds`, and record all of them."""
    tasks = bench.bounds(memory)
    for name, each in gathers.items():
        with bench.attempt(part, {"method": name} | case):
            check_gather(each.run, each.out, each.rows, each.ids, name)
            tasks[name] = (each.num_bytes, each.run)
    models = {name: each.model for name, each in gathers.items()}
    with bench.attempt(part, case):
        record_shares(bench, part, case, tasks, models)


def measure_link(bench: Bench) -> None:
    """Measure the PCIe bus: copies, dense reads and latency."""
    with random_bytes(max(bench.scale.payload_bytes * 8, 1 << 18)) as memory:
        bench.record("link", {"what": "link"}, **pcie_bench.measure_bus(bench.where, memory))


def measure_gather(bench: Bench) -> None:
    """Measure layouts by row width; then programs and dtypes, at some widths."""
    with random_bytes(bench.scale.table_bytes) as memory:
        for row_bytes in bench.scale.widths:
            measure_layouts(bench, memory, row_bytes)
        for row_bytes in bench.scale.program_widths:
            measure_programs(bench, memory, row_bytes)
        for columns in (128, 602):
            measure_dtypes(bench, memory, columns)


def measure_layouts(bench: Bench, memory: Tensor, row_bytes: int) -> None:
    """Measure every layout, with packed rows except for `pitched`."""
    dtype = torch.int32 if row_bytes % 4 == 0 else torch.int16
    num_ids = max(1, bench.scale.payload_bytes // row_bytes)
    pitch = -(-row_bytes // LINE_BYTES) * LINE_BYTES
    gathers = {}
    for layout in LAYOUTS:
        rows = rows_of(memory, row_bytes, pitch if layout == "pitched" else row_bytes, dtype)
        gathers[layout] = zero_copy(rows, num_ids, bench.device, layout=layout)
    measure(bench, "gather", {"row_bytes": row_bytes, "num_ids": num_ids}, memory, gathers)


def measure_programs(bench: Bench, memory: Tensor, row_bytes: int) -> None:
    """Measure rates by number of programs, warps, and vectors in flight per lane."""
    rows = rows_of(memory, row_bytes, row_bytes, torch.int32)
    plain = zero_copy(rows, max(1, bench.scale.payload_bytes // row_bytes), bench.device)
    chosen = gpu.WARPS, gpu.VECTORS
    try:
        for warps, vectors in bench.scale.launches:
            gpu.WARPS, gpu.VECTORS = warps, vectors
            gathers = {
                str(programs): replace(plain, run=partial(plain.run, programs=programs))
                for programs in bench.scale.programs
            }
            case: dict[str, object] = {"row_bytes": row_bytes, "warps": warps, "vectors": vectors}
            measure(bench, "gather_programs", case, memory, gathers)
    finally:
        gpu.WARPS, gpu.VECTORS = chosen


def measure_dtypes(bench: Bench, memory: Tensor, columns: int) -> None:
    """Measure gathers by stored dtype, unchanged and converted to float16."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e5m2]
    num_ids = max(1, bench.scale.payload_bytes // (4 * columns))
    case: dict[str, object] = {"columns": columns, "num_ids": num_ids}
    tasks = bench.bounds(memory)
    for dtype in dtypes:
        rows = rows_of(memory, columns * dtype.itemsize, columns * dtype.itemsize, dtype)
        ids = torch.randint(len(rows), (num_ids,), device=bench.device)
        for target in dict.fromkeys((dtype, torch.float16)):
            out = torch.empty(num_ids, columns, dtype=target, device=bench.device)
            name, gather = f"{dtype} to {target}", partial(gather_rows, rows, ids, out)
            with bench.attempt("gather_dtypes", {"method": name} | case):
                check_gather(gather, out, rows, ids, name)
                tasks[name] = (num_ids * columns * dtype.itemsize, gather)
    record_shares(bench, "gather_dtypes", case, tasks)


def record_shares(
    bench: Bench,
    part: str,
    case: dict[str, object],
    tasks: dict[str, Task],
    models: dict[str, Traffic | None] | None = None,
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


def measure_methods(bench: Bench) -> None:
    """Measure zero-copy and its alternatives, for the columns of products and papers100M."""
    # the features are also in the GPU's memory
    with random_bytes(min(bench.scale.table_bytes, 2 * GIB)) as memory:
        for columns in (100, 128):
            rows = rows_of(memory, 4 * columns, 4 * columns, torch.float32)
            on_gpu = copy_to(rows, bench.device)
            for num_ids in bench.scale.num_ids:
                plain = zero_copy(rows, num_ids, bench.device)
                ids, host_ids, out = plain.ids, plain.ids.cpu(), plain.out
                staging = torch.empty(num_ids, columns, pin_memory=True)
                methods = {
                    "zero-copy": plain.run,
                    "CPU gather, page-locked copy": partial(
                        staged_gather, rows, host_ids, staging, out
                    ),
                    "CPU index, pageable copy": partial(plain_gather, rows, host_ids, out),
                    "all features on the GPU": partial(torch.index_select, on_gpu, 0, ids, out=out),
                    "zero-copy, ids sorted": partial(gather_in_order, rows, ids, out),
                    "zero-copy, ids checked": partial(plain.run, checked=True),
                }
                gathers = {name: Gather(rows, ids, out, run) for name, run in methods.items()}
                case: dict[str, object] = {"columns": columns, "num_ids": num_ids}
                measure(bench, "methods", case, memory, gathers)


def gather_in_order(rows: Tensor, ids: Tensor, out: Tensor) -> None:
    """Zero-copy in the order of the rows' addresses, including the time to sort the ids."""
    gather_rows(rows, ids, out, order=ids.argsort())


def staged_gather(rows: Tensor, ids: Tensor, staging: Tensor, out: Tensor) -> None:
    """Gather with CPU threads into page-locked memory, and copy it to the GPU."""
    # the copy of the previous call reads this memory
    torch.cuda.synchronize()
    gather_numba(rows, ids, staging)
    out.copy_(staging, non_blocking=True)


def plain_gather(rows: Tensor, ids: Tensor, out: Tensor) -> None:
    """Gather with torch on the host, and copy to the GPU, as most training loops do."""
    out.copy_(rows[ids])


def measure_widths(bench: Bench) -> None:
    """Measure gathers by dtype and columns, of rows from the start of a line and at an offset."""
    with random_bytes(bench.scale.table_bytes) as memory:
        for dtype in (torch.float32, torch.float16, torch.int8):
            for columns in bench.scale.columns:
                row_bytes = columns * dtype.itemsize
                num_ids = max(1, bench.scale.payload_bytes // row_bytes)
                gathers = {
                    name: zero_copy(
                        rows_of(memory[begin:], row_bytes, row_bytes, dtype), num_ids, bench.device
                    )
                    for name, begin in (("aligned", 0), ("one element off", dtype.itemsize))
                }
                case: dict[str, object] = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "columns": columns,
                }
                measure(bench, "widths", case | {"num_ids": num_ids}, memory, gathers)


def measure_tlb(bench: Bench) -> None:
    """Measure random rows of 512 B from tables of growing size, with sorted and unsorted ids."""
    row_bytes, largest = 512, max(bench.scale.tlb_gib)
    # more pages than a TLB has entries
    num_ids = max(1, 8 * bench.scale.payload_bytes // row_bytes)
    for huge in (True, False):
        # locking small pages takes a minute for the largest
        most = largest if huge else min(largest, 16)
        pages = "2 MiB" if huge else "4 KiB"
        with (
            bench.attempt("tlb", {"table_gib": most, "table_pages": pages}),
            random_bytes(int(most * GIB), huge=huge) as memory,
        ):
            share = huge_pages_share(memory)
            for gib in (size for size in bench.scale.tlb_gib if size <= most):
                rows = rows_of(memory[: int(gib * GIB)], row_bytes, row_bytes, torch.int32)
                plain = zero_copy(rows, num_ids, bench.device)
                ordered = plain.ids.sort().values
                gathers = {
                    "ids in random order": plain,
                    "ids sorted": Gather(
                        rows, ordered, plain.out, partial(gather_rows, rows, ordered, plain.out)
                    ),
                }
                case = {"table_gib": gib, "table_pages": pages, "huge_pages_share": share}
                measure(bench, "tlb", case, memory, gathers)


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
                plain = partial(gather_rows, rows, ids, out)
                gathers = {
                    "without a cache": Gather(rows, ids, out, plain),
                    "with a cache": Gather(rows, ids, out, partial(plain, cached=cached)),
                }
                case: dict[str, object] = {"row_bytes": row_bytes, "hit_rate": hit_rate}
                measure(bench, "cache", case, memory, gathers)


def measure_codes(bench: Bench) -> None:
    """Measure gathers of quantized rows to float32 and float16, compared with unquantized rows."""
    columns = 128
    num_ids = max(1, bench.scale.payload_bytes // (4 * columns))
    case: dict[str, object] = {"columns": columns, "num_ids": num_ids}
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
                name = f"{dtype} as {target}"
                with bench.attempt("codes", {"method": name} | case):
                    out.fill_(7)
                    gather()
                    check_dequantized(out, codes, scales, ids)
                    tasks[name] = (num_ids * columns, gather)
        # rates count the bytes of codes, which are transferred over the bus
        record_shares(bench, "codes", case, tasks)


def check_dequantized(out: Tensor, codes: Tensor, scales: Tensor, ids: Tensor) -> None:
    """Check that a gather returned the products of codes and scales."""
    some = torch.arange(min(len(ids), 2000))
    at = ids[some.to(ids.device)].cpu()
    expected = (codes[at].float() * scales.cpu()[at][:, None]).to(out.dtype)
    torch.testing.assert_close(
        out[some.to(out.device)].cpu(), expected, rtol=0, atol=0, equal_nan=True
    )


PARTS = {
    "link": measure_link,
    "methods": measure_methods,
    "widths": measure_widths,
    "tlb": measure_tlb,
    "gather": measure_gather,
    "cache": measure_cache,
    "codes": measure_codes,
}
# of the headline claims, see bench/gpu/claims.py
CLAIMS = ("methods", "widths", "tlb")


def main() -> None:
    """Measure the parts that are named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=[*PARTS, *epochs.PARTS, "claims", "all"])
    parser.add_argument("--results", type=Path, help="folder in which results are recorded")
    scales = parser.add_mutually_exclusive_group()
    scales.add_argument("--small", dest="scale", action="store_const", const="small")
    scales.add_argument("--quick", dest="scale", action="store_const", const="quick")
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
    scale = options.scale or "full"
    bench = Bench(where, scale, recorded=options.results is not None or scale != "small")
    chosen = {*options.parts, *(CLAIMS if "claims" in options.parts else ())}
    for name, part in (PARTS | epochs.PARTS).items():
        if name in chosen or "all" in chosen:
            began_s = time.perf_counter()
            with bench.attempt(name, {}):
                part(bench)
            print(f"{name}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr, flush=True)
    if bench.failed:
        sys.exit(f"error: these methods failed: {', '.join(bench.failed)}")


if __name__ == "__main__":
    main()
