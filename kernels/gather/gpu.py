"""Gather rows on a GPU, from its own memory or over the PCIe bus from page-locked host memory.

A load of a warp causes at least one bus request for each 128 B line that it touches. The layout,
see `gcnzc.kernels.gather.lanes`, assigns lanes to rows. The layout `shifted` requests no line of a
row twice, whatever the alignment of rows. It loads whole 16 B vectors, even if a row begins or ends
within one; the bytes before and after the row are in the same 16 B, hence on the same page, and are
masked when the row is stored.

The kernel is persistent: a few programs loop over the rows, each with several loads in flight. They
leave registers to the kernels of the model that run concurrently. They are expected to saturate the
bus, which was not measured; `gcnzc check --tune` compares the times of several numbers of programs.

Notation: N rows in the table, D columns, B gathered rows.
"""

import ctypes
import threading
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnzc.kernels.gather.cached_rows import CachedRows
from gcnzc.kernels.gather.lanes import (
    LINE_BYTES,
    VECTOR_BYTES,
    Lanes,
    Layout,
    assign_lanes,
    default_layout,
)
from gcnzc.kernels.gpu_launch import default_programs, on_device


def aligned_bytes(table: Tensor, row_bytes: int, stride_bytes: int) -> Tensor:
    """Return the table's bytes, from the multiple of 16 B at or below its address.

    The result does not keep the table's memory alive.
    """
    misalignment = table.data_ptr() % VECTOR_BYTES
    num_bytes = misalignment + (table.shape[0] - 1) * stride_bytes + row_bytes
    # whole vectors, so that any word divides the size, but no further vector
    num_bytes += -num_bytes % VECTOR_BYTES
    if table.device.type == "cpu":
        memory = (ctypes.c_byte * num_bytes).from_address(table.data_ptr() - misalignment)
        return torch.frombuffer(memory, dtype=torch.int8)
    return _device_bytes(table, misalignment, num_bytes)


def _device_bytes(table: Tensor, misalignment: int, num_bytes: int) -> Tensor:
    # GPU allocations begin and end on lines, so the bytes below a view's first byte belong to the
    # allocation, even if the storage is shorter
    storage = table.untyped_storage()
    begin = table.data_ptr() - misalignment - storage.data_ptr()
    allocation = torch.empty(0, dtype=torch.int8, device=table.device).set_(storage)
    end = min(begin + num_bytes, len(allocation))
    return allocation[begin : end - (end - begin) % 8]


WARPS = 8
VECTORS = 4  # vectors in flight per lane; with 8 warps a program has 16 KiB in flight

# exponent bits of codes (quantized elements); 0 for integers
EXPONENT_BITS = {torch.int8: 0, torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}

# without a lock, several threads would compile the same kernel at the same time
_LAUNCH_LOCK = threading.Lock()

# rows are copied as integers of these sizes, which leaves their bits unchanged
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class KernelConfig:
    """Launch configuration of the gather kernel, which affects its speed but not its result.

    Defaults of fields that are None: `programs` is `default_programs(device)`, `warps` is `WARPS`,
    and `vectors` is `VECTORS`.

    Raises:
        ValueError: a number is out of range or not a power of two.
    """

    programs: int | None = None  # number of programs
    warps: int | None = None  # warps of a program, a power of two, at most 32
    vectors: int | None = None  # vectors in flight per lane, a power of two

    def __post_init__(self) -> None:
        sizes = [size for size in (self.warps, self.vectors) if size is not None]
        are_powers = all(size > 0 and size & (size - 1) == 0 for size in sizes)
        has_programs = self.programs is None or self.programs > 0
        if not (are_powers and has_programs and (self.warps or 1) <= 32):
            raise ValueError(f"{self} is not a valid configuration")


DEFAULT_CONFIG = KernelConfig()


@triton.jit
def _float8_values(codes, EXPONENT_BITS: tl.constexpr):
    """Convert float8 codes, given as int8, to float32, via float16, which every GPU supports."""
    bits = codes.to(tl.int16)
    if EXPONENT_BITS == 5:
        # e5m2 is the upper half of a float16
        return (bits << 8).to(tl.float16, bitcast=True).to(tl.float32)
    # e4m3fn: read as a float16, the bits have an exponent that is 8 too low, as the biases are 7
    # and 15; the factor 256 corrects it, for subnormal numbers, too
    half = ((bits & 0x7F) << 7) | (bits & -32768)
    values = half.to(tl.float16, bitcast=True).to(tl.float32) * 256
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def _load_ids(
    ids, order, invalid_position, i, row_mask, num_rows,
    HAS_ORDER: tl.constexpr, CHECK_IDS: tl.constexpr,
):  # fmt: skip
    """Return the rows' positions in the result, their ids, and the mask of those to gather.

    If CHECK_IDS, mask ids out of range, and store the position of one of them.
    """
    if HAS_ORDER:
        i = tl.load(order + i, mask=row_mask, other=0)
    # int64, because offsets of rows can exceed 2**31 elements, which are only 8 GB of float32
    i = i.to(tl.int64)
    row_id = tl.load(ids + i, mask=row_mask, other=0).to(tl.int64)
    if CHECK_IDS:
        is_valid = (row_id >= 0) & (row_id < num_rows)
        tl.store(invalid_position + tl.zeros_like(row_id), i, mask=row_mask & (is_valid == 0))
        row_mask = row_mask & is_valid
    return i, row_id, row_mask


@triton.jit
def _row_or_copy(
    row_words, row_id, row_mask, table, slots, cached, line_offset,
    VECTOR_WORDS: tl.constexpr, SLOT_VECTORS: tl.constexpr, NUM_PEERS: tl.constexpr,
):  # fmt: skip
    """Return pointers to rows or, if cached in this GPU's memory or a peer's, to copies."""
    slot = tl.load(slots + row_id, mask=row_mask, other=-1)
    index = slot
    memory = cached
    if NUM_PEERS > 1:
        index = slot // NUM_PEERS
        address = tl.load(cached + slot % NUM_PEERS, mask=slot >= 0, other=0)
        memory = address.to(tl.pointer_type(table.dtype.element_ty))
        # Triton needs the alignment of the memories to load whole vectors
        memory = tl.multiple_of(memory, [16])
    # a copy has the same offset from a 128 B line as the row, so the same lanes load either
    copy = memory + (index.to(tl.int64) * SLOT_VECTORS + line_offset) * VECTOR_WORDS
    return tl.where(slot >= 0, copy, row_words)


@triton.jit
def _assign_vectors(load_index, lead, num_vectors, row_mask, WRAPPED: tl.constexpr):
    """Return the vector of a row that each lane loads, and the mask of lanes that load one.

    `load_index` numbers the loads of a row over all of its lanes and passes. The first `lead` loads
    are assigned to bytes before the row. If WRAPPED, they read the row's last vectors instead;
    otherwise they are masked.
    """
    vector = load_index - lead
    if WRAPPED:
        mask = row_mask & (load_index < num_vectors)
        # `lead` may exceed the number of vectors of a short row
        vector = (vector % num_vectors + num_vectors) % num_vectors
    else:
        mask = row_mask & (vector >= 0) & (vector < num_vectors)
    return vector, mask


# These arguments are not specialized: Triton would recompile, since their values and alignments
# change between minibatches or tables. It need not know them: none is accessed as vectors.
@triton.jit(
    do_not_specialize=[
        "ids",
        "order",
        "invalid_position",
        "slots",
        "scales",
        "num_ids",
        "num_rows",
        "zero",
        "table_line_offset",
    ]
)
def _gather_rows(
    table,
    ids,
    order,
    out,
    invalid_position,
    slots,
    cached,
    scales,
    num_ids,
    num_rows: tl.int64,
    zero,
    table_line_offset,
    STRIDE_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BASE_OFFSET: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    WIDE_OUT: tl.constexpr,
    VECTOR_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    PASSES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    LAYOUT: tl.constexpr,
    SLOT_VECTORS: tl.constexpr,
    NUM_PEERS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    CHECK_IDS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
):
    """Gather rows of `table` into `out`, passed as views whose elements are called words.

    A program processes tiles of TILE_ROWS rows in a grid-stride loop. Each row is loaded by LANES
    lanes in PASSES passes, one vector of VECTOR_WORDS words per lane and pass, see `Lanes`.

    Sizes and modes are compile-time constants, so that Triton loads whole vectors and omits unused
    code. They are separate parameters, because Triton before 3.3 accepts no tuples. Constants that
    follow from other parameters, such as the bytes of a word, are computed in the kernel.

    An argument whose description begins with a condition, such as "if HAS_ORDER", is read only if
    that holds; otherwise the host passes any other tensor, since Triton needs one. `constants`
    returns the constants that depend on the table's layout.

    Args:
        table: aligned to 16 B; the first row begins BASE_OFFSET bytes after it.
        ids: (num_ids,) ids of the rows.
        order: if HAS_ORDER, (num_ids,) positions in `ids`, in the order in which rows are read.
        out: the result, with rows OUT_STRIDE words apart. WIDE_OUT: it has 2**31 words or more.
        invalid_position: if CHECK_IDS, (1,), set to the position of an id outside [0, num_rows).
        slots: if SLOT_VECTORS > 0, the cache slot of each row of the table, negative if not cached.
        cached: if SLOT_VECTORS > 0, the memory of the cached rows, SLOT_VECTORS vectors per slot;
            if NUM_PEERS > 1, the addresses of NUM_PEERS such memories, one on each GPU: slot s is
            in memory s % NUM_PEERS.
        scales: if HAS_SCALES, factors of the codes: one for each row if SCALE_COLUMNS is 0,
            otherwise one for each SCALE_COLUMNS columns.
        num_ids: number of ids.
        num_rows: number of rows of the table.
        zero: 0, as an argument that the compiler cannot replace by a constant.
        table_line_offset: bytes from the start of a 128 B line to `table`. It changes with the
            table's address, so it is not a constant.
        EXPONENT_BITS: of float8 codes, which are passed as int8; 0 for other dtypes.
    """
    WORD_BYTES: tl.constexpr = table.dtype.element_ty.primitive_bitwidth // 8
    LOAD_BYTES: tl.constexpr = VECTOR_WORDS * WORD_BYTES
    ROW_WORDS: tl.constexpr = ROW_BYTES // WORD_BYTES
    # every row begins at a multiple of the vector size
    ALIGNED: tl.constexpr = (STRIDE_BYTES | BASE_OFFSET) % LOAD_BYTES == 0
    # every row also ends at one, so that a lane stores the vectors that it loads
    WHOLE: tl.constexpr = ALIGNED and ROW_WORDS % VECTOR_WORDS == 0
    # Whether the stores of rows that are not gathered are masked by columns outside the row and not
    # by `row_mask`, which takes fewer registers. Not if elements are converted: with the code that
    # ptxas generates, lanes would wait for the values of a load before they issue the last load.
    BY_COLUMN: tl.constexpr = out.dtype == table.dtype
    # whether the first lane is assigned to the start of a line; if `shifted` takes one pass, it is
    # assigned to the row's first vector instead
    FROM_LINE: tl.constexpr = LAYOUT == "wrapped" or (LAYOUT == "shifted" and PASSES > 1)
    tile_row = tl.arange(0, TILE_ROWS * LANES) // LANES
    lane = tl.arange(0, TILE_ROWS * LANES) % LANES
    vector_word = tl.arange(0, VECTOR_WORDS)
    grid_stride = tl.num_programs(0) * TILE_ROWS
    for begin in range(tl.program_id(0) * TILE_ROWS, num_ids, grid_stride):
        i = begin + tile_row
        row_mask = i < num_ids
        i, row_id, row_mask = _load_ids(
            ids, order, invalid_position, i, row_mask, num_rows, HAS_ORDER, CHECK_IDS
        )
        # 64-bit arithmetic for the addresses of rows, 32-bit within a row
        start = BASE_OFFSET + row_id * STRIDE_BYTES
        row_words = table + start // LOAD_BYTES * VECTOR_WORDS
        # LOAD_BYTES is a power of two, and `start` is not negative
        misalignment = (start & (LOAD_BYTES - 1)).to(tl.int32)
        if ALIGNED:
            misalignment = tl.zeros_like(tile_row)
        num_vectors = (misalignment + (ROW_BYTES + LOAD_BYTES - 1)) // LOAD_BYTES
        # vectors from the start of the 128 B line to the row's first vector
        line_offset = ((table_line_offset + start) & 127).to(tl.int32) // LOAD_BYTES
        lead = line_offset if FROM_LINE else tl.zeros_like(tile_row)
        # words from the first lane's load to the row's first word
        skipped_words = lead * VECTOR_WORDS + misalignment // WORD_BYTES
        if BY_COLUMN:
            skipped_words = tl.where(row_mask, skipped_words, -ROW_WORDS)
        # unless lanes store the vectors that they load, 32-bit offsets take fewer registers
        row_out = (i if WIDE_OUT or WHOLE else i.to(tl.int32)) * OUT_STRIDE
        if HAS_SCALES and SCALE_COLUMNS == 0:
            row_scale = tl.load(scales + row_id, mask=row_mask, other=0)
        if SLOT_VECTORS > 0:
            row_words = _row_or_copy(
                row_words, row_id, row_mask, table, slots, cached, line_offset,
                VECTOR_WORDS, SLOT_VECTORS, NUM_PEERS)  # fmt: skip
        # a run-time start prevents unrolling, which would take more registers
        for pass_index in range(zero if PASSES > 1 else 0, PASSES):
            load_index = pass_index * LANES + lane
            vector, mask = _assign_vectors(
                load_index, lead, num_vectors, row_mask, LAYOUT == "wrapped"
            )
            # masked per vector, otherwise Triton would split the vectors
            word = vector[:, None] * VECTOR_WORDS + vector_word[None, :]
            if VECTOR_WORDS == 1:
                # If Triton knows that rows of the table or of the result are aligned, it assigns
                # several adjacent words to each lane, and loads them one by one where the mask may
                # differ: then each load touches all lines. A run-time zero hides the alignment.
                word += zero
            values = tl.load(row_words[:, None] + word, mask=mask[:, None])
            column = word
            store_mask = mask[:, None]
            if not WHOLE:
                # The lane that stores a word is not the one that loads it. Only values go through
                # shared memory, since the storing lane computes the word's column and mask.
                column = load_index[:, None] * VECTOR_WORDS + vector_word[None, :]
                column -= skipped_words[:, None]
                store_mask = (column >= 0) & (column < ROW_WORDS) & (row_mask[:, None] | BY_COLUMN)
            if HAS_SCALES:
                if EXPONENT_BITS > 0:
                    values = _float8_values(values, EXPONENT_BITS)
                values = values.to(tl.float32)
                if SCALE_COLUMNS == 0:
                    values *= row_scale[:, None]
                else:
                    values *= tl.load(scales + column // SCALE_COLUMNS, mask=store_mask, other=0)
            elif WORD_BYTES == 1 and out.dtype.element_ty.primitive_bitwidth != 8:
                # not every device supports the direct conversion, nor does the interpreter
                values = values.to(tl.float32)
            column += row_out[:, None]
            tl.store(out + column, values.to(out.dtype.element_ty), mask=store_mask)


def gather_rows(
    table: Tensor,
    ids: Tensor,
    out: Tensor | None = None,
    *,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    order: Tensor | None = None,
    cached: CachedRows | None = None,
    scales: Tensor | None = None,
    scale_columns: int | None = None,
    programs: int | None = None,
    config: KernelConfig | None = None,
    checked: bool = False,
) -> Tensor:
    """Return `table[ids]` on the device of `ids`, read by a Triton kernel.

    Under Triton's interpreter all tensors may be on the host.

    Args:
        table: (N, D), each row contiguous; on the device of `ids`, or page-locked on the host.
        ids: (B,) int32 or int64 in [0, N); unless `checked`, an id out of range reads out of
            bounds.
        out: (B, D) of `dtype` on the device of `ids`, each row contiguous, written; a new tensor
            if None.
        layout: see `Lanes`; benchmarks set it. By default `pitched` if rows begin on lines, and
            otherwise `shifted`. With `cached`, only these are supported.
        dtype: of the result, to which elements are converted as by `Tensor.to`. If None, that of
            `out` or of the table; float32 for a table of codes.
        order: (B,) int32 or int64 on the device of `ids`: the order in which rows are read, such as
            `ids.argsort()`, so that nearby rows are read at about the same time. It does not change
            the result.
        cached: copies of rows of this table, which are read instead of these rows: on the device
            of `ids`, or sharded over GPUs whose memory this device can read.
        scales: for a table of codes, float32, contiguous, on the device of `ids`: (N,), one for
            each row, or one for each block of columns. See `gcnzc.kernels.gather.quantize`.
        scale_columns: columns of a block; None for a scale per row.
        programs: number of programs; that of `config`, or `default_programs(device)`, if None.
        config: the default of `programs`, and the numbers of warps and vectors.
        checked: check ids in the kernel, and synchronize; no id then reads out of bounds.

    Returns:
        (B, D), computed on the current stream.

    Raises:
        ValueError: the layout is `pitched`, and rows do not begin on lines; or `out` has another
            shape or dtype.
        triton.CompilationError: the device does not support the conversion.
        IndexError: `checked`, and an id is outside [0, N).
    """
    if dtype is None:
        default_dtype = table.dtype if scales is None else torch.float32
        dtype = default_dtype if out is None else out.dtype
    shape = (ids.shape[0], table.shape[1])
    out = torch.empty(shape, dtype=dtype, device=ids.device) if out is None else out
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ValueError(f"gather: out must be {shape} {dtype}, not {tuple(out.shape)} {out.dtype}")
    if out.numel() == 0:
        return out
    converts = dtype != table.dtype or scales is not None
    row_bytes = table.shape[1] * table.element_size()
    # the stride of a single row is arbitrary
    stride_bytes = table.stride(0) * table.element_size() if table.shape[0] > 1 else row_bytes
    config = config or DEFAULT_CONFIG
    if layout is None:
        layout = default_layout(stride_bytes, table.data_ptr())
    lanes = assign_lanes(layout, row_bytes, stride_bytes, table.data_ptr(), table.element_size())
    word = table.dtype if converts else _word_dtype(lanes, out)
    exponent_bits = 0
    if scales is not None:
        word, exponent_bits = torch.int8, EXPONENT_BITS[table.dtype]
    words = aligned_bytes(table, row_bytes, stride_bytes).view(word)
    # a single column may have any stride, which `view` with another dtype rejects
    out_words = out.as_strided(out.shape, (out.stride(0), 1))
    out_words = out_words if converts else out_words.view(word)
    # if the kernel checks several passes of ids that it converts, Triton 3.6 does not compile it
    ids = (ids.long() if checked else ids).contiguous()
    invalid_position = ids
    if checked:
        invalid_position = torch.full((1,), -1, dtype=torch.int64, device=ids.device)
    programs = programs or config.programs or default_programs(out.device)
    num_programs = min(triton.cdiv(len(ids), _rows_per_tile(lanes, config)), programs)
    slots, cached_words, slot_vectors, num_peers = ids, words, 0, 1
    if cached is not None and (cached.num_rows > 0 or cached.peers is not None):
        slots, cached_words = cached.slots, cached.memory.view(-1).view(word)
        slot_vectors = cached.memory.shape[1] // VECTOR_BYTES
        if cached.peers is not None:
            cached_words, num_peers = cached.peers.addresses, len(cached.peers.addresses)
    table_line_offset = table.data_ptr() % LINE_BYTES // VECTOR_BYTES * VECTOR_BYTES
    with _LAUNCH_LOCK, on_device(out.device):
        _gather_rows[(num_programs,)](
            words,
            ids,
            ids if order is None else order.contiguous(),
            out_words,
            invalid_position,
            slots,
            cached_words,
            ids if scales is None else scales,
            len(ids),
            table.shape[0],
            0,
            table_line_offset,
            **constants(lanes, stride_bytes, table.data_ptr(), word, out_words.stride(0), config),
            WIDE_OUT=len(ids) * out_words.stride(0) >= 2**31,
            SLOT_VECTORS=slot_vectors,
            NUM_PEERS=num_peers,
            HAS_ORDER=order is not None,
            CHECK_IDS=checked,
            HAS_SCALES=scales is not None,
            SCALE_COLUMNS=scale_columns or 0,
            EXPONENT_BITS=exponent_bits,
            num_warps=config.warps or WARPS,
        )
    if checked and (position := int(invalid_position)) >= 0:
        raise IndexError(
            f"gather: id {int(ids[position])} at {position} is not in a table of "
            f"{table.shape[0]} rows"
        )
    return out


def constants(
    lanes: Lanes,
    stride_bytes: int,
    base: int,
    word: torch.dtype,
    out_stride: int,
    config: KernelConfig = DEFAULT_CONFIG,
) -> dict[str, int | str]:
    """Return the compile-time constants of `_gather_rows` that depend on the table's layout.

    The constants for the order, checks, cached rows and scales are not included.

    Args:
        lanes: the assignment of the table's rows to lanes.
        stride_bytes: bytes from one row of the table to the next.
        base: address of the first row.
        word: dtype of the words that are loaded.
        out_stride: words from one row of the result to the next.
        config: configuration of the launch.
    """
    return {
        "STRIDE_BYTES": stride_bytes,
        "ROW_BYTES": lanes.row_bytes,
        "BASE_OFFSET": base % VECTOR_BYTES,
        "OUT_STRIDE": out_stride,
        "VECTOR_WORDS": lanes.vector_bytes // word.itemsize,
        "LANES": lanes.lanes,
        "PASSES": lanes.passes,
        "TILE_ROWS": _rows_per_tile(lanes, config),
        "LAYOUT": lanes.layout,
    }


def _rows_per_tile(lanes: Lanes, config: KernelConfig) -> int:
    return max(1, 32 * (config.warps or WARPS) * (config.vectors or VECTORS) // lanes.lanes)


def _word_dtype(lanes: Lanes, out: Tensor) -> torch.dtype:
    # the widest word that divides rows, vectors and the result
    sizes = [lanes.alignment_bytes, lanes.vector_bytes, out.data_ptr(), lanes.row_bytes]
    if out.shape[0] > 1:
        sizes.append(out.stride(0) * out.element_size())
    return next(_WORDS[n] for n in _WORDS if all(size % n == 0 for size in sizes))
