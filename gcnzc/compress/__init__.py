"""Compression: reducers that compute the mean of a vector over the ranks."""

from gcnzc.compress.blocks import Blocks, Rounded
from gcnzc.compress.dense import Dense
from gcnzc.compress.random_k import RandomBlock, RandomK
from gcnzc.compress.reducer import Compression, Reducer, WorkerInfo
from gcnzc.compress.registry import NAMES, compression
from gcnzc.compress.threshold import Threshold
from gcnzc.compress.top_k import TopK
from gcnzc.compress.two_stage import Sign

__all__ = [
    "NAMES",
    "Blocks",
    "Compression",
    "Dense",
    "RandomBlock",
    "RandomK",
    "Reducer",
    "Rounded",
    "Sign",
    "Threshold",
    "TopK",
    "WorkerInfo",
    "compression",
]
