"""R-GCN, heterogeneous GraphSAGE, R-GAT and HGT models on blocks of heterogeneous graphs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from gcnzc.kernels.aggregate.dropout import dropout as drop
from gcnzc.models.hetero.attention import HGTLayer, RGATLayer
from gcnzc.models.hetero.layers import HeteroLayer, HeteroSAGELayer, RGCNLayer
from gcnzc.models.hetero.stack import HeteroModel
from gcnzc.models.stack import check_probability
from gcnzc.system.arguments import check_flag, check_integer


class RGCN(HeteroModel):
    """The relational graph convolutional network (R-GCN) of Schlichtkrull et al., 2018.

    A layer computes `sum over edge types r of W_r mean_r + W_t x + b_t` (equation 2,
    https://arxiv.org/abs/1703.06103) for a node of type t with row x, where mean_r is the mean over
    its in-neighbours of edge type r, like PyG's `RGCNConv`.

    Args:
        metadata: node types and edge types, from `Graph.metadata()` or PyG's
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

    layer_class = RGCNLayer

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
        num_bases: int | None = None,
        root_weight: bool = True,
        **options: Any,
    ) -> None:
        if num_bases is not None:
            num_bases = check_integer("num_bases", num_bases, 1)
        super().__init__(
            metadata,
            in_features,
            hidden,
            num_classes,
            target,
            num_layers,
            dropout,
            num_bases=num_bases,
            root_weight=check_flag("root_weight", root_weight),
            **options,
        )


class HeteroSAGE(HeteroModel):
    """GraphSAGE on heterogeneous graphs: the sum of one layer for each edge type.

    A layer is like PyG's `HeteroConv` with a `SAGEConv` for each edge type and the aggregation
    "sum", which `to_hetero` also builds. A node type without edge types into it gets a linear
    projection of its own rows, where PyG omits the type.

    The arguments are those of `RGCN`, except `num_bases` and
    `root_weight`.
    """

    layer_class = HeteroSAGELayer


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

    layer_class = RGATLayer

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
        heads: int = 4,
        attention_dropout: float = 0.0,
        residual: bool = True,
        activation: str = "elu",
        **options: Any,
    ) -> None:
        super().__init__(
            metadata,
            in_features,
            hidden,
            num_classes,
            target,
            num_layers,
            dropout,
            heads=_check_heads(hidden, heads),
            attention_dropout=check_probability("attention_dropout", attention_dropout),
            residual=residual,
            activation=activation,
            **options,
        )

    def make_layer(
        self, out_types: Sequence[int], out_features: int, is_hidden: bool, **options: Any
    ) -> HeteroLayer:
        """See `HeteroModel.make_layer`; the outputs of heads are concatenated in hidden layers."""
        options |= {"concatenate": is_hidden, "dropout": options.pop("attention_dropout")}
        return super().make_layer(out_types, out_features, is_hidden, **options)


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

    layer_class = HGTLayer

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
        super().__init__(
            metadata,
            in_features,
            hidden,
            num_classes,
            target,
            num_layers,
            dropout,
            input_dropout=input_dropout,
            input_linear=input_linear,
            heads=_check_heads(hidden, heads),
            norm=norm,
            output_linear=True,
        )
        self.activate = _dropout_only


def _check_heads(hidden: int, heads: int) -> int:
    hidden, heads = check_integer("hidden", hidden, 1), check_integer("heads", heads, 1)
    if hidden % heads:
        raise ValueError(f"hidden is {hidden}, which is not divisible by heads, {heads}")
    return heads


def _dropout_only(x: Tensor, p: float, seed: int) -> Tensor:
    return drop(x, p, seed) if p else x
