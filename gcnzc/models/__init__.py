"""GNN models on graphs and heterogeneous graphs, decoders for link prediction, and metrics."""

from typing import TYPE_CHECKING

from gcnzc._lazy import lazy_attributes
from gcnzc.models.gnn import GAT, GCN, GIN, SAGE, GATv2
from gcnzc.models.hetero import HGT, RGAT, RGCN, HeteroModel, HeteroSAGE
from gcnzc.models.link import Dot, HadamardMLP, LinkModel
from gcnzc.models.stack import Model

if TYPE_CHECKING:
    from gcnzc.models.metrics import score, score_pairs

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "HGT",
    "RGAT",
    "RGCN",
    "SAGE",
    "Dot",
    "GATv2",
    "HadamardMLP",
    "HeteroModel",
    "HeteroSAGE",
    "LinkModel",
    "Model",
    "score",
    "score_pairs",
]

# these import scikit-learn
__getattr__, __dir__ = lazy_attributes(__name__, {"gcnzc.models.metrics": ("score", "score_pairs")})
