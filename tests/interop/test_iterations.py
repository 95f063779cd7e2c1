"""Each iteration is an epoch of its own; seeds come from torch; attributes may be on a GPU."""

import pickle
from functools import partial

import pytest
import torch
from interop import test_pyg_hetero as typed
from pyg_or_skip import pyg
from pyg_recorded import assert_same

from gcnzc.interop.pyg import LinkNeighborLoader, NeighborLoader

ITEMS = 20


def make_data():
    numbers = torch.Generator().manual_seed(4)
    return pyg.data.Data(
        x=torch.randn(ITEMS, 3, generator=numbers),
        y=torch.arange(ITEMS),
        edge_index=torch.randint(ITEMS, (2, 150), generator=numbers),
        edge_attr=torch.randn(150, 2, generator=numbers),
        two_index=torch.randint(9, (2, 150), generator=numbers),
    )


OPTIONS = {"batch_size": 5, "shuffle": True, "threads": 1}


def make(**kwargs):
    return NeighborLoader(make_data(), [2, 2], **(OPTIONS | kwargs))


def drawn(batch):
    return batch.input_id.tolist(), batch.n_id.tolist()


def node_epoch(loader):
    return [drawn(batch) for batch in loader]


def epochs_of(loader, count):
    return [node_epoch(loader) for _ in range(count)]


def make_link_loader(**kwargs):
    edges = make_data().edge_index[:, :ITEMS]
    options = OPTIONS | {"neg_sampling": "binary"} | kwargs
    return LinkNeighborLoader(make_data(), [2, 2], edges, **options)


def link_epoch(loader):
    return [(batch.n_id.tolist(), batch.edge_label_index.tolist()) for batch in loader]


def make_dgl_loader(**kwargs):
    from dgl_or_skip import dgl

    from gcnzc.interop.dgl import DataLoader

    graph = dgl.graph(tuple(make_data().edge_index), num_nodes=ITEMS)
    graph.ndata["x"] = make_data().x
    sampler = dgl.dataloading.NeighborSampler([2, 2], prefetch_node_feats=["x"])
    return DataLoader(graph, torch.arange(ITEMS), sampler, **(OPTIONS | kwargs))


def dgl_epoch(loader):
    return [(n.tolist(), s.tolist(), b[0].srcdata["x"].tolist()) for n, s, b in loader]


LOADERS = {"node": (make, node_epoch), "link": (make_link_loader, link_epoch)}
LOADERS["dgl"] = make_dgl_loader, dgl_epoch


@pytest.mark.parametrize("kind", LOADERS)
def test_iterators_of_every_loader_are_epochs_of_their_own_and_its_seed_is_torchs(kind):
    make_loader, read = LOADERS[kind]
    loader = make_loader(seed=1)
    first, second = read(loader), read(loader)
    assert first != second
    loader = make_loader(seed=1)
    pairs = list(zip(iter(loader), iter(loader), strict=True))
    assert [read(batches) for batches in zip(*pairs, strict=True)] == [first, second]
    epochs = []
    for torch_seed in (3, 3, 4):
        torch.manual_seed(torch_seed)
        epochs.append(read(make_loader()))
    assert epochs[0] == epochs[1] != epochs[2]


def make_typed_loader(**kwargs):
    return NeighborLoader(typed.make_data(), [3, 2], "user", **kwargs)


def make_typed_link_loader(**kwargs):
    data, sampling = typed.make_data(), {"neg_sampling": "binary"}
    if "time_attr" in kwargs:
        sampling["edge_label_time"] = data[typed.BUYS].at
    return LinkNeighborLoader(data, [3, 2], typed.BUYS, **sampling, **kwargs)


RESUMED = {
    "node": make,
    "link": make_link_loader,
    "typed node": make_typed_loader,
    "typed node with times": partial(make_typed_loader, time_attr="born"),
    "typed link": make_typed_link_loader,
    "typed link with times": partial(make_typed_link_loader, time_attr="born"),
}


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_loader_yields_the_same_minibatches_with_any_threads(kind):
    def make_loader(threads, seed=3):
        options = {"threads": threads, "seed": seed, "batch_size": 5, "shuffle": True}
        return RESUMED[kind](**options)

    whole = make_loader(1)
    first, second = list(whole), list(whole)
    loader = make_loader(3)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state, copied = (pickle.loads(pickle.dumps(each)) for each in (loader.state_dict(), loader))
    assert type(copied) is type(loader)
    others = make_loader(2), make_loader(2, seed=None)
    for other in others:
        other.load_state_dict(state)
    for other in (*others, copied):
        for expected in (first[2:], second):
            assert_same(other, expected)
    others[0].set_epoch(0)
    assert_same(others[0], first)
    assert_same(iterator, first[2:])
    with pytest.raises(ValueError, match="seed 3, not 4"):
        make_loader(1, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match="other nodes or edges, or of none"):
        make_loader(1).load_state_dict({})


@pytest.mark.parametrize("kind", LOADERS)
def test_the_minibatches_of_another_loader_follow_the_epochs_of_the_sampler(kind):
    """As those of Accelerate, which iterates over the sampler and calls `collate_fn`."""
    make_loader, read = LOADERS[kind]

    def epochs():
        loader = make_loader(seed=1)
        return [read(map(loader.collate_fn, loader.batch_sampler)) for _ in range(2)]

    first, second = epochs()
    assert first != second
    assert [first, second] == epochs()
    # Accelerate's generator decides the order of all ranks
    sampler = make_loader(seed=1).sampler
    sampler.generator = torch.Generator()
    orders = []
    for seed in (3, 3, 4):
        sampler.generator.manual_seed(seed)
        orders.append(list(sampler))
    assert orders[0] == orders[1] != orders[2]


def test_iterations_in_progress_are_resumed_together():
    epochs, loader = epochs_of(make(seed=1), 2), make(seed=1)
    iterators = iter(loader), iter(loader)
    for iterator in iterators:
        next(iterator)
    state, other = loader.state_dict(), make(seed=1)
    other.load_state_dict(state)
    assert epochs_of(other, 2) == [epoch[1:] for epoch in epochs]
    assert [len(list(iterator)) for iterator in iterators] == [3, 3]
    assert list(iterators[0]) == []
    with pytest.raises(ValueError, match=r"'interleaved'\] is not a list of lists of three"):
        other.load_state_dict(state | {"interleaved": [[1, 2]]})


def test_ranks_without_a_seed_have_the_same_order():
    taken, alone = [], []
    for rank in range(2):
        torch.manual_seed(rank)
        loader = make(rank=rank, world_size=2)
        assert len(loader) == 2
        taken += [item for batch in loader for item in batch.input_id.tolist()]
        alone.append(epochs_of(make(), 1))
    assert sorted(taken) == list(range(ITEMS))
    # one rank alone takes its order from torch's random numbers, which differ here
    assert alone[0] != alone[1]


def test_a_given_sampler_orders_the_items():
    loader = make(shuffle=False, sampler=[3, 1, 2, 7, 7, 9], batch_size=4)
    assert [batch.input_id.tolist() for batch in loader] == [[3, 1, 2, 7], [7, 9]]
    groups = [[5, 6], [1], [2, 3, 4]]
    loader = NeighborLoader(make_data(), [2], batch_sampler=groups)
    assert len(loader) == 3
    assert [batch.input_id.tolist() for batch in loader] == groups
    next(iter(loader))
    state = loader.state_dict()
    resumed = NeighborLoader(make_data(), [2], batch_sampler=groups)
    resumed.load_state_dict(state)
    assert [batch.input_id.tolist() for batch in resumed] == groups[1:]
