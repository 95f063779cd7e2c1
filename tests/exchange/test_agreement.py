"""Programs whose requests do not match: the same are reported in lockstep and by processes."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from processes import results

from gcnzc.exchange import (
    AllGather,
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


def do(*requests):
    """A program that makes its requests one after the other."""
    answers = []
    for request in requests:
        answers.append((yield request))
    return answers


def beside(rank):
    """A program whose second request is begun beside it on one rank, and not on the other."""
    yield Wait((yield Start(AllGatherScalar(0))))
    request = Mean(floats(2))
    return (yield Wait((yield Start(request)))) if rank else (yield request)


def floats(count):
    return torch.ones(count)


LARGE = 8_000  # elements of float32 that torch's own collectives reduce


def large():
    return Sum(floats(LARGE))


def sums(count):
    return [large() for _ in range(count)]


def seen():
    """Large requests of two kinds, in which each kind follows itself and the other."""
    return [kind(floats(LARGE)) for kind in (Sum, Sum, Mean, Mean, Sum)]


def calls(caller):
    """A request in the name of a caller."""
    return [Caller(caller), Sum(floats(2)), Caller("")]


def begun_for_another(rank):
    """A program whose second request is begun for another caller on each rank."""
    yield Wait((yield Start(Sum(floats(2)))))
    yield Caller(f"model {rank}")
    pending = yield Start(Sum(floats(2)))
    yield Caller("")
    return (yield Wait(pending))


# (programs of ranks 0 and 1, what is reported)
MISMATCHES = {
    "both send first": (
        lambda rank: do(Send(floats(2), 1 - rank), Receive(floats(2), 1 - rank)),
        "rank . waits for Send of 8 bytes with rank .*none of them can continue",
    ),
    "both receive first": (
        lambda rank: do(Receive(floats(2), 1 - rank), Send(floats(2), 1 - rank)),
        "rank . waits for Receive of 8 bytes with rank .*none of them can continue",
    ),
    "a send of 3 for a receive of 2": (
        lambda rank: do(Receive(floats(2), 0) if rank else Send(floats(3), 1)),
        "requests [23] float32, rank . requests [23] float32",
    ),
    "a send of 2 for a receive of 3": (
        lambda rank: do(Receive(floats(3), 0) if rank else Send(floats(2), 1)),
        "requests [23] float32, rank . requests [23] float32",
    ),
    "a send of another dtype": (
        lambda rank: do(Receive(floats(2).int(), 0) if rank else Send(floats(2), 1)),
        "requests 2 (int|float)32, rank . requests 2 (int|float)32",
    ),
    "a send for a sum": (
        lambda rank: do(Sum(floats(2)) if rank else Send(floats(2), 1)),
        "rank . waits for Receive of 8 bytes|waits for S(um|end) of 8 bytes",
    ),
    "a sum for a mean": (
        lambda rank: do((Mean if rank else Sum)(floats(2))),
        "requests (Sum|Mean) of 2 float32, rank . requests (Sum|Mean) of 2 float32",
    ),
    "a large sum for a mean": (
        lambda rank: do((Mean if rank else Sum)(floats(LARGE))),
        "requests (Sum|Mean) of 8000 float32",
    ),
    "large sums of different sizes": (
        lambda rank: do(Sum(floats(LARGE + 1000 * rank))),
        "requests Sum of [89]000 float32, rank . requests Sum of [89]000",
    ),
    "large sums of different dtypes": (
        lambda rank: do(Sum(floats(LARGE).int() if rank else floats(LARGE))),
        "requests Sum of 8000 (int|float)32, rank . requests Sum of 8000",
    ),
    "a vote of a float": (
        lambda rank: do(AllGatherScalar(1.0 if rank else 1)),
        "requests AllGatherScalar of (int|float)64, rank . "
        "requests AllGatherScalar of (int|float)64",
    ),
    "a broadcast from another rank": (
        lambda rank: do(Broadcast(floats(2), rank)),
        "requests Broadcast of 2 float32 from rank .",
    ),
    "a swap of another size": (
        lambda rank: do(SendReceive(floats(2 + rank), 1 - rank)),
        "rank . sends [23] float32 to rank ., which expects [23] float32",
    ),
    "another count than is sent": (
        lambda rank: do(AllToAll([floats(3)] * 2, [3 + rank, 3])),
        "sends 3 float32 to rank 1, which expects 4 float32",
    ),
    "a rank one round ahead": (
        lambda rank: do(*([AllGatherScalar(1)] * (3 - rank)), SendReceive(floats(2), 1 - rank)),
        "request 3 of channel default: rank . requests",
    ),
    "a large mean after large sums": (
        lambda rank: do(large(), large(), (Mean if rank else Sum)(floats(LARGE))),
        "requests (Sum|Mean) of 8000 float32, rank . requests (Sum|Mean) of 8000 float32",
    ),
    "a receive after large sums": (
        lambda rank: do(large(), large(), Receive(floats(2), 0) if rank else large()),
        "rank . waits for (Receive of 8|Sum of 32000) bytes.*none of them can continue",
    ),
    # each pair was made before, so no check comes first; the next is at most 127 requests later
    "a large mean for a sum where both have followed a sum before": (
        lambda rank: do(*seen(), (Mean if rank else Sum)(floats(LARGE)), *sums(128)),
        "requests (Sum|Mean) of 8000 float32, rank . requests (Sum|Mean) of 8000 float32",
    ),
    "the same requests for two callers in another order": (
        lambda rank: do(*calls(f"model {rank}"), *calls(f"model {1 - rank}")),
        "rank . requests Sum of 2 float32 for model .*, rank . requests Sum of 2 float32 for model",
    ),
    "large requests for two callers in another order": (
        lambda rank: do(Caller(f"model {rank}"), large(), Caller(f"model {1 - rank}"), large()),
        "rank . requests Sum of 8000 float32 for model ., rank . requests Sum of 8000 float32 for",
    ),
    "begun requests for two callers in another order": (
        begun_for_another,
        "request 2 of channel background: rank . requests Sum of 2 float32 for model .",
    ),
    "a message for another caller": (
        lambda rank: do(
            Caller(f"model {rank}"), Receive(floats(2), 0) if rank else Send(floats(2), 1)
        ),
        "requests 2 float32 for model ., rank . requests 2 float32 for model .",
    ),
    "in the background and not": (
        beside,
        "rank . waits for .*none of them can continue",
    ),
}


def report(make, timeout_s):
    """What a program of this process comes to, in words, and how long that took."""
    with init_group(timeout_s=timeout_s) as group:
        began = time.monotonic()
        try:
            return str(run(make(group.rank), group)), time.monotonic() - began
        except (RequestMismatch, RuntimeError) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - began


def report_all(names, timeout_s):
    return [report(MISMATCHES[name][0], timeout_s) for name in names]


@pytest.mark.parametrize("name", MISMATCHES)
def test_lockstep_reports_requests_that_do_not_match(name):
    make, words = MISMATCHES[name]
    with pytest.raises(RequestMismatch, match=words):
        lockstep([make(rank) for rank in range(2)])


def test_processes_report_requests_that_do_not_match_on_all_ranks_at_once(tmp_path):
    names = list(MISMATCHES)
    found = results(2, tmp_path, report_all, names, 60)
    for name, *reports in zip(names, *found, strict=True):
        for words, seconds in reports:
            assert words.startswith("RequestMismatch: the ranks' requests do not match"), name
            assert re.search(MISMATCHES[name][1], words), (name, words)
            assert "hint: every rank must make the same requests in the same order" in words
            assert seconds < 15, (name, seconds)


def around(rank):
    """A program that sends to the next rank before it receives from the one before."""
    return do(Send(floats(2), (rank + 1) % 3), Receive(floats(2), (rank - 1) % 3))


def late(rank):
    """A program in which all wait for rank 1 for longer than a wait is left alone."""
    for _ in range(2):
        yield Compute(2.0 * (rank == 1))
        yield Sum(floats(2))
        yield SendReceive(floats(2), [1, 0, 2][rank])
        if rank == 1:
            yield Compute(1.0)
        if rank < 2:
            yield Receive(floats(2), 1) if rank == 0 else Send(floats(2), 0)
    return "all is well"


def vote_early(rank):
    """A program in which two ranks are in a collective of torch's that the third does not make."""
    return do(large(), large(), AllGatherScalar(1) if rank == 2 else large())


def report_three(timeout_s):
    differs = report(lambda rank: do(Sum(floats(2 + (rank == 1)))), timeout_s)
    return differs, *(report(make, timeout_s) for make in (vote_early, around, late))


def test_all_ranks_report_what_two_of_them_do_and_a_late_rank_is_waited_for(tmp_path):
    for differs, early, cycle, well in results(3, tmp_path, report_three, 60):
        assert "requests Sum of 3 float32" in differs[0]
        assert re.search("rank . waits for Send of 8 bytes with rank .; rank", cycle[0])
        assert re.search(
            "requests (Sum of 8000 float32|AllGatherScalar of int64), rank .", early[0]
        )
        assert max(differs[1], early[1], cycle[1]) < 15
        assert well[0] == "all is well"


def count_messages():
    """How many messages each step of a program sends beside torch's own collectives."""
    sent, send = [], dist.isend

    def count(*args):
        sent.append(args)
        return send(*args)

    def steps():
        counts = []
        for _ in range(4):
            before = len(sent)
            total = yield large()
            yield AllGather(floats(LARGE))
            yield Wait((yield Start(large())))
            yield Sum(floats(2 * LARGE))
            assert float(total[0]) == 2
            counts.append(len(sent) - before)
        return counts

    dist.isend = count
    with init_group(timeout_s=20) as group:
        return run(steps(), group)


def test_ranks_check_that_they_agree_before_collectives_only_where_they_could_differ(tmp_path):
    for counts in results(2, tmp_path, count_messages):
        assert counts[0] > 0
        assert counts[2:] == [0, 0], "messages in steps that repeat the ones before"
