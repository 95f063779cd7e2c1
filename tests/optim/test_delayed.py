"""Exchanges that overlap with the steps, and recipes that are composed of them."""

import pytest
import torch
from optim.local import adamw, all_equal, team, train, vector_of
from optim.models import Everything

from gcnzc.compress import Sign
from gcnzc.exchange import lockstep
from gcnzc.optim import CO2, DiLoCo, Recipe, Strategy, StreamingDiLoCo, co2, streaming_diloco
from gcnzc.optim.local.co2 import EagerRound
from gcnzc.optim.local.staleness_gap import StalenessGap
from gcnzc.optim.strategy.all_ranks import AllRanks, PaddedShards, Shards
from gcnzc.optim.strategy.clipped_step import ClippedStep
from gcnzc.optim.strategy.delayed import DelayedRound, DelayedSteps
from gcnzc.optim.strategy.every_interval import EveryInterval
from gcnzc.optim.strategy.outer_step import OuterSGD, OuterStep


def parameters_of(make, world_size=3, steps=13, dtype=torch.float64):
    """The parameters of the ranks after a run, and after `finalize`."""
    models, optimizers = team(world_size, make, adamw, dtype)
    train(models, optimizers, steps)
    before = [vector_of(model) for model in models]
    lockstep([optimizer.finalize_algorithm() for optimizer in optimizers])
    assert all_equal(models)
    return [*before, vector_of(models[0])]


def assert_same(one, other, **options):
    for mine, theirs in zip(
        parameters_of(one, **options), parameters_of(other, **options), strict=True
    ):
        assert torch.equal(mine, theirs)


def of(make, **options):
    return lambda inner, group: Strategy(inner, make(**options), group)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_recipes_of_the_classes_are_the_classes(world_size):
    for kind, make, options in (
        (CO2, co2, {"local_steps": 3, "sharded": True}),
        (StreamingDiLoCo, streaming_diloco, {"local_steps": 4, "fragments": 3, "delay": 2}),
    ):
        assert_same(
            of(make, **options),
            lambda inner, group, kind=kind, options=options: kind(inner, group, **options),
            world_size=world_size,
        )


@pytest.mark.parametrize("compress", [None, Sign(block=64)], ids=str)
def test_a_delay_of_no_steps_is_an_exchange_at_once(compress):
    def waiting():
        update, exchange = OuterStep(OuterSGD(0.7, 0.9)), AllRanks(compress, "difference")
        delayed = DelayedSteps(exchange, 0, "difference")
        return Recipe("Waiting", EveryInterval(), update, delayed, local_steps=4)

    assert_same(
        of(waiting),
        lambda inner, group: DiLoCo(
            inner, group, local_steps=4, outer_lr=0.7, outer_momentum=0.9, compress=compress
        ),
        dtype=torch.float32,
    )


@pytest.mark.parametrize("weight", [0.0, 0.3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_may_send_the_extras_with_each_row(weight, world_size):
    def delayed(kind):
        shards = kind()
        step = ClippedStep(0.7, 0.2, StalenessGap("none"), None, shards)
        exchange = EagerRound(shards, weight) if weight else DelayedRound(shards)
        return Recipe("Delayed", EveryInterval(), step, exchange, local_steps=3)

    pairs = zip(
        parameters_of(of(delayed, kind=Shards), world_size),
        parameters_of(of(delayed, kind=PaddedShards), world_size),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_each_optimizer_needs_its_own_recipe():
    recipe = co2(local_steps=2)
    Strategy(adamw(Everything().parameters()), recipe)
    with pytest.raises(ValueError, match="a recipe of CO2 that another optimizer uses"):
        Strategy(adamw(Everything().parameters()), recipe)
