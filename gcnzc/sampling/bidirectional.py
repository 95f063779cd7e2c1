"""Add the reverses of sampled edges, for subgraphs in which messages pass in both directions."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gcnzc.graph.stores import EdgeType
from gcnzc.sampling.hetero import HeteroBatch

REVERSE = "rev_"  # prefix of the relation of a reverse edge type, as `ToUndirected` of PyG names it


def find_reverse(edge_type: EdgeType, edge_types: Mapping[EdgeType, object]) -> EdgeType | None:
    """Return the edge type of the reverse edges, by the rules of PyG.

    It is the type with the prefix "rev_"; without it, for edges between nodes of one type, the type
    itself; and otherwise the only edge type in the other direction, if there is exactly one.
    """
    source, relation, target = edge_type
    prefixed = (target, f"{REVERSE}{relation}", source)
    if prefixed in edge_types:
        return prefixed
    if source == target:
        return edge_type
    found = [each for each in edge_types if (each[0], each[2]) == (target, source)]
    return found[0] if len(found) == 1 else None


def to_bidirectional(batch: HeteroBatch, *, keep_ids: bool = False) -> None:
    """Add to each edge type the reverses of the sampled edges of its reverse type, in place.

    Duplicate edges are merged, edges are sorted by destination and source, and have no ids any
    more. Edge types without a reverse type stay as they are.

    Args:
        batch: the subgraph.
        keep_ids: edges of a type that is its own reverse keep their ids, see `merge_reverses`.
    """
    edges = {each: batch.edge_index(each) for each in batch.indptr}
    merged = dict(edges)
    for edge_type in edges:
        reverse = find_reverse(edge_type, edges)
        # the type with the prefix gets its edges along with the type that it reverses
        if edge_type[1].startswith(REVERSE) or reverse is None:
            continue
        num_sources = max(len(batch.nodes[edge_type[0]]), 1)
        if keep_ids and reverse == edge_type:
            row, col = edges[edge_type]
            given = torch.arange(len(row)) if batch.edge_ids is None else batch.edge_ids[edge_type]
            row, col, ids = merge_reverses(row, col, given, num_sources)
            merged[edge_type] = torch.stack([row, col])
            if batch.edge_ids is not None:
                batch.edge_ids[edge_type] = ids
            continue
        row, col = torch.cat([edges[edge_type], edges[reverse].flip(0)], dim=1)
        keys = torch.unique(col * num_sources + row)
        merged[edge_type] = torch.stack([keys % num_sources, keys // num_sources])
        changed = [edge_type]
        if reverse[1].startswith(REVERSE):
            merged[reverse] = merged[edge_type].flip(0)
            changed.append(reverse)
        for each in changed:
            if batch.edge_ids is not None:
                batch.edge_ids.pop(each, None)
    batch.reordered, batch.num_edges = merged, None
    for edge_type, (row, col) in merged.items():
        counts = torch.bincount(col, minlength=len(batch.nodes[edge_type[2]]))
        batch.indptr[edge_type] = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        batch.indices[edge_type] = row[col.argsort(stable=True)].int()


def merge_reverses(
    row: Tensor, col: Tensor, edge_ids: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the edges between nodes of one type together with their reverses.

    Duplicate edges are merged, and edges are sorted by destination and source. An edge has the id
    of the first edge in its own direction, or else of the first edge that it is the reverse of.

    Args:
        row: (E,) int64 positions of the sources in [0, num_nodes).
        col: (E,) positions of the destinations.
        edge_ids: (E,) ids.
        num_nodes: number of nodes.

    Returns:
        Rows, columns and ids of the merged edges.
    """
    keys = torch.cat([col, row]) * max(num_nodes, 1) + torch.cat([row, col])
    found, first = np.unique(keys.numpy(), return_index=True)
    merged, ids = torch.from_numpy(found), torch.cat([edge_ids, edge_ids])[torch.from_numpy(first)]
    return merged % max(num_nodes, 1), merged // max(num_nodes, 1), ids
