"""The simulator: times on links with limits, slow and crashing ranks, payloads without elements."""

import random
import tracemalloc

import pytest
import torch
from collective_sizes import WAYS, lockstep_by
from exchange.cases import ask
from slow_cases import seeds

from gcnzc.exchange import (
    AllGatherScalar,
    Compute,
    Crash,
    Link,
    Mean,
    Now,
    Receive,
    Send,
    SendReceive,
    SlowDown,
    Start,
    Sum,
    Wait,
    WorkerLost,
    lockstep,
)

LINK = Link(bytes_per_s=1e6, delay_s=0.001, message_s=1e-4)


def test_messages_to_one_rank_share_its_incoming_bandwidth():
    def send(rank):
        yield Compute(0.01 * rank)
        if rank:
            return (yield Send(torch.zeros(1000, dtype=torch.uint8), 0))
        buffers = [torch.zeros(1000, dtype=torch.uint8) for _ in range(3)]
        receives = []
        for peer, buffer in enumerate(buffers, 1):
            receives.append((yield Start(Receive(buffer, peer))))
        times = []
        for receive in receives:
            yield Wait(receive)
            times.append((yield Now()))
        return times

    outgoing = 1e6
    # without a limit, each message takes 1 ms after its start
    free = lockstep([send(rank) for rank in range(4)], Link(outgoing)).results[0]
    assert free == pytest.approx([0.011, 0.021, 0.031])
    # 25 ms each: the messages are received one after the other
    limited = lockstep([send(rank) for rank in range(4)], Link(outgoing, in_bytes_per_s=4e4))
    assert limited.results[0] == pytest.approx([0.035, 0.06, 0.085])
    # a message that is received faster than it is sent is not delayed
    wide = lockstep([send(rank) for rank in range(4)], Link(outgoing, in_bytes_per_s=2e6))
    assert wide.results[0] == pytest.approx(free)


def test_ranks_may_have_different_links():
    links = [Link(1e6), Link(1e5)]
    found = lockstep([ask(SendReceive(torch.zeros(250), 1 - rank)) for rank in range(2)], links)
    assert found.seconds == pytest.approx([0.01, 0.01])
    with pytest.raises(ValueError, match="2 links for 3 ranks"):
        lockstep([ask(Sum(torch.zeros(3))) for _ in range(3)], links)


def test_slow_and_paused_ranks_compute_later():
    def work(rank):
        yield Compute(2.0)
        mean = yield Mean(torch.tensor([float(rank)]))
        return float(mean), (yield Now())

    def times(**faults):
        named = {int(name[1:]): each for name, each in faults.items()}
        outcome = lockstep([work(rank) for rank in range(2)], faults=named)
        assert outcome.errors == [None, None]
        assert [mean for mean, _ in outcome.results] == [0.5, 0.5]
        return [now for _, now in outcome.results]

    assert times() == [2.0, 2.0]
    # one second at full speed, two at a third; the other rank waits
    assert times(r1=[SlowDown(1.0, 3.0)]) == [4.0, 4.0]
    # 1.5 s at full speed, then 1 s in which a quarter is done, then the rest
    assert times(r0=[SlowDown(1.5, 4.0, seconds=1.0)]) == [2.75, 2.75]
    assert times(r0=[SlowDown(0.5, float("inf"), seconds=7.0)]) == [9.0, 9.0]
    # in a pause between two computations
    assert times(r0=[SlowDown(2.0, float("inf"), seconds=1.0)]) == [3.0, 3.0]
    # before the computation ends, and after
    assert times(r0=[SlowDown(0.0, 2.0, seconds=1.0), SlowDown(50.0, 9.0)]) == [2.5, 2.5]
    with pytest.raises(ValueError, match="a slow-down begins at 1 s, before the previous one ends"):
        times(r0=[SlowDown(0.0, 2.0), SlowDown(1.0, 2.0)])
    for factor, seconds in ((0.5, 1.0), (float("inf"), float("inf")), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="SlowDown"):
            SlowDown(0.0, factor, seconds)


def test_ranks_that_wait_for_a_crashed_one_report_it():
    def work(rank):
        for step in range(100):
            yield Compute(0.1)
            yield Mean(torch.tensor([float(step)]))

    outcome = lockstep([work(rank) for rank in range(4)], LINK, faults={2: [Crash(1.05)]})
    assert outcome.results == [None] * 4
    assert "rank 2 crashed at 1.05 s" in str(outcome.errors[2])
    for rank in (0, 1, 3):
        assert isinstance(outcome.errors[rank], WorkerLost)
        assert f"rank {rank} waited for" in str(outcome.errors[rank])
        assert "rank 2 crashed at 1.05 s of the simulation" in str(outcome.errors[rank])
        # the next exchange after the crash, at the latest
        assert 1.05 < outcome.seconds[rank] < 1.3


def test_a_message_that_has_left_a_crashed_rank_arrives():
    def work(rank):
        if rank:
            yield Start(Send(torch.ones(1000), 0))
            yield Compute(9.0)
            return None
        values = torch.zeros(1000)
        yield Compute(1.0)
        yield Receive(values, 1)
        return values.sum().item()

    # 4 ms to send, and a latency of 1 ms
    for crash_at, has_left in ((0.0045, True), (0.002, False)):
        outcome = lockstep([work(rank) for rank in range(2)], LINK, faults={1: [Crash(crash_at)]})
        assert outcome.results[0] == (1000.0 if has_left else None)
        assert (outcome.errors[0] is None) == has_left


def test_errors_of_started_requests_are_raised_by_their_wait():
    def work(rank):
        pending = yield Start(Sum(torch.ones(1)))
        other = yield Start(AllGatherScalar(rank), "other")
        yield Compute(1.0)
        try:
            yield Wait(pending)
        except WorkerLost:
            return "lost", (yield Now())
        return (yield Wait(other))

    def crashing(rank):
        yield Compute(0.5)

    ranks = [work(0), work(1), crashing(2)]
    outcome = lockstep(ranks, faults={2: [Crash(0.25)]})
    assert outcome.results == [("lost", 1.0), ("lost", 1.0), None]


def test_memory_is_proportional_to_the_messages_in_flight():
    def work(rounds):
        for _ in range(rounds):
            yield Sum(torch.empty(10_000, device="meta"))

    rounds = 400
    tracemalloc.start()
    lockstep_by("builtin", [work(rounds) for _ in range(4)], LINK)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # the requests of each message alone have 200 bytes
    assert peak < 200 * 4 * 6 * rounds / 5


def random_run(seed):
    """Run means and exchanges of pairs on a random cluster with crashes, and check the results."""
    draw = random.Random(seed)
    world_size = draw.randint(2, 9)
    links = [
        Link(10 ** draw.uniform(4, 8), 10 ** draw.uniform(-5, -1), 10 ** draw.uniform(-6, -3),
             draw.choice([float("inf"), 10 ** draw.uniform(4, 8)]))
        for _ in range(world_size)
    ]  # fmt: skip
    faults = {}
    for rank in range(world_size):
        if draw.random() < 0.3:
            faults[rank] = [Crash(draw.uniform(0, 1.5))]
        elif draw.random() < 0.3:
            factor = draw.choice([2.0, float("inf")])
            faults[rank] = [SlowDown(draw.uniform(0, 1), factor, draw.uniform(0.01, 1))]
    steps = [(draw.randrange(3), draw.randint(1, 3000)) for _ in range(10)]
    way = draw.choice(WAYS)
    paces = [[draw.uniform(0, 0.2) for _ in steps] for _ in range(world_size)]
    done = [0] * world_size

    def work(rank):
        for step, (kind, count) in enumerate(steps):
            yield Compute(paces[rank][step])
            mine = torch.full((count,), float(rank + step), dtype=torch.float64)
            mean = step + (world_size - 1) / 2
            if kind == 0:
                found = yield Mean(mine)
                expected = torch.full_like(found, mean)
            elif kind == 1:
                peer = world_size - 1 - rank
                found = yield SendReceive(mine, peer)
                expected = torch.full_like(found, float(peer + step))
            else:
                pending = yield Start(Mean(mine))
                yield Compute(paces[rank][step] / 2)
                found = yield Wait(pending)
                expected = torch.full_like(found, mean)
            torch.testing.assert_close(found, expected)
            done[rank] += 1

    ranks = [work(rank) for rank in range(world_size)]
    outcome = lockstep_by(way, ranks, links, faults=faults)
    crashed = {rank for rank, each in faults.items() if isinstance(each[0], Crash)}
    for rank, error in enumerate(outcome.errors):
        if error is None:
            assert done[rank] == len(steps)
        else:
            assert crashed, "no rank fails if none has crashed"
            assert "crashed at" in str(error)
    return outcome


@pytest.mark.parametrize("part", seeds(100, 1))
def test_random_schedules_with_crashes_end_with_right_means_or_clear_errors(part):
    first = 100 * part
    outcomes = [random_run(seed) for seed in range(first, first + 100)]
    assert any(any(each.errors) for each in outcomes)
    assert any(not any(each.errors) for each in outcomes)
    # the same seed has the same times
    assert random_run(first).seconds == outcomes[0].seconds


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(0), "bytes_per_s=0.*above 0"),
        (lambda: Link(1e6, INFINITE), "delay_s=inf.*finite"),
        (lambda: Link(1e6, 0, NAN), "message_s=nan"),
        (lambda: Crash(NAN), r"Crash\(at_s=nan\)"),
        (lambda: SlowDown(0, 2, -1), "seconds=-1"),
        (lambda: SlowDown(0, INFINITE), "a pause needs an end"),
        (lambda: lockstep([], faults={7: [Crash(1.0)]}), "rank 7, but there are 0 ranks"),
        (lambda: lockstep([], links={(0, 5): Link()}), r"the pair \(0, 5\), but there are 0"),
    ],
)
def test_links_and_faults_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
