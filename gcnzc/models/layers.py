"""GraphSAGE, GCN, GIN, GAT and GATv2 layers on one block.

A layer projects rows and sums them over neighbours. Both orders give the same result, so each layer
chooses the cheaper one for the block. GATv2 always projects first: its scores need projected rows.

Notation: S sources, T targets (destination nodes), E edges of a block, H heads, F columns (of a
head).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gcnzc.kernels.aggregate.degree_scales import inverse_sqrt_degrees, scale_dtype
from gcnzc.models.autocast import add_linear
from gcnzc.models.layer_edges import BlockEdges, LayerEdges
from gcnzc.sampling.batch import Block


def project_heads(rows_THK: Tensor, weight_HFK: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `rows[t, h] @ weight[h].T + bias[h]` for all rows and heads.

    `torch.bmm` returns (H, T, F); concatenating the heads would copy it. This writes (T, H * F)
    directly, and the gradient of the rows likewise. Differentiable once.

    Args:
        rows_THK: (T, H, K).
        weight_HFK: (H, F, K), converted to the dtype of the rows.
        bias: (H * F,), converted to the dtype of the rows; none if None.

    Returns:
        (T, H * F) with the dtype of the rows.
    """
    dtype = rows_THK.dtype
    bias = None if bias is None else bias.to(dtype)
    return _ProjectHeads.apply(rows_THK, weight_HFK.to(dtype), bias)


class _ProjectHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_THK: Tensor, weight_HFK: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_THK, weight_HFK)
        heads, columns = weight_HFK.shape[:2]
        out = rows_THK.new_empty(len(rows_THK), heads * columns)
        by_head = out.view(-1, heads, columns).transpose(0, 1)
        torch.bmm(rows_THK.transpose(0, 1), weight_HFK.mT, out=by_head)
        return out if bias is None else out.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows_THK, weight_HFK = ctx.saved_tensors
        heads, columns = weight_HFK.shape[:2]
        grad_HTF = grad.reshape(-1, heads, columns).transpose(0, 1)
        grad_rows = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_rows = torch.empty_like(rows_THK, memory_format=torch.contiguous_format)
            torch.bmm(grad_HTF, weight_HFK, out=grad_rows.transpose(0, 1))
        if ctx.needs_input_grad[1]:
            grad_weight = torch.bmm(grad_HTF.mT, rows_THK.transpose(0, 1))
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_rows, grad_weight, grad_bias


# the cost of aggregating one column of one edge, divided by the cost of one multiply-add of a
# projection; bench/training/aggregate.py measures it
EDGE_COST = 8


class Layer(nn.Module):
    """Base class of the message-passing layers."""

    needs_degrees = False  # whether it needs the degrees of the whole graph
    has_scores = False  # whether `scores` returns attention scores
    must_project_first = False  # whether it cannot aggregate rows before they are projected

    def __init__(self, in_features: int, out_features: int, heads: int = 1) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features  # of one head, if there are heads
        self.heads = heads

    def should_project_first(self, num_sources: int, num_targets: int, num_edges: int) -> bool:
        """Return whether projecting the sources is cheaper than projecting the targets' sums."""
        if self.must_project_first:
            return True
        projection_cost = self.in_features * self.heads * self.out_features
        project_first = (
            num_sources * projection_cost + EDGE_COST * num_edges * self.heads * self.out_features
        )
        # all heads read the same unprojected row: the first head reads it from memory, the others
        # from the CPU's cache
        columns_per_edge = self.in_features * (3 + self.heads) / 4
        aggregate_first = num_targets * projection_cost + EDGE_COST * num_edges * columns_per_edge
        return project_first < aggregate_first

    def project(self, x: Tensor) -> Tensor:
        """Project rows to the messages that are aggregated.

        Args:
            x: (n, in_features).

        Returns:
            (n, heads * out_features), the heads one after the other.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement project()")

    def scores(self, x: Tensor) -> Tensor:
        """Return the attention scores of n sources: (n, heads), or (n, 0) without attention."""
        return x[:, :0]

    def compute_targets(
        self, edges: LayerEdges, rows: Tensor, scores: Tensor, x_target: Tensor, is_projected: bool
    ) -> Tensor:
        """Aggregate the rows of in-neighbours, and return the outputs of the targets.

        Args:
            edges: the edges; its indices refer to `rows`.
            rows: (S, in_features), or the messages of the sources if `is_projected`.
            scores: (S, heads), results of `scores`; (S, 0) without attention.
            x_target: (T, in_features).
            is_projected: whether `rows` are messages, the results of `project`.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement compute_targets()")

    def forward(self, block: Block, x_source: Tensor, x_target: Tensor) -> Tensor:
        """Compute the layer on a block.

        Args:
            block: the sampled edges, from S sources to T targets.
            x_source: (S, in_features) on the device of the block.
            x_target: (T, in_features), the first T rows of `x_source`.

        Returns:
            (T, columns).
        """
        edges = BlockEdges(block.indptr, block.indices, None)
        if self.needs_degrees:
            norms = inverse_sqrt_degrees(block.in_degrees, x_source.dtype)
            edges = BlockEdges(
                edges.indptr, edges.indices, None, norms, block.in_degrees[: block.num_dst]
            )
        is_projected = self.should_project_first(
            block.num_src, block.num_dst, block.indices.shape[0]
        )
        rows = self.project(x_source) if is_projected else x_source
        return self.compute_targets(edges, rows, self.scores(x_source), x_target, is_projected)


class SAGELayer(Layer):
    """`W mean(x of in-neighbours) + b + V x`: Hamilton et al., 2017.

    Args:
        in_features: columns of the input.
        out_features: columns of the output.
        self_loops: include the target in the mean of its in-neighbours.
    """

    def __init__(self, in_features: int, out_features: int, *, self_loops: bool = False) -> None:
        super().__init__(in_features, out_features)
        self.self_loops = self_loops
        self.neighbours = nn.Linear(in_features, out_features)
        self.own = nn.Linear(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Reset all weights, as `torch.nn.Linear` and PyG do."""
        self.neighbours.reset_parameters()
        self.own.reset_parameters()

    def project(self, x: Tensor) -> Tensor:
        """Return W x, see `Layer.project`."""
        return functional.linear(x, self.neighbours.weight)

    def compute_targets(
        self, edges: LayerEdges, rows: Tensor, scores: Tensor, x_target: Tensor, is_projected: bool
    ) -> Tensor:
        """See `Layer.compute_targets`."""
        counts = edges.indptr.diff() + 1 if self.self_loops else edges.indptr.diff().clamp(min=1)
        scale = 1 / counts.to(scale_dtype(rows.dtype))
        if self.self_loops or not is_projected:
            mean, target_rows = edges.aggregate_with_targets(rows, scale)
        else:
            mean = edges.aggregate(rows, scale)
        if self.self_loops:
            mean = mean.addcmul_(target_rows, scale[:, None])
        # use the returned view so that its gradient is accumulated in place
        x_target = x_target if is_projected else target_rows
        out = add_bias_(mean, self.neighbours.bias) if is_projected else self.neighbours(mean)
        return add_linear(out, x_target, self.own.weight)


class GCNLayer(Layer):
    """`W sum(x[s] / sqrt((d[s] + 1) (d[t] + 1))) + b` with a self loop: Kipf and Welling, 2017.

    Degrees `d` are those in the whole graph. If k of a target's d in-neighbours are sampled, their
    sum is multiplied by d / k, so that it estimates the sum over all in-neighbours. A self loop of
    the graph counts as an ordinary edge.
    """

    needs_degrees = True

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the weight with Glorot (Xavier) initialization, and the bias to zero."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def project(self, x: Tensor) -> Tensor:
        """Return W x, see `Layer.project`."""
        return functional.linear(x, self.weight)

    def compute_targets(
        self, edges: LayerEdges, rows: Tensor, scores: Tensor, x_target: Tensor, is_projected: bool
    ) -> Tensor:
        """See `Layer.compute_targets`."""
        sum_scale, target_scale = edges.gcn_scales(rows.dtype)
        total, target_rows = edges.aggregate_with_targets(rows, sum_scale, edges.source_norms)
        total.addcmul_(target_rows, target_scale[:, None])
        if is_projected:
            return add_bias_(total, self.bias)
        return functional.linear(total, self.weight, self.bias)


class GINLayer(Layer):
    """`W2 relu(W1 (x + sum of x of in-neighbours) + b1) + b2`: Xu et al., 2019, with epsilon 0.

    Like PyG's `GINConv` with an MLP of two linear layers. If k of a target's d in-neighbours are
    sampled, their sum is multiplied by d / k, so that it estimates the sum over all in-neighbours.
    """

    needs_degrees = True

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.first = nn.Linear(in_features, out_features)
        self.second = nn.Linear(out_features, out_features)

    def reset_parameters(self) -> None:
        """Reset all weights, as `torch.nn.Linear` does."""
        self.first.reset_parameters()
        self.second.reset_parameters()

    def project(self, x: Tensor) -> Tensor:
        """Return W1 x, see `Layer.project`."""
        return functional.linear(x, self.first.weight)

    def compute_targets(
        self, edges: LayerEdges, rows: Tensor, scores: Tensor, x_target: Tensor, is_projected: bool
    ) -> Tensor:
        """See `Layer.compute_targets`."""
        assert edges.target_degrees is not None, "a layer with needs_degrees gets degrees"
        num_sampled = edges.indptr.diff().clamp(min=1)
        scale = edges.target_degrees.to(scale_dtype(rows.dtype)) / num_sampled
        total, target_rows = edges.aggregate_with_targets(rows, scale)
        total = total.add_(target_rows)
        out = add_bias_(total, self.first.bias) if is_projected else self.first(total)
        return self.second(functional.relu(out, inplace=True))


class AttentionLayer(Layer):
    """Base class of the layers with attention over the in-neighbours and the target itself.

    Args:
        in_features: columns of the input.
        out_features: columns of each head.
        heads: number of heads.
        concatenate: concatenate the outputs of the heads instead of averaging them.
        dropout: probability that an attention weight is zeroed during training.
        skip: add a linear projection of the target's input to its output.
        bias: whether the layer has biases.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        heads: int,
        *,
        concatenate: bool,
        dropout: float,
        skip: bool,
        bias: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, heads)
        self.concatenate, self.dropout = concatenate, dropout
        self.add_weights(bias)
        columns = heads * out_features if concatenate else out_features
        self.bias = nn.Parameter(torch.empty(columns)) if bias else None
        self.skip = nn.Linear(in_features, columns) if skip else None
        self.reset_parameters()

    def add_weights(self, bias: bool) -> None:
        """Add the parameters of projections and attention."""
        raise NotImplementedError(f"{type(self).__name__} must implement add_weights()")

    def reset_parameters(self) -> None:
        """Reset the bias to zero, and the skip connection as `torch.nn.Linear` does."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.skip is not None:
            self.skip.reset_parameters()

    def add_skip(self, out: Tensor, x_target: Tensor) -> Tensor:
        """Return the sum of an output and of the skip connection, if there is one."""
        return out if self.skip is None else self.skip(x_target).add_(out)


class GATLayer(AttentionLayer):
    """Attention over the in-neighbours and the target itself: Veličković et al., 2018.

    Like PyG's `GATConv`, with an optional linear skip connection; `bias` is that of the output. For
    the arguments, see `AttentionLayer`.
    """

    has_scores = True

    def add_weights(self, bias: bool) -> None:
        """See `AttentionLayer`."""
        heads, columns = self.heads, self.out_features
        self.weight = nn.Parameter(torch.empty(heads, columns, self.in_features))
        self.source_attention = nn.Parameter(torch.empty(heads, columns))
        self.target_attention = nn.Parameter(torch.empty(heads, columns))

    def reset_parameters(self) -> None:
        """Reset all weights as PyG does: Glorot initialization over all heads, and a zero bias."""
        nn.init.xavier_uniform_(self.weight.view(-1, self.in_features))
        nn.init.xavier_uniform_(self.source_attention)
        nn.init.xavier_uniform_(self.target_attention)
        super().reset_parameters()

    def project(self, x: Tensor) -> Tensor:
        """Return W x of all heads, see `Layer.project`."""
        return functional.linear(x, self.weight.flatten(0, 1))

    def scores(self, x: Tensor) -> Tensor:
        """Return the sources' terms of the attention scores, (n, heads)."""
        return self._attention_scores(x, self.source_attention)

    def _attention_scores(self, x: Tensor, *attention_HF: Tensor) -> Tensor:
        """Return the terms of each attention vector and head, (n, vectors * heads)."""
        # a (W x) is computed as (a W) x, without projecting x
        vectors = [(each[:, None, :] @ self.weight).squeeze(1) for each in attention_HF]
        return x @ torch.cat(vectors).t()

    def compute_targets(
        self, edges: LayerEdges, rows: Tensor, scores: Tensor, x_target: Tensor, is_projected: bool
    ) -> Tensor:
        """See `Layer.compute_targets`."""
        target_scores = self._attention_scores(x_target, self.target_attention)
        return self._combine_rows(edges, rows, scores, target_scores, x_target, is_projected)

    def _combine_rows(
        self,
        edges: LayerEdges,
        rows: Tensor,
        scores: Tensor,
        target_scores: Tensor,
        x_target: Tensor,
        is_projected: bool,
    ) -> Tensor:
        """Compute the targets as `compute_targets` does, given their terms of the scores."""
        row_heads = self.heads if is_projected else 1  # heads in one row
        out_THF = edges.gat_aggregate(
            rows.view(rows.shape[0], row_heads, -1),
            scores,
            target_scores,
            **dropout_options(self),
        )
        bias = self.bias if self.concatenate else None
        if not is_projected:
            out = project_heads(out_THF, self.weight, bias)
        else:
            out = out_THF.flatten(1)
            out = out if bias is None else out + bias.to(out.dtype)
        if not self.concatenate:
            out = out.view(-1, self.heads, self.out_features).mean(1)
            out = out if self.bias is None else add_bias_(out, self.bias)
        return self.add_skip(out, x_target)

    def forward(self, block: Block, x_source: Tensor, x_target: Tensor) -> Tensor:
        """See `Layer.forward`.

        In full-batch training, the scores are computed from the projected rows if rows are
        projected first, so that wide features are read only once. If the input needs a gradient,
        rows are also projected first if that does not make them wider, because the cost of the
        gradient per edge and head grows with the columns.
        """
        sizes = (block.num_src, block.num_dst, block.indices.shape[0])
        is_narrower = x_source.requires_grad and self.out_features <= self.in_features
        is_projected = self.should_project_first(*sizes) or (block.is_full_batch and is_narrower)
        rows = self.project(x_source) if is_projected else x_source
        attention = self.source_attention, self.target_attention
        # one matrix product for the terms of sources and targets, so that its gradient is
        # accumulated into that of the input once
        if block.is_full_batch and is_projected:
            # (2 heads, heads * out_features): a row has the vector of its head, and zeros elsewhere
            vectors = [torch.block_diag(*each.unbind()) for each in attention]
            scores = rows @ torch.cat(vectors).t()
        else:
            scores = self._attention_scores(x_source, *attention)
        source_scores, target_scores = scores.split(self.heads, 1)
        edges = BlockEdges(block.indptr, block.indices, None)
        return self._combine_rows(
            edges, rows, source_scores, target_scores[: block.num_dst], x_target, is_projected
        )


class GATv2Layer(AttentionLayer):
    """Dynamic attention over the in-neighbours and the target itself: Brody et al., 2022.

    Like PyG's `GATv2Conv` with separate weights for sources and targets, with an optional linear
    skip connection; `bias` is for the output and for both projections. For the arguments, see
    `AttentionLayer`.
    """

    must_project_first = True

    def add_weights(self, bias: bool) -> None:
        """See `AttentionLayer`."""
        columns = self.heads * self.out_features
        self.source = nn.Linear(self.in_features, columns, bias)
        self.target = nn.Linear(self.in_features, columns, bias)
        self.attention = nn.Parameter(torch.empty(self.heads, self.out_features))

    def reset_parameters(self) -> None:
        """Reset all weights as PyG does: Glorot initialization, and a zero bias of the output."""
        for linear in (self.source, self.target):
            linear.reset_parameters()
            nn.init.xavier_uniform_(linear.weight)
        nn.init.xavier_uniform_(self.attention)
        super().reset_parameters()

    def project(self, x: Tensor) -> Tensor:
        """Return W x + b of the sources and all heads, see `Layer.project`."""
        return self.source(x)

    def compute_targets(
        self, edges: LayerEdges, rows: Tensor, scores: Tensor, x_target: Tensor, is_projected: bool
    ) -> Tensor:
        """See `Layer.compute_targets`."""
        assert is_projected, "a layer with must_project_first gets projected rows"
        out_THF = edges.gatv2_aggregate(
            rows.view(rows.shape[0], self.heads, -1),
            self.target(x_target).view(x_target.shape[0], self.heads, -1),
            self.attention,
            **dropout_options(self),
        )
        out = out_THF.flatten(1) if self.concatenate else out_THF.mean(1)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return self.add_skip(out, x_target)


def random_seed() -> int:
    """Return a random seed for a kernel that generates its own random numbers."""
    # drawn from torch's default generator, so that `torch.manual_seed` makes runs reproducible
    return int(torch.randint(2**63 - 1, ()))


def dropout_options(module: Any) -> dict[str, Any]:
    """Return the dropout probability of a module, which is 0 in evaluation, and a random seed."""
    p = module.dropout if module.training else 0.0
    return {"dropout": p, "seed": random_seed() if p else 0}


def add_bias_(x: Tensor, bias: Tensor) -> Tensor:
    """Add a bias to `x` in place, cast to the dtype of `x`, which differs under autocast.

    `x` must not be a view: autograd would copy its gradient.
    """
    return x.add_(bias.to(x.dtype))
