"""Gossip that is overlapped with the steps, so that no rank waits for a slow one.

Of two neighbours in the graph, one makes offers: it sends its parameters at the end of a step. The
other one answers with its own parameters at the end of one of its steps. Both apply the exchange
with these two vectors, so the sum of their parameters is preserved. The rank that made the offer
applies it when the answer has arrived, at least one of its steps later.

A rank takes part in at most two overlapping exchanges: its offers without an answer, and the offers
that it answers before it has received these answers. Each exchange subtracts half of the rank's
vector, so the weights of the average are not negative. A rank with two overlapping exchanges
answers further offers after its own have been answered.

This cannot deadlock. Each rank has a colour, different from those of its neighbours, and offers go
from lower to higher colours. So a rank that waits for an answer waits for one of a higher colour,
and one of the highest colour never waits. Steps do not wait for answers. A rank that waits for a
sum of all ranks processes messages meanwhile.

Notation: W ranks, n elements of the flat parameter vector.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Abandon, Algorithm, First, Receive, Send, Start, Sum, Wait
from gcnzc.exchange.topology import Edge, color_edges, neighbors
from gcnzc.kernels.finite import can_be_squared
from gcnzc.optim.control import namespace
from gcnzc.optim.gossip import NOT_USABLE, Gossip
from gcnzc.optim.state import OWN, scalar

MAX_OVERLAPPING = 2
"""the largest number of overlapping exchanges of a rank"""
EXTRAS = 2
"""how many numbers follow the vector of a message: its kind, and how many states its sender has
loaded. Both ranks ignore an offer whose answer has another number of loaded states"""
CLOSED, UNUSABLE, USABLE = range(3)
"""kinds of messages: the sender makes no more offers; an offer or answer whose vector is not finite
or too large; another offer or answer"""


@dataclass(eq=False)
class Neighbor:
    """The messages with one neighbour."""

    peer: int
    channel: str
    """the name of the channel; a rank has at most one neighbour on each, so receives do not wait
    for each other"""
    makes_offers: bool
    """whether this rank makes the offers; otherwise it answers them"""
    received: Tensor
    """(n + `EXTRAS`,) on the host: the last message"""
    receive: Any = None
    """the handle of the receive of an offer, or of the answer to an offer; None if there is none"""
    sent: Tensor | None = None
    """the last message to the neighbour"""
    send: Any = None
    """the handle of the send of `sent`"""
    is_deferred: bool = False
    """whether `received` is an offer that this rank has not answered yet"""


class OverlappedGossip(Gossip):
    """The base class of gossip methods whose exchanges may overlap with the steps.

    The tensors of messages are on the host. If the vector of one rank is not finite, that rank
    takes the vector of the other. A lost neighbour raises `WorkerLost` in a step of this rank.
    """

    x = torch.empty(0)
    """(n,): the parameters, which exchanges change; empty before the broadcast"""
    num_pairs: int = scalar(**OWN)
    """the number of exchanges with a peer that this rank has applied"""
    credit: float = scalar(0.0, **OWN)
    """exchanges that this rank may take part in; each offer or answer subtracts 1"""
    edges: Sequence[Edge]
    """the graph"""
    is_open: bool
    """whether the channels are open"""
    neighbors: list[Neighbor]
    """the neighbours; none until the channels are open"""
    num_loads = 0
    """the number of loaded states"""
    num_unanswered: int
    """the number of offers without an answer"""
    num_overlapping: int
    """the number of overlapping exchanges: the offers of this rank without an answer, and the
    answers that it has sent meanwhile"""
    turn: int
    """the index of the next neighbour that gets an offer"""

    def outside(self) -> dict[str, Any]:
        """See `PartialExchanges`."""
        counts = dict.fromkeys(("num_unanswered", "num_overlapping", "turn"), 0)
        return {**super().outside(), "is_open": False, "neighbors": [], **counts}

    @abstractmethod
    def exchange_with(self, own: Tensor, other: Tensor) -> None:
        """Apply an exchange with another rank.

        Args:
            own: (n,), the parameters of this rank that the other rank has received; older than `x`.
            other: (n,), the parameters of the other rank in the same exchange.
        """

    @abstractmethod
    def replace(self, other: Tensor) -> None:
        """Replace parameters that are not finite by those (n,) of another rank."""

    def open_channels(self) -> Algorithm[None]:
        """Open the channels, and start the receives of offers that are missing."""
        rank = self.group.rank
        if not self.is_open:
            colors = color_ranks(self.group.world_size, self.edges)
            # all ranks open all channels, in the same order
            for number, matching in enumerate(color_edges(self.edges)):
                channel = f"{namespace(self)}/gossip {number}"
                yield Wait((yield Start(Sum(torch.zeros(1)), channel)))
                for pair in (each for each in matching if rank in each):
                    peer = sum(pair) - rank
                    received = torch.zeros(self.flat.num_elements + EXTRAS, dtype=self.flat.dtype)
                    makes_offers = colors[rank] < colors[peer]
                    self.neighbors.append(Neighbor(peer, channel, makes_offers, received))
            self.is_open = True
        for each in self.neighbors:
            if each.receive is None and not each.makes_offers and not each.is_deferred:
                yield from self._start_receive(each)

    def make_offers(self, rate: float) -> Algorithm[None]:
        """Make offers to the neighbours in turn; the answers are applied when they arrive.

        Args:
            rate: the number of exchanges per step.
        """
        self.credit = min(max(self.credit, -MAX_OVERLAPPING) + rate, MAX_OVERLAPPING)
        while self.credit >= 0 and self.num_overlapping < MAX_OVERLAPPING:
            turns = [*self.neighbors[self.turn :], *self.neighbors[: self.turn]]
            ready = (each for each in turns if each.makes_offers and each.receive is None)
            if (each := next(ready, None)) is None:
                return
            self.turn = (self.neighbors.index(each) + 1) % len(self.neighbors)
            yield from self._send(each, self._message())
            yield from self._start_receive(each)
            self.num_exchanges += 1
            self.num_unanswered += 1
            self.num_overlapping += 1
            self.credit -= 1

    def process_messages(self) -> Algorithm[None]:
        """Apply the answers and answer the offers that have arrived; does not wait."""
        while (each := (yield from self._first([], 0.0))) is not None:
            yield from self._process(each)

    def wait_for_all(self, handle: Any) -> Algorithm[Any]:
        """See `PartialExchanges`: process messages until a request has ended."""
        while (each := (yield from self._first([handle], None))) is not None:
            yield from self._process(each)
        self.flat.write_parameters(self.x)
        return (yield Wait(handle))

    def close(self) -> Algorithm[None]:
        """End the exchanges with all ranks, until the next step.

        A rank that has all answers sends the message that it makes no more offers, and waits for
        that message from the neighbours that make offers to it.
        """
        while self.num_unanswered:
            yield from self._process((yield from self._first([], None)))
        for each in self.neighbors:
            if each.makes_offers:
                yield from self._send(each, self._message(CLOSED))
        while (each := (yield from self._first([], None))) is not None:
            yield from self._process(each)
        for each in self.neighbors:
            if each.send is not None:
                yield Wait(each.send)
                each.send = each.sent = None

    def _first(self, others: Sequence[Any], seconds: float | None) -> Algorithm[Any]:
        """Wait for the first message, or for one of the other handles.

        Returns:
            The neighbour whose message has arrived; None if another handle or the time has ended.
        """
        waiting = [each for each in self.neighbors if each.receive is not None]
        handles = [*others, *(each.receive for each in waiting)]
        index = (yield First(handles, seconds)) if handles else None
        return None if index is None or index < len(others) else waiting[index - len(others)]

    def _message(self, kind: int | None = None) -> Tensor:
        """Return a message (n + `EXTRAS`,) on the host with the parameters of this rank."""
        if kind is None:
            kind = USABLE if bool(can_be_squared(self.x)) else UNUSABLE
        extras = torch.tensor([kind, self.num_loads], dtype=self.x.dtype)
        return torch.cat([self.x.cpu(), extras])

    def _start_receive(self, each: Neighbor) -> Algorithm[None]:
        each.receive = yield Start(Receive(each.received, each.peer), each.channel)
        # the receive may still be pending at the end of this step, or of the run
        yield Abandon(each.receive)

    def _send(self, each: Neighbor, message: Tensor) -> Algorithm[None]:
        if each.send is not None:
            # this wait is short: the neighbour has received the message, or is about to
            yield Wait(each.send)
        each.sent = message
        each.send = yield Start(Send(message, each.peer), each.channel)

    def _process(self, each: Neighbor) -> Algorithm[None]:
        """Process a message that has arrived."""
        yield Wait(each.receive)
        each.receive = None
        if each.makes_offers:
            yield from self._process_answer(each)
        elif int(each.received[-EXTRAS]) == CLOSED:
            return
        elif self.num_unanswered and self.num_overlapping >= MAX_OVERLAPPING:
            each.is_deferred = True
        else:
            yield from self._answer(each)

    def _process_answer(self, each: Neighbor) -> Algorithm[None]:
        self.num_unanswered -= 1
        self._apply(each)
        yield Wait(each.send)
        each.send = each.sent = None
        if self.num_unanswered:
            return
        self.num_overlapping = 0
        for other in self.neighbors:
            if other.is_deferred:
                other.is_deferred = False
                yield from self._answer(other)

    def _answer(self, each: Neighbor) -> Algorithm[None]:
        yield from self._send(each, self._message())
        self._apply(each)
        self.credit -= 1
        self.num_overlapping += self.num_unanswered > 0
        yield from self._start_receive(each)

    def _apply(self, each: Neighbor) -> None:
        """Apply an exchange of the last sent and received messages."""
        assert each.sent is not None, "it is sent before the exchange is applied"
        sent, received = each.sent, each.received
        if not sent[-1] == received[-1] == self.num_loads:
            return
        self.num_pairs += 1
        own, other = (message[:-EXTRAS].to(self.x.device) for message in (sent, received))
        is_usable = [int(message[-EXTRAS]) == USABLE for message in (sent, received)]
        if all(is_usable):
            self.exchange_with(own, other)
        for rank, flag in zip((self.group.rank, each.peer), is_usable, strict=True):
            if not flag:
                self.note_drop(f"the parameters of rank {rank} are {NOT_USABLE}")
        # the parameters of this rank may have been replaced since the offer
        if is_usable == [False, True] and not bool(can_be_squared(self.x)):
            self.replace(other)


def color_ranks(world_size: int, edges: Sequence[Edge]) -> list[int]:
    """Return a colour (from 0 on) for each rank, different from those of its neighbours."""
    adjacent = neighbors(world_size, edges)
    colors: list[int] = []
    for rank in range(world_size):
        used = {colors[peer] for peer in adjacent[rank] if peer < rank}
        colors.append(next(color for color in range(world_size) if color not in used))
    return colors
