"""Asynchronous copies of sampled minibatches and their features to a device.

A batch takes two streams, one for each thing that can move bytes over the bus. `copying` belongs to
the copy engine: the ids of the nodes first, then the blocks and labels. `reading` belongs to the
GPU's threads: the gather, which waits for the ids. A share of the rows may come the other way: this
thread gathers them on the host while the GPU reads the others, and the copy engine sends them.

Memory is lent for a batch by pools and comes back when nothing refers to the batch any more. What
follows is the whole of the order between streams, of which a test leaves out each part in turn:

    what is queued                     waits for
    anything                           what the caller had queued when the epoch began
    a write into memory                the end of what was queued by its last borrower's reader
    the gather                         the copy of the ids
    what the model queues              both streams' work on the batch
    a borrower of the host's memory    the copies out of it
    the end of memory                  the end of what was queued by its last borrower's reader
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.kernels.buffers import Pool
from gcnzc.sampling.batch import Batch, Block
from gcnzc.system.spans import Stage
from gcnzc.system.streams import Event, Stream, Streams


class Transfer:
    """The way of a loader's batches to one device.

    Any number of threads may send.

    Args:
        streams: of the device.
        table: features, one row per node, on the device, or where it can read them, or with a
            `copied_share` of 1 anywhere on the host; None if batches have none.
        copied_share: of the rows of each batch, those that a thread gathers on the host and the
            copy engine sends; of a table on the device none. They are the last of a batch, which
            hot sets hold the fewest of.
        priority: of both streams; a lower number is done before the model's work.
        most: batches under way at a time, after which a thread that sends waits.
    """

    def __init__(
        self,
        streams: Streams,
        table: FeatureTable | None,
        copied_share: float = 0.0,
        priority: int = 0,
        most: int = 4,
    ) -> None:
        self._streams, self._table, self._most = streams, table, most
        self._copied_share = copied_share
        copying = streams.new(priority)
        self._copying, self._reading = copying, streams.new(priority)
        # where samplers write, so that the copy engine reads it without a detour
        self.host = Pool(streams.host_memory, small_bytes=0)
        self._device = Pool(
            lambda num_bytes: streams.device_memory(num_bytes, copying),
            small_bytes=0,
            on_release=lambda events: _wait(copying, events),
        )
        self._lock = threading.Lock()
        # what copies read on the host, and the event after which they have
        self._under_way: deque[tuple[Event, list[Tensor]]] = deque()

    def begin(self) -> None:
        """Order what is sent from now on after what the caller has queued, a table's copy say."""
        queued = self._streams.current().record()
        for stream in (self._copying, self._reading):
            stream.wait(queued)

    def send(self, batch: Batch) -> "Sent":
        """Queue the copies of a batch and the gather of its features.

        Args:
            batch: on the host. Its tensors are kept until they are copied; what else a subclass has
                is handed on as it is.

        Returns:
            What `hand_over` makes the batch on the device of.
        """
        self._wait_for_room()
        memory = _Memory(self._device, self._reading)
        # all memory first, so that what is waited for is no part of the stages' times
        copies: list[tuple[Tensor, Tensor]] = []

        def there(tensor: Tensor) -> Tensor:
            lent = memory.empty(tensor.shape, tensor.dtype, self._copying)
            copies.append((lent, tensor))
            return lent

        nodes = there(batch.nodes)
        sent = replace(
            batch,
            nodes=nodes,
            seeds=nodes[: len(batch.seeds)],
            blocks=_blocks_there(batch.blocks, nodes, there),
            y=None if batch.y is None else there(batch.y),
            pairs=None if batch.pairs is None else there(batch.pairs),
        )
        rows = None if self._table is None else self._rows_there(self._table, batch, memory)
        try:
            sent.stages = [*batch.stages, *self._queue(rows, batch, nodes, copies)]
        finally:
            # also of a batch that failed, what is queued reads the host's memory
            copied = self._copying.record()
            with self._lock:
                self._under_way.append((copied, [here for _, here in copies]))
        if rows is None:
            return Sent(sent, memory, [copied])
        sent.x = rows.x
        return Sent(sent, memory, [copied, self._reading.record()])

    def hand_over(self, sent: "Sent") -> Batch:
        """The batch, after whose making the caller's stream is ordered.

        Its memory is kept from being used again before that stream is done with what is queued on
        it when the last reference is dropped. Other streams must be waited for before that.
        """
        reader = self._streams.current()
        sent.memory.readers.append(reader)
        for event in sent.ready:
            reader.wait(event)
        return sent.batch

    def read_in_place(self, nodes: Tensor) -> Tensor:
        """The first of a batch's nodes, whose rows the device reads; the others' are copied."""
        own = self._table is None or self._table.device == self._streams.device
        share = 0.0 if own else self._copied_share
        return nodes[: len(nodes) - round(share * len(nodes))]

    def close(self) -> None:
        """Wait for what is under way."""
        with self._lock:
            while self._under_way:
                copied, _ = self._under_way[0]
                copied.synchronize()
                self._under_way.popleft()

    def __del__(self) -> None:
        # the host's memory must not go before the copies out of it are done
        if hasattr(self, "_under_way"):
            self.close()

    def _wait_for_room(self) -> None:
        with self._lock:
            while self._under_way:
                copied, _ = self._under_way[0]
                if len(self._under_way) >= self._most:
                    copied.synchronize()
                elif not copied.is_past():
                    return
                self._under_way.popleft()

    def _rows_there(self, table: FeatureTable, batch: Batch, memory: "_Memory") -> "_Rows":
        """Memory for the features of a batch."""
        num_rows, num_columns = len(batch.nodes), table.num_columns
        num_copied = num_rows - len(self.read_in_place(batch.nodes))
        both = (self._copying, self._reading) if num_copied else (self._reading,)
        x = memory.empty((num_rows, num_columns), table.dtype, *both)
        codes = None
        if num_copied and table.scales is not None:
            codes = memory.empty((num_copied, num_columns), table.stored_dtype, self._copying)
        return _Rows(table, x, num_rows - num_copied, codes)

    def _queue(
        self, rows: "_Rows | None", batch: Batch, ids: Tensor, copies: list[tuple[Tensor, Tensor]]
    ) -> list[Stage]:
        """Queue the copies, of which the first is that of the ids, and the gather between them."""
        began, stages = self._copying.moment(), []
        self._copying.do(_copy, *copies[0])
        if rows is not None and (rows.num_read > 0 or len(ids) == 0):
            stages.append(self._read(rows, ids))
        for pair in copies[1:]:
            self._copying.do(_copy, *pair)
        if rows is not None and rows.num_read < len(ids):
            staged = self._staged(rows, batch.nodes)
            target = rows.x[rows.num_read :] if rows.codes is None else rows.codes
            copies.append((target, staged))
            self._copying.do(_copy, target, staged)
            if rows.codes is not None:
                out, last = rows.x[rows.num_read :], ids[rows.num_read :]
                self._copying.do(_dequantize, rows.table, rows.codes, last, out)
        stages.append(Stage("copy", "copy stream", began, self._copying.moment()))
        return stages

    def _read(self, rows: "_Rows", ids: Tensor) -> Stage:
        """Queue the gather of the rows that the device reads, after the copy of their ids."""
        self._reading.wait(self._copying.record())
        began = self._reading.moment()
        self._reading.do(_gather, rows.table, ids[: rows.num_read], rows.x[: rows.num_read])
        return Stage("gather", "gather stream", began, self._reading.moment())

    def _staged(self, rows: "_Rows", ids: Tensor) -> Tensor:
        """Gather the other rows in this thread, while the device reads."""
        last = ids[rows.num_read :]
        staged = self.host.empty((len(last), rows.table.num_columns), rows.table.stored_dtype)
        return rows.table.gather_stored(last, staged, threads=1)


@dataclass(frozen=True)
class Sent:
    """A batch whose copies and gather are queued."""

    batch: Batch  # on the device
    memory: "_Memory"
    ready: Sequence[Event]  # after which all of it is there


@dataclass(frozen=True)
class _Rows:
    """Where the features of a batch go, and which way."""

    table: FeatureTable
    x: Tensor  # (B, D)
    num_read: int  # that the device reads by itself; the others are copied
    codes: Tensor | None  # of those, before they are multiplied by their scales


@dataclass(frozen=True, eq=False)
class _Memory:
    """Memory of the device that is lent for one batch, and the streams that use it."""

    pool: Pool
    reading: Stream
    readers: list[Stream] = field(default_factory=list)  # the model's

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *writers: Stream) -> Tensor:
        """Memory into which `writers` may write what they queue next."""
        tensor, events = self.pool.allocate(shape, dtype, self._ends)
        for writer in writers:
            _wait(writer, events)
        return tensor

    def _ends(self) -> Sequence[Event]:
        """The places after all that was queued with the memory, when nothing refers to it."""
        # The model has waited for the gather and the copies. A batch that never came to it has been
        # copied before later batches are, to whose copies all that writes again is ordered.
        return [stream.record() for stream in self.readers or [self.reading]]


def _wait(stream: Stream, events: Sequence[Event]) -> None:
    for event in events:
        stream.wait(event)


def _blocks_there(
    blocks: Sequence[Block], nodes: Tensor, there: Callable[[Tensor], Tensor]
) -> tuple[Block, ...]:
    # the degrees of every block are the first of the outermost's
    degrees = there(blocks[0].degrees) if blocks and blocks[0].degrees is not None else None
    return tuple(
        replace(
            block,
            indptr=there(block.indptr),
            indices=there(block.indices),
            edge_ids=None if block.edge_ids is None else there(block.edge_ids),
            nodes=nodes[: block.num_src],
            degrees=None if degrees is None else degrees[: block.num_src],
        )
        for block in blocks
    )


def _copy(there: Tensor, here: Tensor) -> None:
    there.copy_(here, non_blocking=True)


def _gather(table: FeatureTable, ids: Tensor, out: Tensor) -> None:
    table.gather(ids, out)


def _dequantize(table: FeatureTable, codes: Tensor, ids: Tensor, out: Tensor) -> None:
    scales = table.scales_on(ids.device)
    assert scales is not None, "codes have scales"
    of_ids = scales if table.scale_columns else scales[ids]
    rows = torch.arange(len(ids), device=ids.device)
    FeatureTable(codes, of_ids, table.scale_columns).gather(rows, out)
