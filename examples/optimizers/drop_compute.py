"""Accumulation with drops: torchrun --nproc-per-node 2 examples/optimizers/drop_compute.py"""

import torch
from torch import nn

from gcnzc.exchange import init_group
from gcnzc.optim import DropCompute

with init_group() as group:
    torch.manual_seed(0)
    teacher, model = nn.Linear(20, 4), nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = DropCompute(inner, group, micro_batches=4, threshold="auto", module=model)
    torch.manual_seed(group.rank)  # every worker has rows of its own
    for _ in range(400):
        optimizer.zero_grad()
        for rows in optimizer.micro_batches(torch.randn(4, 16, 20)):  # ends at the threshold
            loss = nn.functional.cross_entropy(model(rows), teacher(rows).argmax(1))
            optimizer.backward(loss)
        optimizer.step()
    optimizer.finalize()
    rows = torch.randn(2000, 20)
    right = (model(rows).argmax(1) == teacher(rows).argmax(1)).float().mean()
    print(f"worker {group.rank}: {right:.3f} right, {optimizer.dropped_share:.3f} dropped")
