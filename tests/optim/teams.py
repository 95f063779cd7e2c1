"""Ranks that train one model on shares of the rows, in a simulation, and what they come to."""

import io

import torch
from torch import nn

from gcnzc.exchange import Group, lockstep

ROWS, COLUMNS = 200, 5


class Everything(nn.Module):
    """An embedding, tied layers, a frozen and an unused parameter, one used by some rows alone."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = nn.Embedding(ROWS, COLUMNS, sparse=sparse)
        self.first = nn.Linear(COLUMNS, COLUMNS)
        self.tied = nn.Linear(COLUMNS, COLUMNS)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(COLUMNS), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.rare = nn.Parameter(torch.ones(COLUMNS))
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.tied(torch.relu(self.first(self.table(rows)))) * self.frozen
        rare = rows < 10
        if rare.any():
            hidden = hidden + rare[:, None] * self.rare
        return hidden.pow(2).mean(dim=1)


def batches(steps):
    generator = torch.Generator().manual_seed(2)
    # of sizes that no number of ranks divides
    return [torch.randperm(ROWS, generator=generator)[: 23 + step % 7] for step in range(steps)]


def loss_of(model, rows):
    return model(rows).mean()


def share_of(rows, group):
    rank, world_size = group.rank, group.world_size
    return rows[len(rows) * rank // world_size : len(rows) * (rank + 1) // world_size]


def set_gradients(model, optimizer, rows):
    """What a rank's loop does before a step, with its share of the rows."""
    share = share_of(rows, optimizer.group)
    optimizer.zero_grad()
    loss_of(model, share).backward()
    optimizer.weight = len(share) * optimizer.group.world_size / len(rows)


def set_noise(model, seed, scale=1.0):
    """Give the trained parameters of a model random gradients, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.randn(parameter.shape, generator=generator) * scale
            parameter.grad = gradient.to(parameter.dtype)


def backward(model, rank, step):
    """The gradients of a model of six columns, for a random minibatch of a rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    model.zero_grad()
    model(torch.randn(16, 6, generator=generator)).square().mean().backward()


def take_steps(model, optimizer, end, begin=0):
    """Steps of a rank with a model of six columns, which its caller runs."""
    for step in range(begin, end):
        backward(model, optimizer.group.rank, step)
        optimizer.step()


def step_on_numbers(model, optimizer, steps):
    """Steps with a model of three columns on rows that have the number of the step."""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 3), step + 1.0)).square().mean().backward()
        optimizer.step()


def train_alone(model, optimizer, steps):
    """Steps of one rank that has all rows."""
    for rows in batches(steps):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    return vector_of(model)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def around(kind, **options):
    """What constructs a method of a class around an inner optimizer."""
    return lambda inner, group: kind(inner, group, **options)


def diverse(world_size, dtype=torch.float64, sparse=False):
    """Models that differ until the first step, but for frozen parameters."""
    models = [Everything(sparse).to(dtype) for _ in range(world_size)]
    with torch.no_grad():
        for rank, model in enumerate(models):
            for parameter in model.parameters():
                parameter.add_(rank * parameter.requires_grad)
    return models


def of_group(models, make):
    """What `make(model, group)` constructs for the model of each rank."""
    return [make(model, Group(rank, len(models))) for rank, model in enumerate(models)]


def team(world_size, make, inner=sgd, dtype=torch.float64):
    """Models and their optimizers, made by `make(inner optimizer, group)`."""
    models = diverse(world_size, dtype)
    return models, of_group(models, lambda model, group: make(inner(model.parameters()), group))


def steps_of(model, optimizer, end, begin=0, bad=None):
    """Steps of a rank; if it is rank 1, a gradient of step `bad` is not finite."""
    yield from optimizer.broadcast_model_algorithm()
    for number, rows in enumerate(batches(end)[begin:], begin):
        set_gradients(model, optimizer, rows)
        if number == bad and optimizer.group.rank == 1:
            model.first.bias.grad[0] = torch.nan
        yield from optimizer.algorithm()


def of_ranks(steps, models, optimizers, *words, **options):
    """The algorithms `steps(model, optimizer, *words, **options)` of all ranks."""
    return [steps(*pair, *words, **options) for pair in zip(models, optimizers, strict=True)]


def train(models, optimizers, end, begin=0, bad=None):
    return lockstep(of_ranks(steps_of, models, optimizers, end, begin, bad))


def step_all(optimizers, **options):
    """A step of all ranks, which have gradients already."""
    return lockstep([optimizer.algorithm() for optimizer in optimizers], **options)


def broadcast(optimizers):
    lockstep([optimizer.broadcast_model_algorithm() for optimizer in optimizers])


def finalize(optimizers):
    lockstep([optimizer.finalize_algorithm() for optimizer in optimizers])


def finish_pending(optimizers):
    # methods that exchange in every step have none
    delayed = [each for each in optimizers if hasattr(each, "finish_pending_algorithm")]
    lockstep([each.finish_pending_algorithm() for each in delayed])


def saved(state):
    """A state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def states_of(optimizers):
    """The states after pending exchanges, as a checkpoint gives them back."""
    finish_pending(optimizers)
    return [saved(optimizer.state_dict()) for optimizer in optimizers]


def vector_of(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def vectors_of(models):
    return torch.stack([vector_of(model) for model in models])


def mean_of(models):
    return vectors_of(models).mean(dim=0)


def all_equal(models):
    first = list(models[0].parameters())
    return all(all(map(torch.equal, model.parameters(), first)) for model in models)


def bits_of(model, optimizer):
    """All that a step may change on a rank, as text with all digits."""
    return repr(plain([model.state_dict(), optimizer.snapshot(), optimizer.steps]))


def plain(value):
    """Lists of numbers in place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return sorted((str(name), plain(each)) for name, each in value.items())
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def are_all_finite(state):
    if isinstance(state, torch.Tensor):
        return not state.dtype.is_floating_point or bool(state.isfinite().all())
    values = state.values() if isinstance(state, dict) else state
    if isinstance(values, float):
        return abs(values) < float("inf")
    is_nested = isinstance(state, dict | list | tuple)
    return not is_nested or all(map(are_all_finite, values))
