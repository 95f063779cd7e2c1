"""Use an optimizer of gcnzc with DistributedDataParallel, which then leaves gradients local.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, leave_local)
    optimizer = OneBitAdam(model.parameters())  # the workers are those of torch.distributed

DistributedDataParallel still sends parameters and buffers of worker 0 to all when it is made, and,
unless it is told `broadcast_buffers=False`, buffers such as BatchNorm's before every forward pass.
With `find_unused_parameters=True` it also asks at every step which parameters were used; that is
needed where some have no gradient, and they then have none here either.
"""

import torch
from torch import Tensor


def keep_gradients_local(state: object, bucket) -> torch.futures.Future[Tensor]:  # type: ignore[no-untyped-def]
    """Give a bucket of gradients back as it is.

    Args:
        state: of the hook, which needs none.
        bucket: a `GradBucket` of torch.distributed. Torch looks at these two names, and at the
            types if there are any; that one's is known to `gcnzc.exchange` alone.
    """
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
