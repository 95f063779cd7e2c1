import pytest
import torch

from gcnzc.exchange import (
    AllGather,
    AllGatherScalar,
    AllToAll,
    Broadcast,
    Choices,
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
    lockstep,
)
from gcnzc.exchange.choices import ALGORITHMS, sent_bytes

WORLDS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16]


def ask(request):
    return (yield request)


def asked(world_size, make, **options):
    return lockstep([ask(make(rank)) for rank in range(world_size)], **options)


def always(kind, name):
    return Choices.always(**{kind: name})


@pytest.mark.parametrize("name", ALGORITHMS["Sum"])
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("elements", [0, 1, 7, 48])
def test_sums_are_sums_and_equal_everywhere(name, world_size, elements):
    values = torch.randn(world_size, elements)
    exact = values.double().sum(0)
    found = asked(
        world_size, lambda rank: Sum(values[rank].clone()), choices=always("Sum", name)
    ).results
    for each in found:
        assert torch.equal(each, found[0])
    torch.testing.assert_close(found[0].double(), exact, rtol=1e-5, atol=1e-5)
    # whole numbers are exact in any order
    whole = torch.arange(elements).repeat(world_size, 1) + torch.arange(world_size)[:, None]
    found = asked(
        world_size, lambda rank: Sum(whole[rank].clone()), choices=always("Sum", name)
    ).results
    assert all(torch.equal(each, whole.sum(0)) for each in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_means_are_written_in_place(dtype):
    values = [torch.full((2, 3), float(rank), dtype=dtype) for rank in range(4)]
    found = asked(4, lambda rank: Mean(values[rank])).results
    for mine, answer in zip(values, found, strict=True):
        assert answer is mine
        assert torch.equal(mine, torch.full((2, 3), 1.5, dtype=dtype))


MOVED = [
    *(torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int16, torch.int64),
    torch.float8_e4m3fn,
]


def some(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def same(one, other):
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_moves_are_exact(dtype, world_size):
    mine = [some(rank, (13,), dtype) for rank in range(world_size)]
    for name in ALGORITHMS["AllGather"]:
        choices = always("AllGather", name)
        for each in asked(world_size, lambda r: AllGather(mine[r]), choices=choices).results:
            assert same(each, torch.stack(mine))
    for name in ALGORITHMS["Broadcast"]:
        for root in range(world_size):
            choices = always("Broadcast", name)
            given = [each.clone() for each in mine]
            requests = [Broadcast(each, root) for each in given]
            found = asked(world_size, requests.__getitem__, choices=choices)
            for rank, each in enumerate(found.results):
                assert each is given[rank]
                assert same(each, mine[root])
    for each in asked(world_size, lambda r: SendReceive(mine[r], world_size - 1 - r)).results:
        assert each.dtype == dtype
    swapped = asked(world_size, lambda r: SendReceive(mine[r], world_size - 1 - r)).results
    assert all(same(each, mine[world_size - 1 - rank]) for rank, each in enumerate(swapped))


@pytest.mark.parametrize("piece_bytes", [1, 5, 1000])
def test_a_chain_passes_on_pieces(piece_bytes):
    values = [torch.zeros(4, 6)[:, ::2] if rank else torch.rand(4, 6)[:, ::2] for rank in range(5)]
    choices = Choices.always(Broadcast=f"chain:{piece_bytes}")
    found = asked(5, lambda rank: Broadcast(values[rank]), choices=choices).results
    # also into memory that is not contiguous
    assert all(torch.equal(each, values[0]) for each in found)
    assert values[3].any()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_parts_of_any_size_reach_whom_they_are_for(world_size, told):
    counts = torch.randint(0, 4, (world_size, world_size))
    parts = [
        [torch.full((int(counts[r, to]),), 10 * r + to) for to in range(world_size)]
        for r in range(world_size)
    ]
    found = asked(
        world_size,
        lambda r: AllToAll(parts[r], counts[:, r].tolist() if told else None),
    ).results
    for rank, received in enumerate(found):
        for source, part in enumerate(received):
            assert torch.equal(part, parts[source][rank])


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_of_a_sum(world_size):
    values = torch.arange(world_size * world_size * 3.0).view(world_size, -1)
    found = asked(world_size, lambda rank: ReduceScatter(values[rank])).results
    assert torch.equal(torch.cat(found), values.sum(0))
    assert torch.equal(values, torch.arange(world_size * world_size * 3.0).view(world_size, -1))


@pytest.mark.parametrize("world_size", WORLDS)
def test_votes_tell_everybodys_number(world_size):
    assert set(asked(world_size, lambda rank: AllGatherScalar(rank**7)).results) == {
        tuple(rank**7 for rank in range(world_size))
    }
    assert set(asked(world_size, lambda rank: AllGatherScalar(rank / 3)).results) == {
        tuple(rank / 3 for rank in range(world_size))
    }
    # a hash of eight bytes
    assert (
        asked(world_size, lambda rank: AllGatherScalar(-(2**63) + 1)).results[0][0] == -(2**63) + 1
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
    "AllToAll, counts asked for": lambda rank, world: AllToAll(
        [torch.ones(r + 1) for r in range(world)]
    ),
    "SendReceive": lambda rank, world: SendReceive(torch.ones(9), world - 1 - rank),
    "AllGatherScalar": lambda rank, world: AllGatherScalar(7),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("title", REQUESTS)
def test_the_ledger_is_the_formula(title, world_size):
    kind = title.split(",")[0]
    for name in ALGORITHMS["Sum" if kind == "Mean" else kind]:
        if name == "halving" and world_size == 6:
            continue
        choices = always("Sum" if kind == "Mean" else kind, name)
        found = asked(world_size, lambda r: REQUESTS[title](r, world_size), choices=choices)
        for rank, ledger in enumerate(found.ledgers):
            request = REQUESTS[title](rank, world_size)
            assert ledger.bytes_sent == sent_bytes(request, rank, world_size, name)
            assert ledger.entries[kind].requests == 1


LINK = Link(bytes_per_s=1e6, delay_s=0.01)


def seconds(request, world_size, choices):
    return max(asked(world_size, request, link=LINK, choices=choices).seconds)


def test_the_clock_agrees_with_the_formulas():
    size = 80_000
    alpha, transfer = LINK.delay_s, size / LINK.bytes_per_s
    whole = lambda rank: Sum(torch.zeros(size // 4))  # noqa: E731
    assert seconds(whole, 8, always("Sum", "doubling")) == pytest.approx(3 * (alpha + transfer))
    assert seconds(whole, 8, always("Sum", "halving")) == pytest.approx(
        6 * alpha + 2 * 7 / 8 * transfer
    )
    assert seconds(whole, 8, always("Sum", "ring")) == pytest.approx(
        14 * alpha + 2 * 7 / 8 * transfer
    )
    choices = Choices.always(Broadcast="chain:1000")
    sent = seconds(lambda rank: Broadcast(torch.zeros(size // 4)), 8, choices)
    assert sent == pytest.approx((80 + 8 - 2) * 0.001 + 7 * alpha)
    votes = seconds(lambda rank: AllGatherScalar(rank), 8, None)
    assert votes == pytest.approx(3 * alpha + 7 * 8 / LINK.bytes_per_s)


def test_what_is_begun_hides_behind_computing():
    def steps(rank, seconds):
        pending = yield Start(Sum(torch.zeros(20_000)))
        yield Compute(seconds)
        yield Wait(pending)

    alone = lockstep([steps(rank, 0.0) for rank in range(2)], LINK)
    assert alone.exchange_s[0] == pytest.approx(alone.seconds[0])
    assert alone.seconds[0] > 0.05
    for computing in (0.05, 0.2, 1.0):
        hidden = lockstep([steps(rank, computing) for rank in range(2)], LINK)
        assert hidden.seconds[0] == pytest.approx(max(computing, alone.seconds[0]))
        assert hidden.exchange_s[0] == pytest.approx(max(0, alone.seconds[0] - computing))


def test_a_channel_answers_one_after_the_other_and_channels_side_by_side():
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


def test_a_slow_link_slows_what_crosses_it():
    narrow = {(0, 1): Link(bytes_per_s=1e5)}
    request = lambda rank: SendReceive(torch.zeros(2500), rank ^ 1)  # noqa: E731
    found = asked(4, request, link=LINK, links=narrow)
    assert found.seconds[1] == pytest.approx(0.1 + LINK.delay_s)
    assert found.seconds[0] == found.seconds[2] == pytest.approx(0.01 + LINK.delay_s)


def test_a_tensor_that_is_being_sent_must_stay():
    def careless(rank):
        values = torch.zeros(3)
        pending = yield Start(Send(values, 1 - rank))
        values += 1
        yield Receive(torch.zeros(3), 1 - rank)
        yield Wait(pending)

    with pytest.raises(RuntimeError, match="changed a tensor while it was being sent"):
        lockstep([careless(rank) for rank in range(2)])


@pytest.mark.parametrize(
    ("request_of_three", "message"),
    [
        (lambda: AllToAll([torch.zeros(1)] * 2), "2 parts for 3 workers"),
        (
            lambda: AllToAll([torch.zeros(1), torch.zeros(1), torch.zeros(1).int()]),
            "several dtypes",
        ),
        (lambda: Mean(torch.zeros(3, dtype=torch.int64)), "Mean of torch.int64"),
        (lambda: Sum(torch.zeros(4, 4).T), "not contiguous"),
        (lambda: ReduceScatter(torch.zeros(4)), "4 elements for 3 workers"),
        (lambda: Broadcast(torch.zeros(4), 3), "from worker 3 of 3"),
        (lambda: SendReceive(torch.zeros(4), -1), "with worker -1 of 3"),
    ],
)
def test_requests_that_make_no_sense(request_of_three, message):
    with pytest.raises(ValueError, match=message):
        asked(3, lambda rank: request_of_three())


@pytest.mark.parametrize("name", ["fastest", "chain:0", "chain:", "ring:5", "doubling"])
def test_only_known_algorithms(name):
    with pytest.raises(ValueError, match="hint: there are binomial, chain, builtin"):
        Choices.always(Broadcast=name)


@pytest.mark.parametrize(
    "steps",
    [
        (),
        ((8, "ring"),),
        ((None, "ring"), (None, "ring")),
        ((9, "ring"), (8, "ring"), (None, "ring")),
    ],
)
def test_choices_serve_every_size(steps):
    with pytest.raises(ValueError, match="hint: their bytes rise, and None comes last"):
        Choices({"Sum": steps})


def test_workers_cannot_choose_by_sizes_that_only_they_know():
    with pytest.raises(ValueError, match="hint: one algorithm must serve all"):
        Choices({"AllToAll": ((8, "direct"), (None, "builtin"))})
