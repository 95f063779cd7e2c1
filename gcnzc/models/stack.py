"""A stack of message-passing layers with normalization, residuals and projections."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gcnzc.kernels.aggregate.dropout import dropout, elu_dropout_, relu_dropout_
from gcnzc.models.autocast import compute_dtype, normalize
from gcnzc.models.layers import (
    AttentionLayer,
    GATLayer,
    GATv2Layer,
    Layer,
    SAGELayer,
    random_seed,
)
from gcnzc.sampling.batch import Block
from gcnzc.system.arguments import check_choice, check_flag, check_integer, check_number

NORMS = {"none": None, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
JUMPING = ("none", "sum", "cat")
# activation and dropout in one pass
ACTIVATIONS = {"relu": relu_dropout_, "elu": elu_dropout_}


def check_probability(name: str, p: float) -> float:
    """Return a dropout probability, which must be in [0, 1)."""
    return check_number(name, p, lambda value: 0 <= value < 1, "use a probability in [0, 1)")


class Stack(nn.Module):
    """The options that models of one node type and of several have in common.

    Args:
        num_classes: columns of the outputs.
        num_layers: number of layers.
        dropout: probability that a hidden element is zeroed during training.
        input_dropout: probability that a feature is zeroed during training.
        norm: "batch", "layer" or "none".
        activation: "relu" or "elu".
        output_linear: whether the outputs are computed by a linear projection after the last layer.

    Attributes:
        num_hidden: number of layers whose outputs are hidden.
        activate: `activate(x, p, seed)` returns the activation of `x` with dropout of probability
            p; it may overwrite `x`.
    """

    def __init__(
        self,
        num_classes: int,
        num_layers: int,
        dropout: float,
        input_dropout: float,
        norm: str,
        activation: str,
        output_linear: bool,
    ) -> None:
        super().__init__()
        self.out_features = check_integer("num_classes", num_classes, 1)
        self.num_layers = check_integer("num_layers", num_layers, 1)
        self.num_hidden = self.num_layers - (not check_flag("output_linear", output_linear))
        self.dropout = check_probability("dropout", dropout)
        self.input_dropout = check_probability("input_dropout", input_dropout)
        check_choice("norm", norm, tuple(NORMS))
        check_choice("activation", activation, tuple(ACTIVATIONS))
        self.activate: Callable[[Tensor, float, int], Tensor] = ACTIVATIONS[activation]

    def _drop(self, x: Tensor, p: float) -> Tensor:
        return dropout(x, p, random_seed()) if self.training and p else x

    def _activate(self, x: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        return self.activate(x, p, random_seed() if p else 0)


class Model(Stack):
    """A stack of message-passing layers with optional normalization, residuals and projections.

    Without `output_linear`, the last layer computes the logits: no normalization, activation or
    dropout follows it. The options are those of Luo et al., "Classic GNNs are Strong Baselines",
    2024. A subclass sets `layer_class`, or overrides `make_layer`.

    Args:
        in_features: columns of the features.
        hidden: columns of the outputs of the hidden layers.
        num_classes: columns of the logits.
        num_layers: number of layers, and of fanouts.
        dropout: probability that a hidden element is zeroed during training.
        input_dropout: probability that a feature is zeroed during training.
        norm: "batch" for batch normalization, "layer" for layer normalization, or "none".
        pre_norm: normalize the inputs of each layer instead of its outputs.
        pre_activation: apply normalization, activation and dropout to the inputs of each layer and
            of the output projection instead of to the outputs of layers, see Li et al., "DeeperGCN:
            All You Need to Train Deeper GCNs", 2020, section 4.2; needs both projections.
        residual: add a linear projection of each layer's input to its output. With
            `pre_activation`, add the input itself, as it was before normalization.
        input_linear: project the features to `hidden` columns before the first layer.
        output_linear: compute the logits with a linear projection after the last layer.
        jumping: input of the output projection: the output of the last layer ("none"), or the sum
            ("sum") or the concatenation ("cat") of the outputs of all layers: the jumping knowledge
            of Xu et al., 2018.
        activation: "relu" or "elu".
        init: initialization of the layers as in "pyg" or "dgl"; see `initialize`.
        layer_options: passed to `make_layer`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number of layers or columns is below 1, a dropout probability is outside
            [0, 1), an option has an unknown value, or options are incompatible.
    """

    layer_class: Callable[..., Layer]

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
        **layer_options: Any,
    ) -> None:
        super().__init__(
            num_classes, num_layers, dropout, input_dropout, norm, activation, output_linear
        )
        self.in_features = check_integer("in_features", in_features, 1)
        hidden = check_integer("hidden", hidden, 1)
        check_choice("jumping", jumping, JUMPING)
        check_choice("init", init, INITS)
        self.pre_norm = check_flag("pre_norm", pre_norm)
        self.pre_activation = check_flag("pre_activation", pre_activation)
        check_flag("residual", residual)
        check_flag("input_linear", input_linear)
        if pre_norm and norm == "none":
            raise ValueError(
                "pre_norm has no effect with norm none\n\nhint: also pass norm='layer'"
            )
        if pre_norm and pre_activation:
            raise ValueError("pre_activation includes pre_norm\n\nhint: pass one of them")
        if pre_activation and not (input_linear and output_linear):
            raise ValueError(
                "pre_activation needs input_linear and output_linear, since activation comes "
                "before each layer\n\nhint: also pass input_linear=True and output_linear=True"
            )
        if jumping != "none" and not output_linear:
            raise ValueError(
                f"jumping {jumping} needs output_linear, since hidden layers do not have as many "
                "columns as the logits\n\nhint: also pass output_linear=True"
            )
        in_widths = [hidden if input_linear else self.in_features]
        in_widths += [hidden] * (self.num_layers - 1)
        num_outputs = self.num_layers - self.num_hidden
        self.widths = (hidden,) * self.num_hidden + (self.out_features,) * num_outputs
        sizes = list(zip(in_widths, self.widths, strict=True))
        self.input_linear = nn.Linear(self.in_features, hidden) if input_linear else None
        self.layers = nn.ModuleList(
            self.make_layer(*each, index < self.num_hidden, **layer_options)
            for index, each in enumerate(sizes)
        )
        self.adds_input = residual and pre_activation
        is_projected = residual and not pre_activation
        self.residuals = nn.ModuleList(nn.Linear(*each) for each in sizes if is_projected)
        columns = hidden * self.num_layers if jumping == "cat" else hidden
        norm_widths = in_widths if pre_norm else self.widths[: self.num_hidden]
        if pre_activation:
            norm_widths = [*in_widths, columns]
        norm_class = NORMS[norm]
        self.norms = nn.ModuleList(norm_class(each) for each in norm_widths if norm_class)
        self.output_linear = nn.Linear(columns, self.out_features) if output_linear else None
        self.jumping, self.init = jumping, init
        initialize(self.layers, init)

    def make_layer(
        self, in_features: int, out_features: int, is_hidden: bool, **options: Any
    ) -> Layer:
        """Return a layer.

        Args:
            in_features: columns of the input.
            out_features: columns of the output: `hidden`, or those of the logits.
            is_hidden: whether the output is hidden.
            options: `layer_options` of the model.
        """
        return self.layer_class(in_features, out_features, **options)

    def reset_parameters(self) -> None:
        """Reset all parameters, with random numbers from torch's default generator."""
        optional = (self.input_linear, self.output_linear)
        for module in (*self.layers, *self.norms, *self.residuals, *optional):
            if module is not None:
                module.reset_parameters()
        initialize(self.layers, self.init)

    def transform_features(self, x: Tensor) -> Tensor:
        """Compute the first layer's input: input dropout, and the projection followed by dropout.

        With `pre_activation`, the projection is not followed by dropout; `transform_input` applies
        it.

        Args:
            x: (n, in_features) in the dtype of the model.
        """
        x = self._drop(x, self.input_dropout)
        if self.input_linear is None:
            return x
        x = self.input_linear(x)
        return x if self.pre_activation else self._drop(x, self.dropout)

    @property
    def transforms_inputs(self) -> bool:
        """Whether `transform_input` changes rows: True with `pre_norm` or `pre_activation`."""
        return self.pre_norm or self.pre_activation

    def transform_input(self, index: int, x: Tensor) -> Tensor:
        """Return the rows that layer `index` reads: with `pre_norm`, the normalized rows.

        With `pre_activation`, activation and dropout follow the normalization.

        Args:
            index: index of the layer; that of the output projection is the number of layers.
            x: (n, columns) rows, the outputs of the previous layer or of `transform_features`.

        Returns:
            (n, columns); `x` itself if `transforms_inputs` is False.
        """
        if self.pre_activation:
            # the activation may overwrite its input
            return self._activate(normalize(self.norms[index], x) if self.norms else x.clone())
        return normalize(self.norms[index], x) if self.pre_norm else x

    def transform_output(self, index: int, out: Tensor, x_target: Tensor) -> Tensor:
        """Apply residual, normalization, activation and dropout to the output of layer `index`.

        Args:
            index: index of the layer.
            out: (T, columns), the layer's output; it may be overwritten.
            x_target: (T, columns), rows of the layer's T targets: those that the layer read, or
                with `pre_activation` the rows before `transform_input`.
        """
        if self.pre_activation:
            return out + x_target if self.adds_input else out
        if self.residuals:
            out = self.residuals[index](x_target).add_(out)
        if index == len(self.layers) - 1 and self.output_linear is None:
            return out
        if self.norms and not self.pre_norm:
            out = normalize(self.norms[index], out)
        return self._activate(out)

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
        if self.pre_activation:
            x = self.transform_input(len(self.layers), x)
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
            raise ValueError(f"{len(blocks)} blocks for a model of {layers} layers")
        check_columns(self, x.shape[1])
        if len(x) != blocks[0].num_src:
            raise ValueError(
                f"{len(x)} rows of features for a first block of {blocks[0].num_src} sources"
            )
        x = self.transform_features(x.to(compute_dtype(parameter_dtype(self), x.device)))
        outputs = []
        for index, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            rows, count = self.transform_input(index, x), block.num_dst
            out = layer(block, rows, rows[:count])
            x = self.transform_output(index, out, (x if self.pre_activation else rows)[:count])
            if self.jumping != "none" or index == layers - 1:
                outputs.append(x[: blocks[-1].num_dst])
        return self.combine(outputs)


def parameter_dtype(model: nn.Module) -> torch.dtype:
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


# The layers of `gcnzc.models.layers` reset their parameters as PyG's do. Their distributions in
# DGL, with the gain g = sqrt(2) of ReLU:
#
# - `SAGEConv`: both weights Xavier uniform with gain g, the bias as in `torch.nn.Linear`;
# - `GraphConv`: as in PyG: the weight Xavier uniform, the bias 0;
# - `GATConv`, `GATv2Conv`: all weights, attention vectors and the projection of the skip connection
#   Xavier normal with gain g, all biases 0;
# - `GINConv`: it has no weights of its own, and the two linear layers of its MLP are as in torch.
#
# Linear projections of residual connections, of the features and of the outputs are
# `torch.nn.Linear`, and are initialized as such with both libraries.
INITS = ("pyg", "dgl")


def initialize(layers: Iterable[nn.Module], init: str) -> None:
    """Initialize layers in place, with random numbers from torch's default generator.

    Args:
        layers: layers whose parameters were reset.
        init: "pyg" keeps the parameters; "dgl" draws those whose distribution differs in DGL.
    """
    if init == "pyg":
        return
    gain = nn.init.calculate_gain("relu")
    for layer in layers:
        if isinstance(layer, SAGELayer):
            nn.init.xavier_uniform_(layer.neighbours.weight, gain)
            nn.init.xavier_uniform_(layer.own.weight, gain)
        elif isinstance(layer, GATLayer):
            nn.init.xavier_normal_(layer.weight.view(-1, layer.in_features), gain)
            _attention_normal_(layer.source_attention, gain)
            _attention_normal_(layer.target_attention, gain)
        elif isinstance(layer, GATv2Layer):
            _linear_normal_(layer.source, gain)
            _linear_normal_(layer.target, gain)
            _attention_normal_(layer.attention, gain)
        if isinstance(layer, AttentionLayer) and layer.skip is not None:
            _linear_normal_(layer.skip, gain)


def _attention_normal_(attention_HF: Tensor, gain: float) -> None:
    # DGL's attention vectors have the shape (1, H, F), whose fans are F and H * F
    heads, columns = attention_HF.shape
    nn.init.normal_(attention_HF, std=gain * math.sqrt(2 / (columns + heads * columns)))


def _linear_normal_(linear: nn.Linear, gain: float) -> None:
    nn.init.xavier_normal_(linear.weight, gain)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
