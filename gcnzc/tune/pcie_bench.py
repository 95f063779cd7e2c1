"""Measure the PCIe bus and how efficiently gathers of a table use it; compare with predictions.

The predictions are those of `gcnzc.features.pcie_traffic`, which needs no GPU. Measured rates are
compared with two others: the rate of a large copy by the copy engine, and the rate of a dense read,
in which the GPU's threads read a contiguous range. It bounds the rate of all gathers.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gcnzc.features.pcie_traffic import Traffic, choose_pitch, traffic
from gcnzc.features.pinning import can_read_host, pinned
from gcnzc.features.registrations import copy_into
from gcnzc.graph import load
from gcnzc.kernels.gather.bench_reads import chase_pointers, read_dense
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.kernels.gather.lanes import LINE_BYTES, default_layout
from gcnzc.kernels.gpu_launch import default_programs
from gcnzc.system import nvml
from gcnzc.tune.search import interleave, medians

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


Figures: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Size and alignment of a feature table, which determine its PCIe traffic."""

    name: str
    num_rows: int
    num_columns: int
    dtype: str  # name of a torch dtype
    stride_bytes: int  # from one row to the next
    base: int = 0  # offset of the first row in its 128 B line
    has_scales: bool = False  # rows are quantized codes
    scale_columns: int | None = None  # number of columns that share a scale; None: those of a row

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.num_columns * self.item_bytes

    def lay(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows that fit into int8 memory, which is aligned to 128 B, as this dtype.

        Raises:
            ValueError: the memory is smaller than a row.
        """
        num_rows = (len(memory) - self.base - self.row_bytes) // self.stride_bytes + 1
        if num_rows < 1:
            raise ValueError(
                f"{len(memory)} bytes of memory are less than a row of {self.row_bytes} bytes\n\n"
                "hint: increase --megabytes, the size of the memory that is read"
            )
        end = len(memory) - (len(memory) - self.base) % self.item_bytes
        strides = (self.stride_bytes // self.item_bytes, 1)
        items = memory[self.base : end].view(dtype)
        return items.as_strided((num_rows, self.num_columns), strides)


def shape_of(path: Path) -> Shape:
    """Return the shape of a folder's feature table; rows of a raw folder are contiguous.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: it has no features, or stores them sparse, which GPUs do not read.
    """
    found = load.info(path)
    about, name = found["features"], str(found["name"])
    if about is None or about["columns"] == 0:
        raise ValueError(
            f"{path} has no features to read\n\n"
            f"hint: `gcnzc prepare {path} DEST --embed 64` computes features from its edges"
        )
    if found["kind"] == "prepared" and about["kind"] == "sparse":
        raise ValueError(
            f"{path} has sparse features, but a GPU reads dense rows\n\n"
            f"hint: convert them with `gcnzc prepare {path} DEST`"
        )
    columns, dtype = about["columns"], about["dtype"]
    # files are mapped, and rows begin after a header of 4096 B, so that the first is at a line
    stride_bytes = about.get("pitch_bytes") or columns * int(getattr(torch, dtype).itemsize)
    scales = {"has_scales": "scales" in about, "scale_columns": about.get("scale_columns")}
    return Shape(name, found["num_nodes"], columns, dtype, stride_bytes, **scales)


def predict_traffic(shape: Shape, split_bytes: int | None = None) -> Figures:
    """Predict a table's PCIe traffic.

    Returns:
        JSON values: sizes; `layout`, see `gcnzc.kernels.gather.lanes.Lanes`; the traffic of a row;
        `pitch_bytes`, the row pitch at which `gcnzc prepare` stores such rows, and `why`.
    """
    found = traffic(
        shape.row_bytes,
        item_bytes=shape.item_bytes,
        stride_bytes=shape.stride_bytes,
        base=shape.base,
        split_bytes=split_bytes,
    )
    pitch_bytes, why = choose_pitch(shape.row_bytes, shape.item_bytes)
    return {
        "name": shape.name,
        "rows": shape.num_rows,
        "columns": shape.num_columns,
        "dtype": shape.dtype,
        "row_bytes": shape.row_bytes,
        "stride_bytes": shape.stride_bytes,
        "base": shape.base,
        "layout": default_layout(shape.stride_bytes, shape.base),
        **traffic_figures(found),
        "efficiency": float(found.efficiency),
        "pitch_bytes": pitch_bytes,
        "why": why,
    }


def traffic_figures(found: Traffic) -> Figures:
    """Return the traffic of a row as JSON values."""
    return {
        "requests_per_row": float(found.requests_per_row),
        "requests": {str(size): float(count) for size, count in found.requests.items()},
        "read_bytes_per_row": float(found.read_bytes),
        "wire_bytes_per_row": float(found.wire_bytes),
    }


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
    gpu = _cuda(device)
    with suppress(RuntimeError), _page_locked(ROOF_BYTES) as memory:
        tasks = _dense_reads(memory, torch.empty_like(memory, device=gpu.device), ROOF_PROGRAMS)
        return max(measure_rates(tasks, gpu.seconds, ROOF_ROUNDS).values())
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
    copies = {
        str(size): (size, partial(copy_into, out[:size], memory[:size], non_blocking=True))
        for size in sorted({min(size, len(out)) for size in COPY_BYTES})
    }
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


def measure_gather(gpu: Gpu, memory: Tensor, shape: Shape) -> float:
    """Measure the bytes of random rows per second that the GPU gathers.

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
    # integers, so that equal rows are equal bit for bit
    rows = shape.lay(memory, _ITEMS[shape.item_bytes])
    chosen = torch.randint(len(rows), (num_ids,), generator=torch.Generator().manual_seed(0))
    ids = chosen.to(gpu.device)
    out = torch.empty(num_ids, shape.num_columns, dtype=rows.dtype, device=gpu.device)
    gather_rows(rows, ids, out)
    found, expected = out[:CHECKED_IDS].cpu(), rows[chosen[:CHECKED_IDS]]
    check_rows(found, expected, f"of rows of {shape.row_bytes} bytes", gpu.device)
    task = num_ids * shape.row_bytes, lambda: gather_rows(rows, ids, out)
    return measure_rates({"gather": task}, gpu.seconds)["gather"]


def check_rows(found: Tensor, expected: Tensor, what: str, device: torch.device) -> None:
    """Raise a RuntimeError if a gather on a device did not return the expected rows."""
    if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
        raise RuntimeError(
            f"a gather {what} returned wrong rows on {device}\n\n"
            "hint: run `pytest -m gpu` to find the kernel that fails"
        )


def report(
    shape: Shape | None, gpu: Gpu | None, *, num_bytes: int, split_bytes: int | None = None
) -> Figures:
    """Return the predicted PCIe traffic of a table, and with a GPU the measured rates.

    Args:
        shape: shape of the table; None to measure only the bus.
        gpu: the GPU; None for predictions only.
        num_bytes: size of the page-locked memory that is read.
        split_bytes: see `gcnzc.features.pcie_traffic`.

    Returns:
        JSON values: `table`, the values of `predict_traffic` and, with a GPU, `payload_bytes_per_s`
        and its ratio to the dense read, the copy and the bus's capacity, or None; and `link`, the
        values of `measure_bus` or None.
    """
    table = None if shape is None else predict_traffic(shape, split_bytes)
    found: Figures = {"split_bytes": split_bytes, "link": None, "table": table}
    if gpu is None:
        return found
    with _page_locked(num_bytes) as memory:
        link = found["link"] = measure_bus(gpu, memory)
        if shape is not None and table is not None:
            words = memory[: len(memory) // 4 * 4].view(torch.int32)
            torch.arange(len(words), dtype=torch.int32, out=words)
            rate = measure_gather(gpu, memory, shape)
            whole = link["pcie_bytes_per_s"]
            table |= {
                "payload_bytes_per_s": rate,
                "share_of_dense": rate / link["dense_bytes_per_s"],
                "share_of_copy": rate / link["copy_bytes_per_s"],
                # bytes on the bus, including packet headers
                "share_of_link": None if whole is None else rate / table["efficiency"] / whole,
            }
    return found


def _cuda(device: torch.device) -> Gpu:
    return Gpu(
        device, lambda work: _cuda_seconds(work, device), lambda busy: nvml.pcie(device, busy)
    )


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
    return {
        str(count): (len(memory), partial(read_dense, memory, out, programs=count))
        for count in dict.fromkeys(programs)
    }


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
