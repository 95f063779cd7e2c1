"""Measure gathers, copies and epochs on a GPU, in under nine minutes.

    python -m bench.gpu.suite all                       everything, recorded in results/gpu_*.jsonl
    python -m bench.gpu.suite widths --results FOLDER   one part, recorded elsewhere
    python -m bench.gpu.suite claims epoch epoch-large --quick    what bench/gpu/claims.py tabulates
    python -m bench.gpu.suite all --small               tiny, recorded only with --results

`python -m bench.gpu.session --dry-run` runs the suite on a fake device, without a GPU.

`link` measures the PCIe bus; `methods` zero-copy and its alternatives; `widths` dtypes, columns and
offsets; `tlb` small and huge pages, of tables beyond the reach of the GPU's TLB; `claims` these
three; `epoch` and `epoch-large` whole minibatches, see bench/gpu/epochs.py. `claims --quick` is
predicted to take 75 s, more than half of it for the compilation of 45 gathers.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench import harness
from bench.gpu import epochs
from bench.gpu.base import GIB, Bench, huge_pages_share, random_bytes
from gcnzc.features.pcie_traffic import Traffic, traffic
from gcnzc.features.registrations import copy_to
from gcnzc.kernels.gather import gather_numba
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.kernels.gather.lanes import LINE_BYTES, Layout
from gcnzc.tune import pcie_bench

# layouts of loads that do not begin on lines
BASELINES: tuple[Layout, ...] = ("scalar", "vector", "wrapped")
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
    rows: Tensor, num_ids: int, device: torch.device, layout: Layout | None = None
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
    """Check that a gather returned the right rows.

    Raises:
        RuntimeError: it did not.
    """
    some = torch.linspace(0, len(ids) - 1, min(len(ids), 20_000)).long()
    expected = rows[ids[some.to(ids.device)].cpu()].contiguous()
    got = found[some.to(found.device)].cpu().contiguous()
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
    """Measure gathers by dtype and columns, of rows from the start of a line and at an offset.

    For float32, the aligned rows are also read with the layouts that gathers do not choose.
    """
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
                if dtype == torch.float32:
                    rows = gathers["aligned"].rows
                    gathers |= {
                        f"aligned, {layout}": zero_copy(rows, num_ids, bench.device, layout)
                        for layout in BASELINES
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


PARTS = {
    "link": measure_link,
    "methods": measure_methods,
    "widths": measure_widths,
    "tlb": measure_tlb,
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
