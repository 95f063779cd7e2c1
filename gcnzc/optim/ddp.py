"""Keep DistributedDataParallel from averaging gradients: a communication hook, and its check.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, keep_gradients_local)
    optimizer = OneBitAdam(model.parameters())  # uses torch.distributed's default process group

DistributedDataParallel still broadcasts rank 0's parameters and buffers when it is constructed, and
buffers such as BatchNorm's before every forward pass unless `broadcast_buffers=False`. If some
parameters have no gradient in a step, `find_unused_parameters=True` is required; each step then has
one more all-reduce.

Delete the DistributedDataParallel object before `destroy_process_group`. Otherwise its destructor
destroys the process group while it holds the GIL: it joins gloo's threads, which may wait for the
GIL (torch 2.13, also without gcnzc).
"""

import gc
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gcnzc.exchange import Group
from gcnzc.exchange.group import count_shared_ranks


def keep_gradients_local(state: object, bucket) -> torch.futures.Future[Tensor]:  # type: ignore[no-untyped-def]
    """Return a bucket of gradients without communication.

    Register it with `model.register_comm_hook(None, keep_gradients_local)`.

    Args:
        state: the hook's state; not used.
        bucket: a `torch.distributed.GradBucket`. It has no annotation because only
            `gcnzc.exchange` imports torch.distributed; torch checks the names of both arguments.

    Returns:
        A completed future with the bucket's buffer.
    """
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def find_ddp(parameters: Iterable[Tensor], group: Group) -> list[DistributedDataParallel]:
    """Find the objects that average gradients of these parameters over ranks of a group.

    Neither parameters nor modules refer to them, so all objects of the process are searched.
    """
    if group.world_size == 1 or not group.backend:
        return []
    own = {id(each) for each in parameters}
    # not isinstance, which proxies of deleted objects answer with an error
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return [
        ddp
        for ddp in found
        # without a reducer, its constructor has failed
        if "reducer" in vars(ddp)
        and count_shared_ranks(group, ddp.process_group) > 1
        and any(
            id(each) in own and name not in ddp.parameters_to_ignore
            for name, each in ddp.module.named_parameters()
        )
    ]


def check_no_average(
    ddp: DistributedDataParallel, times: list[int] | None, name: str, *, accepts_hook: bool
) -> list[int]:
    """Check that no backward pass since the last check has averaged gradients.

    None has in `no_sync`, with `keep_gradients_local`, and if the module inside is trained. The
    first check knows only whether that of the last forward pass would, so it misses an average if
    a forward pass without gradients follows.

    Args:
        ddp: the wrapper of the model.
        times: what the last check returned; None for the first.
        name: the name of the optimizer.
        accepts_hook: whether it can train the model with `keep_gradients_local`.

    Returns:
        The times at which the last backward pass that averages had each gradient.

    Raises:
        ValueError: the gradients were averaged.
    """
    now: list[int] = ddp.reducer.get_backward_stats()
    if times is None:
        is_local = not (ddp._lazy_init_ran and ddp.require_forward_param_sync)
    else:
        is_local = now == times
    has_hook = any(hook is keep_gradients_local for hook, _ in ddp._comm_hooks)
    if is_local or (has_hook and accepts_hook):
        return now
    if accepts_hook:
        raise ValueError(
            "DistributedDataParallel averages the gradients of all ranks in each backward pass, so "
            f"{name} has no local gradients\n\nhint: after wrapping the model, call "
            "model.register_comm_hook(None, gcnzc.optim.keep_gradients_local)"
        )
    raise ValueError(
        "DistributedDataParallel communicates in each micro-batch, also with keep_gradients_local, "
        f"but the ranks of {name} compute different numbers of them\n\nhint: train the model "
        "inside it, its attribute `module`"
    )
