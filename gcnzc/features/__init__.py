"""Tables of features and of embeddings in host memory, and caches of rows in GPU memory."""

from gcnzc.features.access_counts import Presample
from gcnzc.features.cache import CacheCounters, CachedShare, CachedTable, cached, cached_share
from gcnzc.features.embedding import EmbeddingTable
from gcnzc.features.pinning import can_read_host, pinned
from gcnzc.features.table import FeatureTable

__all__ = [
    "CacheCounters",
    "CachedShare",
    "CachedTable",
    "EmbeddingTable",
    "FeatureTable",
    "Presample",
    "cached",
    "cached_share",
    "can_read_host",
    "pinned",
]
