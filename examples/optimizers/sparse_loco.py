"""SparseLoCo in a plain loop: torchrun --nproc-per-node 2 examples/optimizers/sparse_loco.py"""

import torch
from torch import nn

from gcnzc.exchange import init_group
from gcnzc.optim import SparseLoCo

with init_group() as group:
    torch.manual_seed(0)
    teacher, model = nn.Linear(20, 4), nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = SparseLoCo(inner, group, local_steps=30, module=model)
    torch.manual_seed(group.rank)  # every worker has rows of its own
    for _ in range(400):
        rows = torch.randn(64, 20)
        loss = nn.functional.cross_entropy(model(rows), teacher(rows).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.finalize()
    rows = torch.randn(2000, 20)
    right = (model(rows).argmax(1) == teacher(rows).argmax(1)).float().mean()
    print(f"worker {group.rank}: {right:.3f} right, {group.ledger.bytes_sent:,} bytes sent")
