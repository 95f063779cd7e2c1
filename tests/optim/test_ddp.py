import copy
import gc
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from optim.teams import Everything, batches, bits_of, loss_of, of_group, of_ranks, steps_of
from processes import results
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from gcnzc import optim
from gcnzc.exchange import current_group, lockstep

STEPS = 12


def one_bit(model, **options):
    return optim.OneBitAdam(model.parameters(), lr=0.01, warmup=5, refresh=4, **options)


def train_under_ddp():
    """The loop of somebody who uses torch's own data parallelism."""
    dist.init_process_group("gloo")
    model = Everything().float()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped.register_comm_hook(None, optim.keep_gradients_local)
    optimizer = one_bit(wrapped)
    rank, world_size = dist.get_rank(), dist.get_world_size()
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
    # each worker kept the gradients of its own share
    assert differed
    found = bits_of(model, optimizer)
    optimizer.group.close()
    # otherwise its destructor may hang: see gcnzc.optim.ddp
    del wrapped
    dist.destroy_process_group()
    return found


def test_with_the_hook_it_is_as_without_ddp(tmp_path):
    models = [Everything().float() for _ in range(2)]
    optimizers = of_group(models, lambda model, group: one_bit(model, group=group))
    lockstep(of_ranks(steps_of, models, optimizers, STEPS))
    expected = list(map(bits_of, models, optimizers))
    assert results(2, tmp_path, train_under_ddp) == expected


def around_sgd(kind, **own):
    return lambda params, **options: kind(SGD(params, lr=0.1), **own, **options)


MAKERS = {
    "diloco": around_sgd(optim.DiLoCo, local_steps=3),
    "streaming": around_sgd(optim.StreamingDiLoCo, local_steps=4, fragments=2),
    "averaged": around_sgd(optim.Averaged),
    "onebit": partial(optim.OneBitAdam, lr=0.01, warmup=1),
    "zero-one": partial(optim.ZeroOneAdam, lr=0.01),
    "fedglomo": around_sgd(optim.FedGLOMO, local_steps=3),
    "dropcompute": around_sgd(optim.DropCompute, micro_batches=2, threshold=None),
}


class Wrapper(DistributedDataParallel):
    """As that of a library, from which another one derives."""


class WrapperOfWrapper(Wrapper):
    """A subclass of a subclass."""


def take_steps(model, optimizer, context=nullcontext, *, validates=False):
    """Two steps; return the error of one of them."""
    rank = dist.get_rank()

    def closure():
        with context():
            loss = model(torch.ones(2, 3) + rank).sum()
            loss.backward()
        if validates:
            with torch.no_grad():
                model(torch.ones(2, 3))
        return loss

    try:
        for _ in range(2):
            optimizer.zero_grad()
            if isinstance(optimizer, optim.DropCompute):
                for _ in optimizer.micro_batches(range(2)):
                    closure()
            elif not getattr(optimizer, "needs_closure", False):
                closure()
            optimizer.step(*[closure] * getattr(optimizer, "needs_closure", False))
    except ValueError as error:
        return str(error)
    return ""


AVERAGES = ("module", "inner", "none", "later", "validated", "subclass")
# each method with a loop of its own has all uses of DDP, and the others these
FEW = ("none", "hook", "no_sync")


def try_ways_to_wrap():
    """The errors of each optimizer with each use of DDP."""
    dist.init_process_group("gloo")
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    found = {}
    for name, make in MAKERS.items():
        is_few = name not in ("averaged", "dropcompute", "fedglomo")
        for way in FEW if is_few else (*AVERAGES, "hook", "no_sync", "alone", "unused"):
            inner = nn.Linear(3, 2)
            options = {"process_group": alone} if way == "alone" else {}
            kind = WrapperOfWrapper if way == "subclass" else DistributedDataParallel
            wrap = partial(kind, inner, **options)
            wrapped = None if way == "later" else wrap()
            given = {"module": {"module": wrapped}, "inner": {"module": inner}}.get(way, {})
            optimizer = make(inner.parameters(), **given)
            wrapped = wrapped or wrap()
            if way == "hook":
                wrapped.register_comm_hook(None, optim.keep_gradients_local)
            context = wrapped.no_sync if way == "no_sync" else nullcontext
            trained = inner if way == "unused" else wrapped
            found[name, way] = take_steps(
                trained, optimizer, context, validates=way in ("validated", "no_sync")
            )
            # a copy does not refer to the objects of DDP
            copy.deepcopy(optimizer)
            dist.barrier()
            del wrapped, wrap, context, trained, given, optimizer
    current_group().close()
    gc.collect()
    dist.destroy_process_group()
    return found


def test_ddp_that_averages_gradients_is_an_error_of_each_optimizer(tmp_path):
    for found in results(2, tmp_path, try_ways_to_wrap):
        for (name, way), error in found.items():
            averages = way in AVERAGES
            # with the hook, DDP still communicates in each micro-batch
            averages |= (name, way) == ("dropcompute", "hook")
            assert ("keep_gradients_local" in error) == averages, (name, way, error)
