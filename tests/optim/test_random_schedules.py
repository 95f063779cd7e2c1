"""Every strategy with random speeds, links, pauses and crashes: no hang, and no wrong mean.

The gradient of a rank is constant, so with SGD the mean of the parameters over the ranks is known
after any number of steps, whatever the ranks have exchanged in which order.
"""

import math
import random

import pytest
import torch
from slow_cases import seeds

from gcnzc import optim
from gcnzc.compress import Sign
from gcnzc.exchange import Compute, Crash, Group, Link, SlowDown, lockstep

LR = 0.1
ELEMENTS = 5


def star(world_size):
    return [(0, rank) for rank in range(1, world_size)]


def plain(kind, **options):
    """What constructs an optimizer whose options do not depend on the schedule."""
    return lambda inner, group, seed: kind(inner, group, **options)


def of_seed(kind, **options):
    """What constructs an optimizer of a graph, with options that are chosen by the seed."""

    def make(inner, group, seed):
        graphs = "ring", "exponential", "complete", star(group.world_size)
        chosen = {name: values[seed % len(values)] for name, values in options.items()}
        return kind(inner, group, topology=graphs[seed % 4], **chosen)

    return make


WHOLE = {"outer_lr": 1.0, "outer_momentum": 0.0}
# by name, an optimizer whose mean over the ranks is that of independent ranks
MAKERS = {
    "averaged": plain(optim.Averaged),
    "local_sgd": plain(optim.LocalSGD, local_steps=2),
    "diloco": plain(optim.DiLoCo, local_steps=2, **WHOLE),
    "streaming diloco": plain(
        optim.StreamingDiLoCo, local_steps=3, fragments=2, mixing=1.0, **WHOLE
    ),
    "selsync": plain(optim.SelSync, threshold=0.1, window=2),
    "saps": lambda inner, group, seed: optim.SAPS(inner, group, density=0.5, seed=seed),
    "a2cid2": plain(optim.A2CiD2, eta=0.0),
    "a2cid2 overlapped": of_seed(
        optim.A2CiD2,
        eta=[0.0],
        asynchronous=[True],
        control_interval=[1, 3],
        gossip_rate=[0.3, 1.0, 4.0],
    ),
    "backup": of_seed(
        optim.BackupWorkers,
        control_interval=range(1, 8),
        grace=[2.0, 0.0, 0.1, math.inf, 0.0],
        wait_interval=[None, 1, 3],
    ),
}
# whose means have other values, but which must end as well
INEXACT = {
    "averaged sign": plain(optim.Averaged, compress=Sign(block=32)),
    "co2": plain(optim.CO2, local_steps=2),
    "a2cid2 with momentum": plain(optim.A2CiD2, asynchronous=True, control_interval=3),
    "diloco quorum": lambda inner, group, seed: optim.DecoupledDiLoCo(
        inner, group, quorum=group.world_size // 2 + 1, local_steps=2, control_interval=3
    ),
}


def steps_of(parameter, optimizer, gradient, times):
    yield from optimizer.broadcast_model_algorithm()
    for seconds in times:
        yield Compute(seconds)
        parameter.grad = gradient.clone()
        yield from optimizer.algorithm()
    yield from optimizer.finalize_algorithm()


def check_schedule(name, make, seed):
    choose = random.Random(f"{name} {seed}")
    world_size, steps = choose.randint(2, 6), choose.randint(1, 8)
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(world_size, ELEMENTS, dtype=torch.float64, generator=generator)
    times = [
        [choose.choice([0.0, 0.01, choose.random()]) for _ in range(steps)]
        for _ in range(world_size)
    ]
    link = choose.choice([None, Link(1e4, 0.01), Link(1e5, 0.001, message_s=0.001)])
    faults = {
        rank: [SlowDown(choose.random(), choose.choice([3.0, math.inf]), choose.random() + 0.01)]
        for rank in range(world_size)
        if choose.random() < 0.3
    }
    lost = choose.randrange(world_size) if choose.random() < 0.5 else None
    if lost is not None:
        faults[lost] = [Crash(choose.random() * (sum(times[lost]) + 0.1))]
    parameters, algorithms = [], []
    for rank in range(world_size):
        parameter = torch.nn.Parameter(torch.full((ELEMENTS,), float(rank), dtype=torch.float64))
        inner = torch.optim.SGD([parameter], LR)
        optimizer = make(inner, Group(rank, world_size), seed)
        parameters.append(parameter)
        algorithms.append(steps_of(parameter, optimizer, gradients[rank], times[rank]))
    store_s = choose.choice([0.0, 0.001, 0.1])
    outcome = lockstep(algorithms, link, store_s=store_s, faults=faults)
    if outcome.errors == [None] * world_size:
        for parameter in parameters:
            assert torch.equal(parameter, parameters[0])
        if name in MAKERS:
            # all begin with the parameters of rank 0, which are 0
            expected = -LR * steps * gradients.mean(dim=0)
            torch.testing.assert_close(parameters[0].detach(), expected, rtol=1e-9, atol=1e-9)
        return
    assert lost is not None
    for rank, error in enumerate(outcome.errors):
        # a rank that had nothing more to receive may have ended before
        if error is not None and rank != lost:
            assert f"rank {lost} crashed" in str(error), (rank, str(error))


# more than 10,000 schedules with all names
@pytest.mark.parametrize("part", seeds(134, 1))
@pytest.mark.parametrize("name", [*MAKERS, *INEXACT])
def test_random_schedules_end_with_the_right_mean_or_a_clear_error(name, part):
    for seed in range(6 * part, 6 * (part + 1)):
        check_schedule(name, {**MAKERS, **INEXACT}[name], seed)


def finalize_before_a_step(optimizer, parameter, finalizes_only):
    if not finalizes_only:
        own = yield from optimizer.average_parameters_algorithm()
        average = parameter.detach().clone()
        optimizer.restore_parameters(own)
    yield from optimizer.finalize_algorithm()
    return parameter.detach() if finalizes_only else average


@pytest.mark.parametrize("finalizes_only", [False, True])
@pytest.mark.parametrize(
    "name", [name for name in MAKERS if name not in ("averaged", "streaming diloco")]
)
def test_parameters_before_the_first_step_are_those_of_rank_0(name, finalizes_only):
    algorithms = []
    for rank in range(3):
        parameter = torch.nn.Parameter(torch.full((ELEMENTS,), 7.0 + rank, dtype=torch.float64))
        optimizer = MAKERS[name](torch.optim.SGD([parameter], LR), Group(rank, 3), 0)
        algorithms.append(finalize_before_a_step(optimizer, parameter, finalizes_only))
    for found in lockstep(algorithms).results:
        assert torch.equal(found, torch.full((ELEMENTS,), 7.0, dtype=torch.float64))
