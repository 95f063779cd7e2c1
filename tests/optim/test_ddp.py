import torch
import torch.distributed as dist
from optim.models import Everything, batches, loss_of
from optim.replicas import tensors_of, train_as_worker, values_of
from processes import results
from torch.nn.parallel import DistributedDataParallel

from gcnzc.optim import OneBitAdam
from gcnzc.optim.ddp import keep_gradients_local

STEPS = 12


def train_under_ddp(hook):
    """The loop of somebody who uses torch's own data parallelism."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = Everything().float()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    if hook:
        wrapped.register_comm_hook(None, keep_gradients_local)
    optimizer = OneBitAdam(wrapped.parameters(), lr=0.01, warmup=5, refresh=4)
    differed = False
    for rows in batches(STEPS):
        share = rows[len(rows) * rank // world_size : len(rows) * (rank + 1) // world_size]
        optimizer.zero_grad()
        loss_of(wrapped, share).backward()
        everyones = [torch.empty_like(model.first.weight) for _ in range(world_size)]
        dist.all_gather(everyones, model.first.weight.grad)
        differed |= not torch.equal(*everyones)
        optimizer.weight = len(share) * world_size / len(rows)
        optimizer.step()
    found = values_of(model), tensors_of(optimizer), optimizer.numbers
    optimizer.group.close()
    # otherwise its destructor may hang: see gcnzc.optim.ddp
    del wrapped
    dist.destroy_process_group()
    return differed, found


def test_with_the_hook_it_is_as_without_ddp(tmp_path):
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    expected = results(2, tmp_path / "without", train_as_worker, STEPS)
    found = results(2, tmp_path / "with", train_under_ddp, True)
    for (differed, (values, tensors, numbers)), right in zip(found, expected, strict=True):
        # each worker kept the gradients of its own share
        assert differed
        assert torch.equal(values, right[0])
        assert all(map(torch.equal, tensors, right[1]))
        assert numbers == right[2]


def test_without_the_hook_ddp_makes_gradients_the_same(tmp_path):
    assert not any(differed for differed, _ in results(2, tmp_path, train_under_ddp, False))
