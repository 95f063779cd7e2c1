"""A model with everything that exchange must handle, and its training on shares of the rows."""

import torch
from torch import nn

from gcnzc.exchange import Group
from gcnzc.optim import Averaged

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


def batches(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    # of sizes that no number of workers divides
    return [torch.randperm(ROWS, generator=generator)[: 23 + step % 7] for step in range(steps)]


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).mean()


def train_on_shares(model, inner, rank, world_size, steps, group=None):
    """The steps of one worker, as an algorithm."""
    optimizer = Averaged(inner, group or Group(rank, world_size))
    for rows in batches(steps):
        share = rows[len(rows) * rank // world_size : len(rows) * (rank + 1) // world_size]
        optimizer.zero_grad()
        loss_of(model, share).backward()
        optimizer.weight = len(share) * world_size / len(rows)
        yield from optimizer.algorithm()
