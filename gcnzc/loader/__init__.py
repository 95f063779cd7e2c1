"""The loader: minibatches of an epoch, sampled by threads and gathered on a device."""

from gcnzc.loader.loader import Loader
from gcnzc.loader.presampling import presample

__all__ = ["Loader", "presample"]
