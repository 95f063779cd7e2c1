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

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange import Abandon, Algorithm, First, Receive, Send, Start, Sum, Wait
from gcnzc.exchange.topology import Edge, color_edges, neighbors
from gcnzc.optim.strategy.gossip_graph import GossipGraph
from gcnzc.optim.strategy.overlapped_control import OverlappedControl
from gcnzc.optim.strategy.recipe import Exchange
from gcnzc.optim.strategy.strategy import Strategy
from gcnzc.optim.strategy.two_variables import TwoVariables

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


class OverlappedPairs(Exchange):
    """Exchanges with neighbours in a graph, overlapped with the steps; see the module docstring.

    The tensors of messages are on the host. If the vector of one rank is not finite, that rank
    takes the vector of the other. A lost neighbour raises `WorkerLost` in a step of this rank.

    Args:
        graph: the graph.
        update: the vectors of this rank.
    """

    def __init__(self, graph: GossipGraph, update: TwoVariables) -> None:
        self.graph, self.update = graph, update
        self.credit = 0.0
        """exchanges that this rank may take part in: each step adds `rate`, and each offer or
        answer subtracts 1"""
        self.num_exchanges = 0
        """the number of exchanges that this rank has applied"""
        self.generation = 0
        """the number of loaded states"""
        self.neighbors: list[Neighbor] = []
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
        for each in self.neighbors:
            each.receive = each.sent = each.send = None
            each.is_unanswered = each.is_deferred = each.is_closed = False

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

    def attach(self, strategy: Strategy) -> None:
        """See `RecipePart`."""
        super().attach(strategy)
        group, flat_params = strategy.group, strategy.flat_params
        edges = self.graph.edges(group.world_size)
        order = color_ranks(group.world_size, edges)
        matchings = color_edges(edges)
        self.num_channels = len(matchings)
        for number, matching in enumerate(matchings):
            for pair in matching:
                if group.rank in pair:
                    peer = sum(pair) - group.rank
                    received = torch.zeros(
                        flat_params.num_elements + EXTRAS, dtype=flat_params.dtype
                    )
                    makes_offers = order[group.rank] < order[peer]
                    self.neighbors.append(Neighbor(peer, number, makes_offers, received))

    def describe(self) -> str:
        """See `Exchange`."""
        return f"topology={self.graph.topology!r}, asynchronous=True"

    def _channel(self, number: int) -> str:
        return f"{self.strategy.namespace}/gossip {number}"

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

    def mean(self, values: Tensor) -> Algorithm[Tensor | None]:
        """See `Exchange`: make an offer; None, since the answer is applied when it arrives."""
        each = self._next_neighbor()
        assert each is not None, "the policy has called `can_offer`"
        self.turn = (self.neighbors.index(each) + 1) % len(self.neighbors)
        yield from self._send(each, self._message(values))
        each.is_unanswered = True
        self.num_unanswered += 1
        self.num_overlapping += 1
        self.credit -= 1
        return None

    def process_messages(self) -> Algorithm[None]:
        """Apply the answers and answer the offers that have arrived; does not wait."""
        while (each := (yield from self._first([], 0.0))) is not None:
            yield from self._process(each)

    def pause_exchanges(self) -> Algorithm[None]:
        """See `RecipePart`; processes messages until all ranks have called this method."""
        yield from self.open()
        self.update.observe()
        control = self.strategy.control
        assert isinstance(control, OverlappedControl), "the recipe's control is overlapped"
        others = yield Start(Sum(torch.zeros(1)), control.channel)
        while (each := (yield from self._first([others], None))) is not None:
            yield from self._process(each)
        yield Wait(others)
        self.update.write()

    def apply_pending(self) -> Algorithm[None]:
        """See `RecipePart`: end the exchanges with all ranks, until the next step.

        A rank that has all answers sends its neighbours the message that it makes no more offers,
        and waits for that message from each of them.
        """
        yield from self.open()
        self.update.observe()
        while self.num_unanswered:
            yield from self._process((yield from self._first([], None)))
        for each in self.neighbors:
            message = self._message(self.update.x)
            message[-EXTRAS] = MessageKind.CLOSED
            yield from self._send(each, message)
        while not all(each.is_closed for each in self.neighbors):
            yield from self._process((yield from self._first([], None)))
        for each in self.neighbors:
            yield Wait(each.send)
            each.send, each.sent, each.is_closed = None, None, False
        self.update.write()

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

    def _message(self, values: Tensor) -> Tensor:
        """Return a message (n + `EXTRAS`,) on the host with the first n elements of `values`."""
        count = self.update.num_elements
        message = torch.empty_like(self.neighbors[0].received)
        message[:count] = values[:count]
        message[count] = MessageKind.USABLE if self.update.is_usable() else MessageKind.UNUSABLE
        message[count + 1] = self.generation
        return message

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
        answer = self._message(self.update.x)
        if int(each.received[-1]) != self.generation:
            answer[-EXTRAS] = MessageKind.VOID
        yield from self._send(each, answer)
        self._apply(each)
        self.credit -= 1
        self.num_overlapping += self.num_unanswered > 0
        yield from self._start_receive(each)

    def _apply(self, each: Neighbor) -> None:
        """Apply an exchange of the last sent and received messages."""
        assert each.sent is not None, "it is sent before the exchange is applied"
        own, other = each.sent, each.received
        kinds = [int(message[-EXTRAS]) for message in (own, other)]
        if MessageKind.VOID in kinds or own[-1] != other[-1] or own[-1] != self.generation:
            return
        self.num_exchanges += 1
        device, count = self.update.x.device, self.update.num_elements
        if all(kind == MessageKind.USABLE for kind in kinds):
            self.update.exchange(own[:count].to(device), other[:count].to(device))
            return
        for rank, kind in zip((self.strategy.group.rank, each.peer), kinds, strict=True):
            if kind != MessageKind.USABLE:
                self.strategy.record_drop(
                    f"the parameters of rank {rank} are not finite or too large"
                )
        # the parameters of this rank may have been replaced since the offer
        if kinds[1] == MessageKind.USABLE and not self.update.is_usable():
            self.update.replace(other[:count].to(device))


def color_ranks(world_size: int, edges: Sequence[Edge]) -> list[int]:
    """Return a colour (from 0 on) for each rank, different from those of its neighbours."""
    adjacent = neighbors(world_size, edges)
    colors: list[int] = []
    for rank in range(world_size):
        used = {colors[peer] for peer in adjacent[rank] if peer < rank}
        colors.append(next(color for color in range(world_size) if color not in used))
    return colors
