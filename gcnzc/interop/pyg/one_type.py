"""The graph of a PyG `Data` as a heterogeneous graph with one type of nodes and one of edges.

The loaders of `Data` use it for the options of `HeteroSampler`: times, weights, replacement,
disjoint subgraphs, and subgraphs that are not directional. Without these options they sample from
the `Graph` itself.
"""

from typing import Any

import torch
from torch import Tensor

from gcnzc.graph.hetero.graph import EdgeType, HeteroGraph, TimeKind
from gcnzc.graph.hetero.stores import EdgeStore, NodeStore
from gcnzc.graph.hetero.times import as_times
from gcnzc.graph.hetero.values import as_weights
from gcnzc.interop.pyg.graph import CscEdges
from gcnzc.interop.pyg.hetero_arguments import Sampling
from gcnzc.interop.pyg.hetero_graph import TypedGraph, cached_graph
from gcnzc.sampling.bidirectional import merge_reverses
from gcnzc.sampling.hetero import HeteroSampler

NODE = "node"
EDGE: EdgeType = (NODE, "to", NODE)


def to_one_type(
    data: Any, csc: CscEdges, time_attr: str | None, weight_attr: str | None
) -> TypedGraph:
    """Return the graph of a `Data` with its times and weights; it is cached while it is in use.

    Edge ids are positions in `edge_index`.

    Args:
        data: a PyG `Data`.
        csc: the edges of `data`.
        time_attr: attribute of nodes or of edges with times.
        weight_attr: attribute of edges with sampling weights.

    Raises:
        ValueError: there is no such attribute, or its values are wrong.
    """
    time = _attribute(data, "time_attr", time_attr)
    weight = _attribute(data, "weight_attr", weight_attr)
    kind: TimeKind | None = None
    if time_attr is not None:
        # as in PyG, if the data has as many edges as nodes
        kind = "node" if data.is_node_attr(time_attr) else "edge"

    def build() -> TypedGraph:
        graph, order = csc.graph, None if csc.order is None else csc.order.rows
        graph.check()
        node_time = edge_time = edge_weight = None
        if kind == "node":
            node_time = as_times(f"data.{time_attr}", time, graph.num_nodes, None)
        elif kind == "edge":
            edge_time = as_times(f"data.{time_attr}", time, graph.num_edges, None)
        if weight is not None:
            edge_weight = as_weights(f"data.{weight_attr}", weight, graph.num_edges)
        if order is not None:
            edge_time = None if edge_time is None else edge_time[order]
            edge_weight = None if edge_weight is None else edge_weight[order]
        edges = EdgeStore(
            graph.indptr, graph.indices, edge_ids=order, time=edge_time, weight=edge_weight
        )
        nodes = {NODE: NodeStore(graph.num_nodes, time=node_time)}
        found = HeteroGraph(nodes, {EDGE: edges})
        if kind is not None:
            found = found.sort_by_time(kind)
        return TypedGraph(found, kind, (csc, time, weight))

    return cached_graph((NODE, id(csc), kind), (time, weight), build)


def _attribute(data: Any, argument: str, name: str | None) -> Any:
    """Return the values of an attribute of nodes or edges."""
    if name is None:
        return None
    if name in data and (data.is_node_attr(name) or data.is_edge_attr(name)):
        return data[name]
    raise ValueError(
        f"{argument} is {name!r:.100}, which is not an attribute of nodes or edges of the data"
    )


def sample_one_type(
    sampler: HeteroSampler, sampling: Sampling, seeds: Tensor, times: Tensor | None, epoch: int
) -> tuple[Tensor, dict[str, Any]]:
    """Sample a subgraph of a graph from `to_one_type`.

    Args:
        sampler: of directional subgraphs if `sampling` asks for bidirectional ones.
        sampling: how to sample.
        seeds: (S,) node ids on the host.
        times: (S,) times of the seeds, as for `HeteroSampler.sample`.
        epoch: in [0, 2**32).

    Returns:
        The nodes of the subgraph, and the fields of PyG's `Data` that are about its structure.
    """
    batch = sampler.sample({NODE: seeds}, epoch, times)
    assert batch.edge_ids is not None, "the sampler returns edge ids"
    nodes, edges = batch.nodes[NODE], batch.edge_ids[EDGE]
    edge_index = batch.edge_index(EDGE)
    num_nodes, num_edges = batch.num_nodes[NODE], None
    if sampling.subgraph_type == "bidirectional":
        row, col, edges = merge_reverses(edge_index[0], edge_index[1], edges, len(nodes))
        edge_index = torch.stack([row, col])
    elif batch.num_edges is not None:
        num_edges = list(batch.num_edges[EDGE])[: sampling.num_hops]
    return nodes, {
        "edge_index": edge_index,
        "e_id": edges,
        "batch": None if batch.subgraphs is None else batch.subgraphs[NODE],
        "num_sampled_nodes": None
        if num_edges is None
        else list(num_nodes)[: sampling.num_hops + 1],
        "num_sampled_edges": num_edges,
    }
