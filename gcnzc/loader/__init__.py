"""Minibatch loader, whose threads sample neighbours and gather features."""

from gcnzc.loader.full_batch import FullBatchLoader
from gcnzc.loader.loader import Loader
from gcnzc.loader.presampling import presample

__all__ = ["FullBatchLoader", "Loader", "presample"]
