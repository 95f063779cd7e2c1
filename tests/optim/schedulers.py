"""Schedulers that follow each rank's own loss."""

import torch
from optim.kinds import KINDS
from optim.models import Everything, batches, loss_of

from gcnzc.exchange import init_group


def train_by_own_losses():
    """For each optimizer, the error that ends training on this rank, and after which step."""
    with init_group(timeout_s=60) as group:
        return {name: _trained(make, group) for name, make in KINDS.items()}


def _trained(make, group):
    model = Everything().float()
    optimizer = make(model, group)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    for step, rows in enumerate(batches(60)):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        try:
            optimizer.step()
        except ValueError as error:
            return str(error), step
        # the loss of rank 0 decreases in every step, that of rank 1 never
        scheduler.step(1.0 if group.rank else 1 / (1 + step))
    return "", 60
