"""Send and receive messages over a process group of torch.distributed."""

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gcnzc.exchange.agreement import ABORT_TAG, Header, Need, message_tag
from gcnzc.exchange.collectives.messages import as_bytes
from gcnzc.exchange.errors import ConnectionBroken
from gcnzc.exchange.message_checks import check_message
from gcnzc.exchange.requests import Algorithm, Message, Receive, ReceiveAny, Scratch, Send, Wait
from gcnzc.exchange.started_requests import PendingAny, PendingMessage, network

if TYPE_CHECKING:
    from gcnzc.exchange.process_group import Channel


class Messenger:
    """Executes the messages of a channel, which collectives or algorithms request.

    Args:
        channel: the channel, with its process group and buffers.
    """

    def __init__(self, channel: "Channel") -> None:
        self.channel, self.group = channel, channel.group
        self.peer: int | None = None
        """the rank that a message of a collective waits for"""
        self.sequence, self.header = "", Header(0, 0, "")
        """the sequence and the header of the collective that runs"""
        self.is_from_all = False
        self.any_receives: set[PendingAny] = set()
        """the receives from any rank that have not ended"""

    @property
    def process_group(self) -> Any:
        """The process group of torch.distributed; its ranks are those of the group."""
        return self.channel.process_group or dist.group.WORLD

    def find_need(self) -> Need | None:
        """Return the request of a peer that a message of a collective waits for."""
        peer = self.peer
        if peer is None:
            return None
        return Need(peer, self.sequence, self.header.number, is_for_all=self.is_from_all)

    def run(
        self,
        algorithm: Algorithm[Any],
        kind: str,
        sequence: str,
        header: Header,
        *,
        is_from_all: bool = False,
    ) -> Any:
        """Run a collective by its messages, and return its answer.

        Small collectives spend their time here, so this function calls torch.distributed's process
        group directly, and has no function of its own for a message.

        Args:
            algorithm: yields `Scratch`, `Send` and `Receive`, and `Start` and `Wait` of these two.
            kind: the kind of request that the ledger counts the messages for; empty for none.
            sequence: the name of the sequence of requests that the collective belongs to.
            header: the header of the collective.
            is_from_all: see `Collective`; a rank that has not made the request may then be another
                one than the rank of the message.

        Raises:
            ConnectionBroken: a connection broke, or a message took longer than the group's limit.
        """
        self.sequence, self.header, self.is_from_all = sequence, header, is_from_all
        process_group, buffers = self.process_group, self.channel.buffers
        limit = timedelta(seconds=self.group.timeout_s)
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
                self.group.ledger.add(kind, bytes_sent, num_sent)

    def start(self, request: Message, caller: str) -> PendingMessage:
        """Start a message that an algorithm has requested, rather than one of a collective.

        Raises:
            ValueError: see `check_message`; or a `ReceiveAny` over NCCL has a tensor on a GPU.
        """
        group, buffers = self.group, self.channel.buffers
        if group.backend == "nccl" and request.is_on_gpu and isinstance(request, ReceiveAny):
            raise ValueError(
                f"{request.describe()} over NCCL has a tensor on a GPU\n\n"
                "hint: receive into a tensor on the host, and send from one"
            )
        if group.backend == "nccl" or not request.is_on_gpu:
            return self._start(request, caller)
        host = buffers.lend(request.values, pinned=True, is_kept=True)
        work = self._start(request.copy_to_host(host), caller)
        finish = work.finish

        def copy_and_finish() -> Any:
            answer = request.copy_answer(host, finish())
            buffers.give_back(host, pinned=True)
            return answer

        work.finish = copy_and_finish
        return work

    def _start(self, request: Message, caller: str) -> PendingMessage:
        if isinstance(request, ReceiveAny):
            return self.start_any(request, caller)
        assert isinstance(request, Send | Receive), "there are no other messages"
        group, name = self.group, self.channel.name
        check_message(request, group.rank, group.world_size)
        sequence = request.sequence(group.rank, name, caller)
        header = group.log.record_message(request, caller, name)
        data, values = as_bytes(request.values), request.values
        tag = message_tag(header, len(data))
        need = Need(request.peer, sequence, header.number)
        is_nccl = group.backend == "nccl" and request.is_on_gpu
        limit_s = None if is_nccl else group.timeout_s
        process_group, peer = self.channel.process_group, group.ranks[request.peer]
        with network():
            if isinstance(request, Send):
                group.ledger.add("Send", len(data))
                work = dist.isend(data, peer, process_group, tag)
                return PendingMessage(work, lambda: None, data, need, limit_s)
            work = dist.irecv(data, peer, process_group, tag)
            return PendingMessage(work, lambda: values, data, need, limit_s)

    def start_any(self, request: ReceiveAny, caller: str) -> PendingAny:
        """Start a receive from any rank, whose values are on the host.

        Raises:
            ValueError: see `ReceiveAny.check`.
        """
        request.check()
        group, name = self.group, self.channel.name
        if group.world_size == 1:
            raise ValueError(
                f"{request.describe()} on rank 0 of 1\n\nhint: there is no other rank to send it"
            )
        log, values, data = group.log, request.values, as_bytes(request.values)
        header = log.describe_any(request, caller)

        def find_need() -> Need:
            """Return the next message with the tag of each rank."""
            sequences = (
                (peer, request.name_sequence(peer, group.rank, name, caller))
                for peer in range(group.world_size)
                if peer != group.rank
            )
            needs = tuple((peer, each, log.count(each) + 1) for peer, each in sequences)
            return Need(*needs[0], alternatives=needs)

        def finish(source: int) -> tuple[Any, int]:
            self.any_receives.discard(work)
            sequence = request.name_sequence(source, group.rank, name, caller)
            log.record(sequence, header.words, is_ordered=False)
            return values, source

        with network():
            receive = self.process_group.recv_anysource([data], message_tag(header, len(data)))
        work = PendingAny(receive, finish, data, find_need, group.timeout_s)
        self.any_receives.add(work)
        return work

    def abort(self) -> None:
        """End all waits over the connections of the process group."""
        for each in list(self.any_receives):
            each.abort()
        process_group = self.process_group
        if process_group is None:
            # it is destroyed already
            return
        # ValueError: it is being destroyed
        with suppress(RuntimeError, ValueError):
            # gloo closes all connections when a wait times out, and has no other call to do so
            peer = (self.group.rank + 1) % self.group.world_size
            work: Any = process_group.recv([torch.empty(1)], peer, ABORT_TAG)
            work.wait(timedelta(milliseconds=1))
