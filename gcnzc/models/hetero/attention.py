"""R-GAT and HGT layers on a block of all edge types.

As in `gcnzc.models.hetero.layers`, rows are summed before they are transformed, so that the
matrices of edge types apply to destinations, of which a minibatch has fewer than sources.

Notation: for node type t: S sources, D destinations, R edge types into t. H heads, F input columns,
G output columns of a head.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from gcnzc.models.hetero.layers import HeteroLayer, glorot_
from gcnzc.models.layer_edges import TypedEdges
from gcnzc.models.layers import dropout_options
from gcnzc.sampling.hetero import HeteroBlock, HeteroMetadata


class RGATLayer(HeteroLayer):
    """The sum of one GAT layer for each edge type, like PyG's `HeteroConv` of `GATConv`.

    Each edge type has the parameters of a `GATConv` without self loops, whose sources and
    destinations share a matrix. Its softmax is over the in-edges of the edge type. Destinations
    without in-edges get the biases.

    Args:
        metadata, out_types, in_features: see `HeteroLayer`.
        out_features: columns of the output, divisible by `heads` if heads are concatenated.
        heads: attention heads, H.
        concatenate: concatenate the outputs of the heads instead of averaging them.
        dropout: probability that an attention weight is zeroed during training.
    """

    source_order: Tensor
    target_order: Tensor

    def __init__(
        self,
        metadata: HeteroMetadata,
        out_types: Iterable[int],
        in_features: int,
        out_features: int,
        heads: int,
        *,
        concatenate: bool,
        dropout: float,
    ) -> None:
        super().__init__(metadata, out_types, in_features, out_features)
        self.heads, self.concatenate, self.dropout = heads, concatenate, dropout
        count, columns = len(self.edge_types), out_features // (heads if concatenate else 1)
        self.weight = nn.Parameter(torch.empty(count, heads, in_features, columns))
        self.source_attention = nn.Parameter(torch.empty(count, heads, columns))
        self.target_attention = nn.Parameter(torch.empty(count, heads, columns))
        self.bias = nn.Parameter(torch.empty(count, out_features))
        # the parameters of all edge types in the order of their pairs, and of their columns; edge
        # types without parameters have the number `count`
        numbers = {r: number for number, r in enumerate(self.edge_types)}
        for name, groups in (
            ("source_order", metadata.edge_types_out),
            ("target_order", metadata.edge_types_in),
        ):
            order = [numbers.get(r, count) for group in groups for r in group]
            self.register_buffer(name, torch.tensor(order, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all weights as PyG does: Glorot initialization over all heads, and zero biases."""
        columns = self.weight.shape[3]
        glorot_(self.weight, self.in_features, self.heads * columns)
        glorot_(self.source_attention, self.heads, columns)
        glorot_(self.target_attention, self.heads, columns)
        nn.init.zeros_(self.bias)

    def _scores(
        self,
        rows: Sequence[Tensor],
        attention: Tensor,
        order: Tensor,
        groups: Sequence[tuple[int, ...]],
    ) -> Tensor:
        """Return the terms of attention scores: for each row one for each edge type of its group.

        Args:
            rows: (n_t, F) for each node type.
            attention: (edge types, H, G) attention vectors.
            order: numbers of the edge types of all groups, one after the other.
            groups: for each node type its edge types.

        Returns:
            (sum of n_t * edge types of t, H).
        """
        # a (W x) is computed as (a W) x, without projecting x
        vectors = torch.einsum("rhfg,rhg->rhf", self.weight, attention)
        # edge types without parameters have scores of zero; their sums are not read
        vectors = functional.pad(vectors, (0, 0, 0, 0, 0, 1)).index_select(0, order)
        parts = vectors.flatten(1).split([len(group) for group in groups])
        return torch.cat(
            [
                (own @ part.reshape(-1, self.in_features).t()).reshape(-1, self.heads)
                for own, part in zip(rows, parts, strict=True)
            ]
        )

    def forward(self, edges: TypedEdges, rows: Tensor) -> dict[int, Tensor]:
        """See `HeteroLayer.forward`."""
        block = edges.block
        metadata, sources = block.metadata, block.split_rows(rows)
        source_scores = self._scores(
            sources, self.source_attention, self.source_order, metadata.edge_types_out
        )
        target_scores = self._scores(
            block.destination_rows(rows),
            self.target_attention,
            self.target_order,
            metadata.edge_types_in,
        )
        sums = block.split_columns(
            edges.gat_aggregate(rows, source_scores, target_scores, **dropout_options(self))
        )
        matrices = self.weight.split(list(self.num_in))
        biases = self.bias.split(list(self.num_in))
        outs = {}
        for t, matrix, bias in zip(self.out_types, matrices, biases, strict=True):
            shape = (block.num_dst[t], len(matrix), self.heads, self.in_features)
            out = _transform(sums[t].view(shape), matrix)
            out = _flatten_heads(out) if self.concatenate else out.mean(1)
            outs[t] = out + bias.sum(0).to(out.dtype)
        return outs


class HGTLayer(HeteroLayer):
    """A layer of the heterogeneous graph transformer (HGT) of Hu et al., 2020, equations 3 to 5.

    Keys, queries and values have a projection for each node type, and matrices and a prior for each
    edge type and head. The softmax is over all in-edges of a destination. Like PyG's `HGTConv`, the
    sum passes a GELU and a projection, and is added to the destination's row with a gate for each
    node type. Node types without edge types into them have a sum of zeros.

    Args:
        metadata, out_types: see `HeteroLayer`.
        in_features, out_features: F, the same number, divisible by `heads`.
        heads: attention heads, H.
    """

    def __init__(
        self,
        metadata: HeteroMetadata,
        out_types: Iterable[int],
        in_features: int,
        out_features: int,
        heads: int,
    ) -> None:
        super().__init__(metadata, out_types, in_features, out_features)
        self.heads, features, columns = heads, in_features, in_features // heads
        # node types that are sources of an edge type with parameters
        self.source_types = tuple(
            t
            for t, out in enumerate(metadata.edge_types_out)
            if not set(out).isdisjoint(self.edge_types)
        )
        self.keys_values = nn.ModuleList(
            nn.Linear(features, 2 * features) for _ in self.source_types
        )
        self.queries = nn.ModuleList(
            nn.Linear(features, features) for count in self.num_in if count
        )
        self.outputs = nn.ModuleList(nn.Linear(features, features) for _ in self.out_types)
        sizes = (len(self.edge_types), heads, columns, columns)
        self.key_matrix = nn.Parameter(torch.empty(sizes))
        self.value_matrix = nn.Parameter(torch.empty(sizes))
        self.prior = nn.Parameter(torch.empty(sizes[:2]))
        self.skip = nn.Parameter(torch.empty(len(self.out_types)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all weights: Glorot initialization of the edge types; priors and gates of 1."""
        for linear in (*self.keys_values, *self.queries, *self.outputs):
            linear.reset_parameters()
        columns = self.key_matrix.shape[3]
        glorot_(self.key_matrix, columns, columns)
        glorot_(self.value_matrix, columns, columns)
        nn.init.ones_(self.prior)
        nn.init.ones_(self.skip)

    def forward(self, edges: TypedEdges, rows: Tensor) -> dict[int, Tensor]:
        """See `HeteroLayer.forward`."""
        block, heads = edges.block, self.heads
        own_rows = block.destination_rows(rows)
        keys, values = self._keys_values(block, rows)
        queries = self._queries(block, own_rows).to(keys.dtype)
        sums = block.split_columns(edges.dot_attention(keys, queries, values))
        matrices = self.value_matrix.split(list(self.num_in))
        gates = torch.sigmoid(self.skip).to(rows.dtype).unbind()
        outs = {}
        for t, matrix, linear, gate in zip(
            self.out_types, matrices, self.outputs, gates, strict=True
        ):
            shape = (block.num_dst[t], len(matrix), heads, matrix.shape[3])
            out = _transform(sums[t].view(shape), matrix)
            out = linear(functional.gelu(_flatten_heads(out)))
            outs[t] = torch.lerp(own_rows[t], out.to(rows.dtype), gate)
        return outs

    def _keys_values(self, block: HeteroBlock, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of all sources, each (S, H, columns)."""
        linears = dict(zip(self.source_types, self.keys_values, strict=True))
        parts = [
            linears[t](own) if t in linears else own.new_zeros(own.shape[0], 2 * self.in_features)
            for t, own in enumerate(block.split_rows(rows))
        ]
        dtype = parts[self.source_types[0]].dtype if self.source_types else rows.dtype
        both = torch.cat([part.to(dtype) for part in parts])
        keys, values = both.unflatten(1, (2 * self.heads, -1)).split(self.heads, 1)
        return keys, values

    def _queries(self, block: HeteroBlock, own_rows: Sequence[Tensor]) -> Tensor:
        """Return the (columns of the block, H, columns of a head) queries.

        The matrix of an edge type applies to keys; its transpose is applied to queries instead,
        with the prior and the scale.
        """
        columns = self.key_matrix.shape[3]
        scale = (self.prior / math.sqrt(columns))[:, :, None, None]
        matrices = (self.key_matrix * scale).split(list(self.num_in))
        of_types = dict(zip(self.out_types, matrices, strict=True))
        linears = iter(self.queries)
        parts = []
        for t, (own, count) in enumerate(zip(own_rows, block.num_columns, strict=True)):
            if len(of_types.get(t, ())):
                query = next(linears)(own).unflatten(1, (self.heads, columns))
                # for all edge types at once: (H, D, R * columns)
                matrix = of_types[t].permute(1, 3, 0, 2).flatten(2)
                query = torch.bmm(query.transpose(0, 1), matrix).unflatten(2, (-1, columns))
                parts.append(_flatten_types(query.permute(1, 2, 0, 3), 0))
            else:
                parts.append(own.new_zeros(count, self.heads, columns))
        return torch.cat(parts)


def _transform(sums_DRHF: Tensor, matrix_RHFG: Tensor) -> Tensor:
    """Return the (D, H, G) sums over edge types of the products with their matrices."""
    # `einsum` would compare D with 1, and exported programs would reject a single destination
    sums = _flatten_types(sums_DRHF.permute(2, 0, 3, 1), 2)
    return torch.bmm(sums, matrix_RHFG.permute(1, 2, 0, 3).flatten(1, 2)).transpose(0, 1)


def _flatten_types(x: Tensor, dim: int) -> Tensor:
    """Flatten a dimension and the next one, that of edge types."""
    # without a comparison of other sizes with 1, see `_transform`
    return x.squeeze(dim + 1) if x.shape[dim + 1] == 1 else x.flatten(dim, dim + 1)


def _flatten_heads(rows_THF: Tensor) -> Tensor:
    """Return the heads of each row one after the other, (T, H * F)."""
    # without a comparison of T with 1, see `_transform`
    return rows_THF.clone(memory_format=torch.contiguous_format).flatten(1)
