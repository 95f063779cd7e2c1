"""GraphSAGE, GCN and GAT models on blocks."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.kernels.aggregate.dropout import dropout, relu_dropout_
from gcnzc.models.layers import GATLayer, GCNLayer, Layer, SAGELayer, random_seed
from gcnzc.sampling.batch import Block
from gcnzc.system.arguments import check_flag, check_integer, check_number


class Model(nn.Module):
    """A stack of layers, with batch normalisation, an activation and dropout between them.

    Args:
        layers: from the input layer to the layer that returns the logits.
        widths: columns of each layer's output.
        activate: `activate(x, p, seed)` returns the activation of `x` with dropout of probability
            p; it may overwrite `x`.
        dropout: probability of a hidden element to be zeroed in training.
        input_dropout: probability of a feature to be zeroed in training.
        batch_norm: apply batch normalisation between layers.

    Raises:
        ValueError: a dropout outside [0, 1).
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        widths: Sequence[int],
        activate: Callable[[Tensor, float, int], Tensor],
        *,
        dropout: float,
        input_dropout: float,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        dropout = _check_probability("dropout", dropout)
        input_dropout = _check_probability("input_dropout", input_dropout)
        batch_norm = check_flag("batch_norm", batch_norm)
        self.layers = nn.ModuleList(layers)
        hidden = widths[:-1] if batch_norm else []
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in hidden)
        self.widths = tuple(widths)
        self.activate = activate
        self.dropout = dropout
        self.input_dropout = input_dropout

    def reset_parameters(self) -> None:
        """Reset all parameters, with random numbers from torch's default generator."""
        for module in (*self.layers, *self.norms):
            module.reset_parameters()

    def transform_output(self, index: int, x: Tensor) -> Tensor:
        """Apply normalisation, activation and dropout to the output of layer `index`.

        The output of the last layer is returned unchanged.
        """
        if index == len(self.layers) - 1:
            return x
        if self.norms:
            x = self.norms[index](x)
        p = self.dropout if self.training else 0.0
        return self.activate(x, p, random_seed() if p else 0)

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
        x = x.to(parameter_dtype(self))
        if self.training and self.input_dropout:
            x = dropout(x, self.input_dropout, random_seed())
        for index, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = self.transform_output(index, layer(block, x, x[: block.num_dst]))
        return x


class SAGE(Model):
    """GraphSAGE with mean aggregation, as in OGB's examples.

    Args:
        in_features: columns of the features.
        hidden: columns of the hidden layers.
        num_classes: columns of the logits.
        num_layers: number of layers, and of fanouts.
        dropout: probability of a hidden element to be zeroed in training.
        input_dropout: probability of a feature to be zeroed in training.
        batch_norm: apply batch normalisation between layers.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number of layers or columns is below 1, or a dropout is outside [0, 1).
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
        batch_norm: bool = False,
    ) -> None:
        in_features, widths = _check_widths(in_features, hidden, num_classes, num_layers)
        super().__init__(
            [SAGELayer(*columns) for columns in pairwise([in_features, *widths])],
            widths,
            relu_dropout_,
            dropout=dropout,
            input_dropout=input_dropout,
            batch_norm=batch_norm,
        )


class GCN(Model):
    """The graph convolutional network (GCN) of Kipf and Welling, as in OGB's examples.

    The arguments are those of `SAGE`. The in-degrees of nodes in the whole graph are needed. Pass
    `in_degrees=True` to `Loader`, which adds them to the blocks; otherwise they are read from
    `block.graph`, which synchronizes with the GPU. A block with neither is a RuntimeError.
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
        batch_norm: bool = False,
    ) -> None:
        in_features, widths = _check_widths(in_features, hidden, num_classes, num_layers)
        super().__init__(
            [GCNLayer(*columns) for columns in pairwise([in_features, *widths])],
            widths,
            relu_dropout_,
            dropout=dropout,
            input_dropout=input_dropout,
            batch_norm=batch_norm,
        )


class GAT(Model):
    """The graph attention network (GAT) of Veličković et al.

    Hidden layers concatenate their heads; the last layer averages them. The defaults are those of
    OGB's example for ogbn-products. The paper's model for Cora is `GAT(1433, 8, 7, 2, 0.6, heads=8,
    output_heads=1, input_dropout=0.6, attention_dropout=0.6, skip=False)`.

    Args:
        in_features: columns of the features.
        hidden: columns of each head of the hidden layers.
        num_classes: columns of the logits.
        num_layers: number of layers, and of fanouts.
        dropout: probability of a hidden element to be zeroed in training.
        input_dropout: probability of a feature to be zeroed in training.
        heads: heads of every layer but the last.
        output_heads: heads of the last layer; the same as `heads` if None.
        attention_dropout: probability of an attention weight to be zeroed in training.
        skip: add a linear projection of each layer's input to its output.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number of layers, columns or heads is below 1, or a dropout is outside [0, 1).
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
    ) -> None:
        heads = check_integer("heads", heads, 1)
        hidden = check_integer("hidden", hidden, 1)
        last_heads = heads if output_heads is None else output_heads
        last_heads = check_integer(
            "output_heads", last_heads, 1, hint="an integer, or None for the value of `heads`"
        )
        attention_dropout = _check_probability("attention_dropout", attention_dropout)
        skip = check_flag("skip", skip)
        in_features, widths = _check_widths(in_features, hidden * heads, num_classes, num_layers)
        layers = [
            GATLayer(
                before,
                num_classes if last else hidden,
                last_heads if last else heads,
                concatenate=not last,
                dropout=attention_dropout,
                skip=skip,
            )
            for index, before in enumerate([in_features, *widths[:-1]])
            for last in [index == num_layers - 1]
        ]
        super().__init__(
            layers, widths, _elu_dropout_, dropout=dropout, input_dropout=input_dropout
        )


def _elu_dropout_(x: Tensor, p: float, seed: int) -> Tensor:
    x = functional.elu(x, inplace=True)
    return dropout(x, p, seed) if p else x


def _check_widths(
    in_features: int, hidden: int, num_classes: int, num_layers: int
) -> tuple[int, list[int]]:
    """Check the arguments; return the input columns and the output columns of each layer."""
    num_layers = check_integer("num_layers", num_layers, 1)
    hidden = check_integer("hidden", hidden, 1)
    num_classes = check_integer("num_classes", num_classes, 1)
    in_features = check_integer("in_features", in_features, 1, hint="the columns of the features")
    return in_features, [hidden] * (num_layers - 1) + [num_classes]


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
    expected = model.layers[0].in_features
    if num_columns != expected:
        raise ValueError(
            f"the features have {num_columns} columns, but the model expects {expected}\n\n"
            "hint: create the model with in_features equal to the columns of the features"
        )
