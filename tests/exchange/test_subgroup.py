"""Collectives of some ranks of a group."""

import dataclasses
import re

import pytest
import torch
from processes import results

from gcnzc.exchange import (
    AllGatherScalar,
    AllToAll,
    Broadcast,
    Choices,
    Crash,
    Link,
    Mean,
    ReduceScatter,
    RequestMismatch,
    SendReceive,
    SizeOnly,
    Start,
    Subgroup,
    Sum,
    Wait,
    WorkerLost,
    init_group,
    lockstep,
    run,
)
from gcnzc.exchange.collectives import COLLECTIVES
from gcnzc.exchange.requests import yield_request

# two disjoint sets of 5 ranks, one of them not in ascending order
SETS = ([4, 1], [0, 2, 3])
LARGE = 100_000


def values(rank, count):
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * rank + count))


def make_request(kind, seed, position, world_size, count=12):
    """A request of a kind, with the values of `seed`."""
    if kind == "ReduceScatter":
        return ReduceScatter(values(seed, count * world_size))
    if kind == "AllToAll":
        return AllToAll([values(seed, count + to) for to in range(world_size)])
    if kind == "SendReceive":
        return SendReceive(values(seed, count), world_size - 1 - position)
    if kind == "AllGatherScalar":
        return AllGatherScalar(seed / 7)
    tensor = values(seed, count)
    return Broadcast(tensor, world_size - 1) if kind == "Broadcast" else COLLECTIVES[kind](tensor)


def to_lists(answer):
    if isinstance(answer, torch.Tensor):
        return answer.tolist()
    return [to_lists(each) for each in answer] if isinstance(answer, list) else answer


def find_set(rank):
    return next(ranks for ranks in SETS if rank in ranks)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, each in COLLECTIVES.items() for name in each.algorithms],
)
def test_disjoint_subgroups_compute_what_groups_of_their_size_do(kind, name):
    choices = Choices.always(**{kind: name})

    def make(rank):
        ranks = find_set(rank)
        request = make_request(kind, rank, ranks.index(rank), len(ranks))
        return to_lists((yield Subgroup(ranks, request)))

    together = lockstep([make(rank) for rank in range(5)], choices=choices)
    for ranks in SETS:
        requests = [
            make_request(kind, rank, position, len(ranks)) for position, rank in enumerate(ranks)
        ]
        alone = lockstep([yield_request(each) for each in requests], choices=choices)
        for position, rank in enumerate(ranks):
            assert together.results[rank] == to_lists(alone.results[position])
            assert together.ledgers[rank] == alone.ledgers[position]


def test_subgroups_take_turns_with_collectives_of_all_ranks():
    def make(rank):
        found = []
        for ranks in ([0, 1], [1, 2], [0, 1, 2]):
            if rank in ranks:
                found.append(float((yield Subgroup(ranks, Sum(torch.tensor([1.0 + rank]))))))
            found.append(float((yield Mean(torch.tensor([float(rank)])))))
        return found

    assert lockstep([make(rank) for rank in range(3)], Link(delay_s=0.01)).results == [
        [3, 1, 1, 6, 1],
        [3, 1, 5, 1, 6, 1],
        [1, 5, 1, 6, 1],
    ]


def test_disjoint_subgroups_run_at_the_same_time_and_no_other_rank_waits():
    def make(rank):
        if rank < 4:
            yield Subgroup([0, 1] if rank < 2 else [2, 3], Sum(SizeOnly(1000)))

    link = Link(1e6)
    outcome = lockstep([make(rank) for rank in range(5)], link)
    pair = lockstep([yield_request(Sum(SizeOnly(1000))) for _ in range(2)], link)
    assert outcome.seconds == [*pair.seconds, *pair.seconds, 0.0]
    assert outcome.ledgers[4].requests == 0


def test_a_subgroup_of_one_rank_sends_nothing():
    request = Subgroup([1], Mean(torch.tensor([3.0])))

    def make(rank):
        return (yield request) if rank == 1 else None

    outcome = lockstep([make(rank) for rank in range(2)])
    assert float(outcome.results[1]) == 3
    assert outcome.ledgers[1].bytes_sent == 0


def started(rank):
    """All ranks open the channel; then two subgroups run on it."""
    yield Wait((yield Start(AllGatherScalar(0), "sums")))
    if rank == 4:
        return None
    pending = yield Start(
        Subgroup([rank % 2, rank % 2 + 2], Sum(torch.tensor([1.0 + rank]))), "sums"
    )
    return float((yield Wait(pending)))


def test_a_started_subgroup():
    outcome = lockstep([started(rank) for rank in range(5)])
    assert outcome.results == [4, 6, 4, 6, None]


def differ(rank):
    """Two of three ranks make different collectives."""
    kind = Mean if rank == 2 else Sum
    if rank != 1:
        yield Subgroup([0, 2], kind(torch.zeros(3)))
    return "other ranks are not involved"


def in_another_order(rank):
    """Each of two ranks waits for the other one in another collective."""
    both = [Subgroup([0, 2], Sum(torch.zeros(3))), AllGatherScalar(0)]
    if rank == 1:
        both.pop(0)
    yield from reversed(both) if rank == 2 else both


def test_lockstep_names_the_ranks_of_subgroups_that_do_not_match():
    words = "request 1 of collectives of ranks 0, 2 on channel default: rank 0 requests Sum of 3 "
    with pytest.raises(
        RequestMismatch, match=words + "float32 in ranks 0, 2, rank 2 requests Mean"
    ):
        lockstep([differ(rank) for rank in range(3)])
    with pytest.raises(RequestMismatch, match="in Sum, one of the collectives of ranks 0, 2"):
        lockstep([in_another_order(rank) for rank in range(3)])


def test_a_crash_ends_the_subgroup_and_no_other():
    def make(rank):
        for _ in range(3):
            yield Subgroup([0, 1] if rank < 2 else [2, 3], Sum(SizeOnly(1000)))
        return rank

    outcome = lockstep([make(rank) for rank in range(4)], Link(1e6), faults={0: [Crash(0.005)]})
    assert isinstance(outcome.errors[1], WorkerLost)
    assert outcome.results[2:] == [2, 3]


def everything(rank):
    """All kinds of collectives in subgroups, between large collectives of all ranks."""
    found = []
    for _ in range(3):
        # gloo's own collective, which a barrier precedes if it follows another for the first time
        found.append(float((yield Sum(torch.full((LARGE,), 1.0 + rank)))[0]))
        for ranks in ([2, 0], [1, 2]):
            if rank in ranks:
                for kind in COLLECTIVES:
                    request = make_request(kind, rank, ranks.index(rank), 2)
                    found.append(to_lists((yield Subgroup(ranks, request))))
    pending = None
    yield Wait((yield Start(AllGatherScalar(0))))
    if rank < 2:
        pending = yield Start(Subgroup([0, 1], Sum(torch.full((LARGE,), 1.0 + rank))))
    found.append((yield AllGatherScalar(rank)))
    if pending is not None:
        found.append(float((yield Wait(pending))[0]))
    return found


def run_everything():
    with init_group(timeout_s=60) as group:
        return run(everything(group.rank), group), dataclasses.asdict(group.ledger)


def test_processes_answer_as_the_simulation_does(tmp_path):
    outcome = lockstep([everything(rank) for rank in range(3)])
    for rank, (found, ledger) in enumerate(results(3, tmp_path, run_everything)):
        assert found == outcome.results[rank]
        expected = dataclasses.asdict(outcome.ledgers[rank])["entries"]
        assert {kind: each["requests"] for kind, each in ledger["entries"].items()} == {
            kind: each["requests"] for kind, each in expected.items()
        }
        for kind in set(expected) - {"Sum", "AllToAll"}:
            assert ledger["entries"][kind] == expected[kind]


def report(make):
    with init_group(timeout_s=60) as group:
        try:
            return str(run(make(group.rank), group))
        except RequestMismatch as error:
            return str(error)


def test_processes_name_the_ranks_of_subgroups_that_do_not_match(tmp_path):
    first, other, last = results(3, tmp_path, report, differ)
    assert other == "other ranks are not involved"
    for words in (first, last):
        assert re.search("collectives of ranks 0, 2 on channel default: rank . requests", words)
