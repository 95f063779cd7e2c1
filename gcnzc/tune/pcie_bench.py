"""Measure how well a GPU's gathers use the PCIe bus, and compare with the model.

The model is `gcnzc.features.pcie_traffic`, and needs no GPU. What is measured is held against two
rates: that of a large copy by the copy engine, and that of a dense range read by the GPU's threads,
the roof of all gathers.
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

from gcnzc.features.pinning import pinned
from gcnzc.features.registrations import copy_into
from gcnzc.kernels.gather.bench_reads import chase_pointers, read_dense
from gcnzc.kernels.gather.gpu import gather_rows, programs_of
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES, Layout
from gcnzc.system import nvml
from gcnzc.system.progress import ProgressCallback
from gcnzc.tune.search import interleave, medians
from gcnzc.tune.table_shapes import Line, Shape, modelled

ROUNDS = 9


COPY_BYTES = (1 << 26, 1 << 29)


GATHER_BYTES = 1 << 26  # of rows that one timed gather brings


MOST_IDS = 1 << 20


PROGRAMS = (16, 64, 128, 256)  # that read a dense range, besides as many as a gather has


CHASE_BYTES, CHASE_STEPS = 1 << 24, 2048


ROOF_BYTES, ROOF_ROUNDS, ROOF_PROGRAMS = 1 << 27, 3, (64, 128)


BUSY_S = 0.3  # of work while the counters of the link are read


CHECKED_IDS = 1000


_ITEMS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Seconds: TypeAlias = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Gpu:
    """Where gathers are measured."""

    device: torch.device
    seconds: Seconds  # that the work takes which a call queues; it may be called more than once
    # what the machine says of the link while some queued work is done, see `nvml.pcie`
    pcie: Callable[[Callable[[], object]], Mapping[str, float | None]]


def gpu() -> Gpu | None:
    """The current CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    return _cuda(torch.device("cuda", torch.cuda.current_device()))


def bytes_per_s(
    ways: Mapping[str, tuple[int, Callable[[], object]]], seconds: Seconds, rounds: int = ROUNDS
) -> dict[str, float]:
    """How fast each way is: the median of some rounds, in each of which every way has its turn.

    Args:
        ways: by name the bytes that a way moves, and what moves them.
        seconds: see `Gpu`.
        rounds: that are counted, after one that compiles and touches fresh pages.
    """
    median_s = medians(interleave(ways, lambda name: seconds(ways[name][1]), rounds))
    return {name: num_bytes / median_s[name] for name, (num_bytes, _) in ways.items()}


def peak_read_rate(device: torch.device) -> float | None:
    """How fast the threads of a GPU read a dense page-locked range, in bytes a second.

    It takes less than a second, besides compiling the kernel once. None for what is no GPU, or
    where the memory for it cannot be had or locked: a run that asks for this has done its work.
    """
    if device.type != "cuda":
        return None
    try:
        return _dense_peak(_cuda(device))
    except RuntimeError:
        return None


def measured_link(where: Gpu, memory: Tensor) -> Line:
    """The rates of the link that need no table.

    Args:
        where: the GPU.
        memory: of bytes, page-locked on the host, beginning on a line; it is overwritten.

    Returns:
        What JSON can hold: bytes a second of the copy engine by the bytes it copies, and of a dense
        read by programs; `latency_s` of one load after another, and how many requests of 128 B are
        on their way in a dense read because of it; and what `nvml.pcie` says.
    """
    out = torch.empty(min(len(memory), max(COPY_BYTES)), dtype=torch.int8, device=where.device)
    dense = _dense_ways(memory[: len(out)], out, (programs_of(where.device), *PROGRAMS))
    copies: dict[str, tuple[int, Callable[[], object]]] = {}
    for num_bytes in sorted({min(size, len(out)) for size in COPY_BYTES}):
        to, source = out[:num_bytes], memory[:num_bytes]
        copies[str(num_bytes)] = (
            num_bytes,
            partial(copy_into, to, source, non_blocking=True),
        )
    copy_rates = bytes_per_s(copies, where.seconds)
    dense_rates = bytes_per_s(dense, where.seconds)
    fastest = max(dense_rates, key=lambda programs: dense_rates[programs])
    found: Line = {
        "copy_bytes_per_s": max(copy_rates.values()),
        "copies": copy_rates,
        "dense_bytes_per_s": dense_rates[fastest],
        "dense_programs": int(fastest),
        "dense": dense_rates,
    }
    read, times = dense[fastest][1], max(1, round(BUSY_S * dense_rates[fastest] / len(out)))
    found |= where.pcie(lambda: [read() for _ in range(times)])
    found["latency_s"] = _latency_s(where, memory)
    found["requests_in_flight"] = found["latency_s"] * found["dense_bytes_per_s"] / LINE_BYTES
    return found


def measured_layouts(where: Gpu, memory: Tensor, shape: Shape) -> dict[Layout, float]:
    """Bytes of rows a second that each layout gathers, of rows of a shape at random.

    Args:
        where: the GPU.
        memory: of bytes, page-locked on the host, beginning on a line, in which the rows lie; every
            4 B of it should differ.
        shape: of the table; as many rows as there is memory for.

    Raises:
        RuntimeError: a gather brought wrong rows.
    """
    num_ids = min(MOST_IDS, -(-min(GATHER_BYTES, len(memory)) // shape.row_bytes))
    ways: dict[str, tuple[int, Callable[[], object]]] = {}
    for layout in LAYOUTS:
        rows = _rows(memory, shape, *shape.place(layout))
        chooser = torch.Generator().manual_seed(0)
        chosen = torch.randint(len(rows), (num_ids,), generator=chooser)
        ids = chosen.to(where.device)
        out = torch.empty(num_ids, shape.num_columns, dtype=rows.dtype, device=where.device)

        def work(
            rows: Tensor = rows, ids: Tensor = ids, out: Tensor = out, layout: Layout = layout
        ) -> None:
            gather_rows(rows, ids, out, layout=layout)

        work()
        if not torch.equal(out[:CHECKED_IDS].cpu(), rows[chosen[:CHECKED_IDS]]):
            raise RuntimeError(
                f"a {layout} gather of rows of {shape.row_bytes} bytes brought wrong rows on "
                f"{where.device}\n\nhint: `pytest -m gpu` finds the kernel that fails"
            )
        ways[layout] = (num_ids * shape.row_bytes, work)
    rates = bytes_per_s(ways, where.seconds)
    return {layout: rates[layout] for layout in LAYOUTS}


def report(
    shapes: Sequence[Shape],
    where: Gpu | None,
    *,
    num_bytes: int,
    split_bytes: int | None = None,
    widths: Sequence[int] = (),
    advance: ProgressCallback,
) -> Line:
    """The model's figures for some tables, and what a GPU, if there is one, makes of them.

    Args:
        shapes: of the tables. Of several, those of float32 are measured, and equal ones once:
            each shape is five kernels to compile.
        where: the GPU.
        num_bytes: of the page-locked memory in which rows are laid and read.
        split_bytes: see `gcnzc.features.pcie_traffic`.
        widths: of float32 rows, whose figures are told too.
        advance: told how far the measuring is.

    Returns:
        What JSON can hold: `tables`, each as `modelled` says, and, with a GPU, of each layout
        `payload_bytes_per_s` and its shares of the dense read, the copy and the whole link;
        `link`, as `measured_link` says, or None; and `widths`.
    """
    tables = [modelled(shape, split_bytes) for shape in shapes]
    rows = [Shape(f"{width} B", 0, width // 4, "float32", width) for width in widths]
    found: Line = {
        "split_bytes": split_bytes,
        "link": None,
        "tables": tables,
        "widths": [modelled(row, split_bytes) for row in rows],
    }
    if where is None:
        return found
    with _locked(num_bytes) as memory:
        link = measured_link(where, memory)
        words = memory[: len(memory) // 4 * 4].view(torch.int32)
        torch.arange(len(words), dtype=torch.int32, out=words)
        rates: dict[tuple[int, ...], dict[Layout, float]] = {}
        for number, (shape, table) in enumerate(zip(shapes, tables, strict=True)):
            advance(number, len(shapes), f"{shape.name} {shape.dtype}")
            if len(shapes) > 1 and shape.dtype != "float32":
                continue
            key = (shape.row_bytes, shape.item_bytes, shape.stride_bytes, shape.base)
            if key not in rates:
                rates[key] = measured_layouts(where, memory, shape)
            for layout, rate in rates[key].items():
                table["layouts"][layout] |= _shares(rate, table["layouts"][layout], link)
        advance(len(shapes), len(shapes))
    return found | {"link": link}


def _shares(rate: float, figures: Mapping[str, Any], link: Mapping[str, Any]) -> Line:
    whole = link.get("pcie_bytes_per_s")
    return {
        "payload_bytes_per_s": rate,
        "share_of_dense": rate / link["dense_bytes_per_s"],
        "share_of_copy": rate / link["copy_bytes_per_s"],
        # with headers
        "share_of_link": None if whole is None else rate / figures["efficiency"] / whole,
    }


def _cuda(device: torch.device) -> Gpu:
    return Gpu(
        device, lambda work: _cuda_seconds(work, device), lambda busy: nvml.pcie(device, busy)
    )


def _dense_peak(where: Gpu) -> float:
    with _locked(ROOF_BYTES) as memory:
        ways = _dense_ways(memory, torch.empty_like(memory, device=where.device), ROOF_PROGRAMS)
        return max(bytes_per_s(ways, where.seconds, ROOF_ROUNDS).values())


def _cuda_seconds(work: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # something to do while Python queues what is timed
        work()
        begin.record()
        work()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1e3


@contextmanager
def _locked(num_bytes: int) -> Iterator[Tensor]:
    """Bytes on the host, page-locked where there is CUDA, that begin on a line."""
    whole = torch.empty(num_bytes + LINE_BYTES, 1, dtype=torch.int8)
    begin = -whole.data_ptr() % LINE_BYTES
    with pinned(whole[begin : begin + num_bytes]) as table:
        # written once, so that every page is there
        yield table.rows.view(-1).zero_()


def _dense_ways(
    memory: Tensor, out: Tensor, programs: Sequence[int]
) -> dict[str, tuple[int, Callable[[], object]]]:
    def way(count: int) -> Callable[[], object]:
        return lambda: read_dense(memory, out, programs=count)

    return {str(count): (len(memory), way(count)) for count in dict.fromkeys(programs)}


def _rows(memory: Tensor, shape: Shape, stride_bytes: int, base: int) -> Tensor:
    item_bytes = shape.item_bytes
    num_rows = (len(memory) - base - shape.row_bytes) // stride_bytes + 1
    if num_rows < 1:
        raise ValueError(
            f"{len(memory)} bytes of memory do not hold a row of {shape.row_bytes} bytes\n\n"
            "hint: --megabytes says how much memory is read"
        )
    items = memory[base : base + (len(memory) - base) // item_bytes * item_bytes]
    size, strides = (num_rows, shape.num_columns), (stride_bytes // item_bytes, 1)
    return items.view(_ITEMS[item_bytes]).as_strided(size, strides)


def _latency_s(where: Gpu, memory: Tensor) -> float:
    """Seconds from one load to the next that needs its result, each from a line not read before."""
    # not so much that it is the page tables that are read
    num_bytes = min(CHASE_BYTES, len(memory) // LINE_BYTES * LINE_BYTES)
    places = memory[:num_bytes].view(torch.int64)
    step = LINE_BYTES // places.element_size()
    steps = min(CHASE_STEPS, len(places) // step // (ROUNDS + 1))
    order = torch.randperm(len(places) // step, generator=torch.Generator().manual_seed(0)) * step
    places[order] = order.roll(-1)
    begins = cycle(order[: len(order) // steps * steps : steps].tolist())
    out = torch.zeros(1, dtype=torch.int64, device=where.device)
    taken = [
        where.seconds(lambda: chase_pointers(places, next(begins), steps, out))
        for _ in range(ROUNDS)
    ]
    return statistics.median(taken) / steps
