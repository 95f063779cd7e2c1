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
and one of the highest colour never waits. Steps do not wait at all.

Notation: W ranks, n elements of the flat parameter vector.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Abandon, Algorithm, First, Receive, Send, Start, Sum, Wait
from gcnzc.exchange.topology import Edge, color_edges, neighbors
from gcnzc.kernels.finite import can_be_squared
from gcnzc.optim.control import namespace
from gcnzc.optim.gossip import NOT_USABLE, Gossip

MAX_OVERLAPPING = 2
"""the largest number of overlapping exchanges of a rank"""
EXTRAS = 2
"""how many numbers follow the vector of a message: its `MessageKind`, and the number of states that
the sender has loaded"""


class MessageKind(IntEnum):
    """What a message means."""

    CLOSED = 0
    """the sender makes no more offers"""
    VOID = 1
    """the answer to an offer from before a state was loaded, which both ranks ignore"""
    UNUSABLE = 2
    """an offer or answer whose vector is not finite or too large"""
    USABLE = 3
    """an offer or answer"""


@dataclass(eq=False)
class Neighbor:
    """The messages with one neighbour."""

    peer: int
    number: int
    """the number of the channel; a rank has at most one neighbour on each channel, so receives do
    not wait for each other"""
    makes_offers: bool
    """whether this rank makes the offers; otherwise it answers them"""
    received: Tensor
    """(n + `EXTRAS`,) on the host: the last message"""
    receive: Any = None
    """the handle of the receive; None if there is none, or after it has ended"""
    sent: Tensor | None = None
    """the last message to the neighbour"""
    send: Any = None
    """the handle of the send of `sent`"""
    is_unanswered: bool = False
    """whether an offer has no answer yet"""
    is_deferred: bool = False
    """whether `received` is an offer that this rank has not answered yet"""
    is_closed: bool = False
    """whether the neighbour makes no more offers"""


class OverlappedGossip(Gossip):
    """The base class of gossip methods whose exchanges may overlap with the steps, as `Offers`."""

    x: Tensor
    """(n,): the parameters, which exchanges change"""
    num_pairs: int
    """the number of exchanges with a peer that this rank has applied"""
    credit: float
    """exchanges that this rank may take part in; each offer or answer subtracts 1"""

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


class Offers:
    """Exchanges with neighbours in a graph, overlapped with the steps; see the module docstring.

    The tensors of messages are on the host. If the vector of one rank is not finite, that rank
    takes the vector of the other. A lost neighbour raises `WorkerLost` in a step of this rank.

    Args:
        method: the optimizer, which applies the exchanges.
        edges: the graph.
    """

    def __init__(self, method: OverlappedGossip, edges: Sequence[Edge]) -> None:
        self.method = method
        self.generation = 0
        """the number of loaded states"""
        rank, flat = method.group.rank, method.flat
        colors, matchings = color_ranks(method.group.world_size, edges), color_edges(edges)
        self.num_channels = len(matchings)
        self.neighbors: list[Neighbor] = []
        for number, matching in enumerate(matchings):
            for pair in (each for each in matching if rank in each):
                peer = sum(pair) - rank
                received = torch.zeros(flat.num_elements + EXTRAS, dtype=flat.dtype)
                makes_offers = colors[rank] < colors[peer]
                self.neighbors.append(Neighbor(peer, number, makes_offers, received))
        self._forget_messages()

    def _forget_messages(self) -> None:
        self.is_open = False
        self.num_unanswered = 0
        """the number of offers without an answer"""
        self.num_overlapping = 0
        """the number of overlapping exchanges: the offers of this rank without an answer, and the
        answers that it has sent meanwhile"""
        self.turn = 0
        """the index of the next neighbour that gets an offer"""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without messages, which belong to this optimizer, not to a copy."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.neighbors = [
            Neighbor(each.peer, each.number, each.makes_offers, each.received.clone())
            for each in self.neighbors
        ]
        other._forget_messages()
        return vars(other)

    def _channel(self, number: int) -> str:
        return f"{namespace(self.method)}/gossip {number}"

    def open(self) -> Algorithm[None]:
        """Open the channels, and start the receives that are missing."""
        if not self.is_open:
            # all ranks open all channels, in the same order
            for number in range(self.num_channels):
                yield Wait((yield Start(Sum(torch.zeros(1)), self._channel(number))))
            self.is_open = True
        for each in self.neighbors:
            if each.receive is None and not each.is_deferred and not each.is_closed:
                yield from self._start_receive(each)

    def can_offer(self) -> bool:
        """Whether this rank may make an offer now."""
        return self.num_overlapping < MAX_OVERLAPPING and self._next_neighbor() is not None

    def make_offer(self) -> Algorithm[None]:
        """Make an offer to the next neighbour; the answer is applied when it arrives."""
        each = self._next_neighbor()
        assert each is not None, "the caller has called `can_offer`"
        self.turn = (self.neighbors.index(each) + 1) % len(self.neighbors)
        yield from self._send(each, self._message())
        each.is_unanswered = True
        self.num_unanswered += 1
        self.num_overlapping += 1
        self.method.credit -= 1

    def process_messages(self) -> Algorithm[None]:
        """Apply the answers and answer the offers that have arrived; does not wait."""
        while (each := (yield from self._first([], 0.0))) is not None:
            yield from self._process(each)

    def process_until(self, others: Any) -> Algorithm[None]:
        """Process messages until another request has ended."""
        while (each := (yield from self._first([others], None))) is not None:
            yield from self._process(each)
        yield Wait(others)

    def close(self) -> Algorithm[None]:
        """End the exchanges with all ranks, until the next step.

        A rank that has all answers sends its neighbours the message that it makes no more offers,
        and waits for that message from each of them.
        """
        while self.num_unanswered:
            yield from self._process((yield from self._first([], None)))
        for each in self.neighbors:
            yield from self._send(each, self._message(MessageKind.CLOSED))
        while not all(each.is_closed for each in self.neighbors):
            yield from self._process((yield from self._first([], None)))
        for each in self.neighbors:
            yield Wait(each.send)
            each.send, each.sent, each.is_closed = None, None, False

    def _first(self, others: Sequence[Any], seconds: float | None) -> Algorithm[Any]:
        """Wait for the first message, or for one of the other handles.

        Returns:
            The neighbour whose message has arrived; None if another handle or the time has ended.
        """
        waiting = [each for each in self.neighbors if each.receive is not None]
        handles = [*others, *(each.receive for each in waiting)]
        if not handles:
            return None
        index = yield First(handles, seconds)
        return None if index is None or index < len(others) else waiting[index - len(others)]

    def _next_neighbor(self) -> Neighbor | None:
        """Return the next neighbour that can get an offer; None if there is none."""
        turns = [*self.neighbors[self.turn :], *self.neighbors[: self.turn]]
        return next((each for each in turns if each.makes_offers and not each.is_unanswered), None)

    def _message(self, kind: MessageKind | None = None) -> Tensor:
        """Return a message (n + `EXTRAS`,) on the host with the parameters of this rank."""
        if kind is None:
            kind = MessageKind.USABLE if self._is_usable() else MessageKind.UNUSABLE
        message = torch.empty_like(self.neighbors[0].received)
        message[:-EXTRAS] = self.method.x
        message[-EXTRAS], message[-1] = kind, self.generation
        return message

    def _is_usable(self) -> bool:
        return bool(can_be_squared(self.method.x))

    def _start_receive(self, each: Neighbor) -> Algorithm[None]:
        each.receive = yield Start(Receive(each.received, each.peer), self._channel(each.number))
        # the receive may still be pending at the end of this step, or of the run
        yield Abandon(each.receive)

    def _send(self, each: Neighbor, message: Tensor) -> Algorithm[None]:
        if each.send is not None:
            # this wait is short: the neighbour has received the message, or is about to
            yield Wait(each.send)
        each.sent = message
        each.send = yield Start(Send(message, each.peer), self._channel(each.number))

    def _process(self, each: Neighbor) -> Algorithm[None]:
        """Process a message that has arrived."""
        yield Wait(each.receive)
        each.receive = None
        if int(each.received[-EXTRAS]) == MessageKind.CLOSED:
            each.is_closed = True
            if each.is_unanswered:
                yield from self._start_receive(each)
            return
        if each.makes_offers:
            yield from self._apply_answer(each)
        elif self.num_unanswered and self.num_overlapping >= MAX_OVERLAPPING:
            each.is_deferred = True
        else:
            yield from self._answer(each)

    def _apply_answer(self, each: Neighbor) -> Algorithm[None]:
        each.is_unanswered = False
        self.num_unanswered -= 1
        self._apply(each)
        yield Wait(each.send)
        each.send = each.sent = None
        if not each.is_closed:
            yield from self._start_receive(each)
        if self.num_unanswered:
            return
        self.num_overlapping = 0
        for other in self.neighbors:
            if other.is_deferred:
                other.is_deferred = False
                yield from self._answer(other)

    def _answer(self, each: Neighbor) -> Algorithm[None]:
        is_void = int(each.received[-1]) != self.generation
        yield from self._send(each, self._message(MessageKind.VOID if is_void else None))
        self._apply(each)
        self.method.credit -= 1
        self.num_overlapping += self.num_unanswered > 0
        yield from self._start_receive(each)

    def _apply(self, each: Neighbor) -> None:
        """Apply an exchange of the last sent and received messages."""
        assert each.sent is not None, "it is sent before the exchange is applied"
        own, other = each.sent, each.received
        kinds = [int(message[-EXTRAS]) for message in (own, other)]
        if MessageKind.VOID in kinds or own[-1] != other[-1] or own[-1] != self.generation:
            return
        self.method.num_pairs += 1
        device = self.method.x.device
        if all(kind == MessageKind.USABLE for kind in kinds):
            self.method.exchange_with(own[:-EXTRAS].to(device), other[:-EXTRAS].to(device))
            return
        for rank, kind in zip((self.method.group.rank, each.peer), kinds, strict=True):
            if kind != MessageKind.USABLE:
                self.method.note_drop(f"the parameters of rank {rank} are {NOT_USABLE}")
        # the parameters of this rank may have been replaced since the offer
        if kinds[1] == MessageKind.USABLE and not self._is_usable():
            self.method.replace(other[:-EXTRAS].to(device))


def color_ranks(world_size: int, edges: Sequence[Edge]) -> list[int]:
    """Return a colour (from 0 on) for each rank, different from those of its neighbours."""
    adjacent = neighbors(world_size, edges)
    colors: list[int] = []
    for rank in range(world_size):
        used = {colors[peer] for peer in adjacent[rank] if peer < rank}
        colors.append(next(color for color in range(world_size) if color not in used))
    return colors
