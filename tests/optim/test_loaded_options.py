"""Options of parameter groups that are out of range, in a state or changed before a step."""

import copy
import itertools
import math
import re

import pytest
import torch
from optim.kinds import (
    KINDS,
    LR,
    REPLICATED,
    WITH_CLOSURE,
    ZERO_ONE_LOCAL,
)
from slow_cases import mark_slow
from torch import nn

from gcnzc.exchange import Group, lockstep
from gcnzc.optim import Averaged, LocalSGD, ZeroOneAdam

ADAMS = REPLICATED | ZERO_ONE_LOCAL
# whose groups have the options of Adam
OF_ADAM = [name for name in KINDS if name not in WITH_CLOSURE]
WRONG = [
    ("lr", math.nan, "lr{where} is nan"),
    ("lr", "fast", "lr{where} is 'fast'"),
    ("lr", [0.1, 0.2], r"lr{where} is \[0.1, 0.2\]"),
    ("lr", torch.tensor(-1.0), r"lr{where} is tensor\(-1.\)"),
    ("eps", -1e-8, "eps{where} is -1e-08"),
    ("weight_decay", math.nan, "weight_decay{where} is nan"),
    ("betas", (1.0, 0.9), r"betas\[0\]{where} is 1.0"),
    ("betas", (0.9, -0.1), r"betas\[1\]{where} is -0.1"),
    ("betas", 0.9, "betas{where} is 0.9"),
    ("maximize", "no", "maximize{where} is 'no'"),
]


def with_wrong_options(names):
    """All names with the first wrong option, and one name of each kind with all of them."""
    cases = ((name, *wrong) for name, wrong in itertools.product(names, WRONG))
    return mark_slow(
        cases,
        lambda name, option, value, message: (
            name not in ("averaged", "zero-one-adam", "diloco") and message != WRONG[0][2]
        ),
    )


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), step + 1.0)).square().mean().backward()
        optimizer.step()


def make(name, group=None):
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    # a model with two groups of parameters
    holder = nn.Module()
    holder.parameters = lambda: groups
    return model, KINDS[name](holder, group or Group())


def bits_of(model, optimizer):
    return repr([model.state_dict(), optimizer.snapshot(), optimizer.param_groups, optimizer.steps])


@pytest.mark.parametrize(("name", "option", "value", "message"), with_wrong_options(KINDS))
def test_a_state_with_an_option_out_of_range_is_refused_and_changes_nothing(
    name, option, value, message
):
    model, optimizer = make(name)
    train(model, optimizer, 5)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][1][option] = value
    other, loaded = make(name)
    train(other, loaded, 2)
    before = bits_of(other, loaded)
    where = message.format(where=" of parameter group 1 of the state")
    with pytest.raises(ValueError, match=f"^{where}\n\nhint: "):
        loaded.load_state_dict(state)
    assert bits_of(other, loaded) == before
    train(other, loaded, 1)


def make_with_shape(name, shape):
    torch.manual_seed(1)
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.randn(shape))
    return holder, KINDS[name](holder, Group())


def train_weight(model, optimizer, steps):
    for _ in range(steps):
        model.weight.grad = model.weight.detach().clone()
        optimizer.step()


@pytest.mark.parametrize("name", KINDS)
def test_a_state_of_a_parameter_of_another_shape_is_refused_and_changes_nothing(name):
    model, optimizer = make_with_shape(name, (3, 4))
    train_weight(model, optimizer, 5)
    # as many elements, and fewer
    for shape in ((4, 3), (2, 3)):
        other, loaded = make_with_shape(name, shape)
        train_weight(other, loaded, 2)
        before = bits_of(other, loaded)
        state = copy.deepcopy(optimizer.snapshot())
        with pytest.raises(ValueError, match=r"the state has (?s:.*)\n\nhint: load it into"):
            loaded.load_state_dict(state)
        assert bits_of(other, loaded) == before
        train_weight(other, loaded, 1)


INNER = {
    "sgd": lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    "rmsprop": lambda each: torch.optim.RMSprop(each, momentum=0.9, centered=True),
    **{
        kind.__name__: kind
        for kind in (
            *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD),
            *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop),
            lambda each: torch.optim.Adam(each, amsgrad=True),
        )
    },
    **({"Adafactor": torch.optim.Adafactor} if hasattr(torch.optim, "Adafactor") else {}),
}


@pytest.mark.parametrize("inner", INNER)
def test_states_of_torchs_optimizers_are_loaded(inner):
    model, optimizers = nn.Linear(3, 2), []
    for _ in range(2):
        optimizers.append(Averaged(INNER[inner](model.parameters()), Group()))
        train(model, optimizers[-1], 1)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert repr(optimizers[1].state_dict()) == repr(optimizers[0].state_dict())
    train(model, optimizers[1], 1)


@pytest.mark.parametrize(("name", "option", "value", "message"), with_wrong_options(OF_ADAM))
def test_an_option_out_of_range_is_refused_by_the_next_step(name, option, value, message):
    model, optimizer = make(name)
    train(model, optimizer, 5)
    was = optimizer.param_groups[1][option]
    before = copy.deepcopy(model.state_dict()), optimizer.steps
    optimizer.param_groups[1][option] = value
    where = message.format(where=" of parameter group 1")
    with pytest.raises(ValueError, match=f"^{where}\n\nhint: "):
        optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), before[0].values()))
    assert optimizer.steps == before[1]
    # the optimizer remains usable
    optimizer.param_groups[1][option] = was
    train(model, optimizer, 1)
    assert optimizer.steps == before[1] + 1


@pytest.mark.parametrize("name", ADAMS)
def test_options_that_are_not_supported_are_refused_later_too(name):
    _, optimizer = make(name)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match=r"^amsgrad=True of parameter group 0 is not supported"):
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    del optimizer.param_groups[0]["amsgrad"]
    with pytest.raises(ValueError, match=r"^amsgrad=True of parameter group 0 of the state is not"):
        optimizer.load_state_dict(state)
    assert "amsgrad" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("momentum", math.nan, "momentum of parameter group 0 is nan"),
        ("momentum", "0.9", "momentum of parameter group 0 is '0.9'"),
        ("nesterov", "yes", "nesterov of parameter group 0 is 'yes'"),
    ],
)
def test_other_options_of_inner_optimizers_keep_their_types(option, value, message):
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    for optimizer in (Averaged(inner, Group()), LocalSGD(inner, Group())):
        train(model, optimizer, 2)
        was = optimizer.param_groups[0][option]
        optimizer.param_groups[0][option] = value
        with pytest.raises(ValueError, match=f"^{re.escape(message)}\n\nhint: "):
            optimizer.step()
        optimizer.param_groups[0][option] = was


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), capturable=False),
        lambda p: torch.optim.RMSprop(p, momentum=0.5),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Muon([each for each in p if each.dim() == 2]),
    ],
)
def test_options_of_torchs_optimizers_are_accepted(build):
    model = nn.Linear(3, 2)
    optimizer = Averaged(build(list(model.parameters())), Group())
    train(model, optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 2)


@pytest.mark.parametrize("name", OF_ADAM)
def test_schedulers_that_change_rates_and_momenta_are_accepted(name):
    model, optimizer = make(name)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=6)
    for _ in range(5):
        train(model, optimizer, 1)
        cycle.step()
    assert optimizer.param_groups[0]["lr"] != LR


def test_ranks_that_all_have_the_option_raise_without_communication():
    models = [nn.Linear(3, 2) for _ in range(2)]
    optimizers = [
        ZeroOneAdam(model.parameters(), group=Group(rank, 2)) for rank, model in enumerate(models)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(3)).sum().backward()
        optimizer.param_groups[0]["lr"] = math.nan
        # a group that is not connected would raise another error
        with pytest.raises(ValueError, match=r"^lr of parameter group 0 is nan"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
    lockstep([optimizer.algorithm() for optimizer in optimizers])
    assert torch.equal(models[0].weight, models[1].weight)
