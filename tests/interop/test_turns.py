"""Every iteration is another epoch, whoever ended the one before, and how."""

import pytest
import torch

from gcnzc import Graph, Loader
from gcnzc.interop.turns import Turns


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
def test_parts_and_whole_epochs(loader, epochs, counts):
    turns = Turns(loader)
    for epoch, count in enumerate(counts):
        assert take(turns.begin(), count) == epochs[epoch][:count]


def test_past_the_end(loader, epochs):
    turns = Turns(loader)
    for epoch in range(3):
        assert [batch.nodes.tolist() for batch in turns.begin()] == epochs[epoch]


def test_an_iteration_that_took_nothing_does_not_count(loader, epochs):
    turns = Turns(loader)
    turns.begin()
    assert take(turns.begin(), 2) == epochs[0][:2]
    turns.begin()
    turns.begin()
    assert take(turns.begin(), 4) == epochs[1]


@pytest.mark.parametrize("taken", [1, 4])
def test_an_epoch_that_was_asked_for(loader, epochs, taken):
    turns = Turns(loader)
    for epoch in (0, 0, 2, 0, 1):
        turns.set_epoch(epoch)
        assert take(turns.begin(), taken) == epochs[epoch][:taken]
    assert take(turns.begin(), taken) == epochs[2][:taken]


@pytest.mark.parametrize("taken", [0, 1, 3, 4])
@pytest.mark.parametrize("tries", [1, 2])
def test_a_loaded_state_goes_on(loader, epochs, taken, tries):
    turns = Turns(loader)
    take(turns.begin(), 4)
    take(turns.begin(), taken)
    state = loader.state_dict()
    other = Turns(loader)
    # whatever was done before
    other.set_epoch(3)
    take(other.begin(), 2)
    other.load_state_dict(state)
    rest = epochs[1][taken:]
    if taken < 4:
        # the epoch that it is in
        other.set_epoch(1)
        for _ in range(tries - 1):
            other.begin()
        assert take(other.begin(), len(rest)) == rest
    for _ in range(tries - 1):
        other.begin()
    assert take(other.begin(), 4) == epochs[2]


def test_bad_epochs(loader):
    with pytest.raises(ValueError, match="epoch is -1"):
        Turns(loader).set_epoch(-1)
