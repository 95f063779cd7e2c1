"""Messages on channels: waits with a limit for the first of several, and requests left behind."""

import os
import random
import threading
import time

import pytest
import torch
from limits import HANG_S, NEVER_S
from processes import results, shorten_waits, talk, workers
from slow_cases import seeds

from gcnzc.exchange import (
    Abandon,
    AllGatherScalar,
    Compute,
    Crash,
    First,
    Link,
    Now,
    Receive,
    RequestMismatch,
    Send,
    SlowDown,
    Start,
    Sum,
    Wait,
    WorkerLost,
    init_group,
    lockstep,
    run,
)

DELAY_S = 0.01
LINK = Link(delay_s=DELAY_S)


def number():
    return torch.zeros(1)


def wait_with_limits():
    """Rank 0 of 3 waits for the first message of the others, twice with a limit."""
    inboxes = []
    for peer in (1, 2):
        inboxes.append((yield Start(Receive(number(), peer), f"from {peer}")))
    began = yield Now()
    early = yield First(inboxes, 0.25)
    elapsed = (yield Now()) - began
    # rank 1 sends after rank 2 does, of which this rank has the message
    yield Send(number(), 2)
    first = yield First(inboxes)
    yield Send(number(), 1)
    value = yield Wait(inboxes[first])
    rest = [inboxes[1 - first]]
    second = yield First(rest, 60)
    other = yield Wait(rest[second])
    return early, elapsed, first, float(value), float(other)


def send_after(rank, seconds=0.0, *, is_asked=False):
    """Another rank, which opens the channels in the same order as rank 0."""
    for peer in (1, 2):
        # nothing is sent to this rank
        yield Abandon((yield Start(Receive(number(), 0), f"from {peer}")))
    if is_asked:
        yield Receive(number(), 0)
    yield Compute(seconds)
    yield Wait((yield Start(Send(number() + rank, 0), f"from {rank}")))


def leave_at_once(peer):
    yield Abandon((yield Start(Receive(number(), peer), "mail")))


def of_three(rank):
    return wait_with_limits() if rank == 0 else send_after(rank, 0.75, is_asked=True)


def test_the_first_message_is_found_within_a_limit():
    outcome = lockstep([of_three(rank) for rank in range(3)], LINK)
    early, elapsed, first, value, other = outcome.results[0]
    assert (early, first, value, other) == (None, 1, 2, 1)
    assert elapsed == pytest.approx(0.25)
    # a request and its answer for each rank, one after the other
    assert outcome.seconds[0] == pytest.approx(0.25 + 2 * (DELAY_S + 0.75 + DELAY_S))


def test_a_message_that_has_arrived_answers_at_once_and_the_smallest_index_wins():
    def receive():
        inboxes = []
        for peer in (1, 2):
            inboxes.append((yield Start(Receive(number(), peer), f"from {peer}")))
        yield Compute(1.0)
        return (yield First(inboxes, 0.0)), (yield Now())

    outcome = lockstep([receive(), send_after(1, 0), send_after(2, 0)], LINK)
    assert outcome.results[0] == (0, 1.0)


def test_channels_have_messages_of_their_own():
    def receive():
        first = yield Start(Receive(number(), 1), "a")
        second = yield Start(Receive(number(), 1), "b")
        direct = yield Receive(number(), 1)
        return float((yield Wait(first))), float((yield Wait(second))), float(direct)

    def send():
        pending = []
        # opens the channels in the order of rank 0
        yield Abandon((yield Start(Receive(number(), 0), "a")))
        for value, channel in ((3, None), (2, "b"), (1, "a")):
            pending.append((yield Start(Send(number() + value, 0), channel)))
        for each in pending:
            yield Wait(each)

    assert lockstep([receive(), send()], LINK).results[0] == (1, 2, 3)


def test_a_receive_without_a_message_must_be_abandoned():
    def leave(is_abandoned):
        inbox = yield Start(Receive(number(), 1), "mail")
        if is_abandoned:
            yield Abandon(inbox)
        return "left"

    def nothing():
        yield Abandon((yield Start(Receive(number(), 0), "mail")))
        return "nothing"

    assert lockstep([leave(True), nothing()]).results == ["left", "nothing"]
    with pytest.raises(RequestMismatch, match="rank 0 waits for Receive of 4 bytes with rank 1"):
        lockstep([leave(False), nothing()])


def test_a_mismatch_names_channels():
    def wait(rank):
        kind = Receive if rank else Send
        yield Wait((yield Start(kind(number(), 1 - rank), "mail" if rank else "ring")))

    def open_both(rank):
        for name in ("mail", "ring"):
            yield Wait((yield Start(AllGatherScalar(0), name)))
        yield from wait(rank)

    expected = "(?s)rank 0 waits for Send of 4 bytes with rank 1 on channel ring; .*; rank 1 waits "
    expected += "for Receive of 4 bytes with rank 0 on channel mail.*on the same channel"
    with pytest.raises(RequestMismatch, match=expected):
        lockstep([open_both(rank) for rank in range(2)])


def test_an_abandoned_receive_drops_its_message():
    def receive():
        yield Abandon((yield Start(Receive(number(), 1), "mail")))
        return float((yield Wait((yield Start(Receive(number(), 1), "mail")))))

    def send():
        for value in (1, 2):
            yield Wait((yield Start(Send(number() + value, 0), "mail")))

    assert lockstep([receive(), send()]).results[0] == 2


def test_a_crash_ends_the_wait_for_the_first():
    def receive():
        inboxes = []
        for peer in (1, 2):
            inboxes.append((yield Start(Receive(number(), peer), f"from {peer}")))
        lost = yield First(inboxes, 100.0)
        with pytest.raises(WorkerLost, match="rank 2 crashed"):
            yield Wait(inboxes[lost])
        return lost, (yield Now()), float((yield Wait(inboxes[0])))

    def send(rank, seconds):
        yield Compute(seconds)
        yield Wait((yield Start(Send(number() + rank, 0), f"from {rank}")))

    faults = {2: [Crash(0.5)]}
    outcome = lockstep([receive(), send(1, 1.0), send(2, 1.0)], LINK, faults=faults)
    assert outcome.results[0] == (1, pytest.approx(0.5 + DELAY_S), 1)


def first_of_nothing(peer):
    yield First([])


def open_in_order(*names):
    for name in names:
        yield Wait((yield Start(Sum(number()), name)))


def open_after_a_sum(name):
    yield Sum(number())
    yield from open_in_order(name)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (
            (open_in_order("a", "b"), open_in_order("b", "a")),
            "request 1 of channel default: rank 0 requests the opening of channel a, rank 1 "
            "requests the opening of channel b",
        ),
        (
            (open_in_order("a"), open_after_a_sum("a")),
            "requests the opening of channel a, rank 1 requests Sum of",
        ),
        (
            (leave_at_once(1), open_in_order(), leave_at_once(0)),
            "rank 0 opens channel mail, and rank 1 does not, and none of them can continue",
        ),
    ],
)
def test_ranks_that_open_channels_in_another_order_are_a_mismatch(ranks, text):
    with pytest.raises(RequestMismatch, match=text):
        lockstep(ranks)


def invalid_message(kind, peer, values, channel):
    yield Start(kind(values, peer), channel)


def wait_over_processes():
    # abandoned receives of the other ranks do not delay the end until the time limit
    with init_group(timeout_s=NEVER_S) as group:
        answer = run(of_three(group.rank), group)
        with pytest.raises(ValueError, match="First of no requests"):
            run(first_of_nothing(0), group)
        for kind in (Send, Receive):
            with pytest.raises(ValueError, match=f"with rank -1 on rank {group.rank} of 3"):
                run(invalid_message(kind, -1, number(), None), group)
            values, peer = torch.zeros(4, 4).T[1:], (group.rank + 1) % 3
            with pytest.raises(ValueError, match="are not contiguous"):
                run(invalid_message(kind, peer, values, None), group)
    return answer


def test_processes_wait_as_the_simulation_does(tmp_path):
    found = results(3, tmp_path, wait_over_processes)
    early, elapsed, first, value, other = found[0]
    assert (early, first, value, other) == (None, 1, 2, 1)
    # a loaded machine may take longer, but not less time
    assert elapsed >= 0.24


def lose_a_peer():
    shorten_waits()
    with init_group(timeout_s=30) as group:
        if group.rank == 1:
            # opens the channel, and ends
            run(leave_at_once(0), group)
            os._exit(3)
        return run(report_loss(), group)


def report_loss():
    inbox = yield Start(Receive(number(), 1), "mail")
    index = yield First([inbox], 60)
    try:
        yield Wait(inbox)
    except WorkerLost as error:
        return index, str(error)


def test_the_end_of_a_process_ends_the_wait_for_its_message(tmp_path):
    with workers(2, tmp_path, lose_a_peer) as processes:
        processes[0].join(HANG_S)
        assert processes[0].exitcode == 0, talk(tmp_path, 0)
    index, text = torch.load(tmp_path / "0.pt")
    assert index == 0
    assert "rank 1" in text


def end_while_a_receive_waits():
    shorten_waits()
    with init_group(timeout_s=30) as group:
        run(leave_at_once(1 - group.rank), group)
        if group.rank == 1:
            time.sleep(NEVER_S)
        # what the interpreter does first when it ends
        threading._shutdown()
        os._exit(0)


def test_a_process_that_does_not_close_its_group_ends_while_others_go_on(tmp_path):
    with workers(2, tmp_path, end_while_a_receive_waits) as processes:
        processes[0].join(HANG_S)
        assert processes[0].exitcode == 0, talk(tmp_path, 0)
        assert processes[1].exitcode is None


def gather_until(rank, world_size, seconds, limit_s):
    """Sum the powers of two of the ranks that answer in time, of which each has one."""
    peers = [peer for peer in range(world_size) if peer != rank]
    inboxes = {}
    for peer in range(world_size):
        # all ranks open the channels in the same order
        pending = yield Start(Receive(number(), peers[0] if peer == rank else peer), f"from {peer}")
        if peer == rank:
            yield Abandon(pending)
        else:
            inboxes[peer] = pending
    yield Compute(seconds)
    sends = []
    for peer in peers:
        sends.append((yield Start(Send(number() + 2**rank, peer), f"from {rank}")))
    end, total, lost = (yield Now()) + limit_s, 2**rank, set()
    while inboxes:
        waiting = list(inboxes)
        now = yield Now()
        index = yield First([inboxes[peer] for peer in waiting], max(end - now, 0.0))
        if index is None:
            break
        peer = waiting[index]
        try:
            total += int((yield Wait(inboxes.pop(peer))))
        except WorkerLost:
            lost.add(peer)
    for inbox in inboxes.values():
        yield Abandon(inbox)
    return total, lost, set(inboxes)


@pytest.mark.parametrize("seed", seeds(200, 10))
def test_each_rank_is_counted_once_or_lost_or_late(seed):
    choose = random.Random(seed)
    world_size, limit_s = choose.randint(2, 6), choose.choice([0.0, 0.1, 1.0])
    times = [choose.choice([0.0, choose.random()]) for _ in range(world_size)]
    faults = {
        rank: [
            choose.choice([Crash(choose.random()), SlowDown(choose.random(), float("inf"), 0.5)])
        ]
        for rank in range(1, world_size)
        if choose.random() < 0.3
    }
    ranks = [gather_until(rank, world_size, times[rank], limit_s) for rank in range(world_size)]
    outcome = lockstep(ranks, Link(1e6, 0.01), faults=faults)
    for rank, (found, error) in enumerate(zip(outcome.results, outcome.errors, strict=True)):
        if error is not None:
            assert any(isinstance(fault, Crash) for fault in faults[rank])
            continue
        total, lost, late = found
        counted = {peer for peer in range(world_size) if total >> peer & 1}
        assert total < 2**world_size
        assert (len(counted) + len(lost) + len(late), counted | lost | late) == (
            world_size,
            set(range(world_size)),
        )
        assert all(outcome.errors[peer] is not None for peer in lost)
        if not faults and limit_s == 1.0:
            assert not late
