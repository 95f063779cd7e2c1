"""GraphSAGE, GCN, GIN and GAT models on blocks."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.kernels.aggregate.dropout import dropout, relu_dropout_
from gcnzc.models.layers import GATLayer, GCNLayer, GINLayer, Layer, SAGELayer, random_seed
from gcnzc.sampling.batch import Block
from gcnzc.system.arguments import check_choice, check_flag, check_integer, check_number

NORMS = ("none", "batch", "layer")
JUMPING = ("none", "sum", "cat")
ACTIVATIONS = ("relu", "elu")


class Model(nn.Module):
    """A stack of layers, with normalisation, an activation and dropout after each.

    Without `output_linear` the last layer returns the logits, and nothing follows it. With all
    options this is the architecture of Luo et al., "Classic GNNs are Strong Baselines", 2024.

    Args:
        make_layer: `make_layer(in_features, out_features)` returns a layer; `out_features` is None
            for a hidden layer.
        in_features: columns of the features.
        width: columns of the output of a hidden layer.
        num_classes: columns of the logits.
        num_layers: number of layers, and of fanouts.
        activate: `activate(x, p, seed)` returns the activation of `x` with dropout of probability
            p; it may overwrite `x`.
        dropout: probability of a hidden element to be zeroed in training.
        input_dropout: probability of a feature to be zeroed in training.
        norm: "batch" for batch normalisation, "layer" for layer normalisation, or "none".
        pre_norm: normalise the inputs of each layer instead of its outputs.
        residual: add a linear projection of each layer's input to its output.
        input_linear: project the features to `width` columns before the first layer.
        output_linear: compute the logits by a linear projection after the last layer.
        jumping: what the output projection reads: "none", the output of the last layer; "sum" or
            "cat", the sum or the concatenation of the outputs of all layers (Xu et al., 2018).

    Raises:
        ValueError: a dropout outside [0, 1), or options that contradict each other.
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
    ) -> None:
        super().__init__()
        in_features = check_integer("in_features", in_features, 1, hint="the columns of features")
        num_classes = check_integer("num_classes", num_classes, 1)
        num_layers = check_integer("num_layers", num_layers, 1)
        dropout = _check_probability("dropout", dropout)
        input_dropout = _check_probability("input_dropout", input_dropout)
        check_choice("norm", norm, NORMS)
        check_choice("jumping", jumping, JUMPING)
        for name, flag in (
            ("pre_norm", pre_norm),
            ("residual", residual),
            ("input_linear", input_linear),
            ("output_linear", output_linear),
        ):
            check_flag(name, flag)
        check_stack(norm=norm, pre_norm=pre_norm, output_linear=output_linear, jumping=jumping)
        hidden = num_layers if output_linear else num_layers - 1
        first = width if input_linear else in_features
        inputs = [first] + [width] * (num_layers - 1)
        self.widths = tuple([width] * hidden + [num_classes] * (num_layers - hidden))
        self.in_features, self.out_features = in_features, num_classes
        self.input_linear = nn.Linear(in_features, width) if input_linear else None
        self.layers = nn.ModuleList(
            make_layer(columns, None if index < hidden else num_classes)
            for index, columns in enumerate(inputs)
        )
        ends = zip(inputs, self.widths, strict=True)
        self.residuals = nn.ModuleList(nn.Linear(*columns) for columns in ends if residual)
        normalised = inputs if pre_norm else self.widths[:hidden]
        kind = {"none": None, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}[norm]
        self.norms = nn.ModuleList(kind(columns) for columns in normalised if kind is not None)
        columns = width * num_layers if jumping == "cat" else width
        self.output_linear = nn.Linear(columns, num_classes) if output_linear else None
        self.pre_norm, self.jumping = pre_norm, jumping
        self.activate = activate
        self.dropout = dropout
        self.input_dropout = input_dropout

    def reset_parameters(self) -> None:
        """Reset all parameters, with random numbers from torch's default generator."""
        ends = (part for part in (self.input_linear, self.output_linear) if part is not None)
        for module in (*self.layers, *self.norms, *self.residuals, *ends):
            module.reset_parameters()

    def transform_features(self, x: Tensor) -> Tensor:
        """Return the input of the first layer: apply dropout and the input projection to features.

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
        """Normalise rows that layer `index` reads; with `pre_norm`, else they are unchanged."""
        return self.norms[index](x) if self.pre_norm else x

    def transform_output(self, index: int, out: Tensor, x_target: Tensor) -> Tensor:
        """Apply what follows layer `index`: residual, normalisation, activation and dropout.

        Args:
            index: of the layer.
            out: (T, columns), the layer's output; it may be overwritten.
            x_target: (T, columns), the rows of the targets that the layer has read.
        """
        if self.residuals:
            out = self.residuals[index](x_target).add_(out)
        if index == len(self.layers) - 1 and self.output_linear is None:
            return out
        if self.norms and not self.pre_norm:
            out = self.norms[index](out)
        p = self.dropout if self.training else 0.0
        return self.activate(out, p, random_seed() if p else 0)

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the logits, given the outputs of the layers that `jumping` names for the seeds.

        Args:
            outputs: of all layers, or of the last one without `jumping`; each (seeds, columns).
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
                to that of the model.

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
        x = self.transform_features(x.to(parameter_dtype(self)))
        outputs = []
        for index, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = self.normalize_input(index, x)
            x_target = x[: block.num_dst]
            x = self.transform_output(index, layer(block, x, x_target), x_target)
            if self.jumping != "none" or index == layers - 1:
                outputs.append(x[: blocks[-1].num_dst])
        return self.combine(outputs)


class _PlainModel(Model):
    """A stack of layers of one kind, without attention heads."""

    layer_kind: Callable[[int, int], Layer]

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
        batch_norm: bool | None = None,
    ) -> None:
        hidden = check_integer("hidden", hidden, 1)
        kind = type(self).layer_kind
        super().__init__(
            lambda columns, out: kind(columns, hidden if out is None else out),
            in_features,
            hidden,
            num_classes,
            num_layers,
            activation_of(activation),
            dropout=dropout,
            input_dropout=input_dropout,
            norm=_norm_of(norm, batch_norm),
            pre_norm=pre_norm,
            residual=residual,
            input_linear=input_linear,
            output_linear=output_linear,
            jumping=jumping,
        )


class SAGE(_PlainModel):
    """GraphSAGE with mean aggregation; by default as in OGB's examples.

    Args:
        in_features: columns of the features.
        hidden: columns of the hidden layers.
        num_classes: columns of the logits.
        num_layers: number of layers, and of fanouts.
        dropout: probability of a hidden element to be zeroed in training.
        input_dropout: probability of a feature to be zeroed in training.
        norm: "batch" for batch normalisation after hidden layers, "layer" for layer normalisation,
            or "none".
        pre_norm: normalise the inputs of each layer instead of its outputs.
        residual: add a linear projection of each layer's input to its output.
        input_linear: project the features to `hidden` columns before the first layer.
        output_linear: compute the logits by a linear projection after the last layer, which then is
            a hidden layer.
        jumping: "sum" or "cat": the output projection reads the sum or the concatenation of the
            outputs of all layers; "none": the output of the last layer.
        activation: "relu" or "elu".

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number of layers or columns is below 1, a dropout is outside [0, 1), a name is
            unknown, `pre_norm` is given without `norm`, or `jumping` without `output_linear`.
    """

    layer_kind = SAGELayer


class GCN(_PlainModel):
    """The graph convolutional network (GCN) of Kipf and Welling; by default as in OGB's examples.

    The arguments are those of `SAGE`. The in-degrees of nodes in the whole graph are needed. Pass
    `in_degrees=True` to `Loader`, which adds them to the blocks; otherwise they are read from
    `block.graph`, which synchronizes with the GPU. A block with neither is a RuntimeError.
    """

    layer_kind = GCNLayer


class GIN(_PlainModel):
    """The graph isomorphism network (GIN) of Xu et al., with epsilon 0.

    The arguments are those of `SAGE`. Each layer is a perceptron of two layers, with `hidden`
    columns, or `num_classes` in a layer that returns the logits. Sums grow with the degree: train
    with `norm="batch"` or `norm="layer"`. Like GCN, it needs the in-degrees of nodes in the whole
    graph.
    """

    layer_kind = GINLayer


class GAT(Model):
    """The graph attention network (GAT) of Veličković et al.

    Hidden layers concatenate their heads; the last layer averages them if it returns the logits.
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
        heads: heads of hidden layers.
        output_heads: heads of the last layer if it returns the logits; as many as `heads` if None.
        attention_dropout: probability of an attention weight to be zeroed in training.
        skip: add a linear projection of each layer's input to its output; each layer has a bias of
            its own, too.
        residual: the same without the layers' own biases, as in Luo et al., 2024; `skip` is not
            read.
        norm, pre_norm, input_linear, output_linear, jumping: see `SAGE`; hidden layers have
            `hidden * heads` columns.
        activation: "elu" or "relu".

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number of layers, columns or heads is below 1, a dropout is outside [0, 1), a
            name is unknown, `pre_norm` is given without `norm`, or `jumping` without
            `output_linear`.
    """

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
    ) -> None:
        heads = check_integer("heads", heads, 1)
        hidden = check_integer("hidden", hidden, 1)
        last_heads = heads if output_heads is None else output_heads
        last_heads = check_integer(
            "output_heads", last_heads, 1, hint="an integer, or None for the value of `heads`"
        )
        attention_dropout = _check_probability("attention_dropout", attention_dropout)
        skip = check_flag("skip", skip)

        def make_layer(columns: int, out: int | None) -> GATLayer:
            return GATLayer(
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
            activation_of(activation),
            dropout=dropout,
            input_dropout=input_dropout,
            norm=norm,
            pre_norm=pre_norm,
            residual=residual,
            input_linear=input_linear,
            output_linear=output_linear,
            jumping=jumping,
        )


def _elu_dropout_(x: Tensor, p: float, seed: int) -> Tensor:
    x = functional.elu(x, inplace=True)
    return dropout(x, p, seed) if p else x


def check_stack(*, norm: str, pre_norm: bool, output_linear: bool, jumping: str) -> None:
    """Check that options of a stack of layers do not contradict each other.

    Raises:
        ValueError: they do.
    """
    if pre_norm and norm == "none":
        raise ValueError(
            "pre_norm has no effect with norm none\n\nhint: choose norm batch or layer, too"
        )
    if jumping != "none" and not output_linear:
        raise ValueError(
            f"jumping {jumping} needs output_linear: outputs of hidden layers have other columns "
            "than the logits\n\nhint: set output_linear, too"
        )


def activation_of(name: str) -> Callable[[Tensor, float, int], Tensor]:
    """Return `activate(x, p, seed)` of an activation followed by dropout; it may overwrite `x`.

    Raises:
        ValueError: the name is unknown.
    """
    check_choice("activation", name, ACTIVATIONS)
    return relu_dropout_ if name == "relu" else _elu_dropout_


def _norm_of(norm: str, batch_norm: bool | None) -> str:
    if batch_norm is None:
        return norm
    check_flag("batch_norm", batch_norm)
    warnings.warn(
        "batch_norm is now norm='batch'; the old name goes with 0.3", DeprecationWarning, 4
    )
    return "batch" if batch_norm else norm


def _check_probability(name: str, p: float) -> float:
    return check_number(
        name, p, lambda value: 0 <= value < 1, "use a probability from 0 to below 1"
    )


def parameter_dtype(model: Model) -> torch.dtype:
    """Return the dtype of the model's parameters, in which it computes."""
    return next(model.parameters()).dtype


def check_columns(model: Model, num_columns: int) -> None:
    """Check that features have as many columns as the first layer expects.

    Raises:
        ValueError: they do not.
    """
    expected = model.in_features
    if num_columns != expected:
        raise ValueError(
            f"the features have {num_columns} columns, but the model expects {expected}\n\n"
            "hint: create the model with in_features equal to the columns of the features"
        )
