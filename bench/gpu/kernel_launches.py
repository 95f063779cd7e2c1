"""Small launches of every Triton kernel in kernels/, by the functions that users call.

The sizes decide what Triton compiles: widths, layouts and dtypes of tables, and the options of each
kernel. Tensors are on the host, so a driver that only compiles must be active. Results are not
used.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gcnzc.kernels.aggregate import sum_triton
from gcnzc.kernels.aggregate.dropout import dropout_triton
from gcnzc.kernels.aggregate.edge_softmax import edge_softmax_backward_triton, edge_softmax_triton
from gcnzc.kernels.aggregate.gatv2 import leaky_scores_triton, sum_leaky_slopes_triton
from gcnzc.kernels.aggregate.weighted import sddmm_triton, weighted_spmm_triton
from gcnzc.kernels.codec import blocks_gpu, signs_gpu
from gcnzc.kernels.codec.block_layout import BlockLayout
from gcnzc.kernels.codec.number_formats import BITS
from gcnzc.kernels.gather.bench_reads import chase_pointers, read_dense
from gcnzc.kernels.gather.cached_rows import CachedRows, Peers, make_cached_rows
from gcnzc.kernels.gather.gpu import KernelConfig, gather_rows
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES, Layout
from gcnzc.tune.choose import SHAPES

# ogbn-products, ogbn-arxiv, Reddit and Cora
COLUMNS = (100, 128, 602, 1433)
NUM_ROWS = 8
NUM_ELEMENTS = 2 * 4096
HOST = torch.device("cpu")

Launch = Callable[[], object]


def launches() -> Iterator[tuple[str, Launch]]:
    """Yield the name of each launch, which no other has, and a function that launches it."""
    yield from gathers()
    yield from reads()
    yield from aggregations()
    yield from codecs()


def gathers() -> Iterator[tuple[str, Launch]]:
    """Yield gathers of all widths and layouts, and of each option of the kernel."""
    ids = torch.arange(4)
    for columns, layout in itertools.product(COLUMNS, LAYOUTS):
        name = f"gather {columns} float32, {layout}"
        table = rows_of(columns, torch.float32, layout)
        yield name, lambda table=table, layout=layout: gather_rows(table, ids, layout=layout)
    for columns, dtype in itertools.product(COLUMNS, (torch.float16, torch.int8)):
        table = rows_of(columns, dtype)
        yield f"gather {columns} {name_of(dtype)}", lambda table=table: gather_rows(table, ids)
    for columns in (100, 602, 1433):
        table = rows_of(columns, torch.float32)
        cached = make_cached_rows(table, ids[:2], HOST)
        peers = Peers(torch.zeros(2, dtype=torch.int64), 0)
        sharded = CachedRows(cached.slots, cached.memory, peers)
        options = {
            "cached rows": {"cached": cached},
            "cached rows of several GPUs": {"cached": sharded},
            "checked ids": {"checked": True},
            "ordered ids": {"order": ids},
            "to bfloat16": {"dtype": torch.bfloat16},
        }
        for option, named in options.items():
            name = f"gather {columns} float32, {option}"
            yield name, lambda table=table, named=named: gather_rows(table, ids, **named)
    for warps, vectors in SHAPES:
        name = f"gather 100 float32, {warps} warps of {vectors} vectors"
        table, config = rows_of(100, torch.float32), KernelConfig(warps=warps, vectors=vectors)
        yield name, lambda table=table, config=config: gather_rows(table, ids, config=config)
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        codes = rows_of(100, torch.int8).view(dtype)
        for scales, of, columns in ((NUM_ROWS, "rows", None), (-(-100 // 16), "columns", 16)):
            name = f"gather 100 {name_of(dtype)}, scales of {of}"
            named = {"scales": torch.ones(scales), "scale_columns": columns}
            yield name, lambda codes=codes, named=named: gather_rows(codes, ids, **named)


def reads() -> Iterator[tuple[str, Launch]]:
    """Yield the reads that measure the PCIe bus."""
    source = on_line(1 << 16)
    yield "dense read", lambda: read_dense(source, torch.empty_like(source))
    chain = torch.zeros(64, dtype=torch.int64)
    yield "pointer chase", lambda: chase_pointers(chain, 0, 8, chain[:1])


def aggregations() -> Iterator[tuple[str, Launch]]:
    """Yield the kernels of aggregation, and dropout."""
    indptr, indices = torch.tensor([0, 2, 4]), torch.arange(4)
    for columns, dtype in itertools.product((100, 128, 602), (torch.float32, torch.bfloat16)):
        x = torch.zeros(NUM_ROWS, columns, dtype=dtype)
        scales = x[:, 0].contiguous()
        for scaled, pair in (("", (None, None)), (", scaled", (scales, scales[:2]))):
            name = f"sum {columns} {name_of(dtype)}{scaled}"
            yield name, lambda x=x, pair=pair: sum_triton(indptr, indices, x, *pair)
    for heads in (1, 4):
        score_S, score_T, edges = torch.zeros(NUM_ROWS, heads), torch.zeros(2, heads), indices
        weight = torch.zeros(len(indices), heads)
        score = indptr, indices, score_S, score_T, 0.2, weight
        of_heads = f"{heads} heads" if heads > 1 else "1 head"
        yield f"edge softmax, {of_heads}", lambda score=score: edge_softmax_triton(*score)
        grads = weight, torch.empty_like(weight), torch.empty_like(score_T)
        name = f"gradient of edge softmax, {of_heads}"
        yield name, lambda score=score, grads=grads: edge_softmax_backward_triton(*score, *grads)
        for columns in (25, 64):
            x, y = torch.zeros(NUM_ROWS, heads, columns), torch.zeros(2, heads, columns)
            shape = f"{of_heads} of {columns}"
            for ordered, order in (("", None), (", edges in another order", edges)):
                yield (
                    f"weighted sum, {shape}{ordered}",
                    lambda order=order, weight=weight, x=x, heads=heads: weighted_spmm_triton(
                        indptr, indices, order, weight, x, heads
                    ),
                )
            yield (
                f"products of rows, {shape}",
                lambda x=x, y=y: sddmm_triton(indptr, indices, x, y),
            )
            a = torch.zeros(heads, columns)
            yield (
                f"scores of GATv2, {shape}",
                lambda x=x, y=y, a=a: leaky_scores_triton(indptr, indices, x, y, a, 0.2),
            )
            for ordered, order in (("", None), (", edges in another order", edges)):
                yield (
                    f"gradient of scores of GATv2, {shape}{ordered}",
                    lambda order=order, weight=weight, x=x, y=y: sum_leaky_slopes_triton(
                        indptr, indices, order, weight, x, y, 0.2
                    ),
                )
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.zeros(NUM_ROWS, 128, dtype=dtype)
        for name, relu in (("dropout", False), ("dropout with ReLU", True)):
            yield (
                f"{name}, {name_of(dtype)}",
                lambda x=x, relu=relu: dropout_triton(x, 0.5, 1, relu=relu),
            )


def codecs() -> Iterator[tuple[str, Launch]]:
    """Yield the codecs of compressed exchanges."""
    values, error = torch.zeros(NUM_ELEMENTS), torch.zeros(NUM_ELEMENTS)
    for ragged, count in (("", NUM_ELEMENTS), (", ragged", NUM_ELEMENTS - 7)):
        for of_active, active in (("", None), (", active", torch.ones(count, dtype=torch.bool))):
            # several programs for each block
            layout = BlockLayout(count, 1, 1, None)
            yield from signs(f"{of_active}{ragged}", layout, values[:count], error[:count], active)
    vectors = values, error, torch.ones(NUM_ELEMENTS, dtype=torch.bool)
    yield from signs(", active, blocks of 4096", BlockLayout(NUM_ELEMENTS, 2, 1, 4096), *vectors)
    for number_format, rounding in (
        ("int8", None),
        ("int4", None),
        ("int2", None),
        ("float8_e4m3fn", (1, 2)),
        ("float4_e3m0", (1, 2)),
    ):
        layout = BlockLayout(NUM_ELEMENTS, 2, BITS[number_format], 1024)
        yield from blocks(number_format, layout, rounding, *vectors)
        yield from blocks(number_format, layout, rounding, values, error, None)


def signs(
    suffix: str, layout: BlockLayout, values: Tensor, error: Tensor, active: Tensor | None
) -> Iterator[tuple[str, Launch]]:
    """Yield the operations of sign compression."""
    rows = torch.zeros(layout.num_parts, layout.row_bytes, dtype=torch.uint8)
    given = layout, rows
    yield (
        f"encode signs{suffix}",
        lambda: signs_gpu.encode(values, error, active, *given, squares=False),
    )
    if active is None:
        yield (
            f"encode signs without error{suffix}",
            lambda: signs_gpu.encode(values, None, None, *given, squares=True),
        )
        yield f"mean of signs{suffix}", lambda: signs_gpu.mean(rows, layout, values)
    yield (
        f"update error of signs{suffix}",
        lambda: signs_gpu.update_error(values, error, active, *given),
    )
    yield f"decode signs{suffix}", lambda: signs_gpu.decode(rows, layout, active, values)


def blocks(
    number_format: str,
    layout: BlockLayout,
    rounding: tuple[int, int] | None,
    values: Tensor,
    error: Tensor,
    active: Tensor | None,
) -> Iterator[tuple[str, Launch]]:
    """Yield the operations of blocks of low-precision codes."""
    rows = torch.zeros(layout.num_parts, layout.row_bytes, dtype=torch.uint8)
    suffix = f"{number_format}{'' if active is None else ', active'}"
    given = layout, rows, number_format
    yield (
        f"encode {suffix}",
        lambda: blocks_gpu.encode_blocks_triton(values, error, active, *given, rounding),
    )
    yield (
        f"update error of {suffix}",
        lambda: blocks_gpu.update_error_blocks_triton(values, error, active, *given),
    )
    if active is None:
        yield (
            f"mean of {suffix}",
            lambda: blocks_gpu.mean_of_blocks_triton(rows, layout, values, number_format),
        )
    yield (
        f"decode {suffix}",
        lambda: blocks_gpu.decode_blocks_triton(rows, layout, active, values, number_format),
    )


def rows_of(columns: int, dtype: torch.dtype, layout: Layout | None = None) -> Tensor:
    """Return a table that begins on a line; its rows are padded to lines if `layout` needs it."""
    row_bytes = columns * dtype.itemsize
    pitch = -(-row_bytes // LINE_BYTES) * LINE_BYTES if layout == "pitched" else row_bytes
    memory = on_line(NUM_ROWS * pitch).view(dtype)
    return memory.as_strided((NUM_ROWS, columns), (pitch // dtype.itemsize, 1))


def on_line(num_bytes: int) -> Tensor:
    """Return (num_bytes,) int8 zeros that begin on a line, as memory of a GPU does."""
    memory = torch.zeros(num_bytes + LINE_BYTES, dtype=torch.int8)
    begin = -memory.data_ptr() % LINE_BYTES
    return memory[begin : begin + num_bytes]


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")
