"""Old names in states, arguments and attributes, which work until 0.3."""

import copy

import pytest
import torch
from optim.kinds import KINDS
from optim.local import train, vector_of
from optim.models import Everything
from torch.optim import SGD

from gcnzc.compress import Dense
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import (
    OneBitAdam,
    OneBitLamb,
    Strategy,
    ZeroOneAdam,
    ZeroOneSchedule,
    a2cid2,
    backup_workers,
    fedglomo,
    resize_state,
    saps,
)

# where states of 0.2 have other names
OLD_NUMBERS = {
    "has_inactive_gradient": "wakes",
    "reactivate_from": "join_from",
    "reactivation_interval": "join_gap",
    "num_variance_updates": "refreshes",
    "lr_sums": "lengths",
    "refreshed_at": "fresh_at",
}
OLD_VECTORS = {"had_gradient": "awake"}
OLD_LOCAL = {"pending_gradients": "waiting", "num_nonfinite": "left_out"}
OLD_SHARED = {"extra_sums": "told", "skip_reason": "blame"} | {
    f"fragment {number} {name}": f"flight {number} {old}"
    for number in range(4)
    for name, old in [
        *[("due", "due"), ("values", "values"), ("workers", "workers")],
        ("skip_reason", "blame"),
    ]
}
SAVED, END = 6, 12
# and how many names of their states have changed
RENAMED = {
    "onebit-adam": 5,
    "onebit-lamb": 5,
    "zero-one-adam": 7,
    "zero-one-adam local steps": 7,
    "streaming-diloco": 4,
    "co2": 2,
}


def team(name, world_size=2):
    models = [Everything().float() for _ in range(world_size)]
    return models, [
        KINDS[name](model, Group(rank, world_size)) for rank, model in enumerate(models)
    ]


def in_old_format(state):
    """The state as 0.2 saved it, and the number of names that are others."""
    count = 0

    def renamed(values, names):
        nonlocal count
        count += len(names.keys() & values.keys())
        return {names.get(key, key): value for key, value in values.items()}

    shared = renamed(state["shared"], OLD_SHARED)
    shared["numbers"] = renamed(shared["numbers"], OLD_NUMBERS)
    if "vectors" in shared:
        shared["vectors"] = renamed(shared["vectors"], OLD_VECTORS)
    return {**state, "shared": shared, "local": renamed(state["local"], OLD_LOCAL)}, count


def states_of(name):
    models, optimizers = team(name)
    train(models, optimizers, SAVED)
    lockstep(
        [
            optimizer.finish_pending_algorithm()
            for optimizer in optimizers
            if hasattr(optimizer, "inner")
        ]
    )
    present = [copy.deepcopy(optimizer.snapshot()) for optimizer in optimizers]
    old, (count, _) = zip(*map(in_old_format, present), strict=True)
    return models, present, old, count


@pytest.mark.parametrize("name", RENAMED)
def test_states_with_old_names_continue_bit_for_bit(name):
    trained, present, old, count = states_of(name)
    # also the pending gradients of inactive elements, if there are any
    assert count in (RENAMED[name], RENAMED[name] + 1)
    found = []
    for states in (present, old):
        models, optimizers = team(name)
        for model, before, optimizer, state in zip(
            models, trained, optimizers, states, strict=True
        ):
            model.load_state_dict(before.state_dict())
            optimizer.load_state_dict(copy.deepcopy(state))
        train(models, optimizers, END, SAVED)
        found.append([vector_of(model) for model in models])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def plain(value):
    """Lists in place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", RENAMED)
def test_states_with_old_names_are_resized(name):
    _, present, old, _ = states_of(name)
    assert plain(resize_state(old, 1, 3)) == plain(resize_state(present, 1, 3))


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb, ZeroOneAdam])
@pytest.mark.parametrize(("wake", "reactivate"), [("join", "step"), ("stay", "refresh")])
def test_old_arguments_work(kind, wake, reactivate):
    parameters = [torch.nn.Parameter(torch.ones(2))]
    with pytest.warns(DeprecationWarning, match=r"is now") as warned:
        optimizer = kind(parameters, wake=wake, floor=0.5, group=Group())
    texts = [str(each.message) for each in warned]
    assert any("argument wake of" in text and "is now reactivate" in text for text in texts)
    assert any("argument floor of" in text and "is now variance_floor" in text for text in texts)
    assert any(f"{wake!r} is now reactivate={reactivate!r}" in text for text in texts)
    assert (optimizer.reactivate, optimizer.variance_floor) == (reactivate, 0.5)
    with pytest.warns(DeprecationWarning, match=r"\.wake is now"):
        assert optimizer.wake == reactivate
    with pytest.warns(DeprecationWarning, match=r"\.floor is now"):
        assert optimizer.floor == 0.5


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_the_old_name_of_gradient_compression_works(kind):
    parameters, half = [torch.nn.Parameter(torch.ones(2))], Dense(torch.bfloat16)
    with pytest.warns(DeprecationWarning, match=r"dense of .* is now gradient_compression; "):
        optimizer = kind(parameters, dense=half, group=Group())
    assert optimizer.gradient_compression == half
    with pytest.warns(DeprecationWarning, match=r"\.dense is now"):
        assert optimizer.dense == half
    # the name of an option is not in the state, so that of an older version is loaded
    optimizer.load_state_dict(
        kind(parameters, gradient_compression=half, group=Group()).state_dict()
    )


@pytest.mark.parametrize(
    ("recipe", "old", "present"),
    [
        (saps, {"keep": 0.5}, {"density": 0.5}),
        (a2cid2, {"graph": "complete", "rate": 2}, {"topology": "complete", "gossip_rate": 2}),
        (backup_workers, {"graph": "complete"}, {"topology": "complete"}),
        (fedglomo, {"beta": 0.25}, {"round_weight": 0.25}),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_old_arguments_of_recipes_work(recipe, old, present):
    with pytest.warns(DeprecationWarning, match="is now"):
        renamed = recipe(**old)
    described = [
        Strategy(
            SGD([torch.nn.Parameter(torch.ones(2))], 0.1), each, Group(0, 4)
        ).describe_options()
        for each in (renamed, recipe(**present))
    ]
    assert described[0] == described[1]
    assert all(
        f"{name}={value}" in described[0].replace("'", "") for name, value in present.items()
    )


def test_old_names_of_the_schedule_work():
    with pytest.warns(DeprecationWarning, match="is now"):
        schedule = ZeroOneSchedule(3, longest=8, goes_on=True)
    assert schedule == ZeroOneSchedule(3, max_local_interval=8, updates_variance_after_warmup=True)
    with pytest.warns(DeprecationWarning, match="is now"):
        assert (schedule.longest, schedule.goes_on) == (8, True)
    with pytest.warns(DeprecationWarning, match="is now"):
        assert schedule.refreshes(1)
