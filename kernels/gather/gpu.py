"""Gather rows by GPU threads, from the GPU's memory or over the bus from page-locked host memory.

A load of a warp becomes one request on the bus for each line of 128 B that it touches, so lanes are
laid over rows as `gcnzc.kernels.gather.lanes` says: `shifted` asks for no line twice, wherever rows
begin. It loads whole vectors of 16 B, also where a row begins or ends inside of one; the bytes
before and after the row lie in the same 16 B, hence on the same page, and are dropped when rows are
stored.

Few programs stay and take rows in turn, each with several rows in flight: bytes in flight fill the
bus, and registers of programs that wait for it are not there for the model's kernels.

Letters: N rows in the table, D columns, B rows asked for.
"""

import contextlib
import ctypes
import threading
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gcnzc.kernels.gather.cached_rows import CachedRows
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES, VECTOR_BYTES, Lanes, Layout, lanes_of

WARPS = 8


VECTORS = 4  # that each lane has in flight; with 8 warps a program has 16 KiB


# While multiprocessors are free, a device gives each its first program before it gives any a second
# one: so many programs take a part of as many multiprocessors. The number is not measured; `gcnzc
# check --tune` measures it for a machine.
DEFAULT_PROGRAMS = 32


# of codes; 0 where they are integers
EXPONENT_BITS = {torch.int8: 0, torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}


# Without a lock, every loader thread that finds no compiled kernel would compile one; with it, the
# first thread compiles and the others wait for its result
_LAUNCH = threading.Lock()


# words that rows are cut into: bits pass through them unchanged
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class KernelConfig:
    """How a GPU's threads share a gather. It changes how long a gather takes, and no bit of it.

    What is None is left to the constants above, and to `programs_of` the device.

    Raises:
        ValueError: `layout` is none, or a number is no power of two, or below 1.
    """

    layout: Layout | None = None  # of lanes over rows; the usual one where a table has it not
    programs: int | None = None
    warps: int | None = None  # of a program, a power of two of 32 at most
    vectors: int | None = None  # that each lane has in flight, a power of two

    def __post_init__(self) -> None:
        sizes = [size for size in (self.warps, self.vectors) if size is not None]
        powers = all(size > 0 and size & (size - 1) == 0 for size in sizes)
        known = self.layout is None or self.layout in LAYOUTS
        some = self.programs is None or self.programs > 0
        if not (known and powers and some and (self.warps or 1) <= 32):
            raise ValueError(
                f"a gather cannot be shared as {self}\n\n"
                f"hint: a layout of {', '.join(LAYOUTS)}; at least one program; warps, 32 at most, "
                "and vectors that are powers of two"
            )


DEFAULT_CONFIG = KernelConfig()


@triton.jit
def _float8_values(codes, EXPONENT_BITS: tl.constexpr):
    """The numbers of float8 codes, given as int8: by way of float16, which every GPU has."""
    bits = codes.to(tl.int16)
    if EXPONENT_BITS == 5:
        # e5m2 is the upper half of a float16
        return (bits << 8).to(tl.float16, bitcast=True).to(tl.float32)
    # e4m3fn: the bits of a float16 whose exponent is 8 too low, also below the normal numbers
    half = ((bits & 0x7F) << 7) | (bits & -32768)
    values = half.to(tl.float16, bitcast=True).to(tl.float32) * 256
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), values)


# Numbers and alignments that differ between minibatches must not cause another compilation; only
# rows and results are read and written as vectors.
@triton.jit(
    do_not_specialize=[
        "ids",
        "places",
        "outside",
        "slots",
        "scales",
        "num_ids",
        "num_rows",
        "zero",
        "line_inset",
    ]
)
def _gather_rows(
    table,
    ids,
    places,
    out,
    outside,
    slots,
    hot,
    scales,
    num_ids,
    num_rows: tl.int64,
    zero,
    line_inset,
    STRIDE_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    INSET_BYTES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
    PASSES: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FROM_LINE: tl.constexpr,
    WRAPPED: tl.constexpr,
    SCALAR: tl.constexpr,
    HOT_VECTORS: tl.constexpr,
    HOT_MEMORIES: tl.constexpr,
    ORDERED: tl.constexpr,
    CHECKED: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    EXPONENT_BITS: tl.constexpr,
):
    """The rows of `table`, whose first begins INSET_BYTES after its pointer, as words of `out`.

    The pointer is a multiple of 16 B, and lies `line_inset` bytes after a line's begin. With
    HOT_VECTORS above 0, rows that have a slot come from `hot`, which has so many vectors a slot.
    With HOT_MEMORIES above 1, `hot` has the addresses of so many memories, which slots go round.
    With SCALED 1 or 2, words are codes, with an exponent of so many bits if not 0, that are
    multiplied by the scale of their row, or of their block of SCALE_COLUMNS columns.
    """
    VECTOR_BYTES: tl.constexpr = VECTOR * WORD_BYTES
    ROW: tl.constexpr = ROW_BYTES // WORD_BYTES
    slot = tl.arange(0, ROWS * LANES) // LANES
    lane = tl.arange(0, ROWS * LANES) % LANES
    part = tl.arange(0, VECTOR)
    step = tl.num_programs(0) * ROWS
    for begin in range(tl.program_id(0) * ROWS, num_ids, step):
        i = begin + slot
        inside = i < num_ids
        if ORDERED:
            i = tl.load(places + i, mask=inside, other=0)
        # int64 before the multiply: 2**31 elements is only 8 GB of float32
        i = i.to(tl.int64)
        row = tl.load(ids + i, mask=inside, other=0).to(tl.int64)
        if CHECKED:
            known = (row >= 0) & (row < num_rows)
            tl.store(outside + tl.zeros_like(row), i, mask=inside & (known == 0))
            inside = inside & known
        # 64 bits for the addresses where rows begin, 32 for what lies within a row
        start = INSET_BYTES + row * STRIDE_BYTES
        row_words = table + start // VECTOR_BYTES * VECTOR
        # VECTOR_BYTES is a power of two, and `start` is not negative
        inset = (start & (VECTOR_BYTES - 1)).to(tl.int32)
        if ALIGNED:
            inset = tl.zeros_like(slot)
        count = (inset + (ROW_BYTES + VECTOR_BYTES - 1)) // VECTOR_BYTES
        # bytes from a line's begin to the row's
        behind = ((line_inset + start) & 127).to(tl.int32) // VECTOR_BYTES
        lead = tl.zeros_like(slot)
        if FROM_LINE:
            lead = behind
        # the word of a row's first vector that is its first column
        inset_words = inset // WORD_BYTES
        row_out = out + i * OUT_STRIDE
        if SCALED == 1:
            scale = tl.load(scales + row, mask=inside, other=0)
        if HOT_VECTORS > 0:
            place = tl.load(slots + row, mask=inside, other=-1)
            is_hot = place >= 0
            at = place
            copies = hot
            if HOT_MEMORIES > 1:
                at = place // HOT_MEMORIES
                address = tl.load(hot + place % HOT_MEMORIES, mask=is_hot, other=0)
                copies = address.to(tl.pointer_type(table.dtype.element_ty))
                # memories begin on lines, which the compiler must know to load whole vectors
                copies = tl.multiple_of(copies, [16])
            # a hot row lies as far behind a line as the row itself, so that its lanes fit both
            hot_row_words = copies + (at.to(tl.int64) * HOT_VECTORS + behind) * VECTOR
        for turn in range(PASSES):
            number = turn * LANES + lane
            vector = number - lead
            if WRAPPED:
                wanted = inside & (number < count)
                # the lead may be longer than a short row
                vector = (vector % count + count) % count
            else:
                wanted = inside & (vector >= 0) & (vector < count)
            # masked by whole vectors, or the compiler would cut them up
            word = vector[:, None] * VECTOR + part[None, :]
            words = row_words[:, None] + word
            if SCALAR:
                # a number that is not known hides from the compiler that lanes could be joined
                words += zero
            if HOT_VECTORS > 0:
                cold = tl.load(words, mask=(wanted & (place < 0))[:, None], other=0)
                hot_words = hot_row_words[:, None] + word
                values = tl.load(hot_words, mask=(wanted & is_hot)[:, None], other=0)
                values = tl.where(is_hot[:, None], values, cold)
            else:
                values = tl.load(words, mask=wanted[:, None])
            column = word - inset_words[:, None]
            kept = wanted[:, None]
            if not ALIGNED or ROW % VECTOR != 0:
                kept = kept & (column >= 0) & (column < ROW)
            if SCALED > 0:
                if EXPONENT_BITS > 0:
                    values = _float8_values(values, EXPONENT_BITS)
                values = values.to(tl.float32)
                if SCALED == 1:
                    values *= scale[:, None]
                else:
                    values *= tl.load(scales + column // SCALE_COLUMNS, mask=kept, other=0)
            elif WORD_BYTES == 1 and out.dtype.element_ty.primitive_bitwidth != 8:
                # not every device, nor the interpreter, knows the direct way
                values = values.to(tl.float32)
            tl.store(row_out[:, None] + column, values.to(out.dtype.element_ty), mask=kept)


def gather_rows(
    table: Tensor,
    ids: Tensor,
    out: Tensor | None = None,
    *,
    layout: Layout | None = None,
    dtype: torch.dtype | None = None,
    order: Tensor | None = None,
    hot: CachedRows | None = None,
    scales: Tensor | None = None,
    scale_columns: int | None = None,
    programs: int | None = None,
    way: KernelConfig | None = None,
    checked: bool = False,
) -> Tensor:
    """`table[ids]` on the device of `ids`, read by its threads.

    Under Triton's interpreter everything may lie on the host.

    Args:
        table: (N, D), each row contiguous; on the device of `ids`, or page-locked on the host.
        ids: (B,) int32 or int64 in [0, N); one outside reads foreign memory unless `checked`.
        out: (B, D) to write into, each row contiguous, on the device of `ids`; allocated if None.
        layout: of lanes over rows; `pitched` if rows begin on lines, else `shifted`, if None.
        dtype: of the result, to which elements are converted as by `Tensor.to`; that of `out`, or
            of the table, if None; float32 rather than that of a table of codes.
        order: (B,) int32 or int64, on the device of `ids`: in which order to take the rows, such as
            `ids.argsort()`, so that rows near each other are read at about the same time. Where
            they go does not change.
        hot: copies of rows of this table, which are read in its place: made for the device of
            `ids`, on it or on GPUs whose memory it reads.
        scales: of a table of codes, float32, contiguous, on the device of `ids`: (N,), one for each
            row, or one for each block of columns. See `gcnzc.kernels.gather.quantize`.
        scale_columns: of a block of columns; None for scales of rows.
        programs: how many share the work; `programs_of` the device if None.
        way: what `layout` and `programs` are where they are None, and how many warps and vectors
            there are. Its layout is left aside where the table, or `hot`, does not take it.
        checked: look for ids outside and wait for the result; rows in range are then gathered, and
            no foreign memory is read.

    Returns:
        (B, D), ready for work queued later on the current stream.

    Raises:
        ValueError: rows do not begin on lines, and `layout` is `pitched`; a conversion that the
            device does not have; or `hot`, and a layout that does not take it.
        IndexError: an id is outside, and `checked`.
    """
    if dtype is None:
        plain = table.dtype if scales is None else torch.float32
        dtype = plain if out is None else out.dtype
    shape = (ids.shape[0], table.shape[1])
    out = torch.empty(shape, dtype=dtype, device=ids.device) if out is None else out
    if out.numel() == 0:
        return out
    converts = dtype != table.dtype or scales is not None
    row_bytes = table.shape[1] * table.element_size()
    # a single row may have any stride, and begins where it begins
    stride_bytes = table.stride(0) * table.element_size() if table.shape[0] > 1 else row_bytes
    way = way or DEFAULT_CONFIG
    if layout is None:
        on_lines = stride_bytes % LINE_BYTES == 0 and table.data_ptr() % LINE_BYTES == 0
        layout = _layout(way, on_lines, hot is not None)
    lanes = lanes_of(layout, row_bytes, stride_bytes, table.data_ptr(), table.element_size())
    word = table.dtype if converts else _word(lanes, out)
    exponent_bits = 0
    if scales is not None:
        word, exponent_bits = torch.int8, EXPONENT_BITS[table.dtype]
    words = _from_vector(table, row_bytes, stride_bytes).view(word)
    # a single column may have any stride, which a view of other words would not take
    out_words = out.as_strided(out.shape, (out.stride(0), 1))
    out_words = out_words if converts else out_words.view(word)
    ids = ids.contiguous()
    outside = torch.full((1,), -1, dtype=torch.int64, device=ids.device) if checked else ids
    programs = programs or way.programs or programs_of(out.device)
    num_programs = min(triton.cdiv(len(ids), _rows(lanes, way)), programs)
    slots, hot_words, hot_vectors, hot_memories = ids, words, 0, 1
    if hot is not None and (hot.num_rows > 0 or hot.peers is not None):
        if layout not in ("shifted", "pitched"):
            raise ValueError(
                f"hot rows are read as shifted or pitched, not as {layout}\n\n"
                "hint: leave the layout away"
            )
        slots, hot_words = hot.slots, hot.memory.view(-1).view(word)
        hot_vectors = hot.memory.shape[1] // VECTOR_BYTES
        if hot.peers is not None:
            hot_words, hot_memories = hot.peers.addresses, len(hot.peers.addresses)
    # a number of the launch: where memory is allocated must not cause another compilation
    line_inset = table.data_ptr() % LINE_BYTES // VECTOR_BYTES * VECTOR_BYTES
    with _LAUNCH, on(out.device):
        _gather_rows[(num_programs,)](
            words,
            ids,
            ids if order is None else order.contiguous(),
            out_words,
            outside,
            slots,
            hot_words,
            ids if scales is None else scales,
            len(ids),
            table.shape[0],
            0,
            line_inset,
            **constants(lanes, stride_bytes, table.data_ptr(), word, out_words.stride(0), way),
            HOT_VECTORS=hot_vectors,
            HOT_MEMORIES=hot_memories,
            ORDERED=order is not None,
            CHECKED=checked,
            SCALED=0 if scales is None else 1 if scale_columns is None else 2,
            SCALE_COLUMNS=scale_columns or 0,
            EXPONENT_BITS=exponent_bits,
            num_warps=way.warps or WARPS,
        )
    if checked and (bad := int(outside)) >= 0:
        raise IndexError(
            f"gather: id {int(ids[bad])} at {bad} is not in a table of {table.shape[0]} rows\n\n"
            "hint: is the table that of another graph?"
        )
    return out


def _layout(way: KernelConfig, on_lines: bool, has_hot: bool) -> Layout:
    usual: Layout = "pitched" if on_lines else "shifted"
    refused = (way.layout == "pitched" and not on_lines) or (
        has_hot and way.layout not in ("shifted", "pitched")
    )
    return usual if way.layout is None or refused else way.layout


def constants(
    lanes: Lanes,
    stride_bytes: int,
    base: int,
    word: torch.dtype,
    out_stride: int,
    way: KernelConfig = DEFAULT_CONFIG,
) -> dict[str, int | bool]:
    """What `_gather_rows` is compiled for, besides hot rows, ORDERED, CHECKED and scales.

    Args:
        lanes: of the table, whose first row is at address `base`, and each other `stride_bytes`
            after the one before.
        stride_bytes: see there.
        base: see there.
        word: in which rows are loaded and stored.
        out_stride: words from one row of the result to the next.
        way: how programs share the work.
    """
    return {
        "STRIDE_BYTES": stride_bytes,
        "ROW_BYTES": lanes.row_bytes,
        "INSET_BYTES": base % VECTOR_BYTES,
        "OUT_STRIDE": out_stride,
        "WORD_BYTES": word.itemsize,
        "VECTOR": lanes.vector_bytes // word.itemsize,
        "LANES": lanes.lanes,
        "PASSES": lanes.passes,
        "ROWS": _rows(lanes, way),
        "ALIGNED": lanes.unit_bytes >= lanes.vector_bytes or lanes.layout in ("scalar", "pitched"),
        "FROM_LINE": lanes.from_line,
        "WRAPPED": lanes.layout == "wrapped",
        "SCALAR": lanes.layout == "scalar",
    }


def programs_of(device: torch.device) -> int:
    """How many programs a gather has on a device by default: at most two a multiprocessor."""
    if device.type != "cuda":
        return 2
    return min(DEFAULT_PROGRAMS, 2 * _multiprocessors(device))


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _rows(lanes: Lanes, way: KernelConfig) -> int:
    return max(1, 32 * (way.warps or WARPS) * (way.vectors or VECTORS) // lanes.lanes)


def _word(lanes: Lanes, out: Tensor) -> torch.dtype:
    # the widest that rows, vectors and the result are made of
    sizes = [lanes.unit_bytes, lanes.vector_bytes, out.data_ptr(), lanes.row_bytes]
    if out.shape[0] > 1:
        sizes.append(out.stride(0) * out.element_size())
    return next(_WORDS[n] for n in _WORDS if all(size % n == 0 for size in sizes))


def _from_vector(table: Tensor, row_bytes: int, stride_bytes: int) -> Tensor:
    """The table's bytes from the multiple of 16 B at or below it.

    The result does not keep the table's memory alive.
    """
    inset = table.data_ptr() % VECTOR_BYTES
    num_bytes = inset + (table.shape[0] - 1) * stride_bytes + row_bytes
    # whole vectors, so that any word fits; no byte past the last vector that holds one of a row
    num_bytes += -num_bytes % VECTOR_BYTES
    if table.device.type == "cpu":
        memory = (ctypes.c_byte * num_bytes).from_address(table.data_ptr() - inset)
        return torch.frombuffer(memory, dtype=torch.int8)
    return _device_bytes(table, inset, num_bytes)


def _device_bytes(table: Tensor, inset: int, num_bytes: int) -> Tensor:
    # allocations on a GPU begin on lines, so that there is room below a view's first byte, and end
    # on them, though a storage may say less
    storage = table.untyped_storage()
    begin = table.data_ptr() - inset - storage.data_ptr()
    whole = torch.empty(0, dtype=torch.int8, device=table.device).set_(storage)
    end = min(begin + num_bytes, len(whole))
    return whole[begin : end - (end - begin) % 8]


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which kernels run on a tensor's device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
