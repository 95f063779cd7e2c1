"""1-bit Adam in a loop with DDP: torchrun --nproc-per-node 2 examples/optimizers/with_ddp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gcnzc.optim import OneBitAdam, keep_gradients_local

dist.init_process_group("gloo")
torch.manual_seed(0)
teacher, model = nn.Linear(20, 4), nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
model = DistributedDataParallel(model)
model.register_comm_hook(None, keep_gradients_local)  # what DDP would send, the optimizer sends
optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup=60)
torch.manual_seed(dist.get_rank())  # every worker has rows of its own
for _ in range(400):
    rows = torch.randn(64, 20)
    loss = nn.functional.cross_entropy(model(rows), teacher(rows).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
rows = torch.randn(2000, 20)
right = (model(rows).argmax(1) == teacher(rows).argmax(1)).float().mean()
print(f"worker {dist.get_rank()}: {right:.3f} right")
optimizer.group.close()
del model  # otherwise over gloo its destructor may hang
dist.destroy_process_group()
