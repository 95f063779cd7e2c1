"""Layers of GraphSAGE, GCN and GAT on one block.

Each layer is one class that knows its formula. A linear map and a sum over neighbours may be taken
in either order, so each layer takes the cheaper one for the block at hand.

Letters: S sources, T targets, E edges of a block, H heads, F columns (of a head).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.kernels.aggregate import aggregate
from gcnzc.kernels.aggregate.gat import gat_aggregate
from gcnzc.sampling.batch import Block

# what a column of an edge costs, in multiplications of a linear map; bench/aggregate.py says why
EDGE_COST = 8


@dataclass(frozen=True)
class Hop:
    """The edges that a layer sums over, and what GCN needs of the whole graph."""

    indptr: Tensor  # (T + 1,)
    indices: Tensor  # (E,) rows of the sources
    own: Tensor | None  # (T,) each target's row among the sources; None: target t has row t
    source_norms: Tensor | None = None  # (S,) one over the root of the degree, loop included
    target_degrees: Tensor | None = None  # (T,) in the graph, without the loop

    @property
    def num_targets(self) -> int:
        """T."""
        return self.indptr.shape[0] - 1

    def of_targets(self, rows: Tensor) -> Tensor:
        """The targets' rows among those of the sources."""
        return rows[: self.num_targets] if self.own is None else rows[self.own]


class Layer(nn.Module):
    """One layer: what sources send, and what targets make of what they receive."""

    needs_degrees = False  # of the graph
    has_scores = False

    def __init__(self, in_features: int, out_features: int, heads: int = 1) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features  # of one head, if there are heads
        self.heads = heads

    def maps_first(self, num_sources: int, num_targets: int, num_edges: int) -> bool:
        """Whether to map all sources and sum the images costs less than to map the sums."""
        map_cost = self.in_features * self.heads * self.out_features
        first = num_sources * map_cost + EDGE_COST * num_edges * self.heads * self.out_features
        # the heads share a row that is not mapped: it is read once, and weighed in the cache
        shared = self.in_features * (3 + self.heads) / 4
        return first < num_targets * map_cost + EDGE_COST * num_edges * shared

    def mapped(self, x: Tensor) -> Tensor:
        """The images of rows (n, in_features) that sources send: (n, heads * out_features)."""
        raise NotImplementedError(f"each kind of layer maps in its own way: {type(self).__name__}")

    def scores(self, x: Tensor) -> Tensor:
        """What sources send besides: (n, heads), or (n, 0) of a layer without attention."""
        return x[:, :0]

    def receive(
        self, hop: Hop, rows: Tensor, scores: Tensor, x_target: Tensor, is_mapped: bool
    ) -> Tensor:
        """The outputs of the targets, from the rows that `hop.indices` point at."""
        raise NotImplementedError(f"each kind of layer sums in its own way: {type(self).__name__}")

    def forward(self, block: Block, x_source: Tensor, x_target: Tensor) -> Tensor:
        """Compute the layer on a block.

        Args:
            block: S sources, T targets.
            x_source: (S, in_features) on the device of the block.
            x_target: (T, in_features), the first T rows of `x_source`.

        Returns:
            (T, columns).
        """
        hop = Hop(block.indptr, block.indices, None)
        if self.needs_degrees:
            norms = root_norms(block.in_degrees, x_source.dtype)
            hop = Hop(hop.indptr, hop.indices, None, norms, block.in_degrees[: block.num_dst])
        is_mapped = self.maps_first(block.num_src, block.num_dst, block.indices.shape[0])
        rows = self.mapped(x_source) if is_mapped else x_source
        return self.receive(hop, rows, self.scores(x_source), x_target, is_mapped)


class SAGELayer(Layer):
    """`W mean(x of in-neighbours) + b + V x`: Hamilton et al., 2017."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.neighbours = nn.Linear(in_features, out_features)
        self.own = nn.Linear(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw new weights as `torch.nn.Linear` does, and PyG with it."""
        self.neighbours.reset_parameters()
        self.own.reset_parameters()

    def mapped(self, x: Tensor) -> Tensor:
        """W x."""
        return functional.linear(x, self.neighbours.weight)

    def receive(
        self, hop: Hop, rows: Tensor, scores: Tensor, x_target: Tensor, is_mapped: bool
    ) -> Tensor:
        """See `Layer`."""
        mean = aggregate(
            hop.indptr, hop.indices, rows, None, 1 / hop.indptr.diff().clamp(min=1).to(rows.dtype)
        )
        out = mean + self.neighbours.bias if is_mapped else self.neighbours(mean)
        return out.addmm_(x_target, self.own.weight.t())


class GCNLayer(Layer):
    """`W sum(x[s] / sqrt((d[s] + 1) (d[t] + 1))) + b` with a self loop: Kipf and Welling, 2017.

    Degrees `d` are those in the whole graph. Of a target that keeps k of its d in-neighbours, their
    sum counts d / k times, so that it estimates the sum over all. A self loop that is in the graph
    counts as an edge like any other.
    """

    needs_degrees = True

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights as Glorot and Bengio do; no bias."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def mapped(self, x: Tensor) -> Tensor:
        """W x."""
        return functional.linear(x, self.weight)

    def receive(
        self, hop: Hop, rows: Tensor, scores: Tensor, x_target: Tensor, is_mapped: bool
    ) -> Tensor:
        """See `Layer`."""
        assert hop.target_degrees is not None, "layers that need degrees are given them"
        norms = root_norms(hop.target_degrees, rows.dtype)
        kept = hop.indptr.diff().clamp(min=1)
        total = aggregate(
            hop.indptr, hop.indices, rows, hop.source_norms, norms * hop.target_degrees / kept
        )
        total.addcmul_(hop.of_targets(rows), norms.square()[:, None])
        return total + self.bias if is_mapped else functional.linear(total, self.weight, self.bias)


class GATLayer(Layer):
    """Attention over the in-neighbours and the target itself: Veličković et al., 2018.

    As PyG's `GATConv`, plus a linear skip connection from the target.

    Args:
        in_features: columns of a row.
        out_features: columns of a head.
        heads: how many.
        concatenate: give the heads side by side; else their mean.
        dropout: the share of the attention weights left out in training.
        skip: add a linear map of the target's own row.
    """

    has_scores = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        heads: int,
        *,
        concatenate: bool,
        dropout: float,
        skip: bool,
    ) -> None:
        super().__init__(in_features, out_features, heads)
        columns = heads * out_features if concatenate else out_features
        self.concatenate = concatenate
        self.dropout = dropout
        self.weight = nn.Parameter(torch.empty(heads, out_features, in_features))
        self.source_attention = nn.Parameter(torch.empty(heads, out_features))
        self.target_attention = nn.Parameter(torch.empty(heads, out_features))
        self.bias = nn.Parameter(torch.empty(columns))
        self.skip = nn.Linear(in_features, columns) if skip else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights as PyG does: Glorot and Bengio's over all heads; no bias."""
        nn.init.xavier_uniform_(self.weight.view(-1, self.in_features))
        nn.init.xavier_uniform_(self.source_attention)
        nn.init.xavier_uniform_(self.target_attention)
        nn.init.zeros_(self.bias)
        if self.skip is not None:
            self.skip.reset_parameters()

    def mapped(self, x: Tensor) -> Tensor:
        """W x, the heads side by side."""
        return functional.linear(x, self.weight.flatten(0, 1))

    def scores(self, x: Tensor) -> Tensor:
        """What a source's row adds to the score of its edges."""
        return self._scores(x, self.source_attention)

    def _scores(self, x: Tensor, attention_HF: Tensor) -> Tensor:
        # a (W x) is (a W) x, which needs no image of x
        return x @ (attention_HF[:, None, :] @ self.weight).squeeze(1).t()

    def receive(
        self, hop: Hop, rows: Tensor, scores: Tensor, x_target: Tensor, is_mapped: bool
    ) -> Tensor:
        """See `Layer`."""
        parts = self.heads if is_mapped else 1
        out_THF = gat_aggregate(
            hop.indptr,
            hop.indices,
            rows.view(len(rows), parts, -1),
            scores,
            self._scores(x_target, self.target_attention),
            self_index=hop.own,
            dropout=self.dropout if self.training else 0.0,
            seed=draw_seed() if self.training and self.dropout else 0,
        )
        if not is_mapped:
            out_THF = (out_THF.transpose(0, 1) @ self.weight.mT).transpose(0, 1)
        out = (out_THF.flatten(1) if self.concatenate else out_THF.mean(1)) + self.bias
        return out if self.skip is None else self.skip(x_target).add_(out)


def draw_seed() -> int:
    """64 bits for a kernel that draws by itself."""
    # from torch's generator, so that `torch.manual_seed` decides as usual
    return int(torch.randint(2**63 - 1, ()))


def root_norms(degrees: Tensor, dtype: torch.dtype) -> Tensor:
    """One over the root of each degree, the self loop counted."""
    return (degrees + 1).to(dtype).rsqrt()
