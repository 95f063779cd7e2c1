"""Export a model as a program of plain torch operations, which runs without gcnzc.

Notation: S sources, T targets (destination nodes), E edges of a block, H heads, F columns of a
head. In a block of several types: for node type t, S_t sources and T_t destinations; for edge type
r, E_r edges; C columns, see `HeteroBlock`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as fx_config
from torch.nn import functional

from gcnzc.kernels.aggregate.degree_scales import inverse_sqrt_degrees, scale_dtype
from gcnzc.models.hetero.layers import HeteroLayer
from gcnzc.models.hetero.stack import HeteroModel
from gcnzc.models.layer_edges import LayerEdges, TypedEdges
from gcnzc.models.layers import Layer
from gcnzc.models.stack import Model, parameter_dtype
from gcnzc.sampling.batch import Block
from gcnzc.sampling.hetero import HeteroBlock, HeteroMetadata
from gcnzc.system.arguments import check_kind

NEGATIVE_SLOPE = 0.2

Activation: TypeAlias = Callable[[Tensor, float, int], Tensor]


class ProgramTypes(NamedTuple):
    """Types of the arguments of a program of several types, in the order of its dicts."""

    x: list[str]
    """node types"""
    destinations: list[list[str]]
    """of each block: node types"""
    edges: list[list[str]]
    """of each block: edge types as `SOURCE__RELATION__DESTINATION`"""


def export_model(model: Model | HeteroModel) -> ExportedProgram:
    """Export a model in evaluation mode with `torch.export`.

    The program takes a minibatch with any number of nodes and edges, and returns the outputs of its
    seeds, as the model does, up to rounding. As in `Batch.blocks`, the targets of a block are the
    sources of the next block, in their order. For a model of one node type, the arguments are

    - `x`: (S, in_features) features of the sources of the first block, in the model's dtype;
    - `indptr`: a list of (T + 1,) int64 offsets, one tensor for each block, input layer first;
    - `indices`: a list of (E,) int64 positions of sources, of which the targets are the first;
    - `degrees`: a list of (S,) int64 in-degrees of the sources in the whole graph; an empty list
      unless a layer needs them, see `needs_degrees`.

    For a heterogeneous model, they are dicts by type, with the types and the order of
    `list_program_types`:

    - `x`: (S_t, in_features) features of the sources of the first block, or rows of trainable
      embeddings, in the model's dtype;
    - `destinations`: a list with a dict for each block, input layer first: (T_t,) int64 positions
      of the destinations among the sources of their type;
    - `indptr`: a list of dicts by edge type: (T_t + 1,) int64 offsets of the in-edges of each
      destination;
    - `indices`: a list of dicts by edge type: (E_r,) int64 positions of the sources of the edges,
      among the sources of their type.

    Args:
        model: a model on any device; it is not changed.

    Returns:
        The program, on the device of the model; `torch.export.save` writes it.

    Raises:
        TypeError: `model` is not a model of gcnzc.
        ValueError: its activation is neither ReLU nor ELU, or the names of two edge types are
            equal.
    """
    check_kind("model", model, (Model, HeteroModel), "pass a model of gcnzc.models")
    program: nn.Module
    if isinstance(model, HeteroModel):
        names = [edge_name(each) for each in model.metadata.edge_types]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two edge types have the name {twice!r}\n\nhint: rename a type")
        program, arguments = _PlainHeteroModel(model), _example_of_types(model)
    else:
        program, arguments = _PlainModel(model), _example_arguments(model)
    shapes = tuple(map(_dynamic_shapes, arguments))
    # torch.export would otherwise specialize on sizes 0 and 1, and the program would reject blocks
    # with a single target or without edges
    any_size = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with torch.no_grad(), any_size:
        return torch.export.export(program, arguments, dynamic_shapes=shapes)


def needs_degrees(model: Model) -> bool:
    """Return whether the exported program of a model takes in-degrees."""
    return any(cast(Layer, layer).needs_degrees for layer in model.layers)


def edge_name(edge_type: Sequence[str]) -> str:
    """Return the key of an edge type in the arguments of a program."""
    return "__".join(edge_type)


def list_program_types(model: HeteroModel) -> ProgramTypes:
    """Return the types that the arguments of the exported program of a model have."""
    edge_types = model.metadata.edge_types
    numbers = range(1, len(model.layers) + 1)
    return ProgramTypes(
        [model.metadata.node_types[t] for t in model.in_types],
        [model.layer_types(number) for number in numbers],
        [
            [edge_name(edge_types[r]) for r in cast(HeteroLayer, layer).edge_types]
            for layer in model.layers
        ],
    )


def export_arguments(model: Model | HeteroModel, blocks: Sequence[Any], x: Any) -> tuple[Any, ...]:
    """Return the arguments of an exported program for the blocks of a minibatch.

    Args:
        model: the model that was exported.
        blocks: one for each layer, see the model's `forward`.
        x: features of the sources of the first block, see the model's `forward`; on the device of
            the program.

    Returns:
        The arguments that `export_model` lists: call the program's module with `*arguments`.

    Raises:
        RuntimeError: a layer needs in-degrees, and a block has no graph, see `Block.in_degrees`.
    """
    if isinstance(model, HeteroModel):
        return _arguments_of_types(model, blocks, x)
    given: Sequence[Block] = blocks
    return (
        x.to(parameter_dtype(model)),
        [block.indptr.long() for block in given],
        [block.indices.long() for block in given],
        [block.in_degrees for block in given] if needs_degrees(model) else [],
    )


def _arguments_of_types(
    model: HeteroModel, blocks: Sequence[HeteroBlock], x: Mapping[str, Tensor]
) -> tuple[Any, ...]:
    types, names, device = list_program_types(model), model.metadata.node_types, blocks[0].device
    no_rows = {name: torch.empty(0, model.in_features[name], device=device) for name in types.x}
    rows = {name: each.to(parameter_dtype(model)) for name, each in (no_rows | dict(x)).items()}
    destinations, indptr, indices = [], [], []
    for layer, block in zip(model.layers, blocks, strict=True):
        own_types, edge_types = cast(HeteroLayer, layer).out_types, block.metadata.edge_types
        destinations.append(
            {names[t]: torch.arange(block.num_dst[t], device=device) for t in own_types}
        )
        edges = {
            edge_name(edge_types[r]): _edges_of(block, r)
            for r in cast(HeteroLayer, layer).edge_types
        }
        indptr.append({key: offsets for key, (offsets, _) in edges.items()})
        indices.append({key: sources for key, (_, sources) in edges.items()})
    return {name: rows[name] for name in types.x}, destinations, indptr, indices


def _edges_of(block: HeteroBlock, r: int) -> tuple[Tensor, Tensor]:
    """Return the (T + 1,) offsets and the (E,) positions of the sources of an edge type."""
    metadata = block.metadata
    source, _, destination = metadata.edge_types[r]
    s, t = metadata.node_types.index(source), metadata.node_types.index(destination)
    into = metadata.edge_types_in[t]
    first = block.column_offsets[t] + into.index(r)
    counts = block.indptr.diff()
    columns = first + len(into) * torch.arange(block.num_dst[t], device=block.device)
    offsets = functional.pad(counts[columns].cumsum(0), (1, 0))
    is_own = torch.zeros(len(counts), dtype=torch.bool, device=block.device)
    is_own[columns] = True
    edges = is_own.repeat_interleave(counts)
    return offsets, block.indices[edges].long() - block.row_offsets[s]


class _PlainLayerEdges(LayerEdges):
    """In-edges of a block's targets, aggregated by torch's operations."""

    def target_rows(self, rows: Tensor) -> Tensor:
        """See `LayerEdges`."""
        return _first(rows, self.num_targets)

    def aggregate(
        self, rows: Tensor, target_scale: Tensor, source_scale: Tensor | None = None
    ) -> Tensor:
        """See `LayerEdges`."""
        # summed in float32 and rounded once, as in the kernels
        wide = rows.to(scale_dtype(rows.dtype))
        scaled = wide if source_scale is None else wide * source_scale[:, None]
        targets = _targets(self.indptr, self.indices)
        total = _sum(scaled[self.indices], targets, self.num_targets)
        return (total * target_scale[:, None]).to(rows.dtype)

    def gat_aggregate(
        self, rows_SHF: Tensor, scores: Tensor, target_scores: Tensor, **training: Any
    ) -> Tensor:
        """See `LayerEdges`; there is no dropout."""

        def scores_of(sources: Tensor, targets: Tensor) -> Tensor:
            sums = scores[sources] + target_scores[targets]
            return functional.leaky_relu(sums, NEGATIVE_SLOPE)

        return self._weighted_sums(rows_SHF, scores_of)

    def gatv2_aggregate(
        self, rows_SHF: Tensor, targets_THF: Tensor, attention_HF: Tensor, **training: Any
    ) -> Tensor:
        """See `LayerEdges`; there is no dropout."""

        def scores_of(sources: Tensor, targets: Tensor) -> Tensor:
            sums = rows_SHF[sources] + targets_THF[targets]
            return (functional.leaky_relu(sums, NEGATIVE_SLOPE) * attention_HF).sum(2)

        return self._weighted_sums(rows_SHF, scores_of)

    def _weighted_sums(
        self, rows_SHF: Tensor, scores_of: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the sums of rows, weighted by the softmax over in-edges and the target itself."""
        targets = _targets(self.indptr, self.indices)
        own = torch.arange(self.num_targets, device=targets.device)
        # the block's own self loops are ignored, as in the kernels
        is_ignored = torch.cat([self.indices == targets, torch.zeros_like(own, dtype=torch.bool)])
        sources, targets = torch.cat([self.indices, own]), torch.cat([targets, own])
        dtype = scale_dtype(rows_SHF.dtype)
        scores = scores_of(sources, targets).to(dtype).masked_fill(is_ignored[:, None], -torch.inf)
        weights = _softmax(scores, targets, self.num_targets)
        values = weights[:, :, None] * rows_SHF[sources].to(dtype)
        return _sum(values, targets, self.num_targets).to(rows_SHF.dtype)


def _targets(indptr: Tensor, indices: Tensor) -> Tensor:
    """Return the (E,) target of each edge."""
    edges = torch.arange(indices.shape[0], device=indices.device)
    return torch.searchsorted(indptr[1:].contiguous(), edges, right=True)


def _sum(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return the (num_groups, ...) sums of the values of edges, given the group of each edge."""
    return values.new_zeros(num_groups, *values.shape[1:]).index_add(0, groups, values)


def _softmax(scores_EH: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Return the (E, H) softmax of the scores of edges over each group."""
    # subtract the maximum to prevent overflow
    largest = scores_EH.new_full((num_groups, scores_EH.shape[1]), -torch.inf)
    largest = largest.scatter_reduce(0, groups[:, None].expand_as(scores_EH), scores_EH, "amax")
    weights = (scores_EH - largest[groups]).exp()
    return weights / _sum(weights, groups, num_groups)[groups]


@dataclass(frozen=True, repr=False)
class _PlainBlock(HeteroBlock):
    """A block of several types, whose edges are in any order; `indptr` is not used."""

    columns: Tensor  # (E,) column of each edge
    owners: Tensor  # (E,) number of each edge's destination among those of all types
    positions: tuple[Tensor, ...]  # of the destinations of each node type among its sources

    def destination_rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        """See `HeteroBlock`."""
        parts = zip(self.split_rows(rows), self.positions, strict=True)
        return tuple(own.index_select(0, positions) for own, positions in parts)


class _PlainTypedEdges(TypedEdges):
    """Edges of several types, aggregated by torch's operations."""

    block: _PlainBlock

    def mean(self, rows: Tensor) -> Tensor:
        """See `TypedEdges`."""
        values = rows.index_select(0, self.block.indices)
        return self._sum(values) / self._sum(torch.ones_like(values[:, :1])).clamp(min=1)

    def gat_aggregate(
        self, rows: Tensor, scores: Tensor, target_scores: Tensor, **training: Any
    ) -> Tensor:
        """See `TypedEdges`; there is no dropout."""
        block = self.block
        sums = scores[block.pairs] + target_scores[block.columns]
        of_edges = functional.leaky_relu(sums, NEGATIVE_SLOPE)
        weights = _softmax(of_edges, block.columns, block.column_offsets[-1])
        return self._sum(weights[:, :, None] * rows[block.indices][:, None])

    def dot_attention(self, keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
        """See `TypedEdges`."""
        block = self.block
        scores = (keys[block.indices] * queries[block.columns]).sum(2)
        weights = _softmax(scores, block.owners, sum(block.num_dst))
        return self._sum(weights[:, :, None] * values[block.indices])

    def _sum(self, values: Tensor) -> Tensor:
        return _sum(values, self.block.columns, self.block.column_offsets[-1])


class _PlainModel(nn.Module):
    """A model whose arguments are plain tensors, without kernels of gcnzc."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval()
        self.model.activate = _plain_activation(model.activate)

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


class _PlainHeteroModel(nn.Module):
    """A heterogeneous model whose arguments are plain tensors, without kernels of gcnzc."""

    def __init__(self, model: HeteroModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval()
        self.model.activate = _plain_activation(model.activate)

    def forward(
        self,
        x: dict[str, Tensor],
        destinations: list[dict[str, Tensor]],
        indptr: list[dict[str, Tensor]],
        indices: list[dict[str, Tensor]],
    ) -> Tensor | dict[str, Tensor]:
        metadata, edges = self.model.metadata, []
        num_src = tuple(x[name].shape[0] if name in x else 0 for name in metadata.node_types)
        for own in zip(destinations, indptr, indices, strict=True):
            block = _plain_block(metadata, num_src, *own)
            edges.append(_PlainTypedEdges(block))
            num_src = block.num_dst
        return self.model.compute(edges, x)


def _plain_block(
    metadata: HeteroMetadata,
    num_src: tuple[int, ...],
    destinations: dict[str, Tensor],
    indptr: dict[str, Tensor],
    indices: dict[str, Tensor],
) -> _PlainBlock:
    names, relations_in, relations_out = (
        metadata.node_types,
        metadata.edge_types_in,
        metadata.edge_types_out,
    )
    none = next(iter(destinations.values())).new_empty(0)
    positions = tuple(destinations.get(name, none) for name in names)
    num_dst = tuple(each.shape[0] for each in positions)
    block = _PlainBlock(none, none, none, num_src, num_dst, metadata, none, none, positions)
    first_owner = list(accumulate(num_dst, initial=0))
    pairs = [size * len(out) for size, out in zip(num_src, relations_out, strict=True)]
    first_pair = list(accumulate(pairs, initial=0))
    found: list[list[Tensor]] = [[none], [none], [none], [none]]
    for r, edge_type in enumerate(metadata.edge_types):
        key = edge_name(edge_type)
        if key not in indices:
            continue
        sources, targets = indices[key], _targets(indptr[key], indices[key])
        s, t = names.index(edge_type[0]), names.index(edge_type[2])
        into, out = relations_in[t], relations_out[s]
        numbers = (
            block.row_offsets[s] + sources,
            first_pair[s] + len(out) * sources + out.index(r),
            block.column_offsets[t] + len(into) * targets + into.index(r),
            first_owner[t] + targets,
        )
        for parts, own in zip(found, numbers, strict=True):
            parts.append(own)
    fields: Any = zip(("indices", "pairs", "columns", "owners"), map(torch.cat, found), strict=True)
    return replace(block, **dict(fields))


def _first(rows: Tensor, count: int) -> Tensor:
    """Return the first rows."""
    # `index_select`, because a slice adds a size constraint to the program
    return rows.index_select(0, torch.arange(count, device=rows.device))


def _plain_activation(activate: Activation) -> Activation:
    """Return the activation of a model as torch operations, identified by comparing outputs.

    Raises:
        ValueError: it is neither ReLU nor ELU, nor the identity.
    """
    x = torch.linspace(-4, 4, 17)
    found = activate(x.clone(), 0.0, 0)
    for plain in (functional.relu, functional.elu, torch.clone):
        if torch.allclose(found, plain(x)):
            return lambda rows, p, seed: plain(rows)
    raise ValueError(
        "the activation of the model is neither ReLU nor ELU\n\n"
        "hint: only models with `activation` relu or elu can be exported"
    )


def _dynamic_shapes(part: Any) -> Any:
    """Return the dynamic shapes of an argument: any length of each tensor."""
    if isinstance(part, Mapping):
        return {name: _dynamic_shapes(each) for name, each in part.items()}
    return list(map(_dynamic_shapes, part)) if isinstance(part, list) else {0: Dim.DYNAMIC}


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


def _example_of_types(model: HeteroModel) -> tuple[Any, ...]:
    """Return the arguments of a small minibatch, whose sizes all differ."""
    device, types = next(model.parameters()).device, list_program_types(model)
    # from the output layer to the input layer, so that there are fewer destinations than sources
    sizes_of, sizes = count(4, 2), []
    for names in [*reversed(types.destinations), types.x]:
        sizes.append({name: next(sizes_of) for name in names})
    # odd, and larger than the other sizes
    counts = count(2 * sum(map(len, sizes)) + 5, 2)
    x = {
        name: torch.ones(size, model.in_features[name], dtype=parameter_dtype(model), device=device)
        for name, size in sizes[-1].items()
    }
    destinations, indptr, indices = [], [], []
    numbered = {edge_name(each): each for each in model.metadata.edge_types}
    for sources, own, names in zip(sizes[:0:-1], sizes[-2::-1], types.edges, strict=True):
        destinations.append({name: torch.arange(size, device=device) for name, size in own.items()})
        offsets, positions = {}, {}
        for name in names:
            source, _, destination = numbered[name]
            num_edges, num_destinations = next(counts), own[destination]
            steps = torch.arange(num_destinations + 1, device=device)
            offsets[name] = steps * num_edges // num_destinations
            positions[name] = torch.arange(num_edges, device=device) % sources[source]
        indptr.append(offsets)
        indices.append(positions)
    return x, destinations, indptr, indices
