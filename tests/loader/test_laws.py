"""Every loader: no minibatch depends on threads, and a state or a copy continues with the same."""

import copy
import json
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import pytest
import torch
from bits import same_tensors
from transfer_programs import NUM_NODES as NUM_USERS
from transfer_programs import typed_loader

from gcnzc import FullBatchLoader, Graph, cached
from gcnzc.features.table import FeatureTable
from gcnzc.loader.loader import Loader
from gcnzc.sampling.link import LinkSampler
from gcnzc.sampling.neighbor import Sampler

NUM_NODES = 600
TABLE = FeatureTable(torch.arange(2.0 * NUM_NODES).view(-1, 2))
USERS = FeatureTable(torch.arange(3.0 * NUM_USERS).view(-1, 3))
LABELS = torch.arange(NUM_NODES)
# of two ranks, the second one has more nodes
PARTS = (torch.linspace(0, 1, NUM_NODES) ** 0.7 * 2).long().clamp(max=1)


@pytest.fixture(scope="module")
def graph():
    src, dst = torch.randint(NUM_NODES, (2, 5000), generator=torch.Generator().manual_seed(1))
    return Graph.from_edges(src, dst, NUM_NODES)


def of_nodes(graph, **options):
    given = {"table": TABLE, "seeds": LABELS, "fanouts": [3, 2], "labels": LABELS, "seed": 3}
    return Loader(graph, **given | {"batch_size": 40} | options)


def of_links(graph, **options):
    edges = torch.stack(graph.coo())[:, :200].long()
    own = {
        "seeds": torch.arange(200),
        "sampler": LinkSampler(Sampler(graph, [3]), edges),
        "labels": None,
    }
    return of_nodes(graph, **own, shuffle=False, drop_last=True, in_degrees=True, **options)


def of_cached(graph, **options):
    return of_nodes(graph, table=cached(TABLE, 0.1, LABELS.float()), **options)


def of_full_batch(graph, threads=None):
    return FullBatchLoader(graph, TABLE, torch.arange(0, NUM_NODES, 7), 2, LABELS)


def of_types(graph, kind, **options):
    return typed_loader(kind, batch_size=3, tables={"user": USERS}, **options)


LAST = {"rank": 1, "world_size": 2}
LOADERS = {
    "nodes": of_nodes,
    "a rank": partial(of_nodes, **LAST),
    "rotating": partial(of_nodes, seed_order="rotating", **LAST),
    "local": partial(of_nodes, seed_order="local", parts=PARTS, **LAST),
    "links": of_links,
    "cached": of_cached,
    "full batch": of_full_batch,
    "types": partial(of_types, kind="nodes"),
    "types with times": partial(of_types, kind="temporal"),
    "links of types": partial(of_types, kind="links"),
    "links of types with times": partial(of_types, kind="temporal links"),
}


@pytest.fixture(params=LOADERS)
def make(request, graph):
    return partial(LOADERS[request.param], graph)


def assert_same(found, expected):
    """The same minibatches, bit for bit."""
    for mine, theirs in zip(found, expected, strict=True):
        assert same_tensors((mine, mine.items), (theirs, theirs.items))
        for name in ("num_nodes", "num_edges"):
            assert getattr(mine, name, None) == getattr(theirs, name, None)


def test_minibatches_do_not_depend_on_threads(make):
    one = make(threads=1)
    expected = [*one, *one]
    for threads in (2, 8):
        other = make(threads=threads)
        assert_same([*other, *other], expected)


@pytest.mark.parametrize("stop", ["before the first", "after the first", "after the last"])
def test_a_state_resumes_bit_for_bit(make, stop):
    whole = make()
    list(whole)
    expected = [*whole, *whole]
    cut = make()
    cut.set_epoch(1)
    count = {"before the first": 0, "after the first": 1}.get(stop, len(cut))
    batches = iter(cut)
    for _ in range(count):
        next(batches)
    state = cut.state_dict()
    # what any checkpoint holds
    assert json.loads(json.dumps(state)) == state
    del batches
    resumed = make(threads=1)
    resumed.load_state_dict(state)
    # as a training loop says at the beginning of each epoch
    resumed.set_epoch(1)
    assert resumed.state_dict() == state
    assert_same([*resumed, *resumed], expected[count:])
    assert resumed.epoch == 3


def test_an_epoch_that_is_stopped_early_is_repeated(make):
    loader = make()
    first, again = (list(islice(loader, max(1, len(loader) - 1))) for _ in range(2))
    assert_same(again, first)
    assert loader.epoch == 0


@pytest.mark.parametrize("make", sorted({*LOADERS} - {"full batch"}), indirect=True)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_continues_at_the_position_of_the_loader(make, copied):
    loader = make()
    list(loader)
    batches = iter(loader)
    next(batches)
    again = copied(loader)
    assert (again.epoch, len(again), again.state_dict()) == (1, len(loader), loader.state_dict())
    assert again.graph is not loader.graph
    assert_same([*again, *again], [*batches, *loader])


def test_each_batch_goes_to_one_of_the_threads_that_share_an_iterator(graph):
    loader = of_nodes(graph, batch_size=10)
    expected = sorted(tuple(batch.seeds.tolist()) for batch in of_nodes(graph, batch_size=10))
    iterator, taken = iter(loader), []

    def take(_):
        for batch in iterator:
            assert torch.equal(batch.y, batch.seeds)
            taken.append(tuple(batch.seeds.tolist()))
            # longer than a batch takes, so that threads meet at the end of the epoch
            time.sleep(0.002)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, range(8)))
    assert sorted(taken) == expected
    assert loader.epoch == 1
