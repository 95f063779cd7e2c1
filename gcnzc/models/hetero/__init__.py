"""Models on heterogeneous graphs: R-GCN, heterogeneous GraphSAGE, R-GAT and HGT."""

from gcnzc.models.hetero.models import HGT, RGAT, RGCN, HeteroSAGE
from gcnzc.models.hetero.stack import HeteroModel

__all__ = ["HGT", "RGAT", "RGCN", "HeteroModel", "HeteroSAGE"]
