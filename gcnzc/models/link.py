"""Decoders for link prediction: scores of pairs from the outputs for their two nodes.

Letters: P pairs, S nodes, D columns of a model's outputs.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.models.gnn import Model
from gcnzc.sampling.batch import Block

# pairs at a time where there is no gradient: two rows of 256 float32 of each are 128 MB
PAIRS = 1 << 16


class Dot(nn.Module):
    """The product of both ends' outputs, summed over the columns; it has no weights."""

    def reset_parameters(self) -> None:
        """There are none."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """(P,) scores of the pairs whose outputs (P, D) are given."""
        return (source * target).sum(dim=-1)


class HadamardMLP(nn.Module):
    """Linear layers on the product of both ends' outputs by columns, as OGB's examples have them.

    Args:
        columns: D, and the columns between its layers.
        num_layers: linear layers, with an activation and dropout between them.
        dropout: the share of the columns between layers that is left out in training.

    Raises:
        ValueError: no layers.
    """

    def __init__(self, columns: int, num_layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(
                f"a decoder of {num_layers} layers\n\nhint: one or more; `Dot` has none"
            )
        widths = [columns] * num_layers + [1]
        self.layers = nn.ModuleList(nn.Linear(*ends) for ends in pairwise(widths))
        self.dropout = dropout

    def reset_parameters(self) -> None:
        """Draw new weights from torch's generator."""
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """(P,) scores of the pairs whose outputs (P, D) are given."""
        x = source * target
        for layer in self.layers[:-1]:
            x = functional.dropout(functional.relu(layer(x)), self.dropout, self.training)
        return self.layers[-1](x).squeeze(-1)


class LinkModel(nn.Module):
    """A model whose outputs for two nodes a decoder turns into the score of an edge.

    Args:
        encoder: gives D columns for each node.
        decoder: takes those of the sources and of the targets.
    """

    def __init__(self, encoder: Model, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def reset_parameters(self) -> None:
        """Draw new weights from torch's generator."""
        self.encoder.reset_parameters()
        self.decoder.reset_parameters()  # type: ignore[operator]

    def forward(self, blocks: Sequence[Block], x: Tensor, pairs: Tensor) -> Tensor:
        """Return the logits of edges between the pairs.

        Args:
            blocks: one a layer, input layer first, as a `Batch` has them.
            x: features of the sources of the first block, on its device.
            pairs: (2, P) places among the seeds, as a `LinkSampler`'s batch has them.

        Returns:
            (P,).
        """
        rows = self.encoder(blocks, x)
        # gradients of an embedding are summed in the same order every time, also on a GPU
        source, target = functional.embedding(pairs, rows)
        return self.decoder(source, target)

    def scores(self, rows: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        """The logits of pairs whose ends' outputs are there already, without gradients.

        The model computes as in evaluation, and is left in the mode it was in.

        Args:
            rows: (S, D) outputs of the encoder, on any device.
            sources: places in `rows`, of any shape; like all ids on the device of `rows`.
            targets: of the same shape, or of one that broadcasts with it.

        Returns:
            On the CPU, of the common shape.
        """
        weights = next(self.encoder.parameters())
        shape = torch.broadcast_shapes(sources.shape, targets.shape)
        ends = [part.expand(shape) for part in (sources, targets)]
        out = torch.empty(shape, dtype=weights.dtype)
        # whole rows of pairs at a time, so that what is broadcast need not be copied at once
        step = max(1, PAIRS // max(1, shape[1:].numel()))
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                for begin in range(0, len(out), step):
                    part = slice(begin, begin + step)
                    both = [rows[end[part].long()].to(weights.device) for end in ends]
                    out[part] = self.decoder(*both).cpu()
        finally:
            self.train(was_training)
        return out
