"""Workers whose copies of one model stay alike at every step, and their training."""

import torch
from optim.local import saved as from_file
from optim.local import taught
from optim.models import Everything

from gcnzc.exchange import Group, init_group, run
from gcnzc.optim import OneBitAdam


def team(world_size, dtype=torch.float32, **options):
    """Models and their optimizers, of workers that are not connected."""
    models = [Everything().to(dtype) for _ in range(world_size)]
    optimizers = [
        OneBitAdam(model.parameters(), lr=0.01, group=Group(rank, world_size), **options)
        for rank, model in enumerate(models)
    ]
    return models, optimizers


def values_of(model):
    """(n,) float64: all that is trained."""
    return torch.cat([p.detach().double().view(-1) for p in model.parameters() if p.requires_grad])


def saved(optimizer):
    """A state that went through a file."""
    return from_file(optimizer.state_dict())


def tensors_of(optimizer):
    """Copies of all that a step may change, but for the parameters."""
    errors = [error for each in optimizer.reducers.values() for error in each.errors().values()]
    shared = [each for each in optimizer.snapshot()["shared"].values() if torch.is_tensor(each)]
    return [each.clone() for each in (*shared, *errors)]


def numbers_of(optimizer):
    """The values of the shared state that are no tensors."""
    shared = optimizer.snapshot()["shared"]
    return {name: value for name, value in shared.items() if not torch.is_tensor(value)}


def train_as_worker(steps):
    with init_group() as group:
        model = Everything().float()
        optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup=5, refresh=4, group=group)
        run(taught(model, optimizer, steps), group)
        return values_of(model), tensors_of(optimizer), numbers_of(optimizer)
