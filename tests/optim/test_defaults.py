"""With their defaults all methods save bytes, from the class as from the command line."""

import re
import warnings

import pytest
import torch
from torch import nn

from gcnzc.exchange import Group, lockstep
from gcnzc.optim import (
    CO2,
    Averaged,
    DiLoCo,
    LatePhaseWarning,
    LocalSGD,
    MuLoCo,
    Muon,
    OneBitAdam,
    OneBitLamb,
    SparseLoCo,
    StreamingDiLoCo,
    ZeroOneAdam,
    ZeroOneSchedule,
)
from gcnzc.optim.defaults import LOCAL
from gcnzc.train.config import TrainConfig
from gcnzc.train.optimizer_options import ONE_BIT
from gcnzc.train.optimizers import build_method
from gcnzc.train.strategies import STRATEGIES

COMPRESSED = {"onebit-adam": OneBitAdam, "onebit-lamb": OneBitLamb, "zero-one-adam": ZeroOneAdam}
LOCAL_STEPS = {
    "local-sgd": LocalSGD,
    "diloco": DiLoCo,
    "muloco": MuLoCo,
    "sparseloco": SparseLoCo,
    "streaming-diloco": StreamingDiLoCo,
    "co2": CO2,
}
METHODS = (*COMPRESSED, *LOCAL_STEPS)
NUM_ELEMENTS = 2000


def build(method, parameters, group, **options):
    """An optimizer of one rank with a method's defaults."""
    if method in COMPRESSED:
        return COMPRESSED[method](parameters, lr=0.001, group=group, **options)
    inner = (Muon if method == "muloco" else torch.optim.AdamW)(parameters, lr=0.001)
    return LOCAL_STEPS.get(method, Averaged)(inner, group, **options)


def build_team(method, num_elements=NUM_ELEMENTS, world_size=2, **options):
    """The parameters and the optimizers of all ranks."""
    parameters = [nn.Parameter(torch.ones(num_elements)) for _ in range(world_size)]
    optimizers = [
        build(method, [parameter], Group(rank, world_size), **options)
        for rank, parameter in enumerate(parameters)
    ]
    return parameters, optimizers


def train(parameters, optimizers, steps, growth=1.0):
    """Steps with noisy gradients of a square, which grow from one step to the next.

    Returns:
        The bytes that rank 0 sent.
    """

    def take(rank):
        generator = torch.Generator().manual_seed(rank)
        for number in range(steps):
            noise = torch.randn(parameters[rank].shape, generator=generator)
            parameters[rank].grad = (parameters[rank].detach() + noise) * growth**number
            yield from optimizers[rank].algorithm()

    return lockstep([take(rank) for rank in range(len(optimizers))]).ledgers[0].bytes_sent


def describe(optimizer):
    """The options that ranks compare."""
    if hasattr(optimizer, "describe_options"):
        return optimizer.describe_options()
    return optimizer.layout_lines()


def test_every_method_is_tested():
    assert set(METHODS) == {*ONE_BIT, *LOCAL}
    assert set(LOCAL) < set(STRATEGIES)


@pytest.mark.parametrize("steps", [40, 7000])
@pytest.mark.parametrize("method", METHODS)
def test_class_and_command_line_have_the_same_defaults(method, steps):
    group = Group(0, 4)
    parameters = list(nn.Linear(30, 20).parameters())
    option = "optimizer" if method in COMPRESSED else "strategy"
    config = TrainConfig(lr=0.001, **{option: method})
    of_command_line = build_method(config, nn.Linear(30, 20), group, steps)
    # only a share of the run depends on its length
    options = {"total_steps": steps, "weight_decay": 0.0} if method in COMPRESSED else {}
    of_class = build(method, parameters, group, **options)
    assert describe(of_class) == describe(of_command_line)
    if method in ("onebit-adam", "onebit-lamb"):
        assert of_class.warmup == of_command_line.warmup


@pytest.mark.parametrize("method", METHODS)
def test_with_defaults_the_last_of_300_steps_send_less_than_a_quarter(method):
    parameters, optimizers = build_team(method)
    train(parameters, optimizers, 250)
    sent = train(parameters, optimizers, 48)
    assert 0 < sent < train(*build_team("averaged"), 48) / 4


@pytest.mark.parametrize("options", [{}, {"total_steps": 300}], ids=["unknown", "given"])
def test_with_defaults_0_1_adam_takes_local_steps_in_a_run_of_300_steps(options):
    parameters, optimizers = build_team("zero-one-adam", 20, **options)
    apart = 0
    for _ in range(300):
        train(parameters, optimizers, 1)
        apart += optimizers[0].is_out_of_sync
    assert apart >= 50


@pytest.mark.parametrize(("total_steps", "expected"), [(None, 50), (120, 30), (1000, 50)])
@pytest.mark.parametrize("method", ["onebit-adam", "onebit-lamb"])
def test_an_automatic_warm_up_ends_if_the_variance_never_becomes_stable(
    method, total_steps, expected
):
    options = {"warmup": None, "betas": (0.9, 0.9)}
    if total_steps is not None:
        options["total_steps"] = total_steps
    parameters, optimizers = build_team(method, 20, **options)
    train(parameters, optimizers, 60, growth=1.05)
    assert [optimizer.frozen_at for optimizer in optimizers] == [expected, expected]


def test_an_automatic_warm_up_takes_at_least_the_requested_steps():
    options = {"warmup": None, "betas": (0.9, 0.9), "warmup_range": (55, None)}
    parameters, optimizers = build_team("onebit-adam", 20, **options)
    train(parameters, optimizers, 60, growth=1.05)
    assert optimizers[0].frozen_at == 55


LATE = {
    "onebit-adam": ({"warmup": 80}, "OneBitAdam: no compression"),
    "onebit-lamb": ({"warmup": 80}, "OneBitLamb: no compression"),
    "zero-one-adam": ({"schedule": ZeroOneSchedule(20)}, "ZeroOneAdam: no local steps"),
    "diloco": ({"local_steps": 80}, "DiLoCo: no exchange"),
    "streaming-diloco": ({"local_steps": 80}, "StreamingDiLoCo: no exchange"),
    "co2": ({"local_steps": 80}, "CO2: no exchange"),
}


@pytest.mark.parametrize("method", LATE)
def test_rank_0_warns_once_of_a_phase_that_begins_late(method):
    options, message = LATE[method]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(*build_team(method, 20, total_steps=100, **options), 49)
        assert not caught
        train(*build_team(method, 20, total_steps=100, **options), 60)
    (warning,) = caught
    assert str(warning.message).startswith(f"{message} in the first 50 steps of 100\n")
    option = "--local-steps" if "no exchange" in message else "--warmup"
    assert re.search(rf"\n\nhint: .*{option}", str(warning.message))


def test_the_warning_comes_after_1000_steps_if_the_length_is_not_known_and_can_be_silenced():
    with pytest.warns(LatePhaseWarning, match="no exchange in the first 1000 steps\n"):
        train(*build_team("diloco", 2, local_steps=1500), 1001)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LatePhaseWarning)
        train(*build_team("diloco", 2, total_steps=20, local_steps=20), 20)
    # one rank alone has nothing to exchange
    train(*build_team("diloco", 2, world_size=1, total_steps=20, local_steps=20), 20)


def test_a_schedule_without_local_steps_is_no_late_phase():
    never = {"schedule": ZeroOneSchedule(None)}
    train(*build_team("zero-one-adam", 2, total_steps=20, **never), 20)


def test_defaults_do_not_warn():
    for method in METHODS:
        for steps in (30, 60):
            train(*build_team(method, 20, total_steps=steps), steps)
