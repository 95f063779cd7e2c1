"""Compression: reducers that compute the mean of a vector over the ranks."""

from gcnzc._moved import renamed
from gcnzc.compress.blocks import Blocks
from gcnzc.compress.dense import Dense
from gcnzc.compress.reducer import Compression, Reducer, WorkerInfo
from gcnzc.compress.registry import NAMES, compression
from gcnzc.compress.rounded import Rounded
from gcnzc.compress.sign import Sign

__all__ = [
    "NAMES",
    "Blocks",
    "Compression",
    "Dense",
    "Reducer",
    "Rounded",
    "Sign",
    "WorkerInfo",
    "compression",
]

__getattr__ = renamed(
    __name__,
    {
        "Place": "WorkerInfo",
        "WORDS": "NAMES",
    },
)
