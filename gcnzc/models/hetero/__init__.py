"""Models on heterogeneous graphs: R-GCN and heterogeneous GraphSAGE."""

from gcnzc.models.hetero.models import RGCN, HeteroSAGE
from gcnzc.models.hetero.stack import HeteroModel

__all__ = ["RGCN", "HeteroModel", "HeteroSAGE"]
