"""Decoders for link prediction: compute scores of node pairs from the embeddings of both nodes.

Notation: P pairs, S nodes, D columns of an embedding.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.models.stack import Model, check_probability
from gcnzc.sampling.batch import Block
from gcnzc.system.arguments import check_integer

# pairs scored at once without gradients: two rows of 256 float32 for each take 128 MB
PAIRS_PER_CHUNK = 1 << 16


class Dot(nn.Module):
    """Dot-product decoder; it has no parameters."""

    def reset_parameters(self) -> None:
        """Do nothing, since there are no parameters."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the (P,) scores of pairs, given both nodes' embeddings, each (P, D)."""
        return (source * target).sum(dim=-1)

    def score_all_pairs(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the (S, T) scores of all pairs, given the embeddings (S, D) and (T, D).

        The scores have the device and dtype of the embeddings.
        """
        return source @ target.t()


class HadamardMLP(nn.Module):
    """MLP decoder on the elementwise (Hadamard) product of both embeddings, as in OGB's examples.

    Args:
        columns: D, which is also the width of the hidden layers.
        num_layers: number of linear layers, with ReLU and dropout between them.
        dropout: probability that a hidden element is zeroed during training.

    Raises:
        ValueError: there are no layers, or the dropout probability is outside [0, 1).
    """

    def __init__(self, columns: int, num_layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        widths = [columns] * check_integer("num_layers", num_layers, 1) + [1]
        self.layers = nn.ModuleList(nn.Linear(*ends) for ends in pairwise(widths))
        self.dropout = check_probability("dropout", dropout)

    def reset_parameters(self) -> None:
        """Reset all parameters, with random numbers from torch's default generator."""
        for layer in self.layers:
            layer.reset_parameters()  # type: ignore[operator]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the (P,) scores of pairs, given both nodes' embeddings, each (P, D)."""
        x = source * target
        for layer in self.layers[:-1]:
            x = functional.dropout(functional.relu(layer(x)), self.dropout, self.training)
        return self.layers[-1](x).squeeze(-1)

    def score_all_pairs(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the (S, T) scores of all pairs, given the embeddings (S, D) and (T, D).

        The embeddings and the scores have the device and dtype of the decoder.
        """
        step = max(1, PAIRS_PER_CHUNK // max(1, len(source)))
        parts = [self(source[:, None], part) for part in target.split(step)]
        return torch.cat(parts, dim=1)


class LinkModel(nn.Module):
    """A model for link prediction: a GNN encoder and a decoder of node pairs.

    Args:
        encoder: computes an embedding of D columns for each node.
        decoder: computes scores from the embeddings of the sources and of the targets.
    """

    def __init__(self, encoder: Model, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def reset_parameters(self) -> None:
        """Reset all parameters, with random numbers from torch's default generator."""
        self.encoder.reset_parameters()
        self.decoder.reset_parameters()  # type: ignore[operator]

    def forward(self, blocks: Sequence[Block], x: Tensor, pairs: Tensor) -> Tensor:
        """Return the logits of the pairs.

        Args:
            blocks: one per layer, input layer first, as in `Batch.blocks`.
            x: features of the sources of the first block, on its device.
            pairs: (2, P) positions among the seeds, as in a batch of a `LinkSampler`.

        Returns:
            (P,) logits, one for each pair.
        """
        rows = self.encoder(blocks, x)
        # the gradient of `embedding` is deterministic, also on a GPU
        source, target = functional.embedding(pairs, rows)
        return self.decoder(source, target)

    def scores(self, rows: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        """Compute the logits of pairs from precomputed embeddings, without gradients.

        The model is in evaluation mode during the call.

        Args:
            rows: (S, D) embeddings from the encoder, on any device.
            sources: int64 row indices, of any shape, on the device of `rows`.
            targets: int64 row indices, of a shape that broadcasts with that of `sources`.

        Returns:
            The logits on the CPU, of the broadcast shape.
        """
        weights = next(self.encoder.parameters())
        shape = torch.broadcast_shapes(sources.shape, targets.shape)
        ends = [part.expand(shape) for part in (sources, targets)]
        out = torch.empty(shape, dtype=weights.dtype)
        # in chunks along the first axis, so that broadcast rows are not all copied at once
        step = max(1, PAIRS_PER_CHUNK // max(1, shape[1:].numel()))
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
