"""Every iteration is another epoch, however the previous one ended."""

import pytest
import torch

from gcnzc import Graph, Loader
from gcnzc.interop.lightning import Feed


@pytest.fixture
def loader():
    graph = Graph.from_edges(*torch.randint(50, (2, 400)), 50)
    return Loader(graph, None, torch.arange(40), [2], 10, threads=1)


@pytest.fixture
def epochs(loader):
    """What the batches of the first epochs are."""
    found = [[batch.nodes.tolist() for batch in loader] for _ in range(4)]
    loader.set_epoch(0)
    return found


def take(iterator, count):
    return [next(iterator).nodes.tolist() for _ in range(count)]


@pytest.mark.parametrize("counts", [(4, 4), (1, 3, 2), (2, 4, 1), (4, 1, 4)])
def test_each_iteration_is_another_epoch(loader, epochs, counts):
    feed = Feed(loader, advances=True)
    for epoch, count in enumerate(counts):
        assert take(iter(feed), count) == epochs[epoch][:count]


def test_an_iteration_after_the_last_batch_is_the_next_epoch(loader, epochs):
    feed = Feed(loader, advances=True)
    for epoch in range(3):
        assert [batch.nodes.tolist() for batch in iter(feed)] == epochs[epoch]


def test_an_iteration_without_batches_does_not_count(loader, epochs):
    feed = Feed(loader, advances=True)
    iter(feed)
    assert take(iter(feed), 2) == epochs[0][:2]
    iter(feed)
    iter(feed)
    assert take(iter(feed), 4) == epochs[1]


@pytest.mark.parametrize("taken", [1, 4])
def test_set_epoch_determines_the_next_iteration(loader, epochs, taken):
    feed = Feed(loader, advances=True)
    for epoch in (0, 0, 2, 0, 1):
        feed.set_epoch(epoch)
        assert take(iter(feed), taken) == epochs[epoch][:taken]
    assert take(iter(feed), taken) == epochs[2][:taken]


@pytest.mark.parametrize("taken", [0, 1, 3, 4])
@pytest.mark.parametrize("tries", [1, 2])
def test_a_loaded_state_is_resumed(loader, epochs, taken, tries):
    feed = Feed(loader, advances=True)
    take(iter(feed), 4)
    take(iter(feed), taken)
    state = loader.state_dict()
    other = Feed(loader, advances=True)
    # whatever was done before
    other.set_epoch(3)
    take(iter(other), 2)
    other.load_state_dict(state)
    rest = epochs[1][taken:]
    if taken < 4:
        # the epoch that it is in
        other.set_epoch(1)
        for _ in range(tries - 1):
            iter(other)
        assert take(iter(other), len(rest)) == rest
    for _ in range(tries - 1):
        iter(other)
    assert take(iter(other), 4) == epochs[2]
