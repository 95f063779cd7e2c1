"""GraphSAGE, GCN and GAT on blocks: layers with what happens between them."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.kernels.aggregate.dropout import dropout, relu_dropout_
from gcnzc.models.layers import GATLayer, GCNLayer, Layer, SAGELayer, draw_seed
from gcnzc.sampling.batch import Block
from gcnzc.system.arguments import check_flag, check_integer, check_number


class Model(nn.Module):
    """Layers, with batch normalisation, an activation and dropout between them.

    Args:
        layers: the first reads the features, the last gives the logits.
        widths: columns of each layer's output.
        activate: `(x, share, seed)` gives what follows a layer's output `x`, with a share of it
            left out; may write over `x`.
        dropout: the share of the hidden columns left out in training.
        input_dropout: the same of the features.
        batch_norm: normalise the columns between layers.

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
        dropout = _checked_share("dropout", dropout)
        input_dropout = _checked_share("input_dropout", input_dropout)
        batch_norm = check_flag("batch_norm", batch_norm)
        self.layers = nn.ModuleList(layers)
        hidden = widths[:-1] if batch_norm else []
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in hidden)
        self.widths = tuple(widths)
        self.activate = activate
        self.dropout = dropout
        self.input_dropout = input_dropout

    def reset_parameters(self) -> None:
        """Draw new weights from torch's generator."""
        for part in (*self.layers, *self.norms):
            part.reset_parameters()

    def between(self, index: int, x: Tensor) -> Tensor:
        """What happens to the output of layer `index` before the next layer."""
        if index == len(self.layers) - 1:
            return x
        if self.norms:
            x = self.norms[index](x)
        share = self.dropout if self.training else 0.0
        return self.activate(x, share, draw_seed() if share else 0)

    def forward(self, blocks: Sequence[Block], x: Tensor) -> Tensor:
        """Return the logits of the seeds.

        Args:
            blocks: one a layer, input layer first, as a `Batch` has them.
            x: (B, in_features) features of the sources of the first block, on its device; of half
                precision too.

        Returns:
            (seeds, classes).

        Raises:
            ValueError: another number of blocks than layers, or `x` has other rows or columns than
                are asked for.
        """
        layers = len(self.layers)
        if len(blocks) != layers:
            raise ValueError(
                f"{len(blocks)} blocks for a model of {layers} layers\n\n"
                "hint: give as many fan-outs as the model has layers"
            )
        check_columns(self, x.shape[1])
        if len(x) != blocks[0].num_src:
            raise ValueError(
                f"{len(x)} rows of features for a first block of {blocks[0].num_src} sources\n\n"
                "hint: pass the features of batch.nodes, in their order"
            )
        x = x.to(dtype_of(self))
        if self.training and self.input_dropout:
            x = dropout(x, self.input_dropout, draw_seed())
        for index, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = self.between(index, layer(block, x, x[: block.num_dst]))
        return x


class SAGE(Model):
    """GraphSAGE with the mean of the neighbours, as OGB's examples have it.

    Args:
        in_features: columns of the features.
        hidden: columns between layers.
        num_classes: columns of the logits.
        num_layers: how many, and how many fan-outs.
        dropout: the share of the hidden columns left out in training.
        input_dropout: the same of the features.
        batch_norm: normalise the columns between layers.

    Raises:
        TypeError: an argument of another type.
        ValueError: no layers or columns, or a dropout outside [0, 1).
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
        in_features, widths = _widths(in_features, hidden, num_classes, num_layers)
        super().__init__(
            [SAGELayer(*ends) for ends in pairwise([in_features, *widths])],
            widths,
            relu_dropout_,
            dropout=dropout,
            input_dropout=input_dropout,
            batch_norm=batch_norm,
        )


class GCN(Model):
    """The graph convolutional network, as OGB's examples have it.

    Its arguments are those of `SAGE`. Blocks must know their graph, as those of a `Sampler` do.
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
        in_features, widths = _widths(in_features, hidden, num_classes, num_layers)
        super().__init__(
            [GCNLayer(*ends) for ends in pairwise([in_features, *widths])],
            widths,
            relu_dropout_,
            dropout=dropout,
            input_dropout=input_dropout,
            batch_norm=batch_norm,
        )


class GAT(Model):
    """The graph attention network: heads side by side, and the mean of them in the last layer.

    With the defaults it is that of OGB's example for ogbn-products. The network of Veličković et
    al. for Cora is `GAT(1433, 8, 7, 2, 0.6, heads=8, output_heads=1, input_dropout=0.6,
    attention_dropout=0.6, skip=False)`.

    Args:
        in_features: columns of the features.
        hidden: columns of each head between layers.
        num_classes: columns of the logits.
        num_layers: how many, and how many fan-outs.
        dropout: the share of the hidden columns left out in training.
        input_dropout: the same of the features.
        heads: of every layer but the last.
        output_heads: of the last layer; as many as `heads` if None.
        attention_dropout: the share of the neighbours left out in training, for each head.
        skip: add a linear map of each layer's input to its output.

    Raises:
        TypeError: an argument of another type.
        ValueError: no layers, columns or heads, or a dropout outside [0, 1).
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
        last_heads = check_integer("output_heads", last_heads, 1, hint="None takes heads")
        attention_dropout = _checked_share("attention_dropout", attention_dropout)
        skip = check_flag("skip", skip)
        in_features, widths = _widths(in_features, hidden * heads, num_classes, num_layers)
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


def _elu_dropout_(x: Tensor, share: float, seed: int) -> Tensor:
    x = functional.elu(x, inplace=True)
    return dropout(x, share, seed) if share else x


def _widths(
    in_features: int, hidden: int, num_classes: int, num_layers: int
) -> tuple[int, list[int]]:
    """The columns that the first layer takes, and those that each layer gives."""
    num_layers = check_integer("num_layers", num_layers, 1)
    hidden = check_integer("hidden", hidden, 1)
    num_classes = check_integer("num_classes", num_classes, 1)
    in_features = check_integer("in_features", in_features, 1, hint="the columns of the features")
    return in_features, [hidden] * (num_layers - 1) + [num_classes]


def _checked_share(name: str, share: float) -> float:
    return check_number(
        name, share, lambda value: 0 <= value < 1, "it is a share, from 0 to below 1"
    )


def dtype_of(model: Model) -> torch.dtype:
    """Of the parameters, and of what it computes with."""
    return next(model.parameters()).dtype


def check_columns(model: Model, num_columns: int) -> None:
    """Refuse features of another width than the first layer takes."""
    expected = model.layers[0].in_features
    if num_columns != expected:
        raise ValueError(
            f"features of {num_columns} columns for a model of {expected}\n\n"
            "hint: make the model with in_features equal to the columns of the features"
        )
