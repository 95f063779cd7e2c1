"""State dicts in torch's layout, torch.distributed.checkpoint, copies and pickles."""

import copy
import pickle

import pytest
import torch
from optim.checkpoints import COPIED, copy_and_pickle, save_and_load
from optim.kinds import KINDS
from processes import results
from torch import nn

from gcnzc.exchange import Group, lockstep
from gcnzc.optim import Averaged, DiLoCo, OneBitAdam, OneBitLamb, ZeroOneAdam


def test_each_rank_resumes_bit_for_bit_from_a_distributed_checkpoint(tmp_path):
    found = results(2, tmp_path, save_and_load, tmp_path)
    for name in KINDS:
        for is_same, saved, loaded in (each[name] for each in found):
            assert is_same, name
            assert saved == loaded, name
    # what compression has left out is each rank's own
    for name in ("onebit-adam", "onebit-lamb", "zero-one-adam local steps", "averaged sign"):
        assert found[0][name][1] != found[1][name][1], name


def test_copies_and_unpickled_optimizers_continue_like_the_original(tmp_path):
    found = results(2, tmp_path, copy_and_pickle)
    for name in COPIED:
        assert found[0][name] == found[1][name] == [True, True], name


def test_the_step_of_an_optimizer_unpickled_without_other_ranks_is_an_error():
    group = pickle.loads(pickle.dumps(Group(1, 2, "")))
    parameter = nn.Parameter(torch.ones(3))
    optimizer = pickle.loads(pickle.dumps(OneBitAdam([parameter], group=group)))
    assert (optimizer.group.rank, optimizer.group.world_size) == (1, 2)
    with pytest.raises(RuntimeError, match="rank 1 of 2 is not connected"):
        optimizer.step()


def steps(model, optimizer, begin, end):
    yield from optimizer.broadcast_model_algorithm()
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(10 * step + optimizer.group.rank)
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()
        yield from optimizer.algorithm()
        yield from getattr(optimizer, "finish_pending_algorithm", lambda: ())()


def team_of(name, seed):
    torch.manual_seed(seed)
    models = [nn.Linear(3, 2) for _ in range(3)]
    return models, [KINDS[name](model, Group(rank, 3)) for rank, model in enumerate(models)]


@pytest.mark.parametrize("name", ["diloco", "co2", "streaming-diloco", "onebit-adam"])
def test_states_of_two_runs_at_the_same_step_are_an_error(name):
    saved = []
    for seed in range(2):
        models, optimizers = team_of(name, seed)
        lockstep([steps(*pair, 0, 6) for pair in zip(models, optimizers, strict=True)])
        saved.append(
            [
                copy.deepcopy((m.state_dict(), o.state_dict()))
                for m, o in zip(models, optimizers, strict=True)
            ]
        )
    models, optimizers = team_of(name, 2)
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        own, state = saved[rank == 1][rank]
        model.load_state_dict(own)
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"(?s)content of the loaded state .* on rank 1\n\nhint: "):
        lockstep([steps(*pair, 6, 20) for pair in zip(models, optimizers, strict=True)])


@pytest.mark.parametrize("name", KINDS)
def test_state_dicts_have_the_layout_of_torchs(name):
    model = nn.Linear(3, 2)
    optimizer = KINDS[name](model, Group())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups"}
    assert [group["params"] for group in state["param_groups"]] == [[0, 1]]
    assert set(state["state"]) == {0, 1}
    again = copy.deepcopy(model)
    other = KINDS[name](again, Group())
    # a step size that is changed in the state is that of the optimizer
    state["param_groups"][0]["lr"] = 0.5
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.5
    optimizer.param_groups[0]["lr"] = 0.5
    for each, its in ((model, optimizer), (again, other)):
        its.zero_grad()
        each(torch.ones(3)).sum().backward()
        its.step()
    assert torch.equal(again.weight, model.weight)


@pytest.mark.parametrize("make", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_the_state_of_another_optimizer_is_refused_by_name(make):
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    adamw = torch.optim.AdamW([parameter])
    adamw.step()
    optimizer = make([parameter], group=Group())
    with pytest.raises(
        ValueError, match=r"of torch, with exp_avg, exp_avg_sq, step, not the state"
    ):
        optimizer.load_state_dict(adamw.state_dict())
    other = next(each for each in (OneBitAdam, ZeroOneAdam) if each is not make)
    state = other([parameter], group=Group()).state_dict()
    with pytest.raises(ValueError, match=f"the state of {other.__name__}, not of {make.__name__}"):
        optimizer.load_state_dict(state)
    wrapper = DiLoCo(torch.optim.AdamW([parameter]), Group())
    with pytest.raises(ValueError, match="before wrapping it"):
        wrapper.load_state_dict(adamw.state_dict())
    with pytest.raises(ValueError, match="not of the inner optimizer"):
        Averaged(torch.optim.AdamW([parameter]), Group()).load_state_dict(state)


def test_values_that_are_no_state_dict_are_refused():
    parameter = nn.Parameter(torch.ones(3))
    for optimizer in (
        OneBitAdam([parameter], group=Group()),
        Averaged(torch.optim.AdamW([parameter]), Group()),
        DiLoCo(torch.optim.AdamW([parameter]), Group()),
    ):
        for wrong, text in ((None, "a mapping, got NoneType"), ({}, "a state with nothing")):
            with pytest.raises(ValueError, match=text):
                optimizer.load_state_dict(wrong)


def averaged_sgd(model, group):
    return Averaged(torch.optim.SGD(model.parameters(), lr=0.01), group)


def test_an_optimizer_of_torch_loads_a_state_without_compression():
    model = nn.Linear(3, 2)
    optimizer = averaged_sgd(model, Group())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    inner.load_state_dict(state)
    assert inner.param_groups[0]["lr"] == 0.01
    # and the state of one: its counts stay those of this optimizer
    optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.5).state_dict())
    assert (optimizer.param_groups[0]["lr"], optimizer.steps) == (0.5, 1)
    assert set(optimizer.param_groups[0]) == set(torch.optim.SGD([torch.ones(1)]).param_groups[0])
