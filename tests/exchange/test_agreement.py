"""Requests that do not match are reported in lockstep and by processes."""

import re

import pytest
import torch
from limits import NEVER_S
from processes import results, shorten_waits

from gcnzc.exchange import (
    AllGatherScalar,
    AllToAll,
    Broadcast,
    Caller,
    Compute,
    Mean,
    Receive,
    RequestMismatch,
    Send,
    SendReceive,
    Start,
    Sum,
    Wait,
    init_group,
    lockstep,
    run,
)


def make_all(*requests):
    """A program that makes requests one after the other."""
    answers = []
    for request in requests:
        answers.append((yield request))
    return answers


def start_on_one_rank(rank):
    """A program whose second request is started in the background on rank 1 only."""
    yield Wait((yield Start(AllGatherScalar(0))))
    request = Mean(floats(2))
    return (yield Wait((yield Start(request)))) if rank else (yield request)


def floats(count):
    return torch.ones(count)


LARGE = 250_000  # elements of float32 that torch's own collectives reduce


def large():
    return Sum(floats(LARGE))


def sums(count):
    return [large() for _ in range(count)]


def seen():
    """Large requests of two kinds, in which each kind follows itself and the other."""
    return [kind(floats(LARGE)) for kind in (Sum, Sum, Mean, Mean, Sum)]


def calls(caller):
    """A request of a named caller."""
    return [Caller(caller), Sum(floats(2)), Caller("")]


def start_for_rank(rank):
    """A program whose second request has another caller on each rank."""
    yield Wait((yield Start(Sum(floats(2)))))
    yield Caller(f"model {rank}")
    pending = yield Start(Sum(floats(2)))
    yield Caller("")
    return (yield Wait(pending))


def send_on_a_channel(rank):
    """Send to the other rank on a channel, and wait for its message without one."""
    sent = yield Start(Send(floats(1), 1 - rank), "ring")
    yield Receive(floats(1), 1 - rank)
    yield Wait(sent)


def wait_on_a_channel(rank):
    yield Wait((yield Start(Send(floats(1), 1 - rank), "ring")))


def both(text):
    """The requests of both ranks, in either order."""
    return f"requests {text}, rank . requests {text}"


# (programs of ranks 0 and 1, what is reported)
MISMATCHES = {
    "both send first": (
        lambda rank: make_all(Send(floats(2), 1 - rank), Receive(floats(2), 1 - rank)),
        "rank . waits for Send of 8 bytes with rank .*none of them can continue",
    ),
    "a send of 3 for a receive of 2": (
        lambda rank: make_all(Receive(floats(2), 0) if rank else Send(floats(3), 1)),
        both("[23] float32"),
    ),
    "a send of another dtype": (
        lambda rank: make_all(Receive(floats(2).int(), 0) if rank else Send(floats(2), 1)),
        both("2 (int|float)32"),
    ),
    "a send for a sum": (
        lambda rank: make_all(Sum(floats(2)) if rank else Send(floats(2), 1)),
        "rank . waits for Receive of 8 bytes|waits for S(um|end) of 8 bytes",
    ),
    "a sum for a mean": (
        lambda rank: make_all((Mean if rank else Sum)(floats(2))),
        both("(Sum|Mean) of 2 float32"),
    ),
    "large sums of different sizes": (
        lambda rank: make_all(Sum(floats(LARGE + 1000 * rank))),
        both("Sum of 25[01]000 float32"),
    ),
    "a scalar of another type": (
        lambda rank: make_all(AllGatherScalar(1.0 if rank else 1)),
        both("AllGatherScalar of (int|float)64"),
    ),
    "a broadcast from another rank": (
        lambda rank: make_all(Broadcast(floats(2), rank)),
        "requests Broadcast of 2 float32 from rank .",
    ),
    "a send and receive of another size": (
        lambda rank: make_all(SendReceive(floats(2 + rank), 1 - rank)),
        "rank . sends [23] float32 to rank ., which expects [23] float32",
    ),
    "another count than is sent": (
        lambda rank: make_all(AllToAll([floats(3)] * 2, [3 + rank, 3])),
        "sends 3 float32 to rank 1, which expects 4 float32",
    ),
    "a rank one round ahead": (
        lambda rank: make_all(
            *([AllGatherScalar(1)] * (3 - rank)), SendReceive(floats(2), 1 - rank)
        ),
        "request 3 of channel default: rank . requests",
    ),
    "a large mean after large sums": (
        lambda rank: make_all(large(), large(), (Mean if rank else Sum)(floats(LARGE))),
        both("(Sum|Mean) of 250000 float32"),
    ),
    # each pair was made before, so no check comes first; the next is at most 127 requests later
    "a large mean for a sum where both have followed a sum before": (
        lambda rank: make_all(*seen(), (Mean if rank else Sum)(floats(LARGE)), *sums(128)),
        both("(Sum|Mean) of 250000 float32"),
    ),
    "the same requests for two callers in another order": (
        lambda rank: make_all(*calls(f"model {rank}"), *calls(f"model {1 - rank}")),
        both("Sum of 2 float32 for model .*"),
    ),
    "large requests for two callers in another order": (
        lambda rank: make_all(
            Caller(f"model {rank}"), large(), Caller(f"model {1 - rank}"), large()
        ),
        both("Sum of 250000 float32 for model ."),
    ),
    "started requests for two callers in another order": (
        start_for_rank,
        "request 2 of channel background: rank . requests Sum of 2 float32 for model .",
    ),
    "a message for another caller": (
        lambda rank: make_all(
            Caller(f"model {rank}"), Receive(floats(2), 0) if rank else Send(floats(2), 1)
        ),
        both("2 float32 for model ."),
    ),
    "in the background and not": (
        start_on_one_rank,
        "rank . waits for .*none of them can continue",
    ),
    "a message on another channel": (
        send_on_a_channel,
        "none of them can continue; .*rank 0 has started messages from rank 0 to rank 1 on channel "
        "ring, and rank 1 has not",
    ),
    "a message on a channel without a receive": (
        wait_on_a_channel,
        "waits for (Send .*|the end of a started request) on channel ring",
    ),
}


def report(make):
    """Return the result or the error of a program in this process."""
    shorten_waits()
    # an error that comes with the time limit comes too late
    with init_group(timeout_s=NEVER_S) as group:
        try:
            return str(run(make(group.rank), group))
        except (RequestMismatch, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"


def report_all(names):
    return [report(MISMATCHES[name][0]) for name in names]


@pytest.mark.parametrize("name", MISMATCHES)
def test_lockstep_reports_requests_that_do_not_match(name):
    make, words = MISMATCHES[name]
    with pytest.raises(RequestMismatch, match=words):
        lockstep([make(rank) for rank in range(2)])


def test_processes_report_requests_that_do_not_match_on_all_ranks_at_once(tmp_path):
    names = list(MISMATCHES)
    found = results(2, tmp_path, report_all, names)
    for name, *reports in zip(names, *found, strict=True):
        for words in reports:
            assert words.startswith("RequestMismatch: the ranks' requests do not match"), name
            assert re.search(MISMATCHES[name][1], words), (name, words)
            assert "hint: every rank must make the same requests in the same order" in words


def around(rank):
    """A program that sends to the next rank before it receives from the one before."""
    return make_all(Send(floats(2), (rank + 1) % 3), Receive(floats(2), (rank - 1) % 3))


def late(rank):
    """A program in which rank 1 is so late that the others compare their requests."""
    for _ in range(2):
        yield Compute(0.8 * (rank == 1))
        yield Sum(floats(2))
        yield SendReceive(floats(2), [1, 0, 2][rank])
        if rank == 1:
            yield Compute(0.4)
        if rank < 2:
            yield Receive(floats(2), 1) if rank == 0 else Send(floats(2), 0)
    return "all is well"


def gather_early(rank):
    """A program in which two ranks are in a collective of torch that the third does not make."""
    return make_all(large(), large(), AllGatherScalar(1) if rank == 2 else large())


def gather_apart(rank):
    """A program in which rank 1 gathers before a sum on a channel, and the others after it."""
    yield Wait((yield Start(Sum(floats(3)), "side")))
    if rank == 1:
        yield AllGatherScalar(1)
    yield Wait((yield Start(Sum(floats(3)), "side")))
    yield AllGatherScalar(1)


def report_three():
    differs = report(lambda rank: make_all(Sum(floats(2 + (rank == 1)))))
    programs = gather_early, around, gather_apart, late
    return differs, *(report(make) for make in programs)


def test_all_ranks_report_a_mismatch_of_two_and_wait_for_a_late_rank(tmp_path):
    for differs, early, cycle, apart, well in results(3, tmp_path, report_three):
        assert "requests Sum of 3 float32" in differs
        assert re.search("rank . waits for Send of 8 bytes with rank .; rank", cycle)
        assert re.search("requests (Sum of 250000 float32|AllGatherScalar of int64), rank .", early)
        assert "rank 1 waits for AllGatherScalar" in apart
        assert "none of them can continue" in apart
        assert well == "all is well"
