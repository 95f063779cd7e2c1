"""Schedulers that follow each rank's own loss."""

import torch
from optim.models import Everything, batches, loss_of

from gcnzc.compress import Blocks
from gcnzc.exchange import joined
from gcnzc.optim import (
    CO2,
    Averaged,
    DiLoCo,
    LocalSGD,
    OneBitAdam,
    OneBitLamb,
    StreamingDiLoCo,
    ZeroOneAdam,
    ZeroOneSchedule,
)

LR = 0.01
SHORT = ZeroOneSchedule(warmup=4, local_doubling=4, longest=2)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR)


MAKERS = {
    "Averaged": lambda model, group: Averaged(adamw(model), group),
    "Averaged, int8": lambda model, group: Averaged(adamw(model), group, compress=Blocks("int8")),
    "OneBitAdam, warm-up": lambda model, group: OneBitAdam(
        model.parameters(), LR, warmup=1000, group=group
    ),
    "OneBitAdam": lambda model, group: OneBitAdam(model.parameters(), LR, warmup=2, group=group),
    "OneBitLamb": lambda model, group: OneBitLamb(model.parameters(), LR, warmup=2, group=group),
    "ZeroOneAdam": lambda model, group: ZeroOneAdam(
        model.parameters(), LR, schedule=SHORT, group=group
    ),
    "LocalSGD": lambda model, group: LocalSGD(adamw(model), group, local_steps=2),
    "DiLoCo": lambda model, group: DiLoCo(adamw(model), group, local_steps=2),
    "DiLoCo, sharded": lambda model, group: DiLoCo(
        adamw(model), group, local_steps=2, sharded=True
    ),
    "StreamingDiLoCo": lambda model, group: StreamingDiLoCo(
        adamw(model), group, local_steps=2, fragments=2
    ),
    "CO2": lambda model, group: CO2(adamw(model), group, local_steps=2),
    "CO2, sharded": lambda model, group: CO2(adamw(model), group, local_steps=2, sharded=True),
}


def train_by_own_losses():
    """For each optimizer, the error that ends training on this rank, and after which step."""
    with joined(timeout_s=60) as group:
        return {name: _trained(make, group) for name, make in MAKERS.items()}


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
