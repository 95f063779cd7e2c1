"""gcnzc: train graph neural networks whose features are larger than the GPU."""

# before torch is imported
from gcnzc import _allocation as _allocation
from gcnzc import exchange, models, optim
from gcnzc._version import VERSION as __version__
from gcnzc.data import Dataset, load, prepare
from gcnzc.graph import Graph
from gcnzc.hot import cached, cached_share, presample
from gcnzc.layerwise import inference
from gcnzc.loader import Loader
from gcnzc.pairs import LinkSampler
from gcnzc.sampler import Batch, Block, Sampler
from gcnzc.table import FeatureTable, pinned

__all__ = [
    "Batch",
    "Block",
    "Dataset",
    "FeatureTable",
    "Graph",
    "LinkSampler",
    "Loader",
    "Sampler",
    "__version__",
    "cached",
    "cached_share",
    "exchange",
    "inference",
    "load",
    "models",
    "optim",
    "pinned",
    "prepare",
    "presample",
]
