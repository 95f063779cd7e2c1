"""Each strategy has options with which it equals plain data parallel training."""

import pytest
import torch
from optim.local import gradients_of, sgd, team, vector_of
from optim.models import Everything, batches, loss_of

from gcnzc.exchange import lockstep
from gcnzc.optim import Strategy, diloco, local_sgd, selsync

STEPS = 15
# by name, the recipe of the limiting case, and the numbers of ranks for which it is exact
LIMITS = {
    "local_sgd": (lambda: local_sgd(1), (2, 3, 4)),
    "diloco": (lambda: diloco(1, 1.0, 0.0), (2, 3, 4)),
    "diloco sharded": (lambda: diloco(1, 1.0, 0.0, sharded=True), (2, 3, 4)),
    "selsync": (lambda: selsync(threshold=0.0), (2, 3, 4)),
    "selsync in its window": (lambda: selsync(threshold=1e9, window=STEPS), (2, 3)),
}
CASES = [(name, world_size) for name, (_, sizes) in LIMITS.items() for world_size in sizes]


def momentum_sgd(parameters):
    # linear in the gradients, so the mean of the ranks' steps is the step of the mean gradient
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01)


def fill_gradients(model):
    """Missing gradients count as zeros; a local optimizer would skip their parameters."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def steps_of(model, optimizer):
    yield from optimizer.broadcast_model()
    for rows in batches(STEPS):
        gradients_of(model, optimizer, rows)
        fill_gradients(model)
        yield from optimizer.algorithm()


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


@pytest.mark.parametrize("inner", [sgd, momentum_sgd])
@pytest.mark.parametrize(("name", "world_size"), CASES)
def test_the_limiting_case_equals_data_parallel_training(name, world_size, inner):
    recipe = LIMITS[name][0]
    models, optimizers = team(world_size, lambda own, group: Strategy(own, recipe(), group), inner)
    lockstep([steps_of(*pair) for pair in zip(models, optimizers, strict=True)])
    expected = data_parallel(inner)
    for model in models:
        torch.testing.assert_close(vector_of(model), expected, rtol=1e-9, atol=1e-11)
