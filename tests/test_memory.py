"""The least memory that a run needs."""

import pytest
import torch

from gcnzc.exchange import Group
from gcnzc.models import gnn
from gcnzc.train import memory
from gcnzc.train.config import TrainConfig
from gcnzc.train.memory import check_memory, footprint_of

CPU = torch.device("cpu")


def found_of(optimizer="adam", **options):
    config = TrainConfig(fanouts=(2, 2), optimizer=optimizer, **options)
    return footprint_of(config, lambda: gnn.SAGE(10, 7, 3, 2), 1000, 10, 200)


def test_weights_gradients_and_states_are_counted():
    weights = sum(p.numel() for p in gnn.SAGE(10, 7, 3, 2).parameters())
    for optimizer, copies in (("adam", 4), ("sgd", 3), ("muon", 3), ("onebit-adam", 4)):
        assert found_of(optimizer).training == copies * weights * 4


def test_no_more_seeds_are_counted_than_there_are():
    assert found_of(batch_size=50).minibatch == 50 * (10 + 7 + 3) * 4
    assert found_of(batch_size=2**31 - 1).minibatch == 200 * (10 + 7 + 3) * 4


def test_no_random_number_is_drawn():
    before = torch.get_rng_state()
    found_of()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_is_refused_only_beyond_what_the_machine_has(monkeypatch):
    found = found_of()
    needs = found.training + found.minibatch
    monkeypatch.setattr(memory, "total_bytes", lambda: needs)
    check_memory(found, CPU, Group())
    monkeypatch.setattr(memory, "total_bytes", lambda: needs - 1)
    with pytest.raises(RuntimeError, match=r"not enough memory(.|\n)*hint: "):
        check_memory(found, CPU, Group())
