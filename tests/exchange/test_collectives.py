import pytest
import torch
from collective_sizes import WAYS, lockstep_by
from exchange.cases import ask, same

from gcnzc.exchange import (
    AllGather,
    AllGatherScalar,
    AllToAll,
    Broadcast,
    Compute,
    Link,
    Mean,
    Receive,
    ReduceScatter,
    Send,
    SendReceive,
    Start,
    Sum,
    Wait,
    among,
    lockstep,
)

WORLDS = [1, 2, 3, 5, 8]


def run_all(world_size, make, way=None, **options):
    algorithms = [ask(make(rank)) for rank in range(world_size)]
    return lockstep_by(way, algorithms, **options) if way else lockstep(algorithms, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("elements", [0, 1, 7, 48])
def test_sums_are_correct_and_equal_on_all_ranks(way, world_size, elements):
    values = torch.randn(world_size, elements)
    exact = values.double().sum(0)
    found = run_all(world_size, lambda rank: Sum(values[rank].clone()), way).results
    for each in found:
        assert torch.equal(each, found[0])
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-5)
    # sums of integers are exact in any order
    whole = torch.arange(elements).repeat(world_size, 1) + torch.arange(world_size)[:, None]
    found = run_all(world_size, lambda rank: Sum(whole[rank].clone()), way).results
    assert all(torch.equal(each, whole.sum(0)) for each in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_means_are_written_in_place(dtype):
    values = [torch.full((2, 3), float(rank), dtype=dtype) for rank in range(4)]
    found = run_all(4, lambda rank: Mean(values[rank])).results
    for mine, answer in zip(values, found, strict=True):
        assert answer is mine
        assert torch.equal(mine, torch.full((2, 3), 1.5, dtype=dtype))


DTYPES = [
    *(torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int16, torch.int64),
    torch.float8_e4m3fn,
]


def random_values(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_all_gathers_broadcasts_and_send_receives_are_exact(dtype, world_size):
    mine = [random_values(rank, (13,), dtype) for rank in range(world_size)]
    for way in WAYS:
        for each in run_all(world_size, lambda r: AllGather(mine[r]), way).results:
            assert same(each, torch.stack(mine))
    for root in range(world_size):
        given = [each.clone() for each in mine]
        requests = [Broadcast(each, root) for each in given]
        for rank, each in enumerate(run_all(world_size, requests.__getitem__).results):
            assert each is given[rank]
            assert same(each, mine[root])
    for each in run_all(world_size, lambda r: SendReceive(mine[r], world_size - 1 - r)).results:
        assert each.dtype == dtype
    received = run_all(world_size, lambda r: SendReceive(mine[r], world_size - 1 - r)).results
    assert all(same(each, mine[world_size - 1 - rank]) for rank, each in enumerate(received))


def test_a_broadcast_writes_to_tensors_that_are_not_contiguous():
    values = [torch.zeros(4, 6)[:, ::2] if rank else torch.rand(4, 6)[:, ::2] for rank in range(5)]
    found = run_all(5, lambda rank: Broadcast(values[rank])).results
    assert all(torch.equal(each, values[0]) for each in found)
    assert values[3].any()


@pytest.mark.parametrize("has_counts", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_all_to_all_delivers_parts_of_any_size(world_size, has_counts):
    counts = torch.randint(0, 4, (world_size, world_size))
    parts = [
        [torch.full((int(counts[r, to]),), 10 * r + to) for to in range(world_size)]
        for r in range(world_size)
    ]
    found = run_all(
        world_size,
        lambda r: AllToAll(parts[r], counts[:, r].tolist() if has_counts else None),
    ).results
    for rank, received in enumerate(found):
        for source, part in enumerate(received):
            assert torch.equal(part, parts[source][rank])


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_reduce_scatter_returns_shares_of_the_sum(world_size):
    values = torch.arange(world_size * world_size * 3.0).view(world_size, -1)
    found = run_all(world_size, lambda rank: ReduceScatter(values[rank])).results
    assert torch.equal(torch.cat(found), values.sum(0))
    assert torch.equal(values, torch.arange(world_size * world_size * 3.0).view(world_size, -1))


@pytest.mark.parametrize("world_size", WORLDS)
def test_scalars_of_all_ranks_are_gathered(world_size):
    assert set(run_all(world_size, lambda rank: AllGatherScalar(rank**7)).results) == {
        tuple(rank**7 for rank in range(world_size))
    }
    assert set(run_all(world_size, lambda rank: AllGatherScalar(rank / 3)).results) == {
        tuple(rank / 3 for rank in range(world_size))
    }
    # a 64-bit hash
    assert (
        run_all(world_size, lambda rank: AllGatherScalar(-(2**63) + 1)).results[0][0]
        == -(2**63) + 1
    )


REQUESTS = {
    "Sum": lambda rank, world: Sum(torch.ones(5 * world * 8)),
    "Mean": lambda rank, world: Mean(torch.ones(5 * world * 8)),
    "AllGather": lambda rank, world: AllGather(torch.ones(33)),
    "Broadcast": lambda rank, world: Broadcast(torch.ones(33), world - 1),
    "ReduceScatter": lambda rank, world: ReduceScatter(torch.ones(7 * world)),
    "AllToAll": lambda rank, world: AllToAll(
        [torch.ones(r + 1) for r in range(world)], [rank + 1] * world
    ),
    "AllToAll, without counts": lambda rank, world: AllToAll(
        [torch.ones(r + 1) for r in range(world)]
    ),
    "SendReceive": lambda rank, world: SendReceive(torch.ones(9), world - 1 - rank),
    "AllGatherScalar": lambda rank, world: AllGatherScalar(7),
}


@pytest.mark.parametrize("world_size", [1, 3, 4, 6])
@pytest.mark.parametrize("title", REQUESTS)
def test_the_ledger_counts_the_bytes_of_the_formula(title, world_size):
    kind = title.split(",")[0]
    found = run_all(world_size, lambda r: REQUESTS[title](r, world_size), "builtin")
    for rank, ledger in enumerate(found.ledgers):
        request = REQUESTS[title](rank, world_size)
        assert ledger.bytes_sent == request.sent_bytes(rank, world_size)
        assert ledger.entries[kind].requests == 1


@pytest.mark.parametrize("started", [False, True])
def test_fixed_sizes_select_messages_or_the_collective_of_the_process_group(started):
    def is_builtin(request):
        return request.is_builtin(is_started=started)

    largest = 16 << 10 if started else 32 << 10
    for kind in (Sum, Mean):
        assert not is_builtin(kind(torch.zeros(largest // 4)))
        assert is_builtin(kind(torch.zeros(largest // 4 + 1)))
    gathers = [is_builtin(AllGather(torch.zeros(size))) for size in (1, 2 << 10, (2 << 10) + 1)]
    assert gathers == ([True] * 3 if started else [False, False, True])
    assert is_builtin(Broadcast(torch.zeros(1)))
    assert is_builtin(AllToAll([torch.zeros(1)])) == started
    assert not is_builtin(ReduceScatter(torch.zeros(1 << 20)))
    assert not is_builtin(SendReceive(torch.zeros(1 << 20), 0))


LINK = Link(bytes_per_s=1e6, delay_s=0.01)


def seconds(request, world_size, way):
    return max(run_all(world_size, request, way, link=LINK).seconds)


def test_the_clock_agrees_with_the_formulas():
    size = 80_000
    alpha, transfer = LINK.delay_s, size / LINK.bytes_per_s
    whole = lambda rank: Sum(torch.zeros(size // 4))  # noqa: E731
    assert seconds(whole, 8, "messages") == pytest.approx(3 * (alpha + transfer))
    assert seconds(whole, 8, "builtin") == pytest.approx(14 * alpha + 2 * 7 / 8 * transfer)
    sent = seconds(lambda rank: Broadcast(torch.zeros(size // 4)), 8, "builtin")
    assert sent == pytest.approx(3 * (alpha + transfer))
    rows = lambda rank: AllGather(torch.zeros(size // 4))  # noqa: E731
    assert seconds(rows, 8, "messages") == pytest.approx(3 * alpha + 7 * transfer)
    assert seconds(rows, 8, "builtin") == pytest.approx(7 * (alpha + transfer))
    scalars = seconds(lambda rank: AllGatherScalar(rank), 8, "messages")
    assert scalars == pytest.approx(3 * alpha + 7 * 8 / LINK.bytes_per_s)


def test_started_requests_overlap_with_compute():
    def steps(rank, seconds):
        pending = yield Start(Sum(torch.zeros(20_000)))
        yield Compute(seconds)
        yield Wait(pending)

    exchange = lockstep([steps(rank, 0.0) for rank in range(2)], LINK)
    assert exchange.exchange_s[0] == pytest.approx(exchange.seconds[0])
    assert exchange.seconds[0] > 0.05
    for computing in (0.05, 0.2, 1.0):
        overlapped = lockstep([steps(rank, computing) for rank in range(2)], LINK)
        assert overlapped.seconds[0] == pytest.approx(max(computing, exchange.seconds[0]))
        assert overlapped.exchange_s[0] == pytest.approx(max(0, exchange.seconds[0] - computing))


def test_requests_run_in_order_on_one_channel_and_concurrently_on_several():
    def steps(rank, channels):
        pending = []
        for channel in channels:
            pending.append((yield Start(AllGatherScalar(rank), channel)))
        answers = []
        for each in pending:
            answers.append((yield Wait(each)))
        return answers

    one = lockstep([steps(rank, ["a", "a", "a"]) for rank in range(2)], LINK)
    three = lockstep([steps(rank, ["a", "b", "c"]) for rank in range(2)], LINK)
    assert one.results == three.results == [[(0, 1)] * 3] * 2
    assert one.seconds[0] > 2.9 * LINK.delay_s
    assert three.seconds[0] < 1.1 * LINK.delay_s


def test_a_slow_link_delays_only_its_messages():
    narrow = {(0, 1): Link(bytes_per_s=1e5)}
    request = lambda rank: SendReceive(torch.zeros(2500), rank ^ 1)  # noqa: E731
    found = run_all(4, request, link=LINK, links=narrow)
    assert found.seconds[1] == pytest.approx(0.1 + LINK.delay_s)
    assert found.seconds[0] == found.seconds[2] == pytest.approx(0.01 + LINK.delay_s)


def test_changing_a_tensor_while_it_is_sent_is_an_error():
    def careless(rank):
        values = torch.zeros(3)
        pending = yield Start(Send(values, 1 - rank))
        values += 1
        yield Receive(torch.zeros(3), 1 - rank)
        yield Wait(pending)

    with pytest.raises(RuntimeError, match="changed a tensor while it was being sent"):
        lockstep([careless(rank) for rank in range(2)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
@pytest.mark.parametrize("counts", [None, [2, 2]])
def test_answers_of_an_all_to_all_do_not_share_memory_with_its_parts(dtype, counts):
    def exchange(rank):
        parts = [torch.full((2,), 2 * rank + peer, dtype=dtype) for peer in range(2)]
        found = yield AllToAll(parts, counts)
        for part in parts:
            part.fill_(9)
        return [each.tolist() for each in found]

    outcome = lockstep([exchange(rank) for rank in range(2)])
    assert outcome.results == [[[0, 0], [2, 2]], [[1, 1], [3, 3]]]


# two disjoint sets of 5 ranks, one of them not in ascending order
SETS = ([4, 1], [0, 2, 3])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("title", REQUESTS)
def test_disjoint_sets_of_ranks_compute_what_groups_of_their_size_do(title, way):
    make = REQUESTS[title]

    def work(rank):
        ranks = next(each for each in SETS if rank in each)
        request = make(ranks.index(rank), len(ranks))
        return to_lists((yield from among(ranks, rank, request)))

    together = lockstep_by(way, [work(rank) for rank in range(5)], LINK)
    for ranks in SETS:
        requests = [make(position, len(ranks)) for position in range(len(ranks))]
        alone = run_all(len(ranks), requests.__getitem__, way, link=LINK)
        for position, rank in enumerate(ranks):
            assert together.results[rank] == to_lists(alone.results[position])
            assert together.ledgers[rank].bytes_sent == alone.ledgers[position].bytes_sent
            assert together.seconds[rank] == pytest.approx(alone.seconds[position])


def to_lists(answer):
    if isinstance(answer, torch.Tensor):
        return answer.tolist()
    return [to_lists(each) for each in answer] if isinstance(answer, list) else answer
