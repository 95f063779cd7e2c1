import copy
import pickle

import pytest
import torch
from collective_sizes import lockstep_by
from optim.local import (
    Handed,
    adamw,
    all_equal,
    gradients_of,
    saved,
    sgd,
    taught,
    team,
    train,
    vector_of,
)
from optim.models import Everything, batches, loss_of
from torch import nn

from gcnzc.compress import Dense, Sign
from gcnzc.exchange import Compute, Group, Link, lockstep
from gcnzc.optim import DiLoCo, StreamingDiLoCo
from gcnzc.optim.sync_interval import NUM_MEASURED, WARM_UP

HALF = Dense(torch.float16)


def every(steps, **options):
    return lambda inner, group: StreamingDiLoCo(inner, group, local_steps=steps, **options)


def pending_of(optimizer):
    """The fragments whose exchange is pending."""
    return [each for each in optimizer.fragments if each.due]


def by_the_equations(start, gradient, world_size, steps, h, slices, delay, mixing, lr, momentum):
    """Streaming DiLoCo of plain gradient descent, of lists of numbers.

    Args:
        start: of all workers.
        gradient: of (worker, step, parameters).
        slices: of the vector, one for each fragment.
    """
    x = [list(start) for _ in range(world_size)]
    a, b = list(start), [0.0] * len(start)
    under_way = []
    for t in range(1, steps + 1):
        for worker in range(world_size):
            slope = gradient(worker, t, x[worker])
            x[worker] = [value - 0.1 * by for value, by in zip(x[worker], slope, strict=True)]
        for number, places in enumerate(slices):
            first = round(number * h / len(slices))
            if t > first and (t - first) % h == 0:
                d = {i: sum(a[i] - x[w][i] for w in range(world_size)) / world_size for i in places}
                under_way.append((t + delay, d))
        for due, d in under_way:
            if due == t:
                for i, value in d.items():
                    b[i] = momentum * b[i] + value
                    a[i] -= lr * (value + momentum * b[i])
                    for worker in range(world_size):
                        x[worker][i] = mixing * x[worker][i] + (1 - mixing) * a[i]
    return x


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
        self.second = nn.Parameter(torch.linspace(2, 1, 6, dtype=torch.float64).view(2, 3))


def slope(worker, step, x):
    """Of another valley for each worker, which moves."""
    return [value - (worker + 1) * 0.3 * ((step + i) % 4) for i, value in enumerate(x)]


@pytest.mark.parametrize(
    ("h", "parts", "delay", "mixing"),
    [
        (1, 1, 0, 0.0),
        (4, 1, 0, 0.0),
        (4, 1, 3, 0.5),
        (5, 2, 1, 0.5),
        (6, 3, 2, 0.0),
        (7, 3, 5, 0.25),
        (7, 3, 6, 1.0),
        (3, 8, 2, 0.5),
        (10, 11, 4, 0.75),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_does_what_the_equations_say(h, parts, delay, mixing, world_size):
    models = [Two() for _ in range(world_size)]
    make = every(h, fragments=parts, delay=delay, mixing=mixing, outer_lr=0.6, outer_momentum=0.8)
    optimizers = [
        make(torch.optim.SGD(model.parameters(), lr=0.1), Group(rank, world_size))
        for rank, model in enumerate(models)
    ]

    def stepped(rank, model, optimizer):
        for step in range(1, 31):
            found = torch.tensor(slope(rank, step, vector_of(model).tolist()), dtype=torch.float64)
            model.first.grad, model.second.grad = found[:5].clone(), found[5:].view(2, 3).clone()
            yield from optimizer.algorithm()

    start = vector_of(models[0]).tolist()
    triples = zip(range(world_size), models, optimizers, strict=True)
    lockstep([stepped(*each) for each in triples])
    slices = [range(11 * p // parts, 11 * (p + 1) // parts) for p in range(parts)]
    right = by_the_equations(start, slope, world_size, 30, h, slices, delay, mixing, 0.6, 0.8)
    for model, expected in zip(models, right, strict=True):
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(vector_of(model), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compress", [Dense(), HALF])
def test_one_fragment_without_delay_is_diloco_bit_for_bit(compress):
    options = {"outer_lr": 0.7, "outer_momentum": 0.9, "compress": compress}
    models, optimizers = team(3, every(4, fragments=1, delay=0, mixing=0.0, **options), adamw)
    others, theirs = team(3, lambda *of: DiLoCo(*of, local_steps=4, **options), adamw)
    train(models, optimizers, 14)
    train(others, theirs, 14)
    for model, other in zip(models, others, strict=True):
        assert torch.equal(vector_of(model), vector_of(other))


@pytest.mark.parametrize("compress", [Dense(), HALF, Sign(block=64)], ids=["dense", "half", "sign"])
def test_bytes_and_requests_are_as_stated(compress):
    world_size, parts = 4, 3
    make = every(5, fragments=parts, delay=2, signals=2, compress=compress)
    models, optimizers = team(world_size, make, dtype=torch.float32)
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    # two windows of every fragment, the second's last offset and its delay
    found = lockstep_by(
        "builtin",
        [taught(*pair, 15) for pair in zip(models, optimizers, strict=True)],
    )
    optimizer = optimizers[0]
    means = [5, 10, 15, 7, 12, 8, 13]
    counts = [fragment.num_elements for fragment in optimizer.fragments]
    window = sum(compress.bytes_sent(count, world_size, 4) for count in counts)
    stated = 2 * window + compress.bytes_sent(counts[0], world_size, 4)
    for ledger in found.ledgers:
        assert ledger.requests == len(means) * (2 if isinstance(compress, Sign) else 1)
        # parts of a ring differ by an element
        assert abs(ledger.bytes_sent - stated) <= len(means) * 2 * world_size * 4


def test_memory_is_two_vectors_and_the_pending_fragments():
    models, optimizers = team(2, every(6, fragments=4, delay=4))
    count = optimizers[0].flat.num_elements
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
    begins = {round(p * 6 / 4) + 6 * r: p for p in range(4) for r in range(1, 4)}
    for step in range(1, 20):
        train(models, optimizers, step, step - 1)
        flying = [begins[each] for each in range(step - 3, step + 1) if each in begins]
        expected = sum(optimizers[0].fragments[p].num_elements for p in flying)
        assert optimizers[0].state_bytes == (2 * count + expected) * 8


def test_exchanges_over_a_slow_network_overlap_with_steps():
    step_s = 0.1

    def timed(model, optimizer):
        yield from optimizer.broadcast_model_algorithm()
        for rows in batches(12):
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            yield Compute(step_s)
            yield from optimizer.algorithm()

    seconds = {}
    for delay in (0, 2):
        make = every(4, fragments=1, delay=delay)
        models, optimizers = team(2, make, dtype=torch.float32)
        lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])
        size = optimizers[0].flat.num_elements * 4
        found = lockstep(
            [timed(*pair) for pair in zip(models, optimizers, strict=True)],
            Link(bytes_per_s=size / 0.12),
        )
        seconds[delay] = max(found.seconds)
    assert seconds[2] == pytest.approx(12 * step_s)
    assert seconds[0] > 12 * step_s + 3 * 0.1


def test_a_fragment_whose_mean_overflows_changes_nothing():
    make = every(4, fragments=2, delay=1, compress=HALF)
    models, optimizers = team(2, make, sgd, torch.float32)
    train(models, optimizers, 3)
    kept = [(each.anchor.clone(), each.momentum.clone()) for each in optimizers]
    count = optimizers[0].fragments[0].num_elements
    with torch.no_grad():
        models[0].unused[0] = 1e6
    train(models, optimizers, 5, 3)
    for (anchor, momentum), optimizer in zip(kept, optimizers, strict=True):
        assert torch.equal(optimizer.anchor, anchor)
        assert torch.equal(optimizer.momentum, momentum)
        assert optimizer.dropped == 1
        assert optimizer.skip_reason.startswith("synchronization skipped: ")
    train(models, optimizers, 7, 5)
    for (anchor, _), optimizer in zip(kept, optimizers, strict=True):
        # the other fragment is not concerned
        after = optimizer.anchor
        assert torch.equal(after[:count], anchor[:count])
        assert not torch.equal(after[count:], anchor[count:])
        assert optimizer.dropped == 1


def test_fragments_by_module():
    def make(inner, group):
        model = next(models)
        return StreamingDiLoCo(
            inner,
            group,
            local_steps=3,
            fragments="modules",
            named_parameters=model.named_parameters(),
        )

    made = [Everything() for _ in range(2)]
    models = iter(made)
    optimizers = [make(sgd(model.parameters()), Group(rank, 2)) for rank, model in enumerate(made)]
    assert len(optimizers[0].fragments) == 4
    train(made, optimizers, 8)
    lockstep([optimizer.finalize_algorithm() for optimizer in optimizers])
    assert all_equal(made)


def test_a_single_rank_alone_is_saved_and_copied_with_pending_fragments():
    def step(model, optimizer, number):
        gradients_of(model, optimizer, batches(number + 1)[number])
        optimizer.step()

    (model,), (optimizer,) = team(1, every(4, fragments=3, delay=3, alone=True))
    for number in range(6):
        step(model, optimizer, number)
    assert pending_of(optimizer)
    pairs = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    (other,), (loaded,) = team(1, every(4, fragments=3, delay=3, alone=True))
    loaded.load_state_dict(saved(optimizer.state_dict()))
    for pair in ((model, optimizer), (other, loaded), *pairs):
        for number in range(6, 14):
            step(*pair, number)
    assert all_equal([model, other, *(copied for copied, _ in pairs)])


@pytest.mark.parametrize(
    ("exchange_s", "delay", "expected", "then"),
    [
        (0.5, 3, 4, 3),
        (4.0, 3, 24, 3),
        (20.0, 3, 120, 3),
        (0.75, "auto", 5, 2),
        (4.0, "auto", 24, 8),
    ],
)
def test_local_steps_and_delay_hide_the_exchanges(exchange_s, delay, expected, then):
    clocks = [Handed(), Handed()]

    def make(inner, group):
        return StreamingDiLoCo(
            inner,
            group,
            local_steps="auto",
            fragments=3,
            delay=delay,
            clocks=clocks[group.rank],
        )

    def slow(reducer, rank):
        mean = reducer.mean

        def slower(values, extras=0):
            clocks[rank].wall_s += exchange_s
            return (yield from mean(values, extras))

        reducer.mean = slower

    begun, delays = {0: [], 1: []}, {0: [], 1: []}

    def timed(rank):
        optimizer, dues = optimizers[rank], set()
        yield from optimizer.broadcast_model_algorithm()
        for number, rows in enumerate(batches(WARM_UP + NUM_MEASURED + 100), 1):
            clocks[rank].wall_s += 1.0
            optimizer.zero_grad()
            loss_of(models[rank], rows).backward()
            yield from optimizer.algorithm()
            for pending in pending_of(optimizer):
                if pending.due not in dues:
                    dues.add(pending.due)
                    begun[rank].append(number)
                    delays[rank].append(pending.due - number)

    models, optimizers = team(2, make)
    for rank, optimizer in enumerate(optimizers):
        for reducer in optimizer.reducers.values():
            slow(reducer, rank)
    lockstep([timed(rank) for rank in range(2)])
    end = WARM_UP + NUM_MEASURED
    measured = [10, 13, 17, 20, 23]
    later = sorted(
        end + offset + expected * window
        for offset in (0, round(expected / 3), round(2 * expected / 3))
        for window in range(1, 40)
        if end + offset + expected * window <= end + 100
    )
    assert begun[0] == begun[1] == measured + later
    first = 1 if delay == "auto" else delay
    assert delays[0] == delays[1] == [first] * len(measured) + [then] * len(later)
    assert optimizers[0].local_steps == expected
