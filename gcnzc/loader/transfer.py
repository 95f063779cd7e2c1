"""Asynchronous copies of sampled minibatches and their features to a device.

All batches use the same two CUDA streams. The copy stream copies first the node ids, of all node
types, then the blocks, labels and node pairs, with a copy engine of the GPU. The gather stream
waits for the ids and runs the gather kernel, once for each node type with a table. It reads rows
from page-locked host memory, or from the device if the table is there. A fraction of the rows can
be copied instead: the thread that prepares the batch gathers them on the host while the GPU reads
the others, and the copy stream copies them and dequantizes codes.

Each tensor of a batch uses memory of a pool. When the last reference to the tensor and its views is
dropped, the memory returns to the pool. The "reader" of a batch is the stream that was current when
the batch was yielded, on which the model reads it. These are all the dependencies between streams;
the happens-before checker of the tests reports a race if one of them is removed:

    operation                          waits for
    a copy                             work on the current stream when the epoch began
    a write into reused memory         work that was queued on its last reader
    the gathers                        the copy of the ids
    work of the model on a batch       the work of both streams on the batch
    reuse of host memory               the copies that read it
    release of memory to PyTorch       work that was queued on its last reader
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import NODE
from gcnzc.kernels.buffers import Pool
from gcnzc.kernels.gather import gather
from gcnzc.sampling.batch import CopyTensors
from gcnzc.system.spans import Stage
from gcnzc.system.streams import Event, Stream, Streams

# parts of one allocation begin at multiples of this, on which the variant of a kernel depends
ALIGNED_BYTES = 64


class Minibatch(Protocol):
    """What a `Transfer` copies: a `Batch` or a `HeteroBatch`."""

    stages: list[Stage]

    def node_ids(self) -> Mapping[str, Tensor]:
        """Return the node ids by node type."""

    def copy_tensors(self, nodes: Mapping[str, Tensor], copy: CopyTensors) -> Self:
        """Return a minibatch of the copies of all tensors, of which `nodes` has the node ids."""

    def set_features(self, x: Mapping[str, Tensor]) -> None:
        """Set the features of the nodes by node type."""


B = TypeVar("B", bound=Minibatch)


class Transfer:
    """Copies a loader's batches to one device, asynchronously.

    `start` queues the copies of a batch and the gathers of its features. `wait` lets later work on
    the current stream wait for them, and returns the batch. Any number of threads may call `start`.

    Args:
        streams: the streams of the device.
        table: features, one row per node, in memory that the device can read; with a
            `copied_share` of 1, in any host memory. None for batches without features. For graphs
            of several node types, a dict by node type.
        copied_share: fraction of each batch's rows that a thread gathers on the host and the copy
            engine copies; unused if the table is on the device. They are the last rows of a batch:
            those of nodes that the last hop found, which are the least likely to be in a feature
            cache. For several node types, a dict like `table`, or one fraction for all.
        priority: of both streams; with a lower number, thread blocks of the gather kernel are
            scheduled before waiting ones of the model. CUDA ignores the priority of copies.
        max_pending: number of batches whose copies may be pending, above which `start` blocks.
    """

    def __init__(
        self,
        streams: Streams,
        table: FeatureTable | Mapping[str, FeatureTable] | None,
        copied_share: float | Mapping[str, float] = 0.0,
        priority: int = 0,
        max_pending: int = 4,
    ) -> None:
        self._streams, self._max_pending = streams, max_pending
        self._tables = _by_type(table)
        # of each table, the fraction of the rows that are gathered on the host
        self._shares = {
            name: copied_share[name] if isinstance(copied_share, Mapping) else copied_share
            for name, own in self._tables.items()
            if own.device != streams.device
        }
        copy_stream = streams.new(priority)
        self._copy_stream, self._gather_stream = copy_stream, streams.new(priority)
        # page-locked memory for samplers, from which the copy engine copies asynchronously
        self.host = Pool(streams.host_memory, small_bytes=0)
        self._device = Pool(
            lambda num_bytes: streams.device_memory(num_bytes, copy_stream),
            small_bytes=0,
            on_release=lambda events: _wait(copy_stream, events),
        )
        self._lock = threading.Lock()
        # host memory that pending copies read, and the event that follows these copies
        self._pending: deque[tuple[Event, list[Tensor]]] = deque()

    def order_after_current_stream(self) -> None:
        """Order later batches after the work on the current stream, such as a copy of the table."""
        # the gather stream need not wait: each gather waits for the copy of its ids
        self._copy_stream.wait(self._streams.current().record())

    def start(self, batch: B) -> "PendingBatch[B]":
        """Queue the copies of a batch and the gathers of its features, without waiting for them.

        Args:
            batch: on the host. References to its tensors are kept until they are copied; further
                dataclass fields of a subclass are passed through and not copied.

        Returns:
            The pending batch, for `wait`.
        """
        self._wait_for_room()
        memory = _BatchMemory(self._device, self._gather_stream)
        # all memory is allocated first, so that the times of the stages do not include the time in
        # which the streams wait for the last readers of the memory
        copies: list[tuple[Tensor, ...]] = []

        def allocate_copies(sources: Sequence[Tensor]) -> list[Tensor]:
            targets = memory.empty_like(sources, self._copy_stream)
            copies.append((*chain(*zip(targets, sources, strict=True)),))
            return targets

        ids = batch.node_ids()
        nodes = dict(zip(ids, allocate_copies([*ids.values()]), strict=True))
        result = batch.copy_tensors(nodes, allocate_copies)
        rows = [self._allocate_rows(name, ids[name], nodes[name], memory) for name in self._tables]
        try:
            result.stages = [*batch.stages, *self._queue(rows, copies)]
        finally:
            # after an exception, copies that are already queued still read the host's memory
            copied = self._copy_stream.record()
            self._pending.append((copied, [source for each in copies for source in each[1::2]]))
        result.set_features({each.node_type: each.x for each in rows})
        if not rows:
            return PendingBatch(result, memory, [copied])
        return PendingBatch(result, memory, [copied, self._gather_stream.record()])

    def wait(self, pending: "PendingBatch[B]") -> B:
        """Let later work on the current stream wait for a batch, and return the batch.

        This does not block the host. When the last reference to a tensor is dropped, an event is
        recorded on this stream, and the memory is reused only after this event. If other streams
        use the batch, let this stream wait for them before you drop it.
        """
        reader = self._streams.current()
        pending.memory.readers.append(reader)
        for event in pending.events:
            reader.wait(event)
        return pending.batch

    def nodes_read_in_place(self, nodes: Tensor, node_type: str = NODE) -> Tensor:
        """Return the nodes whose rows the gather kernel reads; all nodes without a table."""
        share = self._shares.get(node_type, 0.0)
        return nodes[: len(nodes) - round(share * len(nodes))]

    def close(self) -> None:
        """Wait for pending copies."""
        with self._lock:
            while self._pending:
                copied, _ = self._pending[0]
                copied.synchronize()
                self._pending.popleft()

    def __del__(self) -> None:
        # host memory must not be freed before the copies that read it are finished
        if hasattr(self, "_pending"):
            self.close()

    def _wait_for_room(self) -> None:
        with self._lock:
            while self._pending:
                copied, _ = self._pending[0]
                if len(self._pending) >= self._max_pending:
                    copied.synchronize()
                elif not copied.is_done():
                    return
                self._pending.popleft()

    def _allocate_rows(
        self, node_type: str, ids: Tensor, nodes: Tensor, memory: "_BatchMemory"
    ) -> "_Rows":
        """Allocate the features of the nodes of one type."""
        table = self._tables[node_type]
        num_rows, num_columns = len(ids), table.num_columns
        num_copied = num_rows - len(self.nodes_read_in_place(ids, node_type))
        writers = [self._gather_stream]
        if num_copied:
            writers.append(self._copy_stream)
        x = memory.empty((num_rows, num_columns), table.dtype, *writers)
        codes = None
        if num_copied and table.scales is not None:
            codes = memory.empty((num_copied, num_columns), table.stored_dtype, self._copy_stream)
        return _Rows(node_type, table, ids, nodes, x, num_rows - num_copied, codes)

    def _queue(self, rows: Sequence["_Rows"], copies: list[tuple[Tensor, ...]]) -> list[Stage]:
        """Queue the copy of the ids (the first of `copies`), the gathers, and the other copies."""
        began, stages = self._copy_stream.timed_event(), []
        self._copy_stream.do(_copy, *copies[0])
        # a table that the device cannot read is not passed to its kernel, even for no rows
        gathered = [
            each
            for each in rows
            if each.num_read or (not len(each.ids) and self._shares.get(each.node_type, 0) < 1)
        ]
        if gathered:
            stages.append(self._queue_gathers(gathered))
        for tensors in copies[1:]:
            self._copy_stream.do(_copy, *tensors)
        for each in rows:
            if each.num_read < len(each.ids):
                source = self._gather_on_host(each)
                target = each.x[each.num_read :] if each.codes is None else each.codes
                copies.append((target, source))
                self._copy_stream.do(_copy, target, source)
                if each.codes is not None:
                    out, copied_ids = each.x[each.num_read :], each.nodes[each.num_read :]
                    self._copy_stream.do(_dequantize, each.table, each.codes, copied_ids, out)
        stages.append(Stage("copy", "copy stream", began, self._copy_stream.timed_event()))
        return stages

    def _queue_gathers(self, rows: Sequence["_Rows"]) -> Stage:
        """Queue the gathers of the rows that the device reads, after the copy of the ids."""
        self._gather_stream.wait(self._copy_stream.record())
        began = self._gather_stream.timed_event()
        for each in rows:
            read = slice(each.num_read)
            self._gather_stream.do(_gather, each.table, each.nodes[read], each.x[read])
        return Stage("gather", "gather stream", began, self._gather_stream.timed_event())

    def _gather_on_host(self, rows: "_Rows") -> Tensor:
        """Gather the rows to be copied, in this thread, while the device reads the others."""
        copied_ids, table = rows.ids[rows.num_read :], rows.table
        out = self.host.empty((len(copied_ids), table.num_columns), table.stored_dtype)
        return table.gather_stored(copied_ids, out, threads=1)


@dataclass(frozen=True)
class PendingBatch(Generic[B]):
    """A batch whose copies and gathers are queued."""

    batch: B  # on the device
    memory: "_BatchMemory"
    events: Sequence[Event]  # after which all of its tensors are complete


@dataclass(frozen=True)
class _Rows:
    """The features of the nodes of one type, and how many rows of them the device gathers."""

    node_type: str
    table: FeatureTable
    ids: Tensor  # (B,) on the host
    nodes: Tensor  # the ids on the device
    x: Tensor  # (B, D) on the device
    num_read: int  # rows that the gather kernel reads; the others are copied
    codes: Tensor | None  # the copied rows before they are dequantized


@dataclass(frozen=True, eq=False)
class _BatchMemory:
    """The device memory of one batch, and the streams that use it."""

    pool: Pool
    gather_stream: Stream
    readers: list[Stream] = field(default_factory=list)  # streams of the model

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *writers: Stream) -> Tensor:
        """Allocate a tensor that work may write if it is queued on `writers` afterwards."""
        tensor, events = self.pool.allocate(shape, dtype, self._record_last_use)
        for writer in writers:
            _wait(writer, events)
        return tensor

    def empty_like(self, sources: Sequence[Tensor], *writers: Stream) -> list[Tensor]:
        """Allocate tensors like others of one dtype; several are parts of one allocation."""
        dtype = sources[0].dtype
        if len(sources) == 1:
            return [self.empty(sources[0].shape, dtype, *writers)]
        step = ALIGNED_BYTES // dtype.itemsize
        sizes = [source.numel() + -source.numel() % step for source in sources]
        parts = self.empty((sum(sizes),), dtype, *writers).split(sizes)
        return [
            part[: source.numel()].view(source.shape)
            for part, source in zip(parts, sources, strict=True)
        ]

    def _record_last_use(self) -> Sequence[Event]:
        """Record events after all uses of the memory, once the last reference is dropped."""
        # The readers have waited for both streams of the transfer. A batch that was dropped before
        # `wait` has no reader, but its copies and its gathers may be pending. An event after the
        # gathers suffices: later work on the copy stream follows these copies, and a later gather
        # waits for the copy of its own ids, which is queued after these copies.
        return [stream.record() for stream in self.readers or [self.gather_stream]]


def _wait(stream: Stream, events: Sequence[Event]) -> None:
    for event in events:
        stream.wait(event)


def _by_type(table: FeatureTable | Mapping[str, FeatureTable] | None) -> dict[str, FeatureTable]:
    if isinstance(table, FeatureTable):
        return {NODE: table}
    return dict(table or {})


def _copy(*tensors: Tensor) -> None:
    """Copy tensors, given as each target and then its source."""
    for target, source in zip(tensors[::2], tensors[1::2], strict=True):
        target.copy_(source, non_blocking=True)


def _gather(table: FeatureTable, ids: Tensor, out: Tensor) -> None:
    table.gather(ids, out)


def _dequantize(table: FeatureTable, codes: Tensor, ids: Tensor, out: Tensor) -> None:
    scales = table.scales_on(ids.device)
    assert scales is not None, "codes have scales"
    copied_scales = scales if table.scale_columns else scales[ids]
    rows = torch.arange(len(ids), device=ids.device)
    # not as a FeatureTable, whose check of the scales' values would wait for the device
    gather(codes, rows, out, scales=copied_scales, scale_columns=table.scale_columns)
