"""gcnzc: train graph neural networks whose features are larger than the GPU."""

from typing import TYPE_CHECKING

# before torch is imported
from gcnzc import _allocation as _allocation
from gcnzc._lazy import lazy_attributes
from gcnzc._version import VERSION as __version__

if TYPE_CHECKING:
    from gcnzc import exchange, models, optim
    from gcnzc.features import FeatureTable, cached, cached_share, pinned
    from gcnzc.graph import Graph
    from gcnzc.graph.dataset import Dataset
    from gcnzc.graph.load import load
    from gcnzc.graph.prepare import prepare
    from gcnzc.loader import FullBatchLoader, Loader, presample
    from gcnzc.sampling import Batch, Block, LinkSampler, Sampler
    from gcnzc.train.inference import inference

__all__ = [
    "Batch",
    "Block",
    "Dataset",
    "FeatureTable",
    "FullBatchLoader",
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

# imported on first use, so that one half of the package does not load the other
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "gcnzc.exchange": ("exchange",),
        "gcnzc.models": ("models",),
        "gcnzc.optim": ("optim",),
        "gcnzc.features": ("FeatureTable", "cached", "cached_share", "pinned"),
        "gcnzc.graph": ("Graph",),
        "gcnzc.graph.dataset": ("Dataset",),
        "gcnzc.graph.load": ("load",),
        "gcnzc.graph.prepare": ("prepare",),
        "gcnzc.loader": ("FullBatchLoader", "Loader", "presample"),
        "gcnzc.sampling": ("Batch", "Block", "LinkSampler", "Sampler"),
        "gcnzc.train.inference": ("inference",),
    },
)
