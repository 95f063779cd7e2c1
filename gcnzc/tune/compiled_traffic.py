"""Count the requests of the compiled gather kernel, whose PTX is executed on the CPU.

`gcnzc.features.pcie_traffic` predicts the requests from the layout of lanes. A compiler may split
the vectors of a lane, or assign several to it, which changes the requests and not the result. So
the kernel is compiled for a GPU architecture, and `gcnzc.testing` executes the PTX on a sample of
rows with the dtype, stride and alignment of a table. No GPU is needed.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd

import torch
from torch import Tensor

from gcnzc.features.pcie_traffic import HEADER_BYTES, SIZES, Traffic, table_traffic
from gcnzc.features.table import FeatureTable
from gcnzc.kernels.gather import gather_reference
from gcnzc.kernels.gather.gpu import gather_rows
from gcnzc.kernels.gather.lanes import LINE_BYTES, Layout
from gcnzc.testing.executor import Executor
from gcnzc.testing.triton_driver import execute_on_cpu
from gcnzc.tune.pcie_bench import Figures, Shape, traffic_figures

# fewest rows of a sample; it has more if rows of the table begin at more offsets within a line
MIN_ROWS = 32


# bytes of a sample, unless a single row is larger
SAMPLE_BYTES = 1 << 22


# of a batch of programs; a row of 1 MiB takes about two million
MAX_INSTRUCTIONS = 10**9


def sample_rows(shape: Shape) -> tuple[FeatureTable, Tensor]:
    """Return rows at the addresses of a table's rows within a line, and ids of some of them.

    The (B,) ids are of rows that share no line. The sample has rows at every offset within a line
    that occurs in the table, equally often, unless `SAMPLE_BYTES` limits it to fewer rows.
    """
    stride_bytes, base = shape.stride_bytes, shape.base
    period = LINE_BYTES // gcd(stride_bytes, LINE_BYTES)
    num_ids = min(max(MIN_ROWS, period), max(1, SAMPLE_BYTES // stride_bytes))
    # at least a line between rows; odd, so that all offsets of rows within a line occur
    step = -(-(shape.row_bytes + LINE_BYTES) // stride_bytes) | 1
    num_rows = (num_ids - 1) * step + 1
    generator = torch.Generator().manual_seed(0)
    size = num_rows * stride_bytes + base + 2 * LINE_BYTES
    # no value is infinite or NaN in any dtype
    memory = torch.randint(100, (size,), dtype=torch.int8, generator=generator)
    aligned = memory[-memory.data_ptr() % LINE_BYTES :]
    rows = shape.lay(aligned, getattr(torch, shape.dtype))[:num_rows]
    scales = None
    if shape.has_scales:
        per = shape.scale_columns
        count = num_rows if per is None else -(-shape.num_columns // per)
        scales = torch.rand(count, generator=generator)
    ids = torch.randperm(num_ids, generator=generator) * step
    return FeatureTable(rows, scales, shape.scale_columns), ids


def count_requests(
    table: FeatureTable,
    ids: Tensor,
    arch: int,
    split_bytes: int | None = None,
    *,
    layout: Layout | None = None,
) -> Traffic:
    """Return the traffic of a row, averaged over a sample, by executing the compiled kernel.

    Args:
        table: a sample of rows.
        ids: of the rows to gather.
        arch: compute capability of a GPU, such as 90 for sm_90.
        split_bytes: 64 or 128, see `gcnzc.features.pcie_traffic`.
        layout: see `gcnzc.kernels.gather.gpu.gather_rows`.

    Raises:
        RuntimeError: this version of Triton is not supported, its interpreter is in use, or the
            gathered rows are wrong.
        Fault: the compiled kernel has an undefined result, see `gcnzc.testing.Executor.launch`.
    """
    executor, row_bytes = Executor(max_instructions=MAX_INSTRUCTIONS), table.row_bytes
    scales, scale_columns = table.scales, table.scale_columns
    with execute_on_cpu(arch, executor=executor):
        found = gather_rows(
            table.rows, ids, layout=layout, scales=scales, scale_columns=scale_columns
        )
    expected = gather_reference(table.rows, ids, scales, scale_columns)
    if not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
        raise RuntimeError(
            f"the gather kernel that is compiled for sm_{arch} returned wrong rows of "
            f"{table.rows.dtype} and shape {tuple(table.rows.shape)}\n\n"
            "hint: report this with the version of Triton, "
            "https://github.com/triton-lang/triton/releases lists others"
        )
    counters = executor.counters["load", "table"]
    requests = {size: Fraction(counters.requests[size], len(ids)) for size in SIZES}
    read_bytes = sum(size * count for size, count in requests.items())
    packets = counters.half_lines if split_bytes == 64 else counters.requests.total()
    return Traffic(row_bytes, requests, read_bytes + Fraction(packets * HEADER_BYTES, len(ids)))


def compare(
    shape: Shape,
    archs: Sequence[int],
    split_bytes: int | None = None,
    *,
    layout: Layout | None = None,
) -> Figures:
    """Count the requests of gathers of a table's rows, and predict them for the same rows.

    Args:
        shape: shape of the table.
        archs: see `count_requests`.
        split_bytes: see `count_requests`.
        layout: see `count_requests`.

    Returns:
        JSON values: `sampled_rows`; `model`, the predicted traffic of the sample; and for each
        architecture, such as `sm_90`, the counted traffic, and whether it `equals_model`.

    Raises:
        RuntimeError, Fault: see `count_requests`.
    """
    table, ids = sample_rows(shape)
    model = table_traffic(table, ids, layout=layout, split_bytes=split_bytes)
    found: Figures = {"sampled_rows": len(ids), "model": traffic_figures(model)}
    for arch in archs:
        counted = count_requests(table, ids, arch, split_bytes, layout=layout)
        found[f"sm_{arch}"] = {**traffic_figures(counted), "equals_model": counted == model}
    return found
