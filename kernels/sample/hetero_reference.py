"""Reference for `gcnzc.kernels.sample.hetero`, in plain Python; the results are equal."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from gcnzc.kernels.philox import philox4x32_reference
from gcnzc.kernels.sample.hetero import HeteroOptions, HeteroSample
from gcnzc.kernels.sample.hetero_graph import RELATION_KEY, TYPE_KEY, Relation, derive_key


def sample_hetero_reference(
    num_nodes: Sequence[int],
    node_types: Sequence[str],
    relations: Sequence[Relation],
    edge_types: Sequence[Sequence[str]],
    options: HeteroOptions,
    seeds: Sequence[tuple[int, Tensor]],
    epoch: int,
    seed: int,
    seed_times: Tensor | None = None,
    excluded: Mapping[int, Sequence[int]] | None = None,
) -> HeteroSample:
    """Return what `sample_hetero` returns with `HeteroTables` of the same graph and seed."""
    types, times = range(len(num_nodes)), [] if seed_times is None else seed_times.tolist()
    nodes: list[list[tuple[int, int]]] = [[] for _ in types]  # (subgraph, node)
    keys = [(0, 0)]
    first = 0
    for t, ids in seeds:
        for node in ids.tolist():
            nodes[t].append((first if options.disjoint else 0, node))
            if options.disjoint:
                time = times[first] if options.temporal else 0
                low, high = ((x & 0xFFFFFFFF, x >> 32 & 0xFFFFFFFF) for x in (node, time))
                key = derive_key(seed, TYPE_KEY, node_types[t])
                words = philox4x32_reference(*low, *high, *key)
                keys[first:] = [(int(words[0]), int(words[1]))]
            first += 1
    local = [{pair: i for i, pair in reversed(list(enumerate(nodes[t])))} for t in types]
    edges: list[list[tuple[int, int, int]]] = [[] for _ in relations]  # (row, col, edge id)
    num_new = [[len(nodes[t])] for t in types]
    num_edges: list[list[int]] = [[] for _ in relations]
    begins = [0 for _ in types]
    for hop, fanouts in enumerate(options.fanouts):
        ends = [len(nodes[t]) for t in types]
        before = [len(edges[r]) for r in range(len(relations))]
        for r, relation in enumerate(relations):
            key = derive_key(seed, RELATION_KEY, *edge_types[r])
            for col in range(begins[relation.dst], ends[relation.dst]):
                subgraph, node = nodes[relation.dst][col]
                time = times[subgraph] if options.temporal else None
                column = eligible_edges(relation, node, time, (excluded or {}).get(r, ()))
                is_dated = relation.edge_time is not None or relation.node_time is not None
                if options.temporal == "last" and is_dated and fanouts[r] > 0:
                    column = _last(relation, column, fanouts[r])
                own_key = (key[0] ^ keys[subgraph][0], key[1] ^ keys[subgraph][1])
                for position in _choose(
                    relation, column, fanouts[r], node, hop, epoch, own_key, options
                ):
                    pair = (subgraph, int(relation.indices[position]))
                    if pair not in local[relation.src]:
                        local[relation.src][pair] = len(nodes[relation.src])
                        nodes[relation.src].append(pair)
                    edges[r].append((local[relation.src][pair], col, _edge_id(relation, position)))
        begins = ends if options.once else begins
        for t in types:
            num_new[t].append(len(nodes[t]) - ends[t])
        for r in range(len(relations)):
            num_edges[r].append(len(edges[r]) - before[r])
    if options.induced:
        edges = [
            _induced(relation, nodes, local, times, options, (excluded or {}).get(r, ()))
            for r, relation in enumerate(relations)
        ]
    columns = [
        [torch.tensor([e[i] for e in own], dtype=torch.int64) for own in edges] for i in range(3)
    ]
    return HeteroSample(
        nodes=tuple(torch.tensor([n for _, n in own], dtype=torch.int64) for own in nodes),
        subgraphs=tuple(torch.tensor([s for s, _ in own], dtype=torch.int64) for own in nodes)
        if options.disjoint
        else None,
        rows=tuple(columns[0]),
        cols=tuple(columns[1]),
        edge_ids=tuple(columns[2]) if options.edge_ids else None,
        num_nodes=tuple(map(tuple, num_new)),
        num_edges=None if options.induced else tuple(map(tuple, num_edges)),
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
    options: HeteroOptions,
    excluded: Sequence[int],
) -> list[tuple[int, int, int]]:
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
    options: HeteroOptions,
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
