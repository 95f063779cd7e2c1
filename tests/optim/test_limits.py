"""Each strategy has options with which it equals plain data parallel training."""

import functools
import math

import pytest
import torch
from optim.kinds import GivenGradients
from optim.local import gradients_of, sgd, team, vector_of
from optim.models import Everything, batches, loss_of
from slow_cases import mark_slow

from gcnzc.compress import RandomBlock, RandomK, Threshold, TopK
from gcnzc.exchange import lockstep
from gcnzc.optim import (
    CO2,
    SAPS,
    A2CiD2,
    Averaged,
    BackupWorkers,
    DecoupledDiLoCo,
    DiLoCo,
    FedGLOMO,
    LocalSGD,
    MuLoCo,
    SelSync,
    SparseLoCo,
    StreamingDiLoCo,
)

STEPS = 15
PLAIN = {"local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
SEVERAL = (2, 3, 4)


def averaged(compress, **options):
    return lambda inner, group: Averaged(inner, group, compress=compress, **options)


def around(kind, **options):
    return lambda inner, group: kind(inner, group, **options)


# by name, the limiting case, and the numbers of ranks for which it is exact: with more than two
# ranks, averages of pairs or of neighbours are none over all ranks
LIMITS = {
    "averaged": (averaged(None), SEVERAL),
    "top-k": (averaged(TopK(1.0), momentum="everywhere"), SEVERAL),
    "random-k": (averaged(RandomK(1.0), momentum="everywhere"), SEVERAL),
    "random block": (averaged(RandomBlock(1.0), momentum="everywhere"), SEVERAL),
    "thresholds": (averaged(Threshold(1.0, refresh=1), momentum="everywhere"), SEVERAL),
    "drop-compute": (around(GivenGradients, micro_batches=2, threshold=None), SEVERAL),
    "local_sgd": (around(LocalSGD, local_steps=1), SEVERAL),
    "diloco": (around(DiLoCo, **PLAIN), SEVERAL),
    "diloco sharded": (around(DiLoCo, **PLAIN, sharded=True), SEVERAL),
    "diloco with a quorum of all": (around(DecoupledDiLoCo, **PLAIN, quorum=3), (3,)),
    "sparse diloco": (around(DiLoCo, **PLAIN, compress=TopK(1.0)), SEVERAL),
    "sparseloco": (around(SparseLoCo, local_steps=1, compress=TopK(1.0)), SEVERAL),
    "muloco": (around(MuLoCo, **PLAIN, compress=None), SEVERAL),
    "streaming diloco": (
        around(StreamingDiLoCo, **PLAIN, delay=0, fragments=2, mixing=0.0),
        SEVERAL,
    ),
    "streaming diloco in one fragment": (
        around(StreamingDiLoCo, **PLAIN, delay=0, fragments=1, mixing=0.0),
        SEVERAL,
    ),
    "co2": (around(CO2, **PLAIN, delay=0, eager=0.0), SEVERAL),
    "co2 sharded": (around(CO2, **PLAIN, delay=0, eager=0.0, sharded=True), SEVERAL),
    "selsync": (around(SelSync, threshold=0.0), SEVERAL),
    "selsync in its window": (around(SelSync, threshold=1e9, window=STEPS), SEVERAL),
    "saps": (around(SAPS, density=1.0), (2,)),
    "a2cid2": (around(A2CiD2, eta=0.0), (2,)),
    "backup workers": (around(BackupWorkers, topology="complete", grace=math.inf), SEVERAL),
    "fedglomo": (around(FedGLOMO, local_steps=1, round_weight=1.0, compress=None), SEVERAL),
}


def momentum_sgd(parameters):
    # linear in the gradients, so the mean of the ranks' steps is the step of the mean gradient
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01)


def fill_gradients(model):
    """Missing gradients count as zeros; a local optimizer would skip their parameters."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def steps_of(model, optimizer):
    yield from optimizer.broadcast_model_algorithm()
    for rows in batches(STEPS):

        def closure(rows=rows):
            gradients_of(model, optimizer, rows)
            fill_gradients(model)
            return 0.0

        closure()
        if getattr(optimizer, "needs_closure", False):
            optimizer.closure = closure
        yield from optimizer.algorithm()
    yield from optimizer.finalize_algorithm()


@functools.cache
def data_parallel(inner):
    """One rank that has all rows of every step."""
    model = Everything()
    optimizer = inner(model.parameters())
    for rows in batches(STEPS):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        fill_gradients(model)
        optimizer.step()
    return vector_of(model)


CASES = [
    (name, world_size, inner)
    for name, (_, sizes) in LIMITS.items()
    for world_size in sizes
    # FedGLOMO has momentum of its own, and rejects others
    for inner in ((sgd,) if name == "fedglomo" else (sgd, momentum_sgd))
]


# the limit needs an inner optimizer that is linear in the gradients, and Muon is not
@pytest.mark.filterwarnings("ignore:MuLoCo has SGD:UserWarning")
@pytest.mark.parametrize(
    ("name", "world_size", "inner"),
    # one number of ranks for each inner optimizer
    mark_slow(
        CASES,
        lambda name, world_size, inner: (
            LIMITS[name][1] is SEVERAL and world_size != (2 if inner is momentum_sgd else 3)
        ),
    ),
)
def test_the_limiting_case_equals_data_parallel_training(name, world_size, inner):
    models, optimizers = team(world_size, LIMITS[name][0], inner)
    lockstep([steps_of(*pair) for pair in zip(models, optimizers, strict=True)])
    expected = data_parallel(inner)
    for model in models:
        torch.testing.assert_close(vector_of(model), expected, rtol=1e-5, atol=1e-7)
