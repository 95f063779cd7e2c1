"""GNN models (GCN, GraphSAGE, GIN, GAT, GATv2), decoders for link prediction, and metrics."""

from typing import TYPE_CHECKING

from gcnzc._lazy import lazy_attributes
from gcnzc.models.gnn import GAT, GCN, GIN, SAGE, GATv2
from gcnzc.models.link import Dot, HadamardMLP, LinkModel
from gcnzc.models.stack import Model

if TYPE_CHECKING:
    from gcnzc.models.metrics import score, score_pairs

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "SAGE",
    "Dot",
    "GATv2",
    "HadamardMLP",
    "LinkModel",
    "Model",
    "score",
    "score_pairs",
]

# these import scikit-learn
__getattr__, __dir__ = lazy_attributes(__name__, {"gcnzc.models.metrics": ("score", "score_pairs")})
