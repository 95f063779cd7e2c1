"""Dense computations of the models' formulas, and graphs to compute them on."""

import torch
from torch import Tensor
from torch.nn import functional

from gcnzc.graph.graph import Graph
from gcnzc.models import gnn

MODELS = {
    "sage": lambda *sizes, **options: gnn.SAGE(*sizes, norm="batch", **options),
    "gcn": gnn.GCN,
    "gat": lambda *sizes, **options: gnn.GAT(*sizes, heads=3, **options),
    "gatv2": lambda *sizes, **options: gnn.GATv2(*sizes, heads=3, **options),
}


# options with which inference has more to compute than layers
STACKS: list[dict[str, object]] = [
    {"residual": True, "norm": "layer", "pre_norm": True, "input_linear": True},
    {"output_linear": True, "jumping": "cat", "input_linear": True},
    {"output_linear": True, "jumping": "sum", "residual": True},
    {"pre_activation": True, "residual": True, "norm": "layer"}
    | {"input_linear": True, "output_linear": True},
]


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def random_graph(num_nodes: int = 60, num_edges: int = 300) -> Graph:
    """A graph with hubs, with some nodes that have no in-edges and one that has no edges at all."""
    src = torch.randint(num_nodes - 1, (num_edges,))
    dst = (torch.rand(num_edges) ** 3 * (num_nodes - 6)).long()
    apart = src != dst
    return Graph.from_edges(src[apart], dst[apart], num_nodes)


def dense(graph: Graph) -> Tensor:
    """A[t, s]: how many edges s -> t."""
    src, dst = graph.edges()
    matrix = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    return matrix.index_put((dst.long(), src.long()), torch.ones(()).double(), accumulate=True)


def made(name: str, *sizes: int, **options) -> gnn.Model:
    """A model in float64 whose parameters, biases and running statistics too, are all at random."""
    model = MODELS[name](*sizes, **options).double()
    with torch.no_grad():
        for part in (*model.parameters(), *model.buffers()):
            if part.is_floating_point():
                part.copy_(torch.rand_like(part) - 0.3 if part.dim() > 1 else torch.rand_like(part))
    return model


def sage_by_hand(model: gnn.SAGE, adjacency: Tensor, x: Tensor) -> Tensor:
    mean = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    for index, layer in enumerate(model.layers):
        x = mean @ x @ layer.neighbours.weight.T + layer.neighbours.bias + x @ layer.own.weight.T
        if index < len(model.layers) - 1:
            norm = model.norms[index]
            x = (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt()
            x = (x * norm.weight + norm.bias).clamp(min=0)
    return x


def gcn_by_hand(model: gnn.GCN, adjacency: Tensor, x: Tensor) -> Tensor:
    looped = adjacency + torch.eye(len(x)).double()
    root = looped.sum(1).pow(-0.5)
    propagate = root[:, None] * looped * root[None, :]
    for index, layer in enumerate(model.layers):
        x = propagate @ x @ layer.weight.T + layer.bias
        x = x if index == len(model.layers) - 1 else x.clamp(min=0)
    return x


def gat_by_hand(model: gnn.GAT, adjacency: Tensor, x: Tensor) -> Tensor:
    looped = adjacency + torch.eye(len(x)).double()
    for index, layer in enumerate(model.layers):
        outs = []
        for h in range(layer.heads):
            z = x @ layer.weight[h].T
            score = z @ layer.source_attention[h] + (z @ layer.target_attention[h])[:, None]
            # an edge that is there twice counts twice
            weight = looped * functional.leaky_relu(score, 0.2).exp()
            outs.append(weight / weight.sum(1, keepdim=True) @ z)
        out = torch.cat(outs, 1) if layer.concatenate else torch.stack(outs).mean(0)
        out = out + layer.bias + x @ layer.skip.weight.T + layer.skip.bias
        x = out if index == len(model.layers) - 1 else functional.elu(out)
    return x


def gatv2_by_hand(model: gnn.GATv2, adjacency: Tensor, x: Tensor) -> Tensor:
    looped = adjacency + torch.eye(len(x)).double()
    for index, layer in enumerate(model.layers):
        outs = []
        shape = (len(x), layer.heads, -1)
        left, right = layer.source(x).view(shape), layer.target(x).view(shape)
        for h in range(layer.heads):
            z = right[:, None, h] + left[None, :, h]
            score = functional.leaky_relu(z, 0.2) @ layer.attention[h]
            # an edge that is there twice counts twice
            weight = looped * (score - score.amax(1, keepdim=True)).exp()
            outs.append(weight / weight.sum(1, keepdim=True) @ left[:, h])
        out = torch.cat(outs, 1) if layer.concatenate else torch.stack(outs).mean(0)
        out = out + layer.bias + x @ layer.skip.weight.T + layer.skip.bias
        x = out if index == len(model.layers) - 1 else functional.elu(out)
    return x


BY_HAND = {"sage": sage_by_hand, "gcn": gcn_by_hand, "gat": gat_by_hand, "gatv2": gatv2_by_hand}
