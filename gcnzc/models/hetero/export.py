"""Export a heterogeneous model as a program of plain torch operations, which needs torch alone.

Notation: for node type t: S_t sources, T_t destinations of a block; for edge type r:
E_r edges of a block. H heads, F columns of the input.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as fx_config
from torch.nn import functional

from gcnzc.models.export import NEGATIVE_SLOPE, plain_activation
from gcnzc.models.hetero.attention import HGTLayer, RGATLayer
from gcnzc.models.hetero.layers import HeteroLayer, MeanLayer
from gcnzc.models.hetero.models import HGT
from gcnzc.models.hetero.stack import HeteroModel
from gcnzc.models.stack import parameter_dtype
from gcnzc.sampling.hetero import HeteroBlock, HeteroMetadata
from gcnzc.system.arguments import check_kind

Rows: TypeAlias = Mapping[int, Tensor]  # by number of the node type


class ProgramTypes(NamedTuple):
    """The types that the arguments of an exported program have, in the order of its dicts."""

    x: list[str]
    """node types"""
    destinations: list[list[str]]
    """of each block: node types"""
    edges: list[list[str]]
    """of each block: edge types as `SOURCE__RELATION__DESTINATION`"""


def export_hetero_model(model: HeteroModel) -> ExportedProgram:
    """Export a heterogeneous model in evaluation mode with `torch.export`.

    The program takes a minibatch with any number of nodes and edges, and returns the outputs of its
    seeds, as the model does: a tensor, or a dict by node type if the model has several targets. Its
    arguments are dicts by type, with the types and the order of `list_program_types`:

    - `x`: (S_t, in_features) features of the sources of the first block, or rows of trainable
      embeddings, in the model's dtype;
    - `destinations`: a list with a dict for each block, input layer first: (T_t,) int64 positions
      of the destinations among the sources of their type;
    - `indptr`: a list of dicts by edge type: (T_t + 1,) int64 offsets of the in-edges of each
      destination;
    - `indices`: a list of dicts by edge type: (E_r,) int64 positions of the sources of the edges,
      among the sources of their type.

    The destinations of a block are the sources of the next block, in their order. The outputs are
    those of the model up to rounding.

    Args:
        model: a model on any device; it is not changed.

    Returns:
        The program, on the device of the model; `torch.export.save` writes it.

    Raises:
        TypeError: `model` is not a heterogeneous model of gcnzc.
        ValueError: its activation is neither ReLU nor ELU, or the names of two edge types are
            equal.
    """
    check_kind("model", model, HeteroModel, "pass gcnzc.models.RGCN, RGAT, HGT or HeteroSAGE")
    names = [edge_name(each) for each in model.metadata.edge_types]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"two edge types have the name {twice!r}\n\nhint: rename a node type or relation, so "
            "that SOURCE__RELATION__DESTINATION is unique"
        )
    arguments = _example_arguments(model)
    shapes = tuple(_dynamic_shapes(part) for part in arguments)
    # torch.export would otherwise specialize on sizes 0 and 1, and the program would reject blocks
    # with a single target or without edges
    any_size = fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with torch.no_grad(), any_size:
        return torch.export.export(_PlainHeteroModel(model), arguments, dynamic_shapes=shapes)


def edge_name(edge_type: Sequence[str]) -> str:
    """Return the key of an edge type in the arguments of a program."""
    return "__".join(edge_type)


def list_program_types(model: HeteroModel) -> ProgramTypes:
    """Return the types that the arguments of the exported program of a model have."""
    metadata = model.metadata
    layers = [cast(HeteroLayer, layer) for layer in model.layers]
    return ProgramTypes(
        [metadata.node_types[t] for t in model.in_types],
        [[metadata.node_types[t] for t in layer.out_types] for layer in layers],
        [[edge_name(metadata.edge_types[r]) for r in layer.edge_types] for layer in layers],
    )


def hetero_export_arguments(
    model: HeteroModel, blocks: Sequence[HeteroBlock], x: Mapping[str, Tensor]
) -> tuple[Any, ...]:
    """Return the arguments of an exported program for the blocks of a minibatch.

    Args:
        model: the model that was exported.
        blocks: one for each layer, from `build_hetero_blocks` or `build_full_hetero_blocks`.
        x: features of the sources of the first block by node type, see `HeteroModel.forward`.

    Returns:
        `x`, `destinations`, `indptr` and `indices`, see `export_hetero_model`: call the program's
        module with `*arguments`.
    """
    dtype, device = parameter_dtype(model), blocks[0].device
    names = model.metadata.node_types
    own = {}
    for t in model.in_types:
        rows = x.get(names[t])
        if rows is None:
            rows = torch.empty(0, model.in_features[names[t]], device=device)
        own[names[t]] = rows.to(dtype)
    destinations, indptr, indices = [], [], []
    for module, block in zip(model.layers, blocks, strict=True):
        layer = cast(HeteroLayer, module)
        positions = {t: torch.arange(block.num_dst[t], device=device) for t in layer.out_types}
        destinations.append({names[t]: own_positions for t, own_positions in positions.items()})
        edges = {r: _edges_of(block, r) for r in layer.edge_types}
        keys = {r: edge_name(model.metadata.edge_types[r]) for r in edges}
        indptr.append({keys[r]: offsets for r, (offsets, _) in edges.items()})
        indices.append({keys[r]: sources for r, (_, sources) in edges.items()})
    return own, destinations, indptr, indices


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


class _Edges(NamedTuple):
    """The in-edges of one edge type in a block."""

    sources: Tensor  # (E,) positions among the sources of their type
    destinations: Tensor  # (E,) numbers of the destinations


class _PlainHeteroModel(nn.Module):
    """A heterogeneous model whose arguments are plain tensors, without kernels of gcnzc."""

    def __init__(self, model: HeteroModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval()
        is_hgt = isinstance(model, HGT)
        # HGT has only dropout between layers
        self.model.activate = _identity if is_hgt else plain_activation(model.activate)

    def forward(
        self,
        x: dict[str, Tensor],
        destinations: list[dict[str, Tensor]],
        indptr: list[dict[str, Tensor]],
        indices: list[dict[str, Tensor]],
    ) -> Tensor | dict[str, Tensor]:
        model, metadata = self.model, self.model.metadata
        names = metadata.node_types
        linears = zip(model.in_types, model.input_linears, strict=True)
        rows = {t: linear(x[names[t]]) for t, linear in linears}
        outs: dict[int, Tensor] = {}
        last = len(model.layers) - 1
        # `HeteroModel` has a loop of its own: its kernels read the rows of all types as one tensor,
        # and it omits types without rows, which would fix the sizes in the program
        for index, module in enumerate(model.layers):
            layer = cast(HeteroLayer, module)
            positions = destinations[index]
            own = {t: rows[t].index_select(0, positions[names[t]]) for t in layer.out_types}
            edges = {}
            for r in layer.edge_types:
                key = edge_name(metadata.edge_types[r])
                edges[r] = _with_destinations(indptr[index][key], indices[index][key])
            outs = _compute(layer, _Inputs(metadata, edges, rows, own))
            if model.residuals:
                model.add_residuals(index, outs, own)
            if index == last and not model.output_linears:
                break
            if model.norms:
                for t, norm in zip(outs, model.norms[index], strict=True):  # type: ignore[call-overload]
                    outs[t] = norm(outs[t])
            rows = outs = {t: model.activate(out, 0.0, 0) for t, out in outs.items()}
        return model.project_outputs(outs)


class _Inputs(NamedTuple):
    """The inputs of a layer."""

    metadata: HeteroMetadata
    edges: Mapping[int, _Edges]  # by edge type
    rows: Rows  # (S_t, F)
    own: Rows  # (T_t, F), those of the destinations

    def into(self, t: int) -> list[tuple[_Edges, Tensor]]:
        """Return the edges of each edge type into node type t, and the rows of its sources."""
        types, found = self.metadata, []
        for r in types.edge_types_in[t]:
            source = types.node_types.index(types.edge_types[r][0])
            found.append((self.edges[r], self.rows[source]))
        return found


def _with_destinations(indptr: Tensor, indices: Tensor) -> _Edges:
    edges = torch.arange(indices.shape[0], device=indices.device)
    return _Edges(indices, torch.searchsorted(indptr[1:].contiguous(), edges, right=True))


def _compute(layer: HeteroLayer, inputs: _Inputs) -> dict[int, Tensor]:
    """Return the outputs of a layer by node type; see `HeteroLayer.forward`."""
    if isinstance(layer, MeanLayer):
        return _compute_means(layer, inputs)
    if isinstance(layer, RGATLayer):
        return _compute_rgat(layer, inputs)
    assert isinstance(layer, HGTLayer), "`HeteroModel` has no other layers"
    return _compute_hgt(layer, inputs)


def _compute_means(layer: MeanLayer, inputs: _Inputs) -> dict[int, Tensor]:
    outs = {}
    for t, weights in zip(layer.out_types, layer.weights(), strict=True):
        own = inputs.own[t]
        if weights.own is None:
            # `expand` with a size would fix that size in the program
            out = own.new_zeros(own.shape[0], 1) + weights.bias
        else:
            out = own @ weights.own + weights.bias
        means = []
        for (sources, destinations), rows in inputs.into(t):
            sums = torch.zeros_like(own).index_add(0, destinations, rows.index_select(0, sources))
            ones = torch.ones_like(destinations, dtype=own.dtype)
            counts = own.new_zeros(own.shape[0]).index_add(0, destinations, ones)
            means.append(sums / counts.clamp(min=1)[:, None])
        if means:
            out = out + torch.cat(means, 1) @ weights.neighbours
        outs[t] = out
    return outs


def _compute_rgat(layer: RGATLayer, inputs: _Inputs) -> dict[int, Tensor]:
    numbers = {r: number for number, r in enumerate(layer.edge_types)}
    outs = {}
    for t in layer.out_types:
        own, relations = inputs.own[t], inputs.metadata.edge_types_in[t]
        out = own.new_zeros(own.shape[0], layer.out_features)
        for r, (edges, rows) in zip(relations, inputs.into(t), strict=True):
            number = numbers[r]
            matrix = layer.weight[number]
            of_sources, of_destinations = (
                each @ torch.einsum("hfg,hg->hf", matrix, attention[number]).t()
                for each, attention in (
                    (rows, layer.source_attention),
                    (own, layer.target_attention),
                )
            )
            scores = of_sources[edges.sources] + of_destinations[edges.destinations]
            scores = functional.leaky_relu(scores, NEGATIVE_SLOPE)
            (weights,) = _softmax([(scores, edges.destinations)], own, layer.heads)
            sums = _weighted_sums(edges, weights, rows[:, None, :], own)
            found = _project_heads(sums, matrix)
            found = found.flatten(1) if layer.concatenate else found.mean(1)
            out = out + found + layer.bias[number]
        outs[t] = out
    return outs


def _compute_hgt(layer: HGTLayer, inputs: _Inputs) -> dict[int, Tensor]:
    heads, columns = layer.heads, layer.key_matrix.shape[3]
    numbers = {r: number for number, r in enumerate(layer.edge_types)}
    keys_values = {
        s: linear(inputs.rows[s]).unflatten(1, (2 * heads, columns)).split(heads, 1)
        for s, linear in zip(layer.source_types, layer.keys_values, strict=True)
    }
    matrices = layer.key_matrix * (layer.prior / math.sqrt(columns))[:, :, None, None]
    queries, outs = iter(layer.queries), {}
    gates = torch.sigmoid(layer.skip)
    for place, (t, linear) in enumerate(zip(layer.out_types, layer.outputs, strict=True)):
        own, parts = inputs.own[t], []
        relations = inputs.metadata.edge_types_in[t]
        out = own.new_zeros(own.shape[0], heads, columns)
        if relations:
            query = next(queries)(own).unflatten(1, (heads, columns))
        for r in relations:
            source = inputs.metadata.edge_types[r][0]
            keys, values = keys_values[inputs.metadata.node_types.index(source)]
            own_query = _project_heads(query, matrices[numbers[r]].mT)
            edges = inputs.edges[r]
            scores = (keys[edges.sources] * own_query[edges.destinations]).sum(2)
            parts.append((r, edges, values, scores))
        weights = _softmax([(part[3], part[1].destinations) for part in parts], own, heads)
        for (r, edges, values, _), own_weights in zip(parts, weights, strict=True):
            sums = _weighted_sums(edges, own_weights, values, own)
            out = out + _project_heads(sums, layer.value_matrix[numbers[r]])
        found = linear(functional.gelu(out.flatten(1)))
        outs[t] = torch.lerp(own, found, gates[place])
    return outs


def _project_heads(rows_THF: Tensor, matrix_HFG: Tensor) -> Tensor:
    """Return the (T, H, G) products of the rows of each head with its matrix."""
    # the strides of `einsum` would depend on whether there is one row
    products = [rows @ matrix for rows, matrix in zip(rows_THF.unbind(1), matrix_HFG, strict=True)]
    return torch.stack(products, 1)


def _softmax(parts: Sequence[tuple[Tensor, Tensor]], own: Tensor, heads: int) -> list[Tensor]:
    """Return the softmax of scores over the in-edges of all edge types of each target.

    Args:
        parts: for each edge type the (E, H) scores and the (E,) destinations.
        own: (T, F) rows of the destinations.
        heads: H.
    """
    # subtract the maximum to prevent overflow
    largest = own.new_full((own.shape[0], heads), -torch.inf)
    for scores, destinations in parts:
        index = destinations[:, None].expand(-1, heads)
        largest = largest.scatter_reduce(0, index, scores, "amax")
    weights = [(scores - largest[destinations]).exp() for scores, destinations in parts]
    total = own.new_zeros(own.shape[0], heads)
    for weight, (_, destinations) in zip(weights, parts, strict=True):
        total = total.index_add(0, destinations, weight)
    return [
        weight / total[destinations]
        for weight, (_, destinations) in zip(weights, parts, strict=True)
    ]


def _weighted_sums(edges: _Edges, weights: Tensor, rows: Tensor, own: Tensor) -> Tensor:
    """Return the (T, H, columns) sums of the rows of sources, weighted by edge and head."""
    zeros = own.new_zeros(own.shape[0], weights.shape[1], rows.shape[2])
    return zeros.index_add(0, edges.destinations, weights[:, :, None] * rows[edges.sources])


def _identity(x: Tensor, p: float, seed: int) -> Tensor:
    return x


def _dynamic_shapes(part: Any) -> Any:
    """Return the dynamic shapes of an argument: any length of each tensor."""
    if isinstance(part, Mapping):
        return {name: _dynamic_shapes(each) for name, each in part.items()}
    return [_dynamic_shapes(each) for each in part] if isinstance(part, list) else {0: Dim.DYNAMIC}


def _example_arguments(model: HeteroModel) -> tuple[Any, ...]:
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
