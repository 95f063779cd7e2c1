"""Reference for `gcnzc.kernels.sample`, in plain Python; the results are equal."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from gcnzc.kernels.philox import philox4x32_reference
from gcnzc.kernels.sample import Options
from gcnzc.kernels.sample.graph import GraphTables, Relation

Edge = tuple[int, int, int]  # local ids of source and destination, and the id


@dataclass(frozen=True)
class ReferenceSample:
    """A sampled neighbourhood; lists have one element for each node type or edge type."""

    nodes: list[list[int]]
    subgraphs: list[list[int]]  # zeros if they are not disjoint
    edges: list[list[list[Edge]]]  # by hop, in the order of sampling; one list if they are induced
    num_nodes: list[list[int]]  # before each hop, and at the end, by type


def sample_reference(
    graph: GraphTables,
    options: Options,
    seeds: Sequence[tuple[int, Sequence[int]]],
    epoch: int,
    seed_times: Sequence[int] = (),
    excluded: Mapping[int, Sequence[int]] | None = None,
) -> ReferenceSample:
    """Return what `HopSampler(graph, options).sample` returns."""
    relations, types = graph.relations, range(len(graph.num_nodes))
    nodes: list[list[tuple[int, int]]] = [[] for _ in types]  # (subgraph, node)
    keys = [(0, 0)]
    first = 0
    for t, ids in seeds:
        for node in ids:
            nodes[t].append((first if options.disjoint else 0, int(node)))
            if options.disjoint:
                own_time = seed_times[first] if options.temporal else 0
                low, high = ((x & 0xFFFFFFFF, x >> 32 & 0xFFFFFFFF) for x in (int(node), own_time))
                words = philox4x32_reference(*low, *high, *graph.type_keys[t])
                keys[first:] = [(int(words[0]), int(words[1]))]
            first += 1
    local = [{pair: i for i, pair in reversed(list(enumerate(nodes[t])))} for t in types]
    edges: list[list[list[Edge]]] = [[] for _ in relations]
    num_nodes = [[len(own) for own in nodes]]
    begins = [0 for _ in types]
    for hop, fanouts in enumerate(options.fanouts):
        ends = [len(nodes[t]) for t in types]
        for r, relation in enumerate(relations):
            chosen: list[Edge] = []
            for col in range(begins[relation.dst], ends[relation.dst]):
                subgraph, node = nodes[relation.dst][col]
                time = seed_times[subgraph] if options.temporal else None
                column = eligible_edges(relation, node, time, (excluded or {}).get(r, ()))
                is_dated = relation.edge_time is not None or relation.node_time is not None
                if options.temporal == "last" and is_dated and fanouts[r] > 0:
                    column = _last(relation, column, fanouts[r])
                own_key = (relation.key[0] ^ keys[subgraph][0], relation.key[1] ^ keys[subgraph][1])
                for position in _choose(
                    relation, column, fanouts[r], node, hop, epoch, own_key, options
                ):
                    pair = (subgraph, int(relation.indices[position]))
                    if pair not in local[relation.src]:
                        local[relation.src][pair] = len(nodes[relation.src])
                        nodes[relation.src].append(pair)
                    is_loop = relation.src == relation.dst and pair == (subgraph, node)
                    row = col if options.own_loops and is_loop else local[relation.src][pair]
                    chosen.append((row, col, _edge_id(relation, position)))
            edges[r].append(chosen)
        begins = ends if options.once else begins
        num_nodes.append([len(own) for own in nodes])
    if options.induced:
        edges = [
            [_induced(relation, nodes, local, seed_times, options, (excluded or {}).get(r, ()))]
            for r, relation in enumerate(relations)
        ]
    return ReferenceSample(
        [[node for _, node in own] for own in nodes],
        [[subgraph for subgraph, _ in own] for own in nodes],
        edges,
        num_nodes,
    )


def eligible_edges(
    relation: Relation, node: int, time: int | None, excluded: Sequence[int] = ()
) -> list[int]:
    """Return the positions of the in-edges of a node that are not excluded or later than `time`."""
    column = [p for p in range(*relation.indptr[node : node + 2].tolist()) if p not in excluded]
    if time is None:
        return column
    found = []
    for position in column:
        is_late = relation.edge_time is not None and int(relation.edge_time[position]) > time
        if relation.node_time is not None:
            is_late |= int(relation.node_time[int(relation.indices[position])]) > time
        if not is_late:
            found.append(position)
    return found


def _edge_id(relation: Relation, position: int) -> int:
    return position if relation.edge_ids is None else int(relation.edge_ids[position])


def _induced(
    relation: Relation,
    nodes: Sequence[Sequence[tuple[int, int]]],
    local: Sequence[dict[tuple[int, int], int]],
    times: Sequence[int],
    options: Options,
    excluded: Sequence[int],
) -> list[Edge]:
    edges = []
    for col, (subgraph, node) in enumerate(nodes[relation.dst]):
        time = times[subgraph] if options.temporal else None
        for position in eligible_edges(relation, node, time, excluded):
            row = local[relation.src].get((subgraph, int(relation.indices[position])))
            if row is not None:
                edges.append((row, col, _edge_id(relation, position)))
    return edges


def _last(relation: Relation, column: list[int], fanout: int) -> list[int]:
    """Return the last edges of a column that include `fanout` of a weight above 0."""
    weight = relation.weight
    chosen = [i for i, each in enumerate(column) if weight is None or float(weight[each]) > 0]
    return column[chosen[-fanout] :] if len(chosen) >= fanout else column


def _choose(
    relation: Relation,
    column: list[int],
    fanout: int,
    node: int,
    hop: int,
    epoch: int,
    key: tuple[int, int],
    options: Options,
) -> list[int]:
    """Return the sampled positions of a column, in the order of sampling."""
    weights = None
    if relation.weight is not None:
        weights = [float(relation.weight[position]) for position in column]
    if fanout < 0 or (len(column) <= fanout and not options.replace) or not column:
        return [p for i, p in enumerate(column) if weights is None or weights[i] > 0]
    num_words = len(column) if weights is not None and not options.replace else fanout
    quads = np.arange((num_words + 3) // 4)
    counter = (quads, node & 0xFFFFFFFF, (node >> 32) | (hop << 16), epoch)
    words = np.stack(philox4x32_reference(*counter, *key), axis=1).ravel().tolist()[:num_words]
    if weights is None and options.replace:
        return [column[word * len(column) >> 32] for word in words]
    if weights is None:
        chosen: list[int] = []
        for word, last in zip(words, range(len(column) - fanout, len(column)), strict=True):
            position = word * (last + 1) >> 32
            chosen.append(last if position in chosen else position)
        return [column[position] for position in chosen]
    uniform = [(word + 0.5) / 2**32 for word in words]
    if options.replace:
        sums = list(accumulate(weights))
        if not sums[-1] > 0:
            return []
        positive = [i for i, weight in enumerate(weights) if weight > 0]
        places = [bisect_right(sums, u * sums[-1]) for u in uniform]
        return [column[min(place, positive[-1])] for place in places]
    ranked = sorted(
        (-math.log(u) / weight, i)
        for i, (u, weight) in enumerate(zip(uniform, weights, strict=True))
        if weight > 0
    )
    return [column[i] for _, i in ranked[:fanout]]
