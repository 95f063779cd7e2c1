"""Sampling: from seeds to minibatches of blocks."""

from gcnzc.sampling.batch import Batch, Block
from gcnzc.sampling.link import LinkSampler
from gcnzc.sampling.neighbor import Sampler

__all__ = ["Batch", "Block", "LinkSampler", "Sampler"]
