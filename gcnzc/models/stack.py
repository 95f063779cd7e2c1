"""A stack of message-passing layers with normalization, residuals and projections."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from gcnzc.kernels.aggregate.dropout import dropout
from gcnzc.models.autocast import compute_dtype, normalize
from gcnzc.models.layers import GATLayer, GATv2Layer, Layer, SAGELayer, random_seed
from gcnzc.sampling.batch import Block
from gcnzc.system.arguments import check_choice, check_flag, check_integer, check_number


def check_compatible(
    *,
    norm: str,
    pre_norm: bool,
    pre_activation: bool,
    input_linear: bool,
    output_linear: bool,
    jumping: str,
) -> None:
    """Raise a ValueError if an option has no effect or is not possible with the others."""
    if pre_norm and norm == "none":
        raise ValueError(
            "pre_norm has no effect with norm none\n\nhint: also pass norm='batch' or norm='layer'"
        )
    if pre_norm and pre_activation:
        raise ValueError(
            "pre_activation includes pre_norm\n\nhint: pass one of them; norm chooses the "
            "normalization"
        )
    if pre_activation and not (input_linear and output_linear):
        raise ValueError(
            "pre_activation needs input_linear and output_linear: activation comes before each "
            "layer, and would change the features\n\n"
            "hint: also pass input_linear=True and output_linear=True"
        )
    if jumping != "none" and not output_linear:
        raise ValueError(
            f"jumping {jumping} needs output_linear: the outputs of hidden layers do not have as "
            "many columns as the logits\n\nhint: also pass output_linear=True"
        )


def check_probability(name: str, p: float) -> float:
    """Return a dropout probability, which must be in [0, 1)."""
    return check_number(name, p, lambda value: 0 <= value < 1, "use a probability in [0, 1)")


NORMS = ("none", "batch", "layer")
JUMPING = ("none", "sum", "cat")


class Model(nn.Module):
    """A stack of message-passing layers with optional normalization, residuals and projections.

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
        dropout: probability that a hidden element is zeroed during training.
        input_dropout: probability that a feature is zeroed during training.
        norm: "batch" for batch normalization, "layer" for layer normalization, or "none".
        pre_norm: normalize the inputs of each layer instead of its outputs.
        pre_activation: apply normalization, activation and dropout to the inputs of each layer and
            of the output projection instead of to the outputs of layers, see Li et al., "DeeperGCN:
            All You Need to Train Deeper GCNs", 2020, section 4.2; needs both projections.
        residual: add a linear projection of each layer's input to its output. With
            `pre_activation`, add the input itself, as it was before normalization.
        input_linear: project the features to `width` columns before the first layer.
        output_linear: compute the logits with a linear projection after the last layer.
        jumping: input of the output projection: the output of the last layer ("none"), or the sum
            ("sum") or the concatenation ("cat") of the outputs of all layers: the jumping knowledge
            of Xu et al., 2018.
        init: initialization of the layers as in "pyg" or "dgl"; see `initialization`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number of layers or columns is below 1, a dropout probability is outside
            [0, 1), an option has an unknown value, or options are incompatible.
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
        pre_activation: bool = False,
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
            ("pre_activation", pre_activation),
            ("residual", residual),
            ("input_linear", input_linear),
            ("output_linear", output_linear),
        ):
            check_flag(name, flag)
        check_compatible(
            norm=norm,
            pre_norm=pre_norm,
            pre_activation=pre_activation,
            input_linear=input_linear,
            output_linear=output_linear,
            jumping=jumping,
        )
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
        self.adds_input = residual and pre_activation
        is_projected = residual and not pre_activation
        self.residuals = nn.ModuleList(nn.Linear(*sizes) for sizes in layer_sizes if is_projected)
        columns = width * num_layers if jumping == "cat" else width
        norm_widths = in_widths if pre_norm else self.widths[:num_hidden]
        if pre_activation:
            norm_widths = [*in_widths, columns]
        norm_class = {"none": None, "batch": nn.BatchNorm1d, "layer": nn.LayerNorm}[norm]
        self.norms = nn.ModuleList(
            norm_class(columns) for columns in norm_widths if norm_class is not None
        )
        self.output_linear = nn.Linear(columns, num_classes) if output_linear else None
        self.pre_norm, self.pre_activation, self.jumping = pre_norm, pre_activation, jumping
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

        With `pre_activation`, the projection is not followed by dropout; `transform_input` applies
        it.

        Args:
            x: (n, in_features) in the dtype of the model.
        """
        if self.training and self.input_dropout:
            x = dropout(x, self.input_dropout, random_seed())
        if self.input_linear is not None:
            x = self.input_linear(x)
            if self.training and self.dropout and not self.pre_activation:
                x = dropout(x, self.dropout, random_seed())
        return x

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

    def _activate(self, x: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        return self.activate(x, p, random_seed() if p else 0)

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
            _reset_skip(layer.skip, gain)
        elif isinstance(layer, GATv2Layer):
            for linear in (layer.source, layer.target):
                nn.init.xavier_normal_(linear.weight, gain)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
            _attention_normal_(layer.attention, gain)
            _reset_skip(layer.skip, gain)


def _attention_normal_(attention_HF: Tensor, gain: float) -> None:
    # DGL's attention vectors have the shape (1, H, F), whose fans are F and H * F
    heads, columns = attention_HF.shape
    nn.init.normal_(attention_HF, std=gain * math.sqrt(2 / (columns + heads * columns)))


def _reset_skip(skip: nn.Linear | None, gain: float) -> None:
    if skip is not None:
        nn.init.xavier_normal_(skip.weight, gain)
        nn.init.zeros_(skip.bias)
