"""Streaming DiLoCo: its equations, fragments, overlapped exchanges, memory, faults."""

import copy
import pickle

import pytest
import torch
from optim import teams
from optim.clocks import Handed, slow_down
from torch import nn

from gcnzc.compress import Dense
from gcnzc.exchange import Compute, Group, Link, lockstep
from gcnzc.optim import StreamingDiLoCo
from gcnzc.optim.sync_interval import NUM_MEASURED, WARM_UP

HALF = Dense(torch.float16)


def every(steps, **options):
    return teams.around(StreamingDiLoCo, local_steps=steps, **options)


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
    inner = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    optimizers = teams.of_group(models, lambda model, group: make(inner(model), group))

    def stepped(rank, model, optimizer):
        for step in range(1, 31):
            found = torch.tensor(
                slope(rank, step, teams.vector_of(model).tolist()), dtype=torch.float64
            )
            model.first.grad, model.second.grad = found[:5].clone(), found[5:].view(2, 3).clone()
            yield from optimizer.algorithm()

    start = teams.vector_of(models[0]).tolist()
    triples = zip(range(world_size), models, optimizers, strict=True)
    lockstep([stepped(*each) for each in triples])
    slices = [range(11 * p // parts, 11 * (p + 1) // parts) for p in range(parts)]
    right = by_the_equations(start, slope, world_size, 30, h, slices, delay, mixing, 0.6, 0.8)
    expected = torch.tensor(right, dtype=torch.float64)
    torch.testing.assert_close(teams.vectors_of(models), expected, rtol=0, atol=1e-12)


def test_memory_is_two_vectors_and_the_pending_fragments():
    models, optimizers = teams.team(2, every(6, fragments=4, delay=4))
    count = sum(each.numel() for each in models[0].parameters() if each.requires_grad)
    teams.broadcast(optimizers)
    begins = {round(p * 6 / 4) + 6 * r: p for p in range(4) for r in range(1, 4)}
    for step in range(1, 20):
        teams.train(models, optimizers, step, step - 1)
        pending = [begins[each] for each in range(step - 3, step + 1) if each in begins]
        expected = sum(optimizers[0].fragments[p].num_elements for p in pending)
        assert optimizers[0].state_bytes == (2 * count + expected) * 8


def timed(model, optimizer, step_s, steps):
    yield from optimizer.broadcast_model_algorithm()
    for rows in teams.batches(steps):
        teams.set_gradients(model, optimizer, rows)
        yield Compute(step_s)
        yield from optimizer.algorithm()


def test_exchanges_over_a_slow_network_overlap_with_steps():
    seconds = {}
    for delay in (0, 2):
        models, optimizers = teams.team(2, every(4, fragments=1, delay=delay), dtype=torch.float32)
        teams.broadcast(optimizers)
        size = 4 * sum(each.numel() for each in models[0].parameters() if each.requires_grad)
        found = lockstep(teams.of_ranks(timed, models, optimizers, 0.1, 12), Link(size / 0.12))
        seconds[delay] = max(found.seconds)
    assert seconds[2] == pytest.approx(12 * 0.1)
    assert seconds[0] > 12 * 0.1 + 3 * 0.1


def test_a_fragment_whose_mean_overflows_changes_nothing():
    make = every(4, fragments=2, delay=1, compress=HALF)
    models, optimizers = teams.team(2, make, teams.sgd, torch.float32)
    teams.train(models, optimizers, 3)
    kept = [(each.anchor.clone(), each.momentum.clone()) for each in optimizers]
    count = optimizers[0].fragments[0].num_elements
    with torch.no_grad():
        models[0].unused[0] = 1e6
    teams.train(models, optimizers, 5, 3)
    for (anchor, momentum), optimizer in zip(kept, optimizers, strict=True):
        assert torch.equal(optimizer.anchor, anchor)
        assert torch.equal(optimizer.momentum, momentum)
        assert optimizer.dropped == 1
        assert optimizer.skip_reason.startswith("synchronization skipped: ")
    teams.train(models, optimizers, 7, 5)
    for (anchor, _), optimizer in zip(kept, optimizers, strict=True):
        # the other fragment is not concerned
        after = optimizer.anchor
        assert torch.equal(after[:count], anchor[:count])
        assert not torch.equal(after[count:], anchor[count:])
        assert optimizer.dropped == 1


def test_a_single_rank_alone_is_saved_and_copied_with_pending_fragments():
    def step(model, optimizer, number):
        teams.set_gradients(model, optimizer, teams.batches(number + 1)[number])
        optimizer.step()

    (model,), (optimizer,) = teams.team(1, every(4, fragments=3, delay=3, alone=True))
    for number in range(6):
        step(model, optimizer, number)
    pair = model, optimizer
    pairs = [copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))]
    (other,), (loaded,) = teams.team(1, every(4, fragments=3, delay=3, alone=True))
    loaded.load_state_dict(teams.saved(optimizer.state_dict()))
    for each in (pair, (other, loaded), *pairs):
        for number in range(6, 14):
            step(*each, number)
    assert teams.all_equal([model, other, *(copied for copied, _ in pairs)])


# --- fragments


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        self.scale = nn.Parameter(torch.ones(()))


def sizes_of(model, fragments, **options):
    optimizer = StreamingDiLoCo(
        teams.sgd(model.parameters()), Group(0, 2), fragments=fragments, **options
    )
    return [fragment.num_elements for fragment in optimizer.fragments]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_fragments_have_nearly_equal_sizes_and_all_elements_are_exchanged(count):
    sizes = sizes_of(teams.Everything(), count)
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    models, optimizers = teams.team(2, every(3, fragments=count, delay=0, mixing=0.0))
    teams.train(models, optimizers, 8)
    teams.finalize(optimizers)
    assert teams.all_equal(models)


def test_fragments_by_module_or_names():
    model = Layers()

    def named(fragments):
        return sizes_of(model, fragments, module=model)

    assert named("modules") == [1, 12, 12, 8, 4]
    assert named([r"bias$", r"^layers"]) == [10, 18, 9]
    with pytest.raises(ValueError, match="no parameter for the fragment 'tail'"):
        named(["head", "tail"])
    with pytest.raises(ValueError, match=r"(?s)no name for group 0, parameter 0.*module=model"):
        sizes_of(model, "modules")
    with pytest.raises(ValueError, match="fragments is 'layers'"):
        named("layers")


def test_fragments_by_module_of_tied_and_frozen_parameters_train_in_sync():
    models = [teams.Everything() for _ in range(2)]

    def make(model, group):
        return every(3, fragments="modules", module=model)(teams.sgd(model.parameters()), group)

    optimizers = teams.of_group(models, make)
    assert len(optimizers[0].fragments) == 4
    lockstep(teams.of_ranks(teams.steps_of, models, optimizers, 8))
    teams.finalize(optimizers)
    assert teams.all_equal(models)


# --- measured intervals


@pytest.mark.parametrize(
    ("exchange_s", "delay", "expected", "then"),
    [(0.5, 3, 4, 3), (20.0, 3, 120, 3), (0.75, "auto", 5, 2), (4.0, "auto", 24, 8)],
)
def test_local_steps_and_delay_hide_the_exchanges(exchange_s, delay, expected, then):
    clocks = [Handed(), Handed()]

    def make(inner, group):
        options = {"fragments": 3, "delay": delay, "clocks": clocks[group.rank]}
        return StreamingDiLoCo(inner, group, local_steps="auto", **options)

    begun, delays = [], []

    def measured(rank):
        optimizer, dues = optimizers[rank], set()
        yield from optimizer.broadcast_model_algorithm()
        for number, rows in enumerate(teams.batches(WARM_UP + NUM_MEASURED + 100), 1):
            clocks[rank].wall_s += 1.0
            teams.set_gradients(models[rank], optimizer, rows)
            yield from optimizer.algorithm()
            for due in {each.due for each in optimizer.fragments if each.due} - dues:
                dues.add(due)
                begun.append((rank, number))
                delays.append(due - number)

    models, optimizers = teams.team(2, make)
    for clock, optimizer in zip(clocks, optimizers, strict=True):
        slow_down(optimizer, clock, exchange_s)
    lockstep([measured(rank) for rank in range(2)])
    end = WARM_UP + NUM_MEASURED
    first = [10, 13, 17, 20, 23]
    later = sorted(
        end + offset + expected * window
        for offset in (0, round(expected / 3), round(2 * expected / 3))
        for window in range(1, 40)
        if end + offset + expected * window <= end + 100
    )
    assert sorted(begun) == [(rank, step) for rank in range(2) for step in first + later]
    initial = 1 if delay == "auto" else delay
    assert sorted(delays) == sorted(2 * ([initial] * len(first) + [then] * len(later)))
    assert optimizers[0].local_steps == expected
