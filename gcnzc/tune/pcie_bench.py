"""Measure how efficiently a GPU's gathers use the PCIe bus, and compare with predictions.

The predictions are those of `gcnzc.features.pcie_traffic`, which needs no GPU. Measured rates are
compared with two others: the rate of a large copy by the copy engine, and the rate of a dense read,
in which the GPU's threads read a contiguous range. It bounds the rate of all gathers.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gcnzc.features.pinning import can_read_host, pinned
from gcnzc.features.registrations import copy_into
from gcnzc.kernels.gather.bench_reads import chase_pointers, read_dense
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES, Layout
from gcnzc.kernels.gpu_launch import default_programs
from gcnzc.system import nvml
from gcnzc.system.progress import ProgressCallback
from gcnzc.tune.search import interleave, medians
from gcnzc.tune.table_shapes import Figures, Shape, predict_traffic

ROUNDS = 9


COPY_BYTES = (1 << 26, 1 << 29)


GATHER_BYTES = 1 << 26  # bytes of rows in one timed gather


MAX_IDS = 1 << 20


PROGRAMS = (16, 64, 128, 256)  # numbers of programs for dense reads, besides a gather's default


CHASE_BYTES, CHASE_STEPS = 1 << 24, 2048


ROOF_BYTES, ROOF_ROUNDS, ROOF_PROGRAMS = 1 << 27, 3, (64, 128)


BUSY_S = 0.3  # seconds of traffic while the counters of the PCIe slot are read


CHECKED_IDS = 1000


_ITEMS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Seconds: TypeAlias = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Gpu:
    """A GPU on which gathers are measured."""

    device: torch.device
    # calls a function, possibly more than once, and returns the seconds of the work that it queues
    seconds: Seconds
    # calls a function and returns the counters of the PCIe slot meanwhile, see `nvml.pcie`
    pcie: Callable[[Callable[[], object]], Mapping[str, float | None]]


def current_gpu() -> Gpu | None:
    """Return the current CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    return _cuda(torch.device("cuda", torch.cuda.current_device()))


def measure_rates(
    tasks: Mapping[str, tuple[int, Callable[[], object]]], seconds: Seconds, rounds: int = ROUNDS
) -> dict[str, float]:
    """Measure the bytes per second of some tasks: the median of interleaved rounds.

    Args:
        tasks: by name, the number of bytes that a task moves, and the function that moves them.
        seconds: see `Gpu`.
        rounds: number of rounds, after a warm-up round that compiles and touches fresh pages.
    """
    median_s = medians(interleave(tasks, lambda name: seconds(tasks[name][1]), rounds))
    return {name: num_bytes / median_s[name] for name, (num_bytes, _) in tasks.items()}


def peak_read_rate(device: torch.device) -> float | None:
    """Measure the rate at which a GPU reads a contiguous page-locked range, in bytes per second.

    This takes less than a second, plus the compilation of the kernel. The result is None without a
    GPU, and if the memory cannot be allocated or locked: `gcnzc train` calls this after training,
    and a failure must not lose the run.
    """
    if device.type != "cuda":
        return None
    try:
        return _dense_peak(_cuda(device))
    except RuntimeError:
        return None


def measure_bus(gpu: Gpu, memory: Tensor) -> Figures:
    """Measure the rates of the PCIe bus that do not depend on a table.

    Args:
        gpu: the GPU.
        memory: int8, page-locked on the host, aligned to 128 B; it is overwritten.

    Returns:
        JSON values: bytes per second of the copy engine by copy size, and of dense reads by number
        of programs; `latency_s` of dependent loads; `requests_in_flight`, the number of 128 B
        requests that a dense read keeps in flight at this latency; and the values of `nvml.pcie`.
    """
    out = torch.empty(min(len(memory), max(COPY_BYTES)), dtype=torch.int8, device=gpu.device)
    dense = _dense_reads(memory[: len(out)], out, (default_programs(gpu.device), *PROGRAMS))
    copies: dict[str, tuple[int, Callable[[], object]]] = {}
    for num_bytes in sorted({min(size, len(out)) for size in COPY_BYTES}):
        to, source = out[:num_bytes], memory[:num_bytes]
        copies[str(num_bytes)] = (
            num_bytes,
            partial(copy_into, to, source, non_blocking=True),
        )
    copy_rates = measure_rates(copies, gpu.seconds)
    dense_rates = measure_rates(dense, gpu.seconds)
    fastest = max(dense_rates, key=lambda programs: dense_rates[programs])
    found: Figures = {
        "copy_bytes_per_s": max(copy_rates.values()),
        "copies": copy_rates,
        "dense_bytes_per_s": dense_rates[fastest],
        "dense_programs": int(fastest),
        "dense": dense_rates,
    }
    read, times = dense[fastest][1], max(1, round(BUSY_S * dense_rates[fastest] / len(out)))
    found |= gpu.pcie(lambda: [read() for _ in range(times)])
    found["latency_s"] = _latency_s(gpu, memory)
    found["requests_in_flight"] = found["latency_s"] * found["dense_bytes_per_s"] / LINE_BYTES
    return found


def measure_layouts(gpu: Gpu, memory: Tensor, shape: Shape) -> dict[Layout, float]:
    """Measure the bytes of random rows per second that each layout gathers.

    Args:
        gpu: the GPU.
        memory: int8, page-locked on the host, aligned to 128 B, used for the rows. Its 4 B words
            should all differ, so that wrong rows are detected.
        shape: shape of the rows; their number is limited by the memory.

    Raises:
        RuntimeError: a gather returned wrong rows.
        ValueError: the memory is smaller than a row.
    """
    num_ids = min(MAX_IDS, -(-min(GATHER_BYTES, len(memory)) // shape.row_bytes))
    tasks: dict[str, tuple[int, Callable[[], object]]] = {}
    for layout in LAYOUTS:
        rows = _lay_rows(memory, shape, *shape.stride_and_base(layout))
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randint(len(rows), (num_ids,), generator=generator)
        ids = chosen.to(gpu.device)
        out = torch.empty(num_ids, shape.num_columns, dtype=rows.dtype, device=gpu.device)

        def work(
            rows: Tensor = rows, ids: Tensor = ids, out: Tensor = out, layout: Layout = layout
        ) -> None:
            gather_rows(rows, ids, out, layout=layout)

        work()
        if not torch.equal(out[:CHECKED_IDS].cpu(), rows[chosen[:CHECKED_IDS]]):
            raise RuntimeError(
                f"a {layout} gather of rows of {shape.row_bytes} bytes returned wrong rows on "
                f"{gpu.device}\n\nhint: run `pytest -m gpu` to find the kernel that fails"
            )
        tasks[layout] = (num_ids * shape.row_bytes, work)
    rates = measure_rates(tasks, gpu.seconds)
    return {layout: rates[layout] for layout in LAYOUTS}


def report(
    shapes: Sequence[Shape],
    gpu: Gpu | None,
    *,
    num_bytes: int,
    split_bytes: int | None = None,
    widths: Sequence[int] = (),
    advance: ProgressCallback,
) -> Figures:
    """Return the predicted PCIe traffic of some tables, and with a GPU the measured rates.

    Args:
        shapes: shapes of the tables. If there are several, only float32 ones are measured, and
            equal ones once, since each shape compiles five kernels.
        gpu: the GPU; None for predictions only.
        num_bytes: size of the page-locked memory that is read.
        split_bytes: see `gcnzc.features.pcie_traffic`.
        widths: bytes of float32 rows, for which traffic is predicted too.
        advance: called with the progress of the measurement.

    Returns:
        JSON values: `tables`, each with the values of `predict_traffic` and, with a GPU, for each
        layout `payload_bytes_per_s` and its ratio to the dense read, the copy and the bus's
        capacity; `link`, the values of `measure_bus` or None; and `widths`.
    """
    tables = [predict_traffic(shape, split_bytes) for shape in shapes]
    rows = [Shape(f"{width} B", 0, width // 4, "float32", width) for width in widths]
    found: Figures = {
        "split_bytes": split_bytes,
        "link": None,
        "tables": tables,
        "widths": [predict_traffic(row, split_bytes) for row in rows],
    }
    if gpu is None:
        return found
    with _page_locked(num_bytes) as memory:
        link = measure_bus(gpu, memory)
        words = memory[: len(memory) // 4 * 4].view(torch.int32)
        torch.arange(len(words), dtype=torch.int32, out=words)
        rates: dict[tuple[int, ...], dict[Layout, float]] = {}
        for number, (shape, table) in enumerate(zip(shapes, tables, strict=True)):
            advance(number, len(shapes), f"{shape.name} {shape.dtype}")
            if len(shapes) > 1 and shape.dtype != "float32":
                continue
            key = (shape.row_bytes, shape.item_bytes, shape.stride_bytes, shape.base)
            if key not in rates:
                rates[key] = measure_layouts(gpu, memory, shape)
            for layout, rate in rates[key].items():
                table["layouts"][layout] |= _relative_rates(rate, table["layouts"][layout], link)
        advance(len(shapes), len(shapes))
    return found | {"link": link}


def _relative_rates(rate: float, figures: Mapping[str, Any], link: Mapping[str, Any]) -> Figures:
    whole = link.get("pcie_bytes_per_s")
    return {
        "payload_bytes_per_s": rate,
        "share_of_dense": rate / link["dense_bytes_per_s"],
        "share_of_copy": rate / link["copy_bytes_per_s"],
        # bytes on the bus, including packet headers
        "share_of_link": None if whole is None else rate / figures["efficiency"] / whole,
    }


def _cuda(device: torch.device) -> Gpu:
    return Gpu(
        device, lambda work: _cuda_seconds(work, device), lambda busy: nvml.pcie(device, busy)
    )


def _dense_peak(gpu: Gpu) -> float:
    with _page_locked(ROOF_BYTES) as memory:
        tasks = _dense_reads(memory, torch.empty_like(memory, device=gpu.device), ROOF_PROGRAMS)
        return max(measure_rates(tasks, gpu.seconds, ROOF_ROUNDS).values())


def _cuda_seconds(work: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # keeps the GPU busy while Python queues the timed work
        work()
        begin.record()
        work()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1e3


@contextmanager
def _page_locked(num_bytes: int) -> Iterator[Tensor]:
    """Allocate int8 memory on the host, aligned to 128 B, page-locked if there is CUDA.

    Raises:
        RuntimeError: there is CUDA, but the GPU cannot read host memory.
    """
    whole = torch.empty(num_bytes + LINE_BYTES, 1, dtype=torch.int8)
    begin = -whole.data_ptr() % LINE_BYTES
    with pinned(whole[begin : begin + num_bytes]) as table:
        # `pinned` yields unlocked rows in this case, of which Triton kernels accept no pointer
        if torch.cuda.is_available() and not can_read_host("cuda"):
            raise RuntimeError(
                f"this driver does not let the GPU read {num_bytes:,} bytes of host memory\n\n"
                "hint: `gcnzc pcie` predicts the traffic without a GPU: set CUDA_VISIBLE_DEVICES=''"
            )
        # zeros are written, so that every page is allocated
        yield table.rows.view(-1).zero_()


def _dense_reads(
    memory: Tensor, out: Tensor, programs: Sequence[int]
) -> dict[str, tuple[int, Callable[[], object]]]:
    def read(count: int) -> Callable[[], object]:
        return lambda: read_dense(memory, out, programs=count)

    return {str(count): (len(memory), read(count)) for count in dict.fromkeys(programs)}


def _lay_rows(memory: Tensor, shape: Shape, stride_bytes: int, base: int) -> Tensor:
    item_bytes = shape.item_bytes
    num_rows = (len(memory) - base - shape.row_bytes) // stride_bytes + 1
    if num_rows < 1:
        raise ValueError(
            f"{len(memory)} bytes of memory are less than a row of {shape.row_bytes} bytes\n\n"
            "hint: increase --megabytes, the size of the memory that is read"
        )
    items = memory[base : base + (len(memory) - base) // item_bytes * item_bytes]
    size, strides = (num_rows, shape.num_columns), (stride_bytes // item_bytes, 1)
    return items.view(_ITEMS[item_bytes]).as_strided(size, strides)


def _latency_s(gpu: Gpu, memory: Tensor) -> float:
    """Measure the latency of dependent loads, each from a different 128 B line."""
    # small enough that address translations stay in the GPU's TLB
    num_bytes = min(CHASE_BYTES, len(memory) // LINE_BYTES * LINE_BYTES)
    chain = memory[:num_bytes].view(torch.int64)
    # one index per line, each that of the next line in a random order
    line = LINE_BYTES // chain.element_size()
    steps = min(CHASE_STEPS, len(chain) // line // (ROUNDS + 1))
    order = torch.randperm(len(chain) // line, generator=torch.Generator().manual_seed(0)) * line
    chain[order] = order.roll(-1)
    begins = cycle(order[: len(order) // steps * steps : steps].tolist())
    out = torch.zeros(1, dtype=torch.int64, device=gpu.device)
    seconds_of = [
        gpu.seconds(lambda: chase_pointers(chain, next(begins), steps, out)) for _ in range(ROUNDS)
    ]
    return statistics.median(seconds_of) / steps
