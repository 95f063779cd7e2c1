"""Workers that train one model on shares of the rows, stepping on their own."""

import io

import torch
from optim.models import Everything, batches, loss_of

from gcnzc.exchange import Group, lockstep
from gcnzc.optim import CO2
from gcnzc.optim.sharded import padded_size
from gcnzc.optim.sync_interval import Clocks


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


class Handed(Clocks):
    """Clocks of a worker that a test sets forward."""

    def __init__(self):
        self.wall_s = self.cpu_s = 0.0
        super().__init__(lambda: self.wall_s, lambda: self.cpu_s)

    # so that a test may
    __setattr__ = object.__setattr__


def team(world_size, make, inner=sgd, dtype=torch.float64):
    """Models that differ, until the first step makes them alike, and their optimizers."""
    models = []
    for rank in range(world_size):
        models.append(Everything().to(dtype))
        with torch.no_grad():
            for parameter in models[-1].parameters():
                # frozen ones are left alone
                parameter.add_(rank * parameter.requires_grad)
    optimizers = [
        make(inner(model.parameters()), Group(rank, world_size))
        for rank, model in enumerate(models)
    ]
    return models, optimizers


def sent_by_step(optimizer):
    """Return the bytes that a rank sends for an outer step of DiLoCo or CO2, by formula."""
    flat, world_size, is_co2 = optimizer.flat, optimizer.group.world_size, type(optimizer) is CO2
    count, others = flat.num_elements, world_size - 1
    layers = flat.worker_info(0, world_size).layers
    sent = optimizer.compress.bytes_sent(count, world_size, optimizer.extras, layers)
    if optimizer.sharded:
        # the anchor, of CO2 with the distance
        return sent + others * 4 * (padded_size(count, world_size) // world_size + is_co2)
    return sent + 8 * others * (is_co2 and optimizer.gap_name not in ("none", "4.0"))


def gradients_of(model, optimizer, rows):
    """What a worker's loop does before a step, with its share of the rows."""
    rank, world_size = optimizer.group.rank, optimizer.group.world_size
    share = rows[len(rows) * rank // world_size : len(rows) * (rank + 1) // world_size]
    optimizer.zero_grad()
    loss_of(model, share).backward()
    optimizer.weight = len(share) * world_size / len(rows)


def taught(model, optimizer, end, begin=0, each=None):
    """Steps of one worker; `each` is called after every one with their number."""
    # the parameters of worker 0 come before the first gradient
    yield from optimizer.broadcast_model_algorithm()
    for number, rows in enumerate(batches(end)[begin:], begin + 1):
        gradients_of(model, optimizer, rows)
        yield from optimizer.algorithm()
        if each is not None:
            yield from optimizer.finish_pending_algorithm()
            each(number)


def train(models, optimizers, end, begin=0):
    pairs = zip(models, optimizers, strict=True)
    return lockstep([taught(model, optimizer, end, begin) for model, optimizer in pairs])


def all_equal(models):
    first = list(models[0].parameters())
    return all(all(map(torch.equal, model.parameters(), first)) for model in models)


def vector_of(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def mean_of(models):
    return torch.stack([vector_of(model) for model in models]).mean(dim=0)


def saved(state):
    """A state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
