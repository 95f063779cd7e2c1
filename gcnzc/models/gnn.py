"""GraphSAGE, GCN, GIN, GAT and GATv2 models on blocks."""

from collections.abc import Callable
from typing import Any

from gcnzc.models.layers import GATLayer, GATv2Layer, GCNLayer, GINLayer, Layer, SAGELayer
from gcnzc.models.stack import Model, check_probability
from gcnzc.system.arguments import check_flag, check_integer


class SAGE(Model):
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

    def __init__(
        self,
        in_features: int,
        hidden: int,
        num_classes: int,
        num_layers: int = 3,
        dropout: float = 0.5,
        *,
        self_loops: bool = False,
        **options: Any,
    ) -> None:
        options["self_loops"] = check_flag("self_loops", self_loops)
        super().__init__(in_features, hidden, num_classes, num_layers, dropout, **options)


class GCN(Model):
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


class GIN(Model):
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

    layer_class: Callable[..., Layer] = GATLayer

    def __init__(
        self,
        in_features: int,
        hidden: int,
        num_classes: int,
        num_layers: int = 3,
        dropout: float = 0.5,
        *,
        heads: int = 4,
        output_heads: int | None = None,
        attention_dropout: float = 0.0,
        skip: bool = True,
        residual: bool = False,
        activation: str = "elu",
        **options: Any,
    ) -> None:
        hidden, heads = check_integer("hidden", hidden, 1), check_integer("heads", heads, 1)
        last_heads = heads
        if output_heads is not None:
            last_heads = check_integer("output_heads", output_heads, 1)
            if options.get("output_linear") is True:
                raise ValueError("output_heads has no effect with output_linear")
        super().__init__(
            in_features,
            hidden * heads,
            num_classes,
            num_layers,
            dropout,
            residual=residual,
            activation=activation,
            heads=heads,
            output_heads=last_heads,
            attention_dropout=check_probability("attention_dropout", attention_dropout),
            skip=check_flag("skip", skip) and not residual,
            bias=not residual,
            **options,
        )

    def make_layer(
        self, in_features: int, out_features: int, is_hidden: bool, **options: Any
    ) -> Layer:
        """See `Model.make_layer`; the outputs of the heads are concatenated in hidden layers."""
        heads, output_heads = options.pop("heads"), options.pop("output_heads")
        return self.layer_class(
            in_features,
            out_features // heads if is_hidden else out_features,
            heads if is_hidden else output_heads,
            concatenate=is_hidden,
            dropout=options.pop("attention_dropout"),
            **options,
        )


class GATv2(GAT):
    """The graph attention network with dynamic attention (GATv2) of Brody et al.

    The arguments are those of `GAT`. A score is computed from the projected rows of both ends of an
    edge, so the ranking of in-neighbours by attention can differ between targets. Sources and
    targets have separate projections with biases, as in PyG's `GATv2Conv`; with
    `residual`, they have no biases.
    """

    layer_class = GATv2Layer
