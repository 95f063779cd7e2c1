"""gcnzc: train graph neural networks whose features are larger than the GPU."""

from gcnzc._version import VERSION as __version__

__all__ = ["__version__"]
