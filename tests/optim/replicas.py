"""Workers whose copies of one model stay alike at every step, and their training."""

import io

import torch
from optim.models import Everything, batches, loss_of

from gcnzc.exchange import Group, init_group, lockstep, run
from gcnzc.optim import OneBitAdam


def team(world_size, dtype=torch.float32, **options):
    """Models and their optimizers, of workers that are not connected."""
    models = [Everything().to(dtype) for _ in range(world_size)]
    optimizers = [
        OneBitAdam(model.parameters(), lr=0.01, group=Group(rank, world_size), **options)
        for rank, model in enumerate(models)
    ]
    return models, optimizers


def gradients_of(model, optimizer, rows):
    """What a worker's loop does before a step, with its share of the rows."""
    rank, world_size = optimizer.group.rank, optimizer.group.world_size
    share = rows[len(rows) * rank // world_size : len(rows) * (rank + 1) // world_size]
    optimizer.zero_grad()
    loss_of(model, share).backward()
    optimizer.weight = len(share) * world_size / len(rows)


def taught(model, optimizer, end, begin=0):
    """Steps of one worker, as an algorithm."""
    for rows in batches(end)[begin:]:
        gradients_of(model, optimizer, rows)
        yield from optimizer.algorithm()


def train(models, optimizers, end, begin=0):
    """Steps of all workers."""
    pairs = zip(models, optimizers, strict=True)
    return lockstep([taught(model, optimizer, end, begin) for model, optimizer in pairs])


def values_of(model):
    """(n,) float64: all that is trained."""
    return torch.cat([p.detach().double().view(-1) for p in model.parameters() if p.requires_grad])


def saved(optimizer):
    """A state that went through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tensors_of(optimizer):
    """Copies of all that a step may change, but for the parameters."""
    errors = [error for each in optimizer.reducers.values() for error in each.errors().values()]
    return [each.clone() for each in (*optimizer.vectors.values(), *errors)]


def train_as_worker(steps):
    with init_group() as group:
        model = Everything().float()
        optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup=5, refresh=4, group=group)
        run(taught(model, optimizer, steps), group)
        return values_of(model), tensors_of(optimizer), optimizer.numbers
