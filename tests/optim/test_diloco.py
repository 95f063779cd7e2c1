"""DiLoCo, MuLoCo and local SGD: outer steps, equal methods, shards, faults, a single rank."""

import warnings

import pytest
import torch
from optim import teams
from optim.methods import muon, quorum_of_all
from torch import nn

from gcnzc.compress import Blocks, Dense, Sign
from gcnzc.exchange import Group
from gcnzc.optim import CO2, DiLoCo, LocalSGD, MuLoCo, StreamingDiLoCo, resize_state

HALF = Dense(torch.float16)
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}


def every(steps, **options):
    return teams.around(DiLoCo, local_steps=steps, **{**OUTER, **options})


def momentum(nesterov):
    return lambda parameters: torch.optim.SGD(parameters, 0.7, 0.9, nesterov=nesterov)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"nesterov": False}, momentum(False)),
        ({"nesterov": True}, momentum(True)),
        ({"outer": adam}, adam),
    ],
    ids=["heavy ball", "nesterov", "adam"],
)
def test_an_outer_step_is_torchs_on_the_mean_difference(options, reference):
    models, optimizers = teams.team(3, every(4, **options), teams.adamw)
    teams.broadcast(optimizers)
    common = nn.Parameter(teams.vector_of(models[0]))
    outer = reference([common])
    flags = [torch.full_like(each, each.requires_grad) for each in models[0].parameters()]
    is_trained = torch.cat([each.view(-1) for each in flags]) > 0
    for begin in (0, 4, 8):
        # the same steps with a window that does not end
        others, theirs = teams.team(3, every(100), teams.adamw)
        for model, other, own, its in zip(models, others, optimizers, theirs, strict=True):
            other.load_state_dict(model.state_dict())
            its.inner.load_state_dict(teams.saved(own.inner.state_dict()))
            its.is_broadcast = True
            its.on_broadcast()
        teams.train(others, theirs, begin + 4, begin)
        teams.train(models, optimizers, begin + 4, begin)
        common.grad = common.detach() - teams.mean_of(others)
        outer.step()
        assert teams.all_equal(models)
        found, expected = teams.vector_of(models[0])[is_trained], common.detach()[is_trained]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# two methods with options that make them the same, and the largest difference
HEAVY_BALL = OUTER | {"nesterov": False}
AS_HEAVY_BALL = OUTER | {"gap": "none", "clip": None, "eager": 0.0, "delay": 0}
AT_ONCE = OUTER | {"fragments": 1, "delay": 0, "mixing": 0.0}
INT2 = {"outer_lr": 0.7, "outer_momentum": 0.6, "compress": Blocks("int2", has_feedback=True)}
SAME = [
    (MuLoCo, {}, DiLoCo, INT2, 0.0),
    (CO2, AS_HEAVY_BALL, DiLoCo, HEAVY_BALL, 1e-12),
    *(
        (CO2, AS_HEAVY_BALL | each, DiLoCo, HEAVY_BALL | each, 1e-5)
        for each in ({"compress": HALF}, {"compress": Sign(block=64)})
    ),
    *(
        (StreamingDiLoCo, AT_ONCE | each, DiLoCo, OUTER | each, 0.0)
        for each in ({}, {"compress": HALF})
    ),
    (quorum_of_all, OUTER, DiLoCo, OUTER, 0.0),
    *(
        (kind, OUTER, kind, OUTER | each, 0.0)
        for kind in (DiLoCo, StreamingDiLoCo)
        for each in ({"offload": True}, {"outer": momentum(True)})
    ),
    (DiLoCo, OUTER, DiLoCo, OUTER | {"sharded": True}, 1e-12),
    # of another dtype than the vector's own, though as exact
    (LocalSGD, {}, LocalSGD, {"compress": Dense(torch.float64)}, 1e-12),
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("kind", "options", "other", "its_options", "most"), SAME)
def test_methods_with_these_options_are_the_same(
    kind, options, other, its_options, most, world_size
):
    is_exact = kind is LocalSGD or "compress" not in its_options
    dtype = torch.float64 if is_exact else torch.float32
    inner, found = muon if kind is MuLoCo else teams.adamw, []
    for each, own in ((kind, options), (other, its_options)):
        models, optimizers = teams.team(
            world_size, teams.around(each, local_steps=4, **own), inner, dtype
        )
        teams.train(models, optimizers, 14)
        found.append([teams.vectors_of(models)])
        teams.finalize(optimizers)
        assert teams.all_equal(models)
        found[-1].append(teams.vectors_of(models))
    for one, its in zip(*found, strict=True):
        torch.testing.assert_close(one, its, rtol=0, atol=most)


@pytest.mark.parametrize("kind", [DiLoCo, StreamingDiLoCo])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_outer_optimizer_is_saved_and_resized(kind, world_size):
    make = teams.around(kind, local_steps=4, outer=adam)
    models, optimizers = teams.team(3, make)
    teams.train(models, optimizers, 10)
    teams.finish_pending(optimizers)
    states = [teams.saved(optimizer.state_dict()) for optimizer in optimizers]
    others, loaded = teams.team(world_size, make)
    for rank, optimizer in enumerate(loaded):
        optimizer.load_state_dict(resize_state(states, rank, world_size))
        if world_size > 1:
            for own, first in zip(optimizer.fragments, optimizers[0].fragments, strict=True):
                expected = first.outer.state_dict()["state"]
                assert repr(own.outer.state_dict()["state"]) == repr(expected)
    teams.train(others, loaded, 17, 10)
    if world_size == 3:
        teams.train(models, optimizers, 17, 10)
        assert torch.equal(teams.vectors_of(models), teams.vectors_of(others))


def test_shards_share_the_memory_of_the_state():
    (models, optimizers), (_, theirs) = (
        teams.team(3, every(4, sharded=each)) for each in (True, False)
    )
    for each in (optimizers, theirs):
        teams.broadcast(each)
    count = sum(each.numel() for each in models[0].parameters() if each.requires_grad)
    assert theirs[0].state_bytes == 2 * count * 8
    assert sum(optimizer.state_bytes for optimizer in optimizers) == 2 * count * 8
    assert max(optimizer.state_bytes for optimizer in optimizers) <= 2 * (count // 3 + 32) * 8


@pytest.mark.parametrize("options", [{"compress": HALF}, {"sharded": True}])
@pytest.mark.parametrize("overflows", [False, True])
def test_nothing_changes_if_no_rank_is_finite_or_the_mean_overflows(options, overflows):
    models, optimizers = teams.team(2, every(2, **options), teams.sgd, torch.float32)
    teams.train(models, optimizers, 3)
    kept = [(each.anchor.clone(), each.momentum.clone()) for each in optimizers]
    with torch.no_grad():
        for model in models:
            # of the first share alone
            model.table.weight[0, 0] = 1e6 if overflows else float("nan")
    for optimizer in optimizers if overflows else ():
        # overflows where the difference, which is not compressed, does not
        optimizer.outer_lr = 1e38
    teams.train(models, optimizers, 4, 3)
    for (anchor, buffer), optimizer in zip(kept, optimizers, strict=True):
        assert torch.equal(optimizer.anchor, anchor)
        assert torch.equal(optimizer.momentum, buffer)
        assert ("no rank's parameters are finite" in optimizer.skip_reason) != overflows
        assert optimizer.dropped == 1


def test_a_single_rank_takes_outer_steps_if_requested():
    results = []
    for sharded in (False, True):
        make = every(2, outer_lr=0.5, outer_momentum=0.0, alone=True, sharded=sharded)
        (alone,), optimizers = teams.team(1, make)
        begin = teams.vector_of(alone)
        teams.train([alone], optimizers, 2)
        (other,), its = teams.team(1, every(2))
        teams.train([other], its, 2)
        torch.testing.assert_close(teams.vector_of(alone), (begin + teams.vector_of(other)) / 2)
        results.append(teams.vector_of(alone))
    torch.testing.assert_close(*results, rtol=0, atol=1e-14)


def test_error_feedback_brings_two_bits_nearer_to_whole_numbers():
    found = []
    for compress in (Dense(), INT2["compress"], Blocks("int2")):
        make = teams.around(MuLoCo, local_steps=3, compress=compress)
        models, optimizers = teams.team(2, make, muon, torch.float32)
        teams.train(models, optimizers, 60)
        found.append(teams.vector_of(models[0]))
    dense, with_errors, without = found
    assert (with_errors - dense).norm() < 0.9 * (without - dense).norm()


def test_another_inner_optimizer_of_muloco_causes_a_warning():
    parameters = [*nn.Linear(3, 2).parameters()]
    with pytest.warns(UserWarning, match="MuLoCo has AdamW .* use gcnzc.optim.Muon") as warned:
        MuLoCo(torch.optim.AdamW(parameters), Group())
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MuLoCo(torch.optim.Muon([nn.Parameter(torch.zeros(3, 2))]), Group())
        MuLoCo(muon(parameters), Group())
