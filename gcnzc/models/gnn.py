"""GraphSAGE, GCN, GIN, GAT and GATv2 models on blocks."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from gcnzc.kernels.aggregate.dropout import elu_dropout_, relu_dropout_
from gcnzc.models.layers import (
    GATLayer,
    GATv2Layer,
    GCNLayer,
    GINLayer,
    Layer,
    SAGELayer,
)
from gcnzc.models.stack import Model, check_probability
from gcnzc.system.arguments import check_choice, check_flag, check_integer

ACTIVATIONS = ("relu", "elu")


class _ModelWithoutHeads(Model):
    """Base class of the models without attention heads."""

    layer_class: Callable[[int, int], Layer]

    def __init__(
        self,
        in_features: int,
        hidden: int,
        num_classes: int,
        num_layers: int = 3,
        dropout: float = 0.5,
        *,
        input_dropout: float = 0.0,
        norm: str = "none",
        pre_norm: bool = False,
        pre_activation: bool = False,
        residual: bool = False,
        input_linear: bool = False,
        output_linear: bool = False,
        jumping: str = "none",
        activation: str = "relu",
        init: str = "pyg",
        self_loops: bool = False,
    ) -> None:
        hidden = check_integer("hidden", hidden, 1)
        layer_class = type(self).layer_class
        if check_flag("self_loops", self_loops):
            if layer_class is not SAGELayer:
                raise ValueError(
                    f"self_loops has no effect on {type(self).__name__}, whose layers include the "
                    "target itself"
                )
            layer_class = partial(SAGELayer, self_loops=True)
        super().__init__(
            lambda columns, out: layer_class(columns, hidden if out is None else out),
            in_features,
            hidden,
            num_classes,
            num_layers,
            make_activation(activation),
            dropout=dropout,
            input_dropout=input_dropout,
            norm=norm,
            pre_norm=pre_norm,
            pre_activation=pre_activation,
            residual=residual,
            input_linear=input_linear,
            output_linear=output_linear,
            jumping=jumping,
            init=init,
        )


class SAGE(_ModelWithoutHeads):
    """GraphSAGE with mean aggregation; the defaults are those of OGB's example for ogbn-products.

    Args:
        in_features: columns of the features.
        hidden: columns of the hidden layers.
        num_classes: columns of the logits.
        num_layers: number of layers, and of fanouts.
        dropout: probability that a hidden element is zeroed during training.
        input_dropout: probability that a feature is zeroed during training.
        norm: "batch" for batch normalization after hidden layers, "layer" for layer normalization,
            or "none".
        pre_norm: normalize the inputs of each layer instead of its outputs.
        pre_activation: apply normalization, activation and dropout to the inputs of each layer and
            of the output projection instead of to the outputs of layers; needs both projections.
        residual: add a linear projection of each layer's input to its output. With
            `pre_activation`, add the input itself, as it was before normalization.
        input_linear: project the features to `hidden` columns before the first layer.
        output_linear: compute the logits with a linear projection after the last layer, which is
            then a hidden layer.
        jumping: input of the output projection: the output of the last layer ("none"), or the sum
            ("sum") or the concatenation ("cat") of the outputs of all layers.
        activation: "relu" or "elu".
        init: "pyg" or "dgl": initialize the layers as those of the named library.
        self_loops: include a node in the mean of its in-neighbours, as if the graph had one more
            self loop at every node. With sampling, the mean is over the sampled in-neighbours and
            the node itself. Only for SAGE: the other models include it anyway.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number of layers or columns is below 1, a dropout is outside [0, 1), `norm`,
            `jumping`, `activation` or `init` has an unknown value, or an option is given without
            one that it needs.
    """

    layer_class = SAGELayer


class GCN(_ModelWithoutHeads):
    """The graph convolutional network (GCN) of Kipf and Welling.

    The arguments and defaults are those of `SAGE`, except `self_loops`. The model needs the
    in-degrees of nodes in the whole graph. Pass `in_degrees=True` to `Loader`, which adds them to
    the blocks; otherwise they are read from `block.graph`, which synchronizes with the GPU. A block
    with neither raises a RuntimeError.

    Args:
        in_features, hidden, num_classes, num_layers, dropout: see `SAGE`.
        input_dropout, norm, pre_norm, pre_activation, residual, input_linear: see `SAGE`.
        output_linear, jumping, activation, init: see `SAGE`.
        self_loops: must be False, since a layer includes the node itself.
    """

    layer_class = GCNLayer


class GIN(_ModelWithoutHeads):
    """The graph isomorphism network (GIN) of Xu et al., with epsilon 0.

    The arguments are those of `SAGE`, except `self_loops`. Each layer has an MLP of two linear
    layers, both with `hidden` output columns, or `num_classes` in the layer that computes the
    logits. The sum over in-neighbours grows with the degree, so train with `norm="batch"` or
    `norm="layer"`. If k of d in-neighbours are sampled, their sum is multiplied by d / k. The model
    therefore needs the in-degrees of nodes in the whole graph, see `GCN`.

    Args:
        in_features, hidden, num_classes, num_layers, dropout: see `SAGE`.
        input_dropout, norm, pre_norm, pre_activation, residual, input_linear: see `SAGE`.
        output_linear, jumping, activation, init: see `SAGE`.
    """

    layer_class = GINLayer


class GAT(Model):
    """The graph attention network (GAT) of Veličković et al.

    Hidden layers concatenate the outputs of their heads. The last layer averages them if it
    computes the logits.

    The defaults are those of OGB's example for ogbn-products. The paper's model for Cora is
    `GAT(1433, 8, 7, 2, 0.6, heads=8, output_heads=1, input_dropout=0.6, attention_dropout=0.6,
    skip=False)`.

    Args:
        in_features: columns of the features.
        hidden: columns of each head of the hidden layers.
        num_classes: columns of the logits.
        num_layers: number of layers, and of fanouts.
        dropout: probability that a hidden element is zeroed during training.
        input_dropout: probability that a feature is zeroed during training.
        heads: attention heads of each hidden layer.
        output_heads: attention heads of the last layer, which computes the logits. Default:
            `heads`. Not with `output_linear`.
        attention_dropout: probability that an attention weight is zeroed during training.
        skip: add a linear projection of each layer's input to its output. The layers keep their
            biases.
        residual: add the same projection, or with `pre_activation` the input itself, and omit the
            layers' biases, as in Luo et al., 2024. If True, `skip` is ignored.
        norm, pre_norm, pre_activation, input_linear, output_linear, jumping, init: see `SAGE`;
            hidden layers have `hidden * heads` columns.
        activation: "elu" or "relu".

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number of layers, columns or heads is below 1, a dropout is outside [0, 1),
            `norm`, `jumping`, `activation` or `init` has an unknown value, or an option is given
            without one that it needs.
    """

    layer_class: Callable[..., GATLayer | GATv2Layer] = GATLayer

    def __init__(
        self,
        in_features: int,
        hidden: int,
        num_classes: int,
        num_layers: int = 3,
        dropout: float = 0.5,
        *,
        input_dropout: float = 0.0,
        heads: int = 4,
        output_heads: int | None = None,
        attention_dropout: float = 0.0,
        skip: bool = True,
        norm: str = "none",
        pre_norm: bool = False,
        pre_activation: bool = False,
        residual: bool = False,
        input_linear: bool = False,
        output_linear: bool = False,
        jumping: str = "none",
        activation: str = "elu",
        init: str = "pyg",
    ) -> None:
        heads = check_integer("heads", heads, 1)
        hidden = check_integer("hidden", hidden, 1)
        last_heads = heads if output_heads is None else output_heads
        last_heads = check_integer(
            "output_heads", last_heads, 1, hint="an integer, or None for the value of `heads`"
        )
        if output_heads is not None and output_linear is True:
            raise ValueError(
                "output_heads has no effect with output_linear, which computes the logits"
            )
        attention_dropout = check_probability("attention_dropout", attention_dropout)
        skip = check_flag("skip", skip)

        layer_class = type(self).layer_class

        def make_layer(columns: int, out: int | None) -> Layer:
            return layer_class(
                columns,
                hidden if out is None else out,
                heads if out is None else last_heads,
                concatenate=out is None,
                dropout=attention_dropout,
                skip=skip and not residual,
                bias=not residual,
            )

        super().__init__(
            make_layer,
            in_features,
            hidden * heads,
            num_classes,
            num_layers,
            make_activation(activation),
            dropout=dropout,
            input_dropout=input_dropout,
            norm=norm,
            pre_norm=pre_norm,
            pre_activation=pre_activation,
            residual=residual,
            input_linear=input_linear,
            output_linear=output_linear,
            jumping=jumping,
            init=init,
        )


class GATv2(GAT):
    """The graph attention network with dynamic attention (GATv2) of Brody et al.

    The arguments are those of `GAT`. A score is computed from the projected rows of both ends of an
    edge, so the ranking of in-neighbours by attention can differ between targets. Sources and
    targets have separate projections with biases, as in PyG's `GATv2Conv`; with
    `residual`, they have no biases.
    """

    layer_class = GATv2Layer


def make_activation(name: str) -> Callable[[Tensor, float, int], Tensor]:
    """Return a function of (x, p, seed): activation and dropout; it may overwrite x."""
    check_choice("activation", name, ACTIVATIONS)
    return relu_dropout_ if name == "relu" else elu_dropout_
