"""Divide nodes into ranges and among workers, and find the nodes that others depend on.

Ranges must not depend on the number of workers, nor on where rows are stored, because they
determine how outputs are rounded.

Notation: N nodes, M requested nodes, T targets, E edges.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from gcnzc.graph.graph import Graph

BATCH_NODES = 1 << 14  # maximum targets of a range
BATCH_EDGES = 1 << 20  # maximum in-edges of a range of several targets

# A range has at most a 64th of the graph's nodes, or 64 nodes if that is more, so that a small
# graph is divided among workers, too.
MIN_RANGES, MIN_NODES = 64, 64

Span: TypeAlias = tuple[int, int]  # begin and end of a range


def limit_batch_nodes(graph: Graph, batch_nodes: int) -> int:
    """Return the maximum number of nodes of a range of a graph."""
    return min(batch_nodes, max(MIN_NODES, graph.num_nodes // MIN_RANGES))


def needed_nodes(
    graph: Graph, num_layers: int, nodes: Tensor | None, batch_nodes: int
) -> list[Tensor | None]:
    """Return the nodes whose rows are needed to compute the outputs of some nodes.

    Args:
        graph: the whole graph.
        num_layers: number of layers.
        nodes: (M,) int64 node ids; None for all nodes.
        batch_nodes: maximum number of nodes whose in-edges are read at a time.

    Returns:
        The sorted int64 ids of each layer's sources, input layer first, then `nodes`. None stands
        for all nodes.
    """
    needed = [nodes]
    for _ in range(num_layers):
        targets = needed[0]
        if targets is not None:
            seen = torch.zeros(graph.num_nodes, dtype=torch.bool)
            seen[targets] = True
            for begin, end in ranges(graph, targets, batch_nodes):
                seen[in_edges(graph, targets[begin:end])[1].long()] = True
            targets = None if seen.all() else seen.nonzero().flatten()
        needed.insert(0, targets)
    return needed


def ranges(graph: Graph, ids: Tensor | None, batch_nodes: int) -> Iterator[Span]:
    """Yield ranges of nodes, with bounded numbers of nodes and edges.

    Args:
        graph: the whole graph.
        ids: (T,) int64 node ids; None for all nodes.
        batch_nodes: maximum number of nodes of a range.

    Yields:
        Begin and end of each range, as positions in `ids`.
    """
    ends = offsets(graph, ids)
    begin, count = 0, len(ends) - 1
    while begin < count:
        edge_limit = int(torch.searchsorted(ends, ends[begin] + BATCH_EDGES, right=True)) - 1
        end = min(max(edge_limit, begin + 1), begin + batch_nodes, count)
        yield begin, end
        begin = end


def assign_ranges(
    graph: Graph, ids: Tensor | None, batch_nodes: int, num_workers: int
) -> list[list[Span]]:
    """Assign ranges of nodes to workers, with about equal sums of nodes and edges.

    Args:
        graph, ids, batch_nodes: see `ranges`.
        num_workers: number of workers.

    Returns:
        The ranges of each worker, in ascending order.
    """
    ends, spans = offsets(graph, ids), list(ranges(graph, ids, batch_nodes))
    return divide_spans(spans, [e - b + int(ends[e] - ends[b]) for b, e in spans], num_workers)


def assign_equal_ranges(count: int, size: int, num_workers: int) -> list[list[Span]]:
    """Assign ranges of rows to workers, about as many rows to each.

    Args:
        count: number of rows.
        size: rows of a range; the last one may have fewer.
        num_workers: number of workers.

    Returns:
        The ranges of each worker, in ascending order.
    """
    spans = [(at, min(at + size, count)) for at in range(0, count, size)]
    return divide_spans(spans, [end - begin for begin, end in spans], num_workers)


def divide_spans(spans: Sequence[Span], costs: Sequence[int], num_workers: int) -> list[list[Span]]:
    """Divide consecutive spans into one consecutive group per worker, of about equal cost.

    Args:
        spans: the spans, in ascending order.
        costs: positive cost of each span.
        num_workers: number of workers.

    Returns:
        The spans of each worker.
    """
    shares: list[list[Span]] = [[] for _ in range(num_workers)]
    before, total = 0, sum(costs)
    for span, cost in zip(spans, costs, strict=True):
        # a span belongs to the group that contains the middle of its cost
        shares[(2 * before + cost) * num_workers // (2 * total)].append(span)
        before += cost
    return shares


def offsets(graph: Graph, ids: Tensor | None) -> Tensor:
    """Return the cumulative in-degrees of `ids` or of all nodes, (n + 1,), starting with 0."""
    if ids is None:
        return graph.indptr
    return functional.pad(degrees_of(graph, ids).cumsum(0), (1, 0))


def in_edges(graph: Graph, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the in-edges of nodes in CSC format; those of consecutive nodes are not copied.

    Args:
        graph: the whole graph.
        ids: (T,) int64 node ids.

    Returns:
        (T + 1,) int64 offsets, and (E,) node ids of the sources, with the dtype of `graph.indices`.
    """
    if len(ids) and bool((ids.diff() == 1).all()):
        bounds = graph.indptr[int(ids[0]) : int(ids[-1]) + 2]
        return bounds - bounds[0], graph.indices[int(bounds[0]) : int(bounds[-1])]
    indptr = offsets(graph, ids)
    shift = (graph.indptr[ids] - indptr[:-1]).repeat_interleave(indptr.diff())
    return indptr, graph.indices[torch.arange(len(shift)) + shift]


def degrees_of(graph: Graph, ids: Tensor) -> Tensor:
    """Return the (T,) int64 in-degrees of nodes, given their (T,) int64 ids."""
    return graph.indptr[ids + 1] - graph.indptr[ids]


def ids_of_range(nodes: Tensor | None, begin: int, end: int) -> Tensor:
    """Return the (end - begin,) int64 node ids of a range of nodes.

    Args:
        nodes: (M,) int64 node ids; None for all nodes.
        begin, end: positions in `nodes`.
    """
    return torch.arange(begin, end) if nodes is None else nodes[begin:end]


def row_index(ids: Tensor | None, graph: Graph) -> Tensor | None:
    """Return the position of each node in `ids`.

    Args:
        ids: (M,) int64 node ids; None for all nodes in order.
        graph: the whole graph.

    Returns:
        (N,) positions with the dtype of `graph.indices`, 0 for other nodes; None if `ids` is None.
    """
    if ids is None:
        return None
    row_of = torch.zeros(graph.num_nodes, dtype=graph.indices.dtype)
    row_of[ids] = torch.arange(len(ids), dtype=row_of.dtype)
    return row_of
