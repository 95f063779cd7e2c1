"""Export a model as a program of plain torch operations, which runs without gcnzc.

Notation: S sources, T targets (destination nodes), E edges of a block, H heads, F columns of a
head.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as fx_config
from torch.nn import functional

from gcnzc.kernels.aggregate.degree_scales import inverse_sqrt_degrees, scale_dtype
from gcnzc.models.layer_edges import LayerEdges
from gcnzc.models.layers import Layer
from gcnzc.models.stack import Model, parameter_dtype
from gcnzc.sampling.batch import Batch
from gcnzc.system.arguments import check_kind

NEGATIVE_SLOPE = 0.2

Activation: TypeAlias = Callable[[Tensor, float, int], Tensor]


def export_model(model: Model) -> ExportedProgram:
    """Export a model in evaluation mode with `torch.export`.

    The program takes a minibatch with any number of nodes and edges, and returns the logits of its
    seeds. Its arguments are

    - `x`: (S, in_features) features of the sources of the first block, in the model's dtype;
    - `indptr`: a list of (T + 1,) int64 offsets, one tensor for each block, input layer first;
    - `indices`: a list of (E,) int64 positions of sources;
    - `degrees`: a list of (S,) int64 in-degrees of the sources in the whole graph; an empty list
      unless a layer needs them, see `needs_degrees`.

    As in `Batch.blocks`, the targets of a block are its first sources, and the sources of the next
    block. The outputs are those of the model up to rounding.

    Args:
        model: a model on any device; it is not changed.

    Returns:
        The program, on the device of the model; `torch.export.save` writes it.

    Raises:
        TypeError: `model` is not a model of gcnzc.
        ValueError: its activation is neither ReLU nor ELU.
    """
    check_kind("model", model, Model, "pass a model of gcnzc.models")
    program = _PlainModel(model)
    arguments = _example_arguments(model)
    shapes = tuple(
        [{0: Dim.DYNAMIC} for _ in part] if isinstance(part, list) else {0: Dim.DYNAMIC}
        for part in arguments
    )
    # torch.export would otherwise specialize on sizes 0 and 1, and the program would reject blocks
    # with a single target or without edges
    any_size = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with torch.no_grad(), any_size:
        return torch.export.export(program, arguments, dynamic_shapes=shapes)


def needs_degrees(model: Model) -> bool:
    """Return whether the exported program of a model takes in-degrees."""
    return any(cast(Layer, layer).needs_degrees for layer in model.layers)


def export_arguments(model: Model, batch: Batch, x: Tensor) -> tuple[Any, ...]:
    """Return the arguments of an exported program for a minibatch.

    Args:
        model: the model that was exported.
        batch: the minibatch.
        x: (S, in_features) features of `batch.nodes`, on the device of the program.

    Returns:
        `x`, `indptr`, `indices` and `degrees`, see `export_model`: call the program's module with
        `*arguments`.

    Raises:
        RuntimeError: a layer needs in-degrees, and a block has no graph, see `Block.in_degrees`.
    """
    blocks = batch.blocks
    return (
        x.to(parameter_dtype(model)),
        [block.indptr.long() for block in blocks],
        [block.indices.long() for block in blocks],
        [block.in_degrees for block in blocks] if needs_degrees(model) else [],
    )


class _PlainLayerEdges(LayerEdges):
    """In-edges of a block's targets, aggregated by torch's operations."""

    def target_rows(self, rows: Tensor) -> Tensor:
        """See `LayerEdges`."""
        return _first(rows, self.num_targets)

    def _targets(self) -> Tensor:
        """Return the (E,) target of each edge."""
        edges = torch.arange(self.indices.shape[0], device=self.indices.device)
        return torch.searchsorted(self.indptr[1:].contiguous(), edges, right=True)

    def aggregate(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> Tensor:
        """See `LayerEdges`."""
        # summed in float32 and rounded once, as in the kernels
        wide = rows.to(scale_dtype(rows.dtype))
        scaled = wide if source_scale is None else wide * source_scale[:, None]
        zeros = scaled.new_zeros(self.num_targets, rows.shape[1])
        total = zeros.index_add(0, self._targets(), scaled[self.indices])
        return (total * target_scale[:, None]).to(rows.dtype)

    def gat_aggregate(
        self,
        rows_SHF: Tensor,
        scores: Tensor,
        target_scores: Tensor,
        *,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> Tensor:
        """See `LayerEdges`."""
        self_scores = functional.leaky_relu(
            _first(scores, self.num_targets) + target_scores, NEGATIVE_SLOPE
        )
        of_edges = scores[self.indices] + target_scores[self._targets()]
        return self._combine(rows_SHF, functional.leaky_relu(of_edges, NEGATIVE_SLOPE), self_scores)

    def gatv2_aggregate(
        self,
        rows_SHF: Tensor,
        targets_THF: Tensor,
        attention_HF: Tensor,
        *,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> Tensor:
        """See `LayerEdges`."""
        sums = rows_SHF[self.indices] + targets_THF[self._targets()]
        self_sums = _first(rows_SHF, self.num_targets) + targets_THF
        scores, self_scores = (
            (functional.leaky_relu(part, NEGATIVE_SLOPE) * attention_HF).sum(2)
            for part in (sums, self_sums)
        )
        return self._combine(rows_SHF, scores, self_scores)

    def _combine(self, rows_SHF: Tensor, scores_EH: Tensor, self_scores_TH: Tensor) -> Tensor:
        """Return the sums of rows, weighted by the softmax over in-edges and the target itself."""
        dtype = rows_SHF.dtype
        rows_SHF, scores_EH, self_scores_TH = (
            each.to(scale_dtype(dtype)) for each in (rows_SHF, scores_EH, self_scores_TH)
        )
        targets, heads = self._targets(), self_scores_TH.shape[1]
        # the block's own self loops are ignored, as in the kernels
        is_loop = self.indices == targets
        scores_EH = scores_EH.masked_fill(is_loop[:, None], -torch.inf)
        index = targets[:, None].expand(-1, heads)
        # subtract the maximum to prevent overflow
        largest = self_scores_TH.scatter_reduce(0, index, scores_EH, "amax")
        weights = (scores_EH - largest[targets]).exp()
        self_weights = (self_scores_TH - largest).exp()
        total = self_weights.index_add(0, targets, weights)
        out = self_weights[:, :, None] * _first(rows_SHF, self.num_targets)
        out = out.index_add(0, targets, weights[:, :, None] * rows_SHF[self.indices])
        return (out / total[:, :, None]).to(dtype)


class _PlainModel(nn.Module):
    """A model whose arguments are plain tensors, without kernels of gcnzc."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval()
        self.model.activate = plain_activation(model.activate)

    def forward(
        self,
        x: Tensor,
        indptr: Sequence[Tensor],
        indices: Sequence[Tensor],
        degrees: Sequence[Tensor],
    ) -> Tensor:
        model, outputs = self.model, []
        num_seeds = indptr[-1].shape[0] - 1
        x = model.transform_features(x)
        last = len(model.layers) - 1
        for index, module in enumerate(model.layers):
            layer = cast(Layer, module)
            source, x = x, model.transform_input(index, x)
            edges = _PlainLayerEdges(indptr[index], indices[index], None)
            x_target = _first(x, edges.num_targets)
            if layer.needs_degrees:
                norms = inverse_sqrt_degrees(degrees[index], x.dtype)
                target_degrees = _first(degrees[index], edges.num_targets)
                edges = _PlainLayerEdges(edges.indptr, edges.indices, None, norms, target_degrees)
            is_smaller = layer.heads * layer.out_features < layer.in_features
            # heads are projected first: torch.export cannot trace `project_heads`
            is_projected = is_smaller or layer.must_project_first or layer.has_scores
            rows = layer.project(x) if is_projected else x
            out = layer.compute_targets(edges, rows, layer.scores(x), x_target, is_projected)
            if model.pre_activation:
                x_target = _first(source, edges.num_targets)
            x = model.transform_output(index, out, x_target)
            if model.jumping != "none" or index == last:
                outputs.append(_first(x, num_seeds))
        return model.combine(outputs)


def _first(rows: Tensor, count: int) -> Tensor:
    """Return the first rows."""
    # `index_select`, because a slice adds a size constraint to the program
    return rows.index_select(0, torch.arange(count, device=rows.device))


def plain_activation(activate: Activation) -> Activation:
    """Return the activation of a model as torch operations, identified by comparing outputs.

    Raises:
        ValueError: it is neither ReLU nor ELU.
    """
    x = torch.linspace(-4, 4, 17)
    found = activate(x.clone(), 0.0, 0)
    for plain in (_relu, _elu):
        if torch.allclose(found, plain(x, 0.0, 0)):
            return plain
    raise ValueError(
        "the activation of the model is neither ReLU nor ELU\n\n"
        "hint: only models with `activation` relu or elu can be exported"
    )


def _relu(x: Tensor, p: float, seed: int) -> Tensor:
    return functional.relu(x)


def _elu(x: Tensor, p: float, seed: int) -> Tensor:
    return functional.elu(x)


def _example_arguments(model: Model) -> tuple[Any, ...]:
    """Return the arguments of a small minibatch, whose sizes all differ."""
    device, count = next(model.parameters()).device, len(model.layers)
    sizes = [3 + 4 * (count - layer) for layer in range(count + 1)]
    indptr, indices = [], []
    for sources, targets in pairwise(sizes):
        indptr.append(2 * torch.arange(targets + 1, device=device))
        indices.append(torch.arange(2 * targets, device=device) % sources)
    degrees = [torch.full((size,), 2, device=device) for size in sizes[:-1]]
    x = torch.ones(sizes[0], model.in_features, dtype=parameter_dtype(model), device=device)
    return x, indptr, indices, degrees if needs_degrees(model) else []
