"""R-GCN and heterogeneous GraphSAGE layers on a block of all edge types.

A layer first aggregates the rows of in-neighbours for each destination and edge type, with one call
of a kernel. The sums of a destination are adjacent, so that one matrix product for each node type
transforms the sums of all edge types into it, and adds them.

Notation: for node type t: D destinations, R edge types into t; F input columns, H output columns.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gcnzc.models.autocast import add_linear
from gcnzc.models.layer_edges import TypedEdges
from gcnzc.sampling.hetero import HeteroMetadata


class HeteroLayer(nn.Module):
    """Base class of the layers on heterogeneous blocks.

    Args:
        metadata: node types and edge types of the blocks.
        out_types: positions of the node types whose outputs are computed. Only the edge types into
            them have parameters.
        in_features: columns of the input, for all node types.
        out_features: columns of the output.

    Attributes:
        edge_types: positions of the edge types into `out_types`, in the order of the parameters:
            those into the first type, then those into the second, and so on.
        num_in: number of edge types into each of `out_types`.
    """

    def __init__(
        self,
        metadata: HeteroMetadata,
        out_types: Iterable[int],
        in_features: int,
        out_features: int,
    ) -> None:
        super().__init__()
        self.metadata = metadata
        self.out_types = tuple(out_types)
        self.in_features, self.out_features = in_features, out_features
        into = [metadata.edge_types_in[t] for t in self.out_types]
        self.edge_types = tuple(r for each in into for r in each)
        self.num_in = tuple(map(len, into))

    def reset_parameters(self) -> None:
        """Reset all parameters, with random numbers from torch's default generator."""
        raise NotImplementedError(f"{type(self).__name__} must implement reset_parameters()")

    def forward(self, edges: TypedEdges, rows: Tensor) -> dict[int, Tensor]:
        """Compute the layer on a block.

        Args:
            edges: the edges of all types.
            rows: (sum of sources, F) rows of the sources of all node types.

        Returns:
            For each of `out_types` the (D, H) outputs of its destinations.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement forward()")


class TypeWeights(NamedTuple):
    """The parameters of a mean layer that compute the outputs of one node type."""

    neighbours: Tensor  # (R * F, H), the matrices of the edge types one below the other
    own: Tensor | None  # (F, H)
    bias: Tensor  # (H,)


class MeanLayer(HeteroLayer):
    """`sum over edge types r of W_r mean_r(x of in-neighbours) + W x + b`: the base of two layers.

    The mean over no in-neighbours is zero.
    """

    def weights(self) -> list[TypeWeights]:
        """Return the parameters of each of `out_types`."""
        raise NotImplementedError(f"{type(self).__name__} must implement weights()")

    def forward(self, edges: TypedEdges, rows: Tensor) -> dict[int, Tensor]:
        """See `HeteroLayer.forward`."""
        block = edges.block
        means = block.split_columns(edges.mean(rows))
        own_rows = block.destination_rows(rows)
        outs = {}
        for t, weights in zip(self.out_types, self.weights(), strict=True):
            if weights.own is None:
                out = weights.bias.to(rows.dtype).repeat(block.num_dst[t], 1)
            else:
                out = torch.addmm(weights.bias, own_rows[t], weights.own)
            width = len(weights.neighbours)
            if width:
                of_type = means[t].view(block.num_dst[t], width)
                out = add_linear(out, of_type, weights.neighbours.t())
            outs[t] = out
        return outs


class RGCNLayer(MeanLayer):
    """The relational graph convolution of Schlichtkrull et al., 2018, equation 2.

    The normalization is the mean over the in-neighbours of each edge type. Each node type has a
    matrix for its own rows, the self-connection, and a bias.

    Args:
        metadata, out_types, in_features, out_features: see `HeteroLayer`.
        num_bases: number B of basis matrices, of which the matrices of all edge types are linear
            combinations (equation 3); None for a matrix for each edge type.
        root_weight: whether node types have matrices for their own rows.
    """

    def __init__(
        self,
        metadata: HeteroMetadata,
        out_types: Iterable[int],
        in_features: int,
        out_features: int,
        *,
        num_bases: int | None = None,
        root_weight: bool = True,
    ) -> None:
        super().__init__(metadata, out_types, in_features, out_features)
        count, sizes = len(self.edge_types), (in_features, out_features)
        self.weight = nn.Parameter(torch.empty(count if num_bases is None else num_bases, *sizes))
        self.coefficients = None
        if num_bases is not None:
            self.coefficients = nn.Parameter(torch.empty(count, num_bases))
        self.own = None
        if root_weight:
            self.own = nn.Parameter(torch.empty(len(self.out_types), *sizes))
        self.bias = nn.Parameter(torch.empty(len(self.out_types), out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset matrices and coefficients with Glorot initialization as PyG does; zero biases."""
        glorot_(self.weight, self.in_features, self.out_features)
        if self.own is not None:
            glorot_(self.own, self.in_features, self.out_features)
        if self.coefficients is not None:
            glorot_(self.coefficients, *self.coefficients.shape)
        nn.init.zeros_(self.bias)

    def weights(self) -> list[TypeWeights]:
        """See `MeanLayer.weights`."""
        weight = self.weight.flatten(1)
        if self.coefficients is not None:
            weight = self.coefficients @ weight
        stacked = weight.view(-1, self.out_features)
        sizes = [count * self.in_features for count in self.num_in]
        own = [None] * len(sizes) if self.own is None else self.own.unbind()
        parts = zip(stacked.split(sizes), own, self.bias.unbind(), strict=True)
        return [TypeWeights(*each) for each in parts]


class HeteroSAGELayer(MeanLayer):
    """The sum of one GraphSAGE layer for each edge type, like PyG's `HeteroConv` of `SAGEConv`.

    Each edge type has a matrix for the mean of the in-neighbours, a matrix for the destination's
    own row, and a bias. A node type without edge types into it has one matrix and bias for its own
    rows.
    """

    def __init__(
        self,
        metadata: HeteroMetadata,
        out_types: Iterable[int],
        in_features: int,
        out_features: int,
    ) -> None:
        super().__init__(metadata, out_types, in_features, out_features)
        self.num_own = [max(count, 1) for count in self.num_in]
        sizes = (in_features, out_features)
        self.neighbours = nn.Parameter(torch.empty(len(self.edge_types), *sizes))
        self.own = nn.Parameter(torch.empty(sum(self.num_own), *sizes))
        self.bias = nn.Parameter(torch.empty(sum(self.num_own), out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all matrices and biases, as `torch.nn.Linear` and PyG do."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in (self.neighbours, self.own, self.bias):
            nn.init.uniform_(parameter, -bound, bound)

    def weights(self) -> list[TypeWeights]:
        """See `MeanLayer.weights`."""
        stacked = self.neighbours.view(-1, self.out_features)
        sizes = [count * self.in_features for count in self.num_in]
        parts = zip(
            stacked.split(sizes),
            self.own.split(self.num_own),
            self.bias.split(self.num_own),
            strict=True,
        )
        # the matrices apply to the same row, so their sum does
        return [TypeWeights(matrix, own.sum(0), bias.sum(0)) for matrix, own, bias in parts]


def glorot_(parameter: Tensor, fan_in: int, fan_out: int) -> None:
    """Fill a parameter in place with Glorot (Xavier) uniform initialization."""
    bound = math.sqrt(6 / max(fan_in + fan_out, 1))
    nn.init.uniform_(parameter, -bound, bound)
