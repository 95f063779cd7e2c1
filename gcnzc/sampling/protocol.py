"""The interface of samplers."""

from typing import Protocol

from torch import Tensor

from gcnzc.sampling.batch import Batch


class Samples(Protocol):
    """What draws neighbourhoods: `gcnzc.Sampler`, or another engine behind the same door.

    If it has an attribute `thread_safe` that is False, one thread at a time samples. If it has
    `num_items`, its seeds are numbers below that, of edges say, and not ids of nodes. If it has
    `pool`, of `gcnzc.kernels.buffers`, a loader for a GPU puts there where batches should lie. If
    it has `settings`, a dict of plain values, the state of a loader has these values, and only a
    loader whose sampler has the same ones resumes it. A batch that comes with labels keeps them.
    """

    def sample(self, seeds: Tensor, epoch: int) -> Batch:
        """The neighbourhood of `seeds`, without features and labels."""
