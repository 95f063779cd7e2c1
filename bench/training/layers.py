"""Measure full-batch layers on the CPU, compared with the layers of PyG and DGL.

    python -m bench.training.layers [--threads 2] [--rounds 7] [--graphs cora,arxiv]
        [--layers sage,gcn,gat] [--cora PATH]

A call computes the forward and the backward pass of one layer on the whole graph, with the
gradients of its weights and, for a hidden layer, of its input. All layers of a kind have the same
weights, and their outputs and gradients are compared first. Their measurements are interleaved.

The graphs are a random graph of ogbn-arxiv's shape with reverse edges, and cora (or, without its
file, a random graph of its shape). What is independent of weights and features is not timed: each
library's own formats of the graph are built before, GCN's normalization is cached where the layer
can do so, and self loops are added to the graphs of DGL, whose layers do not add them.

PyG is measured with each of its formats of the graph: the edge list, `torch_geometric.EdgeIndex`
sorted by target with all caches, and torch's sparse CSR matrix.
"""

import argparse
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness import record, side_by_side
from bench.training.aggregate import power_law
from gcnzc.graph.graph import Graph
from gcnzc.graph.load import load
from gcnzc.interop.dgl import import_dgl
from gcnzc.models.layers import GATLayer, GCNLayer, Layer, SAGELayer
from gcnzc.sampling.batch import Block
from gcnzc.sampling.full import build_full_blocks, find_layer_nodes

ARXIV_NODES, ARXIV_EDGES = 169_343, 1_166_243
CORA_NODES, CORA_EDGES, CORA_COLUMNS = 2708, 5278, 1433

Step = Callable[[Tensor], Tensor]


def build_layers(in_features: int, columns: int, heads: int) -> dict[str, Layer]:
    """Return our layer of each kind, with `columns` output columns in all."""
    return {
        "sage": SAGELayer(in_features, columns),
        "gcn": GCNLayer(in_features, columns),
        "gat": GATLayer(
            in_features, columns // heads, heads, concatenate=True, dropout=0.0, skip=False
        ),
    }


def own_steps(block: Block, layer: Layer) -> dict[str, Step]:
    """Return our layer as a function of the input rows."""
    return {"gcnzc": lambda x: layer(block, x, x)}


def pyg_adjacencies(graph: Graph) -> dict[str, Callable[[], Any]]:
    """Return functions that build the graph in each of PyG's formats, by name."""
    from torch_geometric import EdgeIndex

    src, dst = (ids.long() for ids in graph.coo())
    edges, size = torch.stack([src, dst]), (graph.num_nodes, graph.num_nodes)

    def edge_index() -> Any:
        return EdgeIndex(edges, sparse_size=size, sort_order="col").fill_cache_()

    def csr() -> Any:
        ones = torch.ones(graph.num_edges)
        ids = graph.indices.long()
        return torch.sparse_csr_tensor(graph.indptr, ids, ones, size, check_invariants=False)

    return {"edge list": lambda: edges, "EdgeIndex": edge_index, "sparse CSR": csr}


def pyg_layer(kind: str, layer: Any) -> nn.Module:
    """Return PyG's layer of a kind with the weights of ours."""
    from torch_geometric import nn as pyg

    columns, in_features = layer.heads * layer.out_features, layer.in_features
    if kind == "sage":
        conv = pyg.SAGEConv(in_features, columns)
        pairs = [
            (conv.lin_l.weight, layer.neighbours.weight),
            (conv.lin_l.bias, layer.neighbours.bias),
            (conv.lin_r.weight, layer.own.weight),
        ]
    elif kind == "gcn":
        conv = pyg.GCNConv(in_features, columns, cached=True)
        pairs = [(conv.lin.weight, layer.weight), (conv.bias, layer.bias)]
    else:
        conv = pyg.GATConv(in_features, layer.out_features, layer.heads)
        pairs = [
            (conv.lin.weight, layer.weight.flatten(0, 1)),
            (conv.att_src, layer.source_attention[None]),
            (conv.att_dst, layer.target_attention[None]),
            (conv.bias, layer.bias),
        ]
    copy_weights(pairs)
    return conv


def copy_weights(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair to the first."""
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def pyg_steps(graph: Graph, kind: str, layer: Layer, x: Tensor) -> dict[str, Step]:
    """Return PyG's layer with each format of the graph that it supports."""
    steps: dict[str, Step] = {}
    if importlib.util.find_spec("torch_geometric") is None:
        return steps
    for name, build in pyg_adjacencies(graph).items():
        conv = pyg_layer(kind, layer)
        try:
            adjacency = build()
            step = partial(lambda conv, adjacency, x: conv(x, adjacency), conv, adjacency)
            step(x.detach().requires_grad_()).sum().backward()
        except Exception as error:
            print(f"PyG's {type(conv).__name__} with {name}: {type(error).__name__}: {error!s:.80}")
            continue
        steps[f"PyG, {name}"] = step
    return steps


def dgl_steps(graph: Graph, kind: str, layer: Any) -> dict[str, Step]:
    """Return DGL's layer with the weights of ours."""
    if importlib.util.find_spec("dgl") is None:
        return {}
    dgl = import_dgl()
    from dgl.nn import GATConv, GraphConv, SAGEConv

    src, dst = graph.coo()
    made = dgl.graph((src.long(), dst.long()), num_nodes=graph.num_nodes)
    if kind != "sage":
        made = dgl.add_self_loop(made)
    made.create_formats_()
    columns, in_features = layer.heads * layer.out_features, layer.in_features
    if kind == "sage":
        conv = SAGEConv(in_features, columns, "mean")
        copy_weights([
            (conv.fc_neigh.weight, layer.neighbours.weight),
            (conv.fc_self.weight, layer.own.weight),
            (conv.fc_self.bias, layer.neighbours.bias),
        ])  # fmt: skip
    elif kind == "gcn":
        conv = GraphConv(in_features, columns)
        copy_weights([(conv.weight, layer.weight.t()), (conv.bias, layer.bias)])
    else:
        conv = GATConv(in_features, layer.out_features, layer.heads)
        copy_weights([
            (conv.fc.weight, layer.weight.flatten(0, 1)),
            (conv.attn_l, layer.source_attention[None]),
            (conv.attn_r, layer.target_attention[None]),
            (conv.bias, layer.bias),
        ])  # fmt: skip
    return {"DGL": lambda x: conv(made, x).flatten(1)}


def forward_and_backward(step: Step, x: Tensor, grad: Tensor, parameters: list[Tensor]) -> None:
    """Compute one layer and its gradients."""
    x.grad = None
    for parameter in parameters:
        parameter.grad = None
    step(x).backward(grad)


def check(steps: dict[str, Step], x: Tensor, grad: Tensor) -> None:
    """Raise AssertionError unless all layers compute the same outputs and input gradients."""
    results = {}
    for name, step in steps.items():
        rows = x.detach().clone().requires_grad_()
        out = step(rows)
        out.backward(grad)
        results[name] = (out.detach(), rows.grad)
    for name, found in results.items():
        for ours, theirs in zip(results["gcnzc"], found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, msg=name)


def compare(
    name: str,
    graph: Graph,
    columns: tuple[int, int],
    heads: int,
    rounds: int,
    kinds: str,
) -> None:
    """Time the layers of all libraries on a graph, and record them.

    Args:
        name: name of the graph.
        graph: the graph.
        columns: columns of the input and of the output.
        heads: attention heads of the GAT layer.
        rounds: timed calls of each layer.
        kinds: kinds of layers, separated by commas.
    """
    torch.manual_seed(0)
    (block,) = build_full_blocks(graph, find_layer_nodes(graph, torch.arange(graph.num_nodes), 1))
    x, grad = (torch.randn(graph.num_nodes, width) for width in columns)
    for kind, layer in build_layers(*columns, heads).items():
        if kind not in kinds.split(","):
            continue
        steps = own_steps(block, layer) | pyg_steps(graph, kind, layer, x)
        steps |= dgl_steps(graph, kind, layer)
        check(steps, x, grad)
        for is_hidden in (True, False):
            rows = x.detach().clone().requires_grad_(is_hidden)
            calls = {
                each: partial(forward_and_backward, step, rows, grad, [])
                for each, step in steps.items()
            }
            timings = side_by_side(calls, rounds, warmup=1)
            case = {"graph": name, "layer": kind, "columns": "->".join(map(str, columns))}
            case |= {"edges": graph.num_edges, "input_gradient": is_hidden}
            for each, timing in timings.items():
                times = timing.median_s / timings["gcnzc"].median_s
                record("layers_cpu", case | {"way": each}, timing, times_gcnzc=times)


def cora(path: Path) -> Graph:
    """Return cora's graph, or a random one of its shape if there is no file."""
    if path.exists():
        return load(path).graph
    return power_law(CORA_NODES, CORA_EDGES).rebuild(bidirected=True, self_loops="remove")


def main() -> None:
    """Measure every layer on every graph."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--graphs", default="cora,arxiv")
    parser.add_argument("--layers", default="sage,gcn,gat")
    parser.add_argument("--cora", type=Path, default=Path("../shared/data/cora/cora.npz"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
    if "cora" in options.graphs:
        compare(
            "cora",
            cora(options.cora),
            (CORA_COLUMNS, 64),
            8,
            max(15, options.rounds),
            options.layers,
        )
    if "arxiv" in options.graphs:
        graph = power_law(ARXIV_NODES, ARXIV_EDGES)
        graph = graph.rebuild(bidirected=True, self_loops="remove", duplicates="remove")
        compare("ogbn-arxiv's shape", graph, (128, 256), 4, options.rounds, options.layers)


if __name__ == "__main__":
    main()
