"""Requests to the store: one winner, waits with a limit, time, and ranks that end."""

import os
import random

import pytest
import torch
from limits import HANG_S
from processes import results, shorten_waits, talk, workers
from slow_cases import seeds

from gcnzc import exchange
from gcnzc.exchange.engine import Entry
from gcnzc.exchange.requests import MAX_KEY_BYTES

STORE_S = 0.01


def elect(rank, rounds):
    """In each round all ranks set the same key; return the winners."""
    winners = []
    for number in range(rounds):
        answer = yield exchange.CompareAndSet(f"winner/{number}", b"", f"rank {rank}".encode())
        winners.append(answer.decode())
    return winners


def use_all(rank):
    """Every request once; rank 1 sets what rank 0 waits for."""
    before = yield exchange.ReadKeys(["missing", "other"])
    early = yield exchange.WaitForKey("late", 0.05)
    if rank == 1:
        yield exchange.Compute(0.2)
        yield exchange.CompareAndSet("late", b"", b"\x01\xff")
    value = yield exchange.WaitForKey("late")
    wrong = yield exchange.CompareAndSet("late", b"another", b"new")
    absent = yield exchange.CompareAndSet("absent", b"another", b"new")
    same = yield exchange.CompareAndSet("absent", b"new", b"new")
    zero = yield exchange.CompareAndSet(f"zero/{rank}", b"", b"\0")
    zeros = [
        (yield exchange.ReadKeys([f"zero/{rank}"])),
        (yield exchange.WaitForKey(f"zero/{rank}")),
    ]
    equal = yield exchange.CompareAndSet(f"zero/{rank}", b"\0", b"\0")
    own = yield exchange.CompareAndSet(f"own/{rank}", b"", b"1")
    changed = yield exchange.CompareAndSet(f"own/{rank}", b"1", b"2")
    read = yield exchange.ReadKeys([f"own/{rank}", "absent", "late"])
    yield exchange.DeleteKeys([f"own/{rank}", "absent"])
    (deleted,) = yield exchange.ReadKeys([f"own/{rank}"])
    again = yield exchange.CompareAndSet(f"own/{rank}", b"", b"3")
    first = before, early, value, wrong, absent, same, zero, zeros, equal
    return *first, own, changed, read, deleted, again


EXPECTED = (
    [b"", b""],
    None,
    b"\x01\xff",
    b"\x01\xff",
    b"",
    b"",
    b"\0",
    [[b"\0"], b"\0"],
    b"\0",
    b"1",
    b"2",
    [b"2", b"", b"\x01\xff"],
    b"",
    b"3",
)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_one_rank_wins_each_round(world_size):
    found = exchange.lockstep(
        [elect(rank, 20) for rank in range(world_size)], store_s=STORE_S
    ).results
    assert all(each == found[0] for each in found)
    assert set(found[0]) <= {f"rank {rank}" for rank in range(world_size)}


def test_every_request_in_a_simulation():
    assert exchange.lockstep([use_all(rank) for rank in range(3)]).results == [EXPECTED] * 3


@pytest.mark.parametrize("world_size", [1, 3])
def test_values_that_are_sent_to_the_store_count(world_size):
    def set_twice():
        yield exchange.CompareAndSet("key", b"", b"12345")
        yield exchange.CompareAndSet("key", b"12345", b"123")
        yield exchange.ReadKeys(["key"])
        yield exchange.WaitForKey("key")

    expected = {
        "CompareAndSet": Entry(2, 2, 5 + 5 + 3),
        "ReadKeys": Entry(1),
        "WaitForKey": Entry(1),
    }
    if world_size == 1:
        # nothing is sent
        expected["CompareAndSet"] = Entry(2)
        group = exchange.Group()
        exchange.run(set_twice(), group)
        assert group.ledger.entries == expected
    ledgers = exchange.lockstep([set_twice() for _ in range(world_size)]).ledgers
    assert all(each.entries == expected for each in ledgers)


def test_a_single_rank_has_a_store_of_its_own():
    group = exchange.Group()
    assert exchange.run(elect(0, 2), group) == ["rank 0", "rank 0"]
    assert exchange.run(elect(1, 2), group) == ["rank 0", "rank 0"]
    assert exchange.run(elect(1, 1), exchange.Group()) == ["rank 1"]


def set_and_read(key):
    yield exchange.CompareAndSet(key, b"", b"1")
    return (yield exchange.ReadKeys([key, "missing"]))


def use_over_processes():
    shorten_waits()
    with exchange.init_group(timeout_s=5) as group:
        answers = exchange.run(use_all(group.rank), group)
        entries = repr(group.ledger.entries)
        # the longest key reaches the store, also with the prefixes of a subgroup
        longest = "k" * MAX_KEY_BYTES
        assert exchange.run(set_and_read(longest), group.subgroup(range(3))) == [b"1", b""]
        winners = exchange.run(elect(group.rank, 200), group)
        with pytest.raises(exchange.WorkerLost, match="the key never"):
            exchange.run(wait_for_never(None), group)
        # a result has no bytes
        return repr(answers), winners, entries


def test_processes_answer_as_the_simulation_does(tmp_path):
    found = results(3, tmp_path, use_over_processes)
    assert [answers for answers, *_ in found] == [repr(EXPECTED)] * 3
    simulated = exchange.lockstep([use_all(rank) for rank in range(3)]).ledgers
    assert [entries for *_, entries in found] == [repr(each.entries) for each in simulated]
    winners = [each for _, each, _ in found]
    assert winners[0] == winners[1] == winners[2]
    assert set(winners[0]) <= {"rank 0", "rank 1", "rank 2"}


def wait_for_never(seconds):
    return (yield exchange.WaitForKey("never", seconds)), (yield exchange.Now())


def test_a_rank_that_waits_for_a_crashed_one_is_lost():
    def wait():
        try:
            yield exchange.WaitForKey("a")
        except exchange.WorkerLost as error:
            return str(error)

    def set_later():
        yield exchange.Compute(1.0)
        yield exchange.CompareAndSet("a", b"", b"1")

    faults = {1: [exchange.Crash(0.5)]}
    found = exchange.lockstep([wait(), set_later()], faults=faults).results[0]
    assert "rank 0 waited for the key a, which no rank has set: rank 1 crashed" in found
    with pytest.raises(exchange.RequestMismatch, match="rank 0 waits for the key a"):
        exchange.lockstep([wait()])
    # of a rank that crashes while its request is on the way, the request is lost
    faults = {1: [exchange.Crash(1.25)]}
    assert (
        "no rank has set"
        in exchange.lockstep([wait(), set_later()], faults=faults, store_s=1.0).results[0]
    )


def lose_the_setter():
    shorten_waits()
    with exchange.init_group(timeout_s=5) as group:
        if group.rank == 1:
            os._exit(3)
        with pytest.raises(exchange.WorkerLost) as caught:
            exchange.run(wait_for_never(None), group)
        return str(caught.value)


def test_a_wait_names_a_process_that_has_ended(tmp_path):
    with workers(2, tmp_path, lose_the_setter) as processes:
        processes[0].join(HANG_S)
        assert processes[0].exitcode == 0, talk(tmp_path, 0)
    text = torch.load(tmp_path / "0.pt")
    assert "for the key never" in text
    assert "rank 1" in text


def count(rank, steps, choose):
    """Add to a counter by compare-and-set."""
    value = b""
    for _ in range(steps):
        yield exchange.Compute(choose.choice([0.0, choose.random()]))
        while True:
            new = str(int((value or b"0").split()[0]) + 1).encode() + b" %d" % rank
            answer = yield exchange.CompareAndSet("counter", value, new)
            value, before = answer, value
            if answer == new and before != new:
                break
    return (yield exchange.ReadKeys(["counter"]))


@pytest.mark.parametrize("seed", seeds(50, 5))
def test_no_increment_is_lost(seed):
    choose = random.Random(seed)
    world_size, steps = choose.randint(1, 5), choose.randint(1, 5)
    store_s = choose.choice([0.0, 0.1])
    faults = {0: [exchange.SlowDown(0.1, float("inf"), 0.5)]}
    ranks = [count(rank, steps, choose) for rank in range(world_size)]
    found = exchange.lockstep(ranks, faults=faults, store_s=store_s).results
    assert max(int(value.split()[0]) for (value,) in found) == world_size * steps
