"""Compression: reducers that compute the mean of a vector over the ranks."""

from gcnzc.compress.blocks import Blocks
from gcnzc.compress.dense import Dense
from gcnzc.compress.reducer import Compression, Place, Reducer
from gcnzc.compress.registry import WORDS, compression
from gcnzc.compress.rounded import Rounded
from gcnzc.compress.sign import Sign

__all__ = [
    "WORDS",
    "Blocks",
    "Compression",
    "Dense",
    "Place",
    "Reducer",
    "Rounded",
    "Sign",
    "compression",
]
