"""Simulated TCP connections that share links: fair rates, send buffers, crashes."""

import random

import pytest
import torch
from collective_sizes import WAYS, executed_by

from bench.network.shared_links import SharedLinks, TcpLink, tcp_link
from gcnzc.exchange import (
    AllToAll,
    Compute,
    Link,
    Now,
    Receive,
    Send,
    Start,
    Sum,
    Wait,
    lockstep,
)

RATE = 1e6
SHARED = TcpLink(RATE, in_bytes_per_s=RATE)


def simulate(ranks, link, links=None):
    return lockstep(ranks, SharedLinks(len(ranks), link, links))


def data(num_bytes):
    return torch.zeros(num_bytes, dtype=torch.uint8)


def send(peers, num_bytes):
    """Send to each peer at the same time, and return when each send ended."""
    pending = []
    for peer in peers:
        pending.append((yield Start(Send(data(num_bytes), peer))))
    times = []
    for each in pending:
        yield Wait(each)
        times.append((yield Now()))
    return times


def receive(peers, num_bytes, wait_s=0.0):
    """Receive from each peer, and return when each message arrived."""
    yield Compute(wait_s)
    pending = []
    for peer in peers:
        pending.append((yield Start(Receive(data(num_bytes), peer))))
    times = []
    for each in pending:
        yield Wait(each)
        times.append((yield Now()))
    return times


def test_messages_of_a_sender_share_its_link():
    ranks = [send([1, 2], 1000), receive([0], 1000), receive([0], 1000)]
    results = simulate(ranks, SHARED).results
    assert results == [pytest.approx([2e-3, 2e-3]), pytest.approx([2e-3]), pytest.approx([2e-3])]


def test_messages_to_a_receiver_share_its_link():
    ranks = [receive([1, 2], 1000), send([0], 1000), send([0], 1000)]
    results = simulate(ranks, SHARED).results
    assert results == [pytest.approx([2e-3, 2e-3]), pytest.approx([2e-3]), pytest.approx([2e-3])]


def test_a_slow_pair_leaves_its_share_to_others():
    """Max-min fair: 0.1 MB/s for the slow pair, and the other 0.9 MB/s for the fast one."""
    ranks = [send([1, 2], 900), receive([0], 900), receive([0], 900)]
    slow = {(0, 1): Link(RATE / 10, delay_s=0.5)}
    results = simulate(ranks, SHARED, slow).results
    assert results[2] == pytest.approx([1e-3])
    assert results[1] == pytest.approx([9e-3 + 0.5])


def test_the_overhead_of_a_message_occupies_the_sender():
    link = TcpLink(RATE, message_s=0.01)
    ranks = [send([1, 2], 1000), receive([0], 1000), receive([0], 1000)]
    results = simulate(ranks, link).results
    assert results[1:] == [pytest.approx([0.011]), pytest.approx([0.021])]


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_rates_never_exceed_a_link_and_all_bytes_arrive(world_size):
    """The time of random messages is at least that of the busiest link, at most that of all."""
    choose = random.Random(world_size)
    sizes = {
        (a, b): choose.randrange(1, 5000)
        for a in range(world_size)
        for b in range(world_size)
        if a != b
    }

    def exchange(rank):
        parts = [data(sizes.get((rank, peer), 0)) for peer in range(world_size)]
        counts = [sizes.get((peer, rank), 0) for peer in range(world_size)]
        return (yield AllToAll(parts, counts))

    outcome = simulate([exchange(rank) for rank in range(world_size)], SHARED)
    outgoing = [sum(n for (a, _), n in sizes.items() if a == r) for r in range(world_size)]
    incoming = [sum(n for (_, b), n in sizes.items() if b == r) for r in range(world_size)]
    assert max(outgoing + incoming) / RATE <= max(outcome.seconds) * (1 + 1e-9)
    assert max(outcome.seconds) <= sum(sizes.values()) / RATE * (1 + 1e-9)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_sums_over_shared_links_have_the_results_of_ideal_ones(way, world_size):
    def total(rank, make):
        return (yield Sum(make(rank)))

    link = tcp_link(100.0, delay_s=1e-3)
    values = [torch.full((1003,), float(rank)) for rank in range(world_size)]
    with executed_by(way):
        shared = simulate([total(r, lambda r: values[r].clone()) for r in range(world_size)], link)
        empty = [total(r, lambda _: torch.empty(1003, device="meta")) for r in range(world_size)]
        sizes = simulate(empty, link)
    assert all(torch.equal(each, sum(values)) for each in shared.results)
    assert sizes.seconds == shared.seconds
    assert sizes.ledgers == shared.ledgers


def test_links_are_checked():
    with pytest.raises(ValueError, match="a link with buffer_bytes=-1"):
        TcpLink(buffer_bytes=-1)
