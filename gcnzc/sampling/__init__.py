"""Neighbor sampling: minibatches of blocks for seed nodes and seed edges."""

from gcnzc.sampling.batch import Batch, Block
from gcnzc.sampling.hetero import (
    HeteroBatch,
    HeteroBlock,
    HeteroMetadata,
    build_full_hetero_blocks,
    build_hetero_blocks,
)
from gcnzc.sampling.link import LinkSampler
from gcnzc.sampling.neighbor import Sampler

__all__ = [
    "Batch",
    "Block",
    "HeteroBatch",
    "HeteroBlock",
    "HeteroMetadata",
    "LinkSampler",
    "Sampler",
    "build_full_hetero_blocks",
    "build_hetero_blocks",
]
