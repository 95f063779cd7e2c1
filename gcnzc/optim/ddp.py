"""A communication hook that makes DistributedDataParallel leave gradients to gcnzc's optimizers.

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

import torch
from torch import Tensor


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
