"""Each order of the seeds is one pass per epoch, and gives each rank the seeds that it promises."""

import copy

import numpy as np
import pytest
import torch

from gcnzc.graph.graph import Graph
from gcnzc.loader.loader import Loader
from gcnzc.loader.seeds import Shares

NUM_NODES = 600
SEEDS = torch.arange(1, NUM_NODES, 3)  # 200
WORLD_SIZES = [1, 2, 3, 7]
ORDERS = ["rotating", "local"]


@pytest.fixture(scope="module")
def graph():
    generator = torch.Generator().manual_seed(1)
    src, dst = torch.randint(NUM_NODES, (2, 8 * NUM_NODES), generator=generator)
    return Graph.from_edges(src, dst, NUM_NODES)


@pytest.fixture
def make(graph):
    def make(**options):
        given = {"seeds": SEEDS, "fanouts": [2], "batch_size": 8, "threads": 1} | options
        if given.get("seed_order") == "local" and "parts" not in given:
            given["parts"] = parts_of(given.get("world_size", 1))
        return Loader(graph, None, **given)

    return make


def parts_of(world_size):
    """Parts of consecutive nodes, which are uneven: the last ones are larger."""
    return (torch.linspace(0, 1, NUM_NODES) ** 0.7 * world_size).long().clamp(max=world_size - 1)


def ranks(make, world_size, **options):
    return [make(rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def take_epoch(loader):
    """Return the seeds of each step of an epoch."""
    return [batch.seeds.tolist() for batch in loader]


def flatten(steps):
    return [seed for step in steps for seed in step]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_an_epoch_is_one_pass_in_equal_steps(make, order, world_size):
    loaders = ranks(make, world_size, seed_order=order)
    plain = [Shares(len(SEEDS), 8, rank, world_size) for rank in range(world_size)]
    for epoch in range(3):
        steps = [take_epoch(loader) for loader in loaders]
        assert {len(each) for each in steps} == {len(plain[0])}
        assert sorted(flatten(flatten(steps))) == SEEDS.tolist()
        # in each step the ranks have the same numbers of seeds as in the default order
        for step in range(len(plain[0])):
            sizes = sorted(len(each[step]) for each in steps)
            assert sizes == sorted(len(range(len(SEEDS))[each.seed_range(step)]) for each in plain)
            for loader, each in zip(loaders, steps, strict=True):
                loader.set_epoch(epoch)
                mean = sum(sizes) / world_size
                assert loader.shares.loss_weight(step) == pytest.approx(len(each[step]) / mean)
        for loader in loaders:
            loader.set_epoch(epoch + 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_seeds", [200, 199, 43, 21])
def test_in_as_many_epochs_as_ranks_each_rank_takes_every_seed_once(make, world_size, num_seeds):
    seeds = SEEDS[:num_seeds]
    loaders = ranks(make, world_size, seed_order="rotating", seeds=seeds)
    cycles = []
    for _ in range(2):
        chunks = [[set(flatten(take_epoch(x))) for x in loaders] for _ in range(world_size)]
        for rank in range(world_size):
            assert sorted(s for epoch in chunks for s in epoch[rank]) == seeds.tolist()
        # rank r visits the chunks r, r + 1, ..., of which no two are the same at the same time
        for epoch in range(world_size):
            assert chunks[epoch] == [chunks[0][(r + epoch) % world_size] for r in range(world_size)]
        cycles.append(chunks[0])
    # after a cycle there is another permutation
    assert world_size == 1 or cycles[0] != cycles[1]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_seeds", [200, 57])
def test_drop_last_drops_other_seeds_each_epoch(make, order, num_seeds):
    loaders = ranks(make, 3, seed_order=order, seeds=SEEDS[:num_seeds], drop_last=True)
    dropped = []
    for _ in range(6):
        steps = [take_epoch(loader) for loader in loaders]
        assert {len(step) for each in steps for step in each} == {8}
        taken = flatten(flatten(steps))
        assert len(set(taken)) == len(taken) == num_seeds // 24 * 24
        dropped.append(frozenset(SEEDS[:num_seeds].tolist()) - frozenset(taken))
    assert len(set(dropped)) > 1


# local


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_take_their_part_and_large_parts_lend_seeds(make, world_size):
    parts = parts_of(world_size)
    loaders = ranks(make, world_size, seed_order="local")
    sizes = np.bincount(parts[SEEDS], minlength=world_size)
    first = [flatten(take_epoch(loader)) for loader in loaders]
    for rank, taken in enumerate(first):
        own = sum(int(parts[seed]) == rank for seed in taken)
        assert own == min(len(taken), sizes[rank])
    for _ in range(2):
        later = [flatten(take_epoch(loader)) for loader in loaders]
        assert [sorted(each) for each in later] == [sorted(each) for each in first]
        assert later != first


# state


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5), (7, 2)])
def test_another_number_of_ranks_takes_the_remaining_seeds(make, order, before, after):
    loaders = ranks(make, before, seed_order=order)
    for loader in loaders:
        loader.set_epoch(1)
    iterators = [iter(loader) for loader in loaders]
    used = [seed for iterator in iterators for seed in next(iterator).seeds.tolist()]
    used += [seed for iterator in iterators for seed in next(iterator).seeds.tolist()]
    state = loaders[0].state_dict()
    for iterator in iterators:
        iterator.close()
    given = {"parts": parts_of(before)} if order == "local" else {}
    others = ranks(make, after, seed_order=order, batch_size=5)
    for other in others:
        other.load_state_dict(state, **given)
    # where that epoch is saved again, copied, and resumed by as many ranks as at first
    iterators = [iter(copy.deepcopy(other)) for other in others]
    used += [seed for iterator in iterators for seed in next(iterator).seeds.tolist()]
    again = others[0].state_dict() | {"position": 1}
    for iterator in iterators:
        iterator.close()
    last = ranks(make, before, seed_order=order)
    for loader in last:
        loader.load_state_dict(again)
        used += flatten(take_epoch(loader))
    assert sorted(used) == SEEDS.tolist()
    # the next epoch is that of an uninterrupted run
    fresh = ranks(make, before, seed_order=order)
    for loader in fresh:
        loader.set_epoch(2)
    assert [take_epoch(each) for each in last] == [take_epoch(each) for each in fresh]


def test_parts_of_another_number_of_ranks_are_needed_only_within_an_epoch(make):
    loader = make(seed_order="local", world_size=3)
    state = loader.state_dict()
    other = make(seed_order="local", world_size=2)
    other.load_state_dict(state)
    assert len(flatten(take_epoch(other))) == 100
    with pytest.raises(ValueError, match=r"(?s)parts of 3 ranks, and this.* has 2\n\nhint: "):
        other.load_state_dict(state | {"position": 1})
    with pytest.raises(ValueError, match=r"(?s)parts of 3 ranks, and this.* has 2\n\nhint: "):
        other.load_state_dict(state | {"position": 1}, parts_of(3).flip(0))


def test_the_state_of_other_parts_is_rejected(make):
    state = make(seed_order="local", world_size=2).state_dict() | {"position": 1}
    other = make(seed_order="local", world_size=2, parts=torch.arange(NUM_NODES) % 2)
    with pytest.raises(ValueError, match="other parts"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"order_world_size": 0}, r"\['order_world_size'\] is 0"),
        ({"order_batch_size": 0}, r"\['order_batch_size'\] is 0"),
        ({"order_batch_size": None}, "the state lacks order_batch_size"),
    ],
)
def test_an_invalid_state_is_rejected_and_changes_nothing(make, change, words):
    loader = make(seed_order="rotating", world_size=2)
    state = loader.state_dict() | {"position": 1, "epoch": 3} | change
    before = loader.state_dict()
    with pytest.raises(ValueError, match=rf"(?s){words}.*\n\nhint: "):
        loader.load_state_dict({name: value for name, value in state.items() if value is not None})
    assert loader.state_dict() == before


# arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed_order": "random"}, "seed_order is 'random'"),
        ({"seed_order": "rotating", "shuffle": False}, "'rotating' with shuffle=False"),
        ({"seed_order": "local", "shuffle": False}, "'local' with shuffle=False"),
        ({"seed_order": "local", "parts": None}, "parts is None"),
        ({"seed_order": "rotating", "parts": [0]}, "parts has no effect"),
        ({"seed_order": "local", "parts": [0, 0]}, "parts has 2 elements for 600"),
        ({"seed_order": "local", "parts": [3] * 600}, "from 3 to 3 with a world_size of 2"),
        ({"seed_order": "local", "parts": [-1] * 600}, "from -1 to -1"),
        ({"seed_order": "local", "parts": torch.zeros(600)}, "parts is a tensor of torch.float32"),
    ],
)
def test_invalid_arguments_are_rejected(make, options, words):
    with pytest.raises(ValueError, match=words):
        make(world_size=2, **options)
