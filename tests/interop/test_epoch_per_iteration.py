"""Every iteration is another epoch, however the previous one ended."""

import pytest
import torch

from gcnzc import Graph, Loader
from gcnzc.interop.epoch_per_iteration import EpochPerIteration


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
    epoch_per_iteration = EpochPerIteration(loader)
    for epoch, count in enumerate(counts):
        assert take(epoch_per_iteration.begin(), count) == epochs[epoch][:count]


def test_an_iteration_after_the_last_batch_is_the_next_epoch(loader, epochs):
    epoch_per_iteration = EpochPerIteration(loader)
    for epoch in range(3):
        assert [batch.nodes.tolist() for batch in epoch_per_iteration.begin()] == epochs[epoch]


def test_an_iteration_without_batches_does_not_count(loader, epochs):
    epoch_per_iteration = EpochPerIteration(loader)
    epoch_per_iteration.begin()
    assert take(epoch_per_iteration.begin(), 2) == epochs[0][:2]
    epoch_per_iteration.begin()
    epoch_per_iteration.begin()
    assert take(epoch_per_iteration.begin(), 4) == epochs[1]


@pytest.mark.parametrize("taken", [1, 4])
def test_set_epoch_determines_the_next_iteration(loader, epochs, taken):
    epoch_per_iteration = EpochPerIteration(loader)
    for epoch in (0, 0, 2, 0, 1):
        epoch_per_iteration.set_epoch(epoch)
        assert take(epoch_per_iteration.begin(), taken) == epochs[epoch][:taken]
    assert take(epoch_per_iteration.begin(), taken) == epochs[2][:taken]


@pytest.mark.parametrize("taken", [0, 1, 3, 4])
@pytest.mark.parametrize("tries", [1, 2])
def test_a_loaded_state_is_resumed(loader, epochs, taken, tries):
    epoch_per_iteration = EpochPerIteration(loader)
    take(epoch_per_iteration.begin(), 4)
    take(epoch_per_iteration.begin(), taken)
    state = loader.state_dict()
    other = EpochPerIteration(loader)
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
