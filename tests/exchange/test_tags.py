"""Messages with tags, and receives from any rank."""

import os
import re

import pytest
import torch
from limits import HANG_S, NEVER_S
from processes import results, workers

from gcnzc.exchange import (
    Abandon,
    Caller,
    Compute,
    Crash,
    First,
    Link,
    Now,
    Receive,
    ReceiveAny,
    RequestMismatch,
    Send,
    Start,
    Wait,
    WorkerLost,
    init_group,
    lockstep,
    run,
)

LINK = Link(delay_s=0.01)


def numbers(value=0.0, count=2):
    return torch.full((count,), float(value))


def receive_in_another_order(rank):
    """Rank 0 receives the messages of rank 1 by their tags, sizes and callers."""
    if rank == 0:
        found = []
        for tag, count in ((3, 2), (1, 5), (None, 2), (2, 2), (1, 2), (1, 2)):
            found.append((yield Receive(numbers(count=count), 1, tag)).tolist())
        yield Caller("other")
        found.append((yield Receive(numbers(), 1, 3)).tolist())
        return found
    pending = []
    for value, tag, count in ((10, 1, 2), (11, 1, 2), (12, 2, 2), (13, 3, 2), (14, 1, 5)):
        pending.append((yield Start(Send(numbers(value, count), 0, tag))))
    pending.append((yield Start(Send(numbers(15), 0))))
    yield Caller("other")
    pending.append((yield Start(Send(numbers(16), 0, tag=3))))
    for each in pending:
        yield Wait(each)
    return None


IN_ANOTHER_ORDER = [
    [13.0] * 2,
    [14.0] * 5,
    [15.0] * 2,
    [12.0] * 2,
    [10.0] * 2,
    [11.0] * 2,
    [16.0] * 2,
]


def gather(rank, world_size, channel=None):
    """Rank 0 receives two messages of each other rank, in any order."""
    if rank > 0:
        for turn in range(2):
            send = Send(numbers(10 * rank + turn), 0, 5)
            yield Wait((yield Start(send, channel)))
        return None
    found = []
    for _ in range(2 * (world_size - 1)):
        request = ReceiveAny(numbers(), 5)
        values, source = yield request if channel is None else Wait((yield Start(request, channel)))
        assert values is request.values
        found.append((source, values.tolist()))
    return found


def check_gathered(found, world_size):
    expected = [
        (rank, numbers(10 * rank + turn).tolist())
        for rank in range(1, world_size)
        for turn in (0, 1)
    ]
    assert sorted(found) == expected
    for rank in range(1, world_size):
        assert [values for source, values in found if source == rank] == [
            values for source, values in expected if source == rank
        ], "messages of one rank are in order"


def wait_with_a_limit(rank):
    """Rank 0 waits with a limit twice; the message of rank 1 is late, and rank 2 sends none."""
    if rank == 0:
        inbox = yield Start(ReceiveAny(numbers(), 1), "mail")
        early = yield First([inbox], 0.2)
        # rank 1 sends its message after this one
        yield Send(numbers(), 1, 6)
        late = yield First([inbox], 60)
        values, source = yield Wait(inbox)
        rest = yield Start(ReceiveAny(numbers(), 1), "mail")
        never = yield First([rest], 0.1)
        yield Abandon(rest)
        return early, late, values.tolist(), source, never
    yield Abandon((yield Start(ReceiveAny(numbers(), 2), "mail")))
    if rank == 1:
        yield Receive(numbers(), 0, 6)
        yield Compute(0.8)
        yield Wait((yield Start(Send(numbers(7), 0, 1), "mail")))
    yield Compute(0.5)
    return None


def both_kinds(rank):
    """A receive from any rank takes a message that no other receive names."""
    if rank == 0:
        values, source = yield ReceiveAny(numbers(), 4)
        other = yield Receive(numbers(), 3 - source, 4)
        return source, values.tolist(), other.tolist()
    yield Send(numbers(rank), 0, 4)
    return None


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_tags_sizes_and_callers_select_messages(delay_s):
    outcome = lockstep([receive_in_another_order(rank) for rank in range(2)], Link(delay_s=delay_s))
    assert outcome.results[0] == IN_ANOTHER_ORDER
    assert outcome.ledgers[1].entries["Send"].messages == len(IN_ANOTHER_ORDER)
    assert outcome.ledgers[1].bytes_sent == sum(4 * len(values) for values in IN_ANOTHER_ORDER)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("channel", [None, "mail"])
def test_messages_of_any_rank_are_received_once(world_size, channel):
    algorithms = [gather(rank, world_size, channel) for rank in range(world_size)]
    check_gathered(lockstep(algorithms, LINK).results[0], world_size)


def test_the_message_that_is_sent_first_is_received_first():
    def receive():
        yield Compute(1.0)  # all messages have been sent
        sources = []
        for _ in range(3):
            sources.append((yield ReceiveAny(numbers(), 0))[1])
        return sources

    def send(rank):
        yield Compute((None, 0.3, 0.1, 0.2)[rank])
        yield Send(numbers(), 0, 0)

    assert lockstep([receive(), *(send(rank) for rank in (1, 2, 3))]).results[0] == [2, 3, 1]


def test_a_limit_does_not_end_a_receive_from_any_rank():
    outcome = lockstep([wait_with_a_limit(rank) for rank in range(3)], LINK)
    assert outcome.results[0] == (None, 0, [7.0, 7.0], 1, None)
    assert outcome.seconds[0] == pytest.approx(0.2 + 0.01 + 0.8 + 0.01 + 0.1)


def differ(rank, second):
    """Rank 1 sends a message that rank 0 does not receive."""
    if rank == 0:
        return (yield Receive(numbers(), 1, 7))
    return (yield second)


def differ_from_any(rank):
    """No message has the size that rank 0 receives from any rank."""
    if rank == 0:
        return (yield ReceiveAny(numbers(), 7))
    return (yield Send(numbers(count=3), 0, 7))


def late_for_any(rank):
    """Ranks wait for one another for longer than the comparison takes, and none of them fails."""
    if rank == 0:
        (first, one), (second, other) = (
            (yield ReceiveAny(numbers(), 7)),
            (yield ReceiveAny(numbers(), 7)),
        )
        return sorted([one, other]), float(first[0] + second[0])
    yield Compute(3.0 * (rank == 1))
    return (yield Send(numbers(rank), 0, 7))


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (Send(numbers(), 0, 8), "Receive of 8 bytes with rank 1 with tag 7.* Send of .* tag 8"),
        (Send(numbers(), 0), "Receive of 8 bytes with rank 1 with tag 7"),
        (Send(numbers(count=3), 0, 7), "Send of 12 bytes with rank 0 with tag 7"),
    ],
)
def test_lockstep_reports_messages_without_a_receive(second, words):
    with pytest.raises(RequestMismatch, match=words):
        lockstep([differ(rank, second) for rank in range(2)])


def test_lockstep_reports_a_receive_from_any_rank_without_a_message():
    with pytest.raises(RequestMismatch, match="rank 0 waits for ReceiveAny of 8 bytes with tag 7"):
        lockstep([differ_from_any(rank) for rank in range(3)])


def test_a_lost_rank_does_not_end_a_receive_of_others():
    def receive():
        _, source = yield ReceiveAny(numbers(), 1)
        try:
            yield ReceiveAny(numbers(), 1)
        except WorkerLost as error:
            return source, str(error)

    def send(rank):
        yield Compute(rank * 1.0)
        yield Send(numbers(), 0, 1)

    outcome = lockstep([receive(), send(1), send(2)], faults={1: [Crash(0.5)]})
    source, error = outcome.results[0]
    assert source == 2
    assert "ReceiveAny of 8 bytes with tag 1" in error
    assert "rank 1 crashed" in error


def run_everything():
    with init_group(timeout_s=60) as group:
        rank = group.rank
        order = run(receive_in_another_order(rank), group) if rank < 2 else None
        found = [run(gather(rank, 3, channel), group) for channel in (None, "box")]
        late = run(late_for_any(rank), group)
        sent = group.ledger.entries["Send"].messages if rank else 0
        return (
            order,
            found,
            run(both_kinds(rank), group),
            late,
            sent,
            run(wait_with_a_limit(rank), group),
        )


def test_processes_answer_as_the_simulation_does(tmp_path):
    answers = results(3, tmp_path, run_everything)
    order, found, (source, values, other), late, _, limited = answers[0]
    assert order == IN_ANOTHER_ORDER
    for each in found:
        check_gathered(each, 3)
    assert (values, other) == (numbers(source).tolist(), numbers(3 - source).tolist())
    assert late == ([1, 2], 3.0)
    assert limited == (None, 0, [7.0, 7.0], 1, None)
    assert [each[4] for each in answers[1:]] == [7 + 2 + 2 + 1, 2 + 2 + 1]


def report(make):
    # an error that comes with the time limit comes too late
    with init_group(timeout_s=NEVER_S) as group:
        try:
            return str(run(make(group.rank), group))
        except RequestMismatch as error:
            return str(error)


def test_processes_report_a_receive_from_any_rank_without_a_message(tmp_path):
    for words in results(3, tmp_path, report, differ_from_any):
        assert re.search("rank 0 waits for ReceiveAny of 8 bytes with tag 7", words)
        assert re.search("rank 2 waits for Send of 12 bytes with rank 0 with tag 7", words)


def receive_from_the_living(path):
    with init_group(timeout_s=60) as group:
        if group.rank == 1:
            os._exit(1)

        def receive():
            now = yield Now()
            values, source = yield ReceiveAny(numbers(), 3)
            return values.tolist(), source, (yield Now()) - now

        def send():
            yield Compute(2.0)
            yield Send(numbers(9), 0, 3)

        found = run(receive() if group.rank == 0 else send(), group)
        if group.rank == 0:
            torch.save(found, path)


def test_a_process_that_ends_does_not_end_a_receive_of_others(tmp_path):
    with workers(3, tmp_path, receive_from_the_living, tmp_path / "found") as running:
        for each in running:
            each.join(HANG_S)
    values, source, _ = torch.load(tmp_path / "found")
    assert (values, source) == ([9.0, 9.0], 2)
