"""Neighbor sampling: minibatches of blocks for seed nodes and seed edges."""

from gcnzc.sampling.batch import Batch, Block
from gcnzc.sampling.hetero import HeteroBatch, HeteroSampler
from gcnzc.sampling.link import LinkSampler
from gcnzc.sampling.neighbor import Sampler

__all__ = ["Batch", "Block", "HeteroBatch", "HeteroSampler", "LinkSampler", "Sampler"]
