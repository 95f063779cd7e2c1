"""Channels: execute collectives one after the other over a process group of torch.distributed."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gcnzc.exchange.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Mean,
    ReduceScatter,
    SendReceive,
    Sum,
    as_bytes,
    doubling_gather,
    from_bytes,
)
from gcnzc.exchange.errors import ConnectionBroken, network
from gcnzc.exchange.request_log import (
    ABORT_TAG,
    NO_HEADER,
    Ledger,
    Need,
    RequestLog,
    channel_sequence,
    message_tag,
)
from gcnzc.exchange.requests import Algorithm, Exchange, Receive, Scratch, Send, Wait, require

# torch 2.13 renames these functions, and warns about the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# how many pairs of successive requests a channel stores
PAIRS_KEPT = 4096
# at least one of this many requests of a channel has a header; the barrier that sends it takes
# about as long as a short collective of torch
CHECK_EVERY = 128


class Ranks(Protocol):
    """The ranks of a group, and what its channels have in common."""

    rank: int
    world_size: int
    backend: str
    ranks: list[int]
    """the members' ranks in torch.distributed's default group"""
    timeout_s: float
    ledger: Ledger
    log: RequestLog

    def is_nccl(self, request: Exchange) -> bool:
        """Whether NCCL executes a request, which has the time limit of its process group."""


class StagingBuffers:
    """Host buffers of a channel, which later requests of the same size reuse."""

    def __init__(self) -> None:
        self.free: dict[Any, list[Tensor]] = {}
        self.lent: list[tuple[list[Tensor], Tensor]] = []

    def find(self, values: Tensor, *, pinned: bool) -> list[Tensor]:
        """Return the free buffers with the size and dtype of `values`, at least one.

        Args:
            values: of n elements; a buffer is (n,).
            pinned: whether the buffers are page-locked, if possible.
        """
        free = self.free.setdefault((values.numel(), values.dtype, pinned), [])
        if not free:
            try:
                buffer = torch.empty(values.numel(), dtype=values.dtype, pin_memory=pinned)
            except RuntimeError:
                buffer = torch.empty(values.numel(), dtype=values.dtype)
            free.append(buffer)
        return free

    def lend(self, values: Tensor, *, pinned: bool = False) -> Tensor:
        """Return a buffer until `take_back`; see `find`."""
        free = self.find(values, pinned=pinned)
        self.lent.append((free, free.pop()))
        return self.lent[-1][1]

    def copy_to_host(self, values: Tensor) -> Tensor:
        """Copy `values` to page-locked memory; wait until they are computed and copied."""
        return self.lend(values, pinned=True).view(values.shape).copy_(values)

    def take_back(self) -> None:
        """Take back all lent buffers for reuse."""
        for free, buffer in self.lent:
            free.append(buffer)
        self.lent.clear()


def wait_for_work(work: Any, limit_s: float | None) -> None:
    """Wait for work of torch.distributed; `limit_s` is None for NCCL, which has its own limit."""
    with network():
        if limit_s is None:
            # with a time limit, the host would poll until the device has finished
            work.wait()
        else:
            # gloo's messages have no other time limit; after a timeout the connection is closed
            work.wait(timedelta(seconds=limit_s))


class Channel:
    """Executes collectives one after the other, over its own process group.

    Args:
        ranks: the ranks of the group.
        name: the name of the channel; empty for the default channel.
        process_group: of torch.distributed; None for its default one.
    """

    def __init__(self, ranks: Ranks, name: str, process_group: Any) -> None:
        require(
            name != "default",
            'the channel name "default" is reserved, since messages name the channel of requests '
            "that are not started so",
            "use another name",
        )
        self.ranks, self.name, self.process_group = ranks, name, process_group
        self.sequence = channel_sequence(name)
        self.buffers = StagingBuffers()
        self.header = NO_HEADER  # of the current request
        self.pairs: set[tuple[str, str]] = set()  # of successive requests
        self.need: Need | None = None  # of a collective of the process group
        self.peer: int | None = None  # that a message of a collective waits for
        self.is_from_all = False  # whether that collective needs the requests of all ranks
        self.any_receives: set[Any] = set()  # ends of receives from any rank that wait

    @property
    def torch_group(self) -> Any:
        """The process group of torch.distributed; None if it is destroyed."""
        return self.process_group or dist.group.WORLD

    def find_need(self) -> Need | None:
        """Return the request of a peer that the current collective waits for."""
        peer = self.peer
        if peer is None:
            return self.need
        return Need(peer, self.sequence, self.header.number, is_for_all=self.is_from_all)

    def execute(self, request: Collective, caller: str, *, is_started: bool = False) -> Any:
        """Execute a request together with the other ranks, and return its answer.

        Args:
            request: the same on all ranks.
            caller: the caller; empty for none.
            is_started: whether this channel's thread executes it.
        """
        ranks, kind = self.ranks, request.name
        request.check(ranks.world_size)
        if ranks.is_nccl(request):
            if not self.name:
                # other channels record no NCCL requests, since the order of threads may differ;
                # the digest of this one is part of later headers
                ranks.log.record(self.sequence, request, caller)
            return self.start_nccl(request)()
        ranks.ledger.count(kind)
        before = self.header.words
        self.header = ranks.log.record(self.sequence, request, caller)
        pair = before, self.header.words
        is_checked = pair not in self.pairs or self.header.number % CHECK_EVERY == 0
        if len(self.pairs) >= PAIRS_KEPT:
            self.pairs.clear()
        self.pairs.add(pair)
        is_on_gpu = request.is_on_gpu
        staged = request.copy_to_host(self.buffers.copy_to_host) if is_on_gpu else request
        if ranks.world_size > 1 and request.is_builtin(is_started=is_started):
            answer = self._run_builtin(staged, is_checked=is_checked)
        else:
            algorithm = staged.messages(ranks.rank, ranks.world_size, is_builtin=False)
            answer = self._run_messages(algorithm, kind, is_from_all=request.is_from_all)
        if is_on_gpu:
            answer = request.copy_answer(answer)
        self.buffers.take_back()
        return answer

    def check_agreement(self, words: str, caller: str) -> None:
        """Wait until all ranks have made the same call, described by `words`, with a barrier."""
        self.header = self.ranks.log.record(self.sequence, words, caller)
        self._run_barrier()

    def _run_barrier(self) -> None:
        """Run a barrier, whose messages have the header of the current request.

        A gather of one byte from each rank takes ⌈log2 W⌉ rounds, as a dissemination barrier does.
        """
        token = torch.zeros(1, dtype=torch.uint8)
        algorithm = doubling_gather(token, self.ranks.rank, self.ranks.world_size)
        self._run_messages(algorithm, "", is_from_all=True)

    def _run_messages(self, algorithm: Algorithm[Any], kind: str, *, is_from_all: bool) -> Any:
        """Run a collective by its messages, and return its answer.

        Small collectives spend their time here, so this function calls torch.distributed's process
        group directly, and has no function of its own for a message.

        Args:
            algorithm: yields `Scratch`, `Send` and `Receive`, and `Start` and `Wait` of these two.
            kind: the kind of request that the ledger counts the messages for; empty for none.
            is_from_all: see `Collective`; a rank that has not made the request may then be another
                one than the rank of the message.

        Raises:
            ConnectionBroken: a connection broke, or a message took longer than the group's limit.
        """
        self.is_from_all, header, buffers = is_from_all, self.header, self.buffers
        process_group: Any = self.process_group or dist.group.WORLD
        limit = timedelta(seconds=self.ranks.timeout_s)
        tags: dict[int, int] = {}
        num_sent = bytes_sent = 0
        answer: Any = None
        step: Any
        values: Any
        try:
            while True:
                try:
                    step = algorithm.send(answer)
                except StopIteration as stop:
                    return stop.value
                step_type = type(step)
                if step_type is Wait:
                    work, self.peer, answer = step.pending
                elif step_type is Scratch:
                    answer = buffers.lend(step.values)
                    continue
                else:
                    is_message = step_type is Send or step_type is Receive
                    message = step if is_message else step.request
                    values, peer = message.values, message.peer
                    num_bytes = values.nbytes
                    tag = tags.get(num_bytes)
                    if tag is None:
                        tag = tags[num_bytes] = message_tag(header, num_bytes)
                    try:
                        if type(message) is Send:
                            work = process_group.send([values], peer, tag)
                            num_sent += 1
                            bytes_sent += num_bytes
                            values = None
                        else:
                            work = process_group.recv([values], peer, tag)
                    except RuntimeError as error:
                        raise ConnectionBroken from error
                    if not is_message:
                        answer = work, peer, values
                        continue
                    self.peer, answer = peer, values
                try:
                    work.wait(limit)
                except RuntimeError as error:
                    raise ConnectionBroken from error
        finally:
            self.peer = None
            if kind:
                self.ranks.ledger.add(kind, bytes_sent, num_sent)

    def _run_builtin(self, request: Collective, *, is_checked: bool) -> Any:
        """Execute `request` with the process group's own collective, which has no headers.

        If `is_checked`, a barrier, whose messages have headers, precedes it: if the request follows
        the previous one for the first time on this channel, and for one of `CHECK_EVERY` requests.
        If one rank waits in the barrier and another in a collective, their requests are compared.
        A mismatch elsewhere starts different gloo collectives, which may end a process or compute a
        wrong result; a header shows it fewer than `CHECK_EVERY` requests later.
        """
        ranks = self.ranks
        if is_checked:
            self._run_barrier()
        peer = (ranks.rank + 1) % ranks.world_size
        self.need = Need(peer, self.sequence, self.header.number, is_for_all=True)
        answer = self._start_builtin(request, ranks.timeout_s)()
        self.need = None
        return answer

    def start_nccl(self, request: Collective) -> Callable[[], Any]:
        """Start a collective of NCCL; return a function that waits for its answer."""
        self.ranks.ledger.count(request.name)
        return self._start_builtin(request, None)

    def _start_builtin(self, request: Collective, limit_s: float | None) -> Callable[[], Any]:
        """Start the process group's own collective; see `start_nccl`."""
        ranks = self.ranks
        sent_bytes = round(request.sent_bytes(ranks.rank, ranks.world_size))
        ranks.ledger.add(request.name, sent_bytes, 0)
        with network():
            work, finish = _BUILTIN[type(request)](request, self)

        def wait() -> Any:
            if work is not None:
                wait_for_work(work, limit_s)
            return finish()

        return wait

    def abort(self) -> None:
        """End all waits over the connections of the process group."""
        process_group = self.torch_group
        if process_group is None:
            return
        # ValueError: it is being destroyed
        with suppress(RuntimeError, ValueError):
            # gloo closes all connections when a wait times out, and has no other call to do so
            peer = (self.ranks.rank + 1) % self.ranks.world_size
            work: Any = process_group.recv([torch.empty(1)], peer, ABORT_TAG)
            work.wait(timedelta(milliseconds=1))


# the process group's own collectives, as functions that start one, and return its work and a
# function that returns the answer after the work has ended


def _start_all_reduce(request: AllReduce, on: Channel) -> tuple[Any, Callable[[], Tensor]]:
    work = dist.all_reduce(request.values.view(-1), group=on.process_group, async_op=True)
    return work, lambda: request.finish(on.ranks.world_size)


def _start_broadcast(request: Broadcast, on: Channel) -> tuple[Any, Callable[[], Tensor]]:
    flat, root = as_bytes(request.values), on.ranks.ranks[request.root]
    work = dist.broadcast(flat, root, group=on.process_group, async_op=True)
    return work, lambda: request.copy_back(flat)


def _start_all_gather(request: AllGather, on: Channel) -> tuple[Any, Callable[[], Tensor]]:
    values, world_size = as_bytes(request.values), on.ranks.world_size
    rows = values.new_empty(world_size * len(values))
    work = _all_gather(rows, values, group=on.process_group, async_op=True)
    shape = world_size, *request.values.shape
    return work, lambda: from_bytes(rows, request.values, *shape)


def _start_reduce_scatter(request: ReduceScatter, on: Channel) -> tuple[Any, Callable[[], Tensor]]:
    share = request.values.new_empty(request.values.numel() // on.ranks.world_size)
    values = request.values.view(-1)
    work = _reduce_scatter(share, values, group=on.process_group, async_op=True)
    return work, lambda: share


def _start_all_to_all(request: AllToAll, on: Channel) -> tuple[Any, Callable[[], list[Tensor]]]:
    """Start the all-to-all of the process group, after that of the lengths if need be."""
    parts, dtype = [as_bytes(part) for part in request.parts], request.parts[0].dtype
    counts = request.counts
    if counts is None:
        # host tensors, so gloo exchanges them without a device synchronization
        lengths = torch.tensor([len(part) for part in request.parts])
        received_lengths = torch.empty_like(lengths)
        dist.all_to_all_single(received_lengths, lengths, group=on.process_group)
        counts = received_lengths.tolist()
    sizes = [count * dtype.itemsize for count in counts]
    received = parts[0].new_empty(sum(sizes))
    own = [len(part) for part in parts]
    work = dist.all_to_all_single(
        received, torch.cat(parts), sizes, own, group=on.process_group, async_op=True
    )
    # the parts have one dtype, so they are aligned for the view
    return work, lambda: [part.view(dtype) for part in received.split(sizes)]


def _start_send_receive(request: SendReceive, on: Channel) -> tuple[Any, Callable[[], Tensor]]:
    """Start a send and a receive of the process group; nothing if the peer is this rank."""
    other, values = torch.empty_like(request.values), request.values
    if request.peer == on.ranks.rank:
        return None, lambda: other.copy_(values)
    peer = on.ranks.ranks[request.peer]
    both = (dist.isend, values), (dist.irecv, other)
    operations = [dist.P2POp(start, tensor, peer, on.process_group) for start, tensor in both]
    return dist.batch_isend_irecv(operations)[-1], lambda: other


_BUILTIN: dict[type[Collective], Callable[[Any, Channel], tuple[Any, Callable[[], Any]]]] = {
    Sum: _start_all_reduce,
    Mean: _start_all_reduce,
    Broadcast: _start_broadcast,
    AllGather: _start_all_gather,
    ReduceScatter: _start_reduce_scatter,
    AllToAll: _start_all_to_all,
    SendReceive: _start_send_receive,
}
