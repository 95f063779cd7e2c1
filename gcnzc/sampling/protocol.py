"""The interface of samplers."""

from typing import Protocol

from torch import Tensor

from gcnzc.sampling.batch import Batch


class SamplerProtocol(Protocol):
    """A sampler that `gcnzc.Loader` accepts: `gcnzc.Sampler`, `LinkSampler` or another engine.

    Optional attributes:

    - `thread_safe`: if False, the loader calls `sample` from one thread at a time.
    - `num_items`: the seeds are indices in [0, num_items), for example of edges, not node ids.
    - `pool`: a buffer pool of `gcnzc.kernels.buffers`; a loader for a GPU replaces it by one of
      page-locked memory.
    - `settings`: a dict of plain values that determine the samples. The loader saves it in its
      state dict, and loads a state dict only if the settings are equal.

    If a minibatch already has labels, the loader keeps them.
    """

    def sample(self, seeds: Tensor, epoch: int) -> Batch:
        """Sample the neighbourhood of `seeds` for an epoch; features are added by the loader."""
