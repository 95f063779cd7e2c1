"""Make the replicas equal after the last step, and verify that they are."""

from typing import TYPE_CHECKING

from gcnzc.exchange import Algorithm
from gcnzc.exchange.sync import synchronize_buffers

if TYPE_CHECKING:
    from gcnzc.optim.base import DistributedOptimizer


def finalize_replicas(optimizer: "DistributedOptimizer") -> Algorithm[None]:
    """Return the communication and computation of `DistributedOptimizer.finalize`.

    Raises:
        ValueError: see there; raised on all ranks.
    """
    yield from optimizer.broadcast_model_algorithm()
    has_peers = optimizer.group.world_size > 1
    if has_peers:
        # compare even if no bit has differed: since the last exchange the ranks may have taken
        # different numbers of steps
        optimizer.comparison.is_due = True
        # the parameters are compared below, because the last synchronization may change them
        optimizer.checksums.renew(None)
        yield from optimizer.compare_algorithm()
    if reason := (yield from optimizer.finish()):
        effect = ", so the ranks have different parameters" if has_peers else ""
        raise ValueError(
            f"the last synchronization failed{effect}: {reason}"
            "\n\nhint: load an earlier checkpoint, and continue with a smaller learning rate or "
            "with gradient clipping; `optimizer.skip_reason` after each step shows the first one "
            "that was skipped, and why"
        )
    if has_peers:
        named = optimizer.name_parameters()
        optimizer.checksums.renew(named)
        yield from optimizer.checksums.check_equal(named)
        if optimizer.module is not None:
            yield from synchronize_buffers(optimizer.module)
