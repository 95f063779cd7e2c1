"""R-GCN, heterogeneous GraphSAGE, R-GAT and HGT models on blocks of heterogeneous graphs."""

from collections.abc import Mapping, Sequence
from typing import Any

from gcnzc.models.gnn import make_activation
from gcnzc.models.hetero.layers import HeteroLayer, HeteroSAGELayer, RGCNLayer
from gcnzc.models.hetero.stack import HeteroModel
from gcnzc.sampling.hetero_block import HeteroMetadata
from gcnzc.system.arguments import check_integer


class RGCN(HeteroModel):
    """The relational graph convolutional network (R-GCN) of Schlichtkrull et al., 2018.

    A layer computes `sum over edge types r of W_r mean_r + W_t x + b_t` (equation 2,
    https://arxiv.org/abs/1703.06103) for a node of type t with row x, where mean_r is the mean over
    its in-neighbours of edge type r, like PyG's `RGCNConv`.

    Args:
        metadata: node types and edge types, from `HeteroGraph.metadata()` or PyG's
            `HeteroData.metadata()`.
        in_features: columns of the features, or of the trainable embeddings, of each node type.
        hidden: columns of the hidden layers.
        num_classes: columns of the logits, or of the embeddings for link prediction.
        target: the node type whose outputs are computed; or a sequence of node types, for which the
            model returns a dict.
        num_layers: number of layers, and of hops of the sampler.
        dropout: probability that a hidden element is zeroed during training.
        input_dropout: probability that a feature is zeroed during training.
        num_bases: number of basis matrices of each layer (equation 3), of which the matrices of all
            edge types are linear combinations. Default: a matrix for each edge type.
        norm: "batch" for batch normalization after hidden layers, "layer" for layer normalization,
            both with parameters for each node type; or "none".
        residual: add a linear projection of each layer's input to its output.
        output_linear: compute the outputs with a linear projection after the last layer, which is
            then a hidden layer.
        activation: "relu" or "elu".

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a node type is unknown or has no `in_features`, a number of layers, columns or
            bases is below 1, a dropout is outside [0, 1), or `norm` or `activation` has an unknown
            value.
    """

    def __init__(
        self,
        metadata: Any,
        in_features: Mapping[str, int],
        hidden: int,
        num_classes: int,
        target: str | Sequence[str],
        num_layers: int = 2,
        dropout: float = 0.5,
        *,
        input_dropout: float = 0.0,
        num_bases: int | None = None,
        norm: str = "none",
        residual: bool = False,
        output_linear: bool = False,
        activation: str = "relu",
    ) -> None:
        hidden = check_integer("hidden", hidden, 1)
        if num_bases is not None:
            num_bases = check_integer("num_bases", num_bases, 1)

        def make_layer(types: HeteroMetadata, own: Sequence[int], out: int | None) -> HeteroLayer:
            return RGCNLayer(types, own, hidden, out or hidden, num_bases=num_bases)

        super().__init__(
            make_layer,
            metadata,
            in_features,
            hidden,
            num_classes,
            target,
            num_layers,
            make_activation(activation),
            dropout=dropout,
            input_dropout=input_dropout,
            norm=norm,
            residual=residual,
            output_linear=output_linear,
        )


class HeteroSAGE(HeteroModel):
    """GraphSAGE on heterogeneous graphs: the sum of one layer for each edge type.

    A layer is like PyG's `HeteroConv` with a `SAGEConv` for each edge type and the aggregation
    "sum", which `to_hetero` also builds. A node type without edge types into it gets a linear
    projection of its own rows, where PyG omits the type.

    The arguments are those of `RGCN`, except `num_bases`.
    """

    def __init__(
        self,
        metadata: Any,
        in_features: Mapping[str, int],
        hidden: int,
        num_classes: int,
        target: str | Sequence[str],
        num_layers: int = 2,
        dropout: float = 0.5,
        *,
        input_dropout: float = 0.0,
        norm: str = "none",
        residual: bool = False,
        output_linear: bool = False,
        activation: str = "relu",
    ) -> None:
        hidden = check_integer("hidden", hidden, 1)

        def make_layer(types: HeteroMetadata, own: Sequence[int], out: int | None) -> HeteroLayer:
            return HeteroSAGELayer(types, own, hidden, out or hidden)

        super().__init__(
            make_layer,
            metadata,
            in_features,
            hidden,
            num_classes,
            target,
            num_layers,
            make_activation(activation),
            dropout=dropout,
            input_dropout=input_dropout,
            norm=norm,
            residual=residual,
            output_linear=output_linear,
        )
