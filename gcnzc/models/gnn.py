"""GraphSAGE, GCN, GIN, GAT and GATv2 models on blocks."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.kernels.aggregate.dropout import dropout, relu_dropout_
from gcnzc.models.autocast import compute_dtype, normalize
from gcnzc.models.checks import check_compatible, check_probability, resolve_norm
from gcnzc.models.initialization import INITS, initialize
from gcnzc.models.layers import (
    GATLayer,
    GATv2Layer,
    GCNLayer,
    GINLayer,
    Layer,
    SAGELayer,
    random_seed,
)
from gcnzc.sampling.batch import Block
from gcnzc.system.arguments import check_choice, check_flag, check_integer

NORMS = ("none", "batch", "layer")
JUMPING = ("none", "sum", "cat")
ACTIVATIONS = ("relu", "elu")


class Model(nn.Module):
    """A stack of message-passing layers; normalization, activation and dropout follow each layer.

    Without `output_linear`, the last layer computes the logits: no normalization, activation or
    dropout follows it. The options are those of Luo et al., "Classic GNNs are Strong Baselines",
    2024.

    Args:
        make_layer: `make_layer(in_features, out_features)` returns a layer; `out_features` is None
            for a hidden layer, whose output has `width` columns.
        in_features: columns of the features.
        width: columns of the outputs of the hidden layers.
        num_classes: columns of the logits.
        num_layers: number of layers, and of fanouts.
        activate: `activate(x, p, seed)` returns the activation of `x` with dropout of probability
            p; it may overwrite `x`.
        dropout: probability of a hidden element to be zeroed in training.
        input_dropout: probability of a feature to be zeroed in training.
        norm: "batch" for batch normalization, "layer" for layer normalization, or "none".
        pre_norm: normalize the inputs of each layer instead of its outputs.
        residual: add a linear projection of each layer's input to its output.
        input_linear: project the features to `width` columns before the first layer.
        output_linear: compute the logits by a linear projection after the last layer.
        jumping: input of the output projection: the output of the last layer ("none"), or the sum
            ("sum") or the concatenation ("cat") of the outputs of all layers: the jumping knowledge
            of Xu et al., 2018.
        init: initialization of the layers as in "pyg" or "dgl"; see `initialization`.

    Raises:
        ValueError: a dropout probability is outside [0, 1), or options are incompatible.
    """

    def __init__(
        self,
        make_layer: Callable[[int, int | None], Layer],
        in_features: int,
        width: int,
        num_classes: int,
        num_layers: int,
        activate: Callable[[Tensor, float, int], Tensor],
        *,
        dropout: float,
        input_dropout: float,
        norm: str = "none",
        pre_norm: bool = False,
        residual: bool = False,
        input_linear: bool = False,
        output_linear: bool = False,
        jumping: str = "none",
        init: str = "pyg",
    ) -> None:
        super().__init__()
        in_features = check_integer("in_features", in_features, 1, hint="the columns of features")
        num_classes = check_integer("num_classes", num_classes, 1)
        num_layers = check_integer("num_layers", num_layers, 1)
        dropout = check_probability("dropout", dropout)
        input_dropout = check_probability("input_dropout", input_dropout)
        check_choice("norm", norm, NORMS)
        check_choice("jumping", jumping, JUMPING)
        check_choice("init", init, INITS)
        for name, flag in (
            ("pre_norm", pre_norm),
            ("residual", residual),
            ("input_linear", input_linear),
            ("output_linear", output_linear),
        ):
            check_flag(name, flag)
        check_compatible(norm=norm, pre_norm=pre_norm, output_linear=output_linear, jumping=jumping)
        num_hidden = num_layers if output_linear else num_layers - 1
        first = width if input_linear else in_features
        in_widths = [first] + [width] * (num_layers - 1)
        self.widths = tuple([width] * num_hidden + [num_classes] * (num_layers - num_hidden))
        self.in_features, self.out_features = in_features, num_classes
        self.input_linear = nn.Linear(in_features, width) if input_linear else None
        self.layers = nn.ModuleList(
            make_layer(columns, None if index < num_hidden else num_classes)
            for index, columns in enumerate(in_widths)
        )
        layer_sizes = zip(in_widths, self.widths, strict=True)
        self.residuals = nn.ModuleList(nn.Linear(*sizes) for sizes in layer_sizes if residual)
        norm_widths = in_widths if pre_norm else self.widths[:num_hidden]
        norm_class = {"none": None, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}[norm]
        self.norms = nn.ModuleList(
            norm_class(columns) for columns in norm_widths if norm_class is not None
        )
        columns = width * num_layers if jumping == "cat" else width
        self.output_linear = nn.Linear(columns, num_classes) if output_linear else None
        self.pre_norm, self.jumping = pre_norm, jumping
        self.activate = activate
        self.dropout = dropout
        self.input_dropout = input_dropout
        self.init = init
        initialize(self.layers, init)

    def reset_parameters(self) -> None:
        """Reset all parameters, with random numbers from torch's default generator."""
        optional = (self.input_linear, self.output_linear)
        for module in (*self.layers, *self.norms, *self.residuals, *optional):
            if module is not None:
                module.reset_parameters()
        initialize(self.layers, self.init)

    def transform_features(self, x: Tensor) -> Tensor:
        """Compute the first layer's input: input dropout, and the projection followed by dropout.

        Args:
            x: (n, in_features) in the dtype of the model.
        """
        if self.training and self.input_dropout:
            x = dropout(x, self.input_dropout, random_seed())
        if self.input_linear is not None:
            x = self.input_linear(x)
            if self.training and self.dropout:
                x = dropout(x, self.dropout, random_seed())
        return x

    def normalize_input(self, index: int, x: Tensor) -> Tensor:
        """Normalize the input rows of layer `index` if `pre_norm`; else return them unchanged."""
        return normalize(self.norms[index], x) if self.pre_norm else x

    def transform_output(self, index: int, out: Tensor, x_target: Tensor) -> Tensor:
        """Apply residual, normalization, activation and dropout to the output of layer `index`.

        Args:
            index: index of the layer.
            out: (T, columns), the layer's output; it may be overwritten.
            x_target: (T, columns), the layer's input rows of its T destination nodes.
        """
        if self.residuals:
            out = self.residuals[index](x_target).add_(out)
        if index == len(self.layers) - 1 and self.output_linear is None:
            return out
        if self.norms and not self.pre_norm:
            out = normalize(self.norms[index], out)
        p = self.dropout if self.training else 0.0
        return self.activate(out, p, random_seed() if p else 0)

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        """Compute the logits of the seeds from the layers' outputs for the seeds.

        Args:
            outputs: outputs of all layers with `jumping`, otherwise that of the last layer; each
                (seeds, columns).
        """
        x = torch.cat(list(outputs), 1) if self.jumping == "cat" else outputs[0]
        if self.jumping == "sum":
            for other in outputs[1:]:
                x = x + other
        return x if self.output_linear is None else self.output_linear(x)

    def forward(self, blocks: Sequence[Block], x: Tensor) -> Tensor:
        """Return the logits of the seeds.

        Args:
            blocks: one per layer, input layer first, as in `Batch.blocks`.
            x: (N, in_features) features of the first block's sources, where N is
                `blocks[0].num_src`, on the device of the block; any floating-point dtype, converted
                to that of the model, or under `torch.autocast` to its dtype.

        Returns:
            (seeds, classes).

        Raises:
            ValueError: the number of blocks is not the number of layers, or `x` has the wrong
                number of rows or columns.
        """
        layers = len(self.layers)
        if len(blocks) != layers:
            raise ValueError(
                f"{len(blocks)} blocks for a model of {layers} layers\n\n"
                "hint: sample with as many fanouts as the model has layers"
            )
        check_columns(self, x.shape[1])
        if len(x) != blocks[0].num_src:
            raise ValueError(
                f"{len(x)} rows of features for a first block of {blocks[0].num_src} sources\n\n"
                "hint: pass the features of batch.nodes, in their order"
            )
        x = self.transform_features(x.to(compute_dtype(parameter_dtype(self), x.device)))
        outputs = []
        for index, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = self.normalize_input(index, x)
            x_target = x[: block.num_dst]
            x = self.transform_output(index, layer(block, x, x_target), x_target)
            if self.jumping != "none" or index == layers - 1:
                outputs.append(x[: blocks[-1].num_dst])
        return self.combine(outputs)


class _PlainModel(Model):
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
        residual: bool = False,
        input_linear: bool = False,
        output_linear: bool = False,
        jumping: str = "none",
        activation: str = "relu",
        init: str = "pyg",
        self_loops: bool = False,
        batch_norm: bool | None = None,
    ) -> None:
        hidden = check_integer("hidden", hidden, 1)
        layer_class = type(self).layer_class
        if check_flag("self_loops", self_loops):
            if layer_class is not SAGELayer:
                raise ValueError(
                    f"self_loops has no effect on {type(self).__name__}, whose layers include the "
                    "target itself\n\nhint: leave self_loops out"
                )
            layer_class = partial(SAGELayer, self_loops=True)
        super().__init__(
            lambda columns, out: layer_class(columns, hidden if out is None else out),
            in_features,
            hidden,
            num_classes,
            num_layers,
            _make_activation(activation),
            dropout=dropout,
            input_dropout=input_dropout,
            norm=resolve_norm(norm, batch_norm),
            pre_norm=pre_norm,
            residual=residual,
            input_linear=input_linear,
            output_linear=output_linear,
            jumping=jumping,
            init=init,
        )


class SAGE(_PlainModel):
    """GraphSAGE with mean aggregation; the defaults are those of OGB's example for ogbn-products.

    Args:
        in_features: columns of the features.
        hidden: columns of the hidden layers.
        num_classes: columns of the logits.
        num_layers: number of layers, and of fanouts.
        dropout: probability of a hidden element to be zeroed in training.
        input_dropout: probability of a feature to be zeroed in training.
        norm: "batch" for batch normalization after hidden layers, "layer" for layer normalization,
            or "none".
        pre_norm: normalize the inputs of each layer instead of its outputs.
        residual: add a linear projection of each layer's input to its output.
        input_linear: project the features to `hidden` columns before the first layer.
        output_linear: compute the logits by a linear projection after the last layer, which then is
            a hidden layer.
        jumping: input of the output projection: the output of the last layer ("none"), or the sum
            ("sum") or the concatenation ("cat") of the outputs of all layers.
        activation: "relu" or "elu".
        init: "pyg" or "dgl": initialize the layers as the layers of this library do.
        self_loops: include a node in the mean of its in-neighbours, as if the graph had a self
            loop at every node. Only for SAGE: the other models include it anyway.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number of layers or columns is below 1, a dropout is outside [0, 1), `norm`,
            `jumping` or `activation` has an unknown value, `pre_norm` is given without `norm`, or
            `jumping` without `output_linear`.
    """

    layer_class = SAGELayer


class GCN(_PlainModel):
    """The graph convolutional network (GCN) of Kipf and Welling.

    The arguments and defaults are those of `SAGE`. The model needs the in-degrees of nodes in the
    whole graph. Pass `in_degrees=True` to `Loader`, which adds them to the blocks; otherwise they
    are read from `block.graph`, which synchronizes with the GPU. A block with neither raises a
    RuntimeError.
    """

    layer_class = GCNLayer


class GIN(_PlainModel):
    """The graph isomorphism network (GIN) of Xu et al., with epsilon 0.

    The arguments are those of `SAGE`. Each layer has an MLP of two linear layers, both with
    `hidden` output columns, or `num_classes` in the layer that computes the logits. The sum over
    in-neighbours grows with the degree, so train with `norm="batch"` or `norm="layer"`. If k of d
    in-neighbours are sampled, their sum is multiplied by d / k. The model therefore needs the
    in-degrees of nodes in the whole graph, see `GCN`.
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
        dropout: probability of a hidden element to be zeroed in training.
        input_dropout: probability of a feature to be zeroed in training.
        heads: attention heads of each hidden layer.
        output_heads: attention heads of the last layer if it computes the logits. Default: `heads`.
        attention_dropout: probability of an attention weight to be zeroed in training.
        skip: add a linear projection of each layer's input to its output. The layers keep their
            biases.
        residual: add the same projection and omit the layers' biases, as in Luo et al., 2024. If
            True, `skip` is ignored.
        norm, pre_norm, input_linear, output_linear, jumping, init: see `SAGE`; hidden layers have
            `hidden * heads` columns.
        activation: "elu" or "relu".

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number of layers, columns or heads is below 1, a dropout is outside [0, 1),
            `norm`, `jumping` or `activation` has an unknown value, `pre_norm` is given without
            `norm`, or `jumping` without `output_linear`.
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
            _make_activation(activation),
            dropout=dropout,
            input_dropout=input_dropout,
            norm=norm,
            pre_norm=pre_norm,
            residual=residual,
            input_linear=input_linear,
            output_linear=output_linear,
            jumping=jumping,
            init=init,
        )


class GATv2(GAT):
    """The graph attention network with dynamic attention (GATv2) of Brody et al.

    The arguments are those of `GAT`. A score is computed from the projected rows of both ends of an
    edge, so the ranking of in-neighbours by attention can differ between destination nodes. Sources
    and destinations have separate projections with biases, as in PyG's `GATv2Conv`; with
    `residual`, they have no biases.
    """

    layer_class = GATv2Layer


def _elu_dropout_(x: Tensor, p: float, seed: int) -> Tensor:
    x = functional.elu(x, inplace=True)
    return dropout(x, p, seed) if p else x


def _make_activation(name: str) -> Callable[[Tensor, float, int], Tensor]:
    """Return a function of (x, p, seed): activation and dropout; it may overwrite x."""
    check_choice("activation", name, ACTIVATIONS)
    return relu_dropout_ if name == "relu" else _elu_dropout_


def parameter_dtype(model: Model) -> torch.dtype:
    """Return the dtype of the model's parameters, and of its computation without autocast."""
    return next(model.parameters()).dtype


def check_columns(model: Model, num_columns: int) -> None:
    """Check that features have as many columns as the model expects.

    Raises:
        ValueError: the numbers differ.
    """
    expected = model.in_features
    if num_columns != expected:
        raise ValueError(
            f"the features have {num_columns} columns, but the model expects {expected}\n\n"
            "hint: create the model with in_features equal to the columns of the features"
        )
