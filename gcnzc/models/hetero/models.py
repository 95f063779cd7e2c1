"""R-GCN, heterogeneous GraphSAGE, R-GAT and HGT models on blocks of heterogeneous graphs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from gcnzc.kernels.aggregate.dropout import dropout as drop
from gcnzc.models.gnn import make_activation
from gcnzc.models.hetero.attention import HGTLayer, RGATLayer
from gcnzc.models.hetero.layers import HeteroLayer, HeteroSAGELayer, RGCNLayer
from gcnzc.models.hetero.stack import HeteroModel
from gcnzc.models.stack import check_probability
from gcnzc.sampling.hetero import HeteroMetadata
from gcnzc.system.arguments import check_flag, check_integer


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
        input_linear: project the features of all node types to `hidden` columns; or the node types
            whose features are projected. The others, such as trainable embeddings, must have
            `hidden` columns.
        num_bases: number of basis matrices of each layer (equation 3), of which the matrices of all
            edge types are linear combinations. Default: a matrix for each edge type.
        root_weight: whether node types have matrices W_t for their own rows. Without them, add self
            loops to an edge type, so that a node's own row is in its mean.
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
        input_linear: bool | Collection[str] = True,
        num_bases: int | None = None,
        root_weight: bool = True,
        norm: str = "none",
        residual: bool = False,
        output_linear: bool = False,
        activation: str = "relu",
    ) -> None:
        hidden = check_integer("hidden", hidden, 1)
        if num_bases is not None:
            num_bases = check_integer("num_bases", num_bases, 1)
        root_weight = check_flag("root_weight", root_weight)

        def make_layer(types: HeteroMetadata, own: Sequence[int], out: int | None) -> HeteroLayer:
            return RGCNLayer(
                types, own, hidden, out or hidden, num_bases=num_bases, root_weight=root_weight
            )

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
            input_linear=input_linear,
            norm=norm,
            residual=residual,
            output_linear=output_linear,
        )


class HeteroSAGE(HeteroModel):
    """GraphSAGE on heterogeneous graphs: the sum of one layer for each edge type.

    A layer is like PyG's `HeteroConv` with a `SAGEConv` for each edge type and the aggregation
    "sum", which `to_hetero` also builds. A node type without edge types into it gets a linear
    projection of its own rows, where PyG omits the type.

    The arguments are those of `RGCN`, except `num_bases` and
    `root_weight`.
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
        input_linear: bool | Collection[str] = True,
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
            input_linear=input_linear,
            norm=norm,
            residual=residual,
            output_linear=output_linear,
        )


class RGAT(HeteroModel):
    """A relational graph attention network (R-GAT): the sum of one GAT layer for each edge type.

    A layer is like PyG's `HeteroConv` with a `GATConv` without self loops for each edge type, and
    the aggregation "sum"; sources and destinations share a matrix. The attention is that of
    Veličković et al., 2018, https://arxiv.org/abs/1710.10903, with one softmax for each edge type.
    Hidden layers concatenate the outputs of their heads; a last layer that computes the outputs
    averages them.

    The arguments are those of `RGCN`, except `num_bases` and `root_weight`, and:

    Args:
        hidden: columns of the hidden layers, over all heads; divisible by `heads`.
        heads: attention heads of each layer.
        attention_dropout: probability that an attention weight is zeroed during training.
        residual: add a linear projection of each layer's input to its output. Without it, a node's
            own row only affects its attention weights.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: see `RGCN`; or `hidden` is not divisible by `heads`.
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
        input_linear: bool | Collection[str] = True,
        heads: int = 4,
        attention_dropout: float = 0.0,
        norm: str = "none",
        residual: bool = True,
        output_linear: bool = False,
        activation: str = "elu",
    ) -> None:
        hidden, heads = _check_heads(hidden, heads)
        attention_dropout = check_probability("attention_dropout", attention_dropout)

        def make_layer(types: HeteroMetadata, own: Sequence[int], out: int | None) -> HeteroLayer:
            return RGATLayer(
                types,
                own,
                hidden,
                out or hidden,
                heads,
                concatenate=out is None,
                dropout=attention_dropout,
            )

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
            input_linear=input_linear,
            norm=norm,
            residual=residual,
            output_linear=output_linear,
        )


class HGT(HeteroModel):
    """The heterogeneous graph transformer (HGT) of Hu et al., 2020.

    A layer computes equations 3 to 5 of https://arxiv.org/abs/2003.01332 without the relative
    temporal encoding, like PyG's `HGTConv`: attention with matrices and a prior for each edge type,
    one softmax over all in-edges of a node, and a gated skip connection. A linear projection
    computes the outputs after the last layer. There is no activation between layers, which contain
    a GELU.

    The arguments are those of `RGCN`, except `num_bases`, `root_weight`, `residual`,
    `output_linear` and `activation`, and:

    Args:
        hidden: columns of the layers, over all heads; divisible by `heads`.
        heads: attention heads of each layer.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: see `RGCN`; or `hidden` is not divisible by `heads`.
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
        input_linear: bool | Collection[str] = True,
        heads: int = 4,
        norm: str = "none",
    ) -> None:
        hidden, heads = _check_heads(hidden, heads)

        def make_layer(types: HeteroMetadata, own: Sequence[int], out: int | None) -> HeteroLayer:
            return HGTLayer(types, own, hidden, heads)

        super().__init__(
            make_layer,
            metadata,
            in_features,
            hidden,
            num_classes,
            target,
            num_layers,
            _dropout_only,
            dropout=dropout,
            input_dropout=input_dropout,
            input_linear=input_linear,
            norm=norm,
            residual=False,
            output_linear=True,
        )


def _check_heads(hidden: int, heads: int) -> tuple[int, int]:
    hidden, heads = check_integer("hidden", hidden, 1), check_integer("heads", heads, 1)
    if hidden % heads:
        raise ValueError(
            f"hidden is {hidden}, which is not divisible by heads, {heads}\n\n"
            f"hint: hidden={hidden + heads - hidden % heads}, the columns of all heads together"
        )
    return hidden, heads


def _dropout_only(x: Tensor, p: float, seed: int) -> Tensor:
    return drop(x, p, seed) if p else x
