"""Dense computations of the models' formulas, and graphs to compute them on."""

import torch
from torch import Tensor
from torch.nn import functional

from gcnzc.graph.graph import Graph
from gcnzc.models import gnn

KINDS = {"sage": gnn.SAGE, "gcn": gnn.GCN, "gin": gnn.GIN, "gat": gnn.GAT, "gatv2": gnn.GATv2}
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
    src, dst = graph.coo()
    matrix = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    return matrix.index_put((dst.long(), src.long()), torch.ones(()).double(), accumulate=True)


def made(name: str, *sizes: int, **options) -> gnn.Model:
    """A model in float64 whose parameters, biases and running statistics too, are all at random."""
    return randomized(MODELS[name](*sizes, **options))


def randomized(model: gnn.Model) -> gnn.Model:
    with torch.no_grad():
        for part in (*model.double().parameters(), *model.buffers()):
            if part.is_floating_point():
                # variances are vectors, and must not be negative
                part.copy_(torch.rand_like(part) - 0.3 * (part.dim() > 1))
    return model


def dense_layer(layer, adjacency, x):
    """Compute one layer on the whole graph with a dense adjacency matrix."""
    if isinstance(layer, gnn.SAGELayer):
        mean = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
        neighbours = mean @ x @ layer.neighbours.weight.T + layer.neighbours.bias
        return neighbours + x @ layer.own.weight.T
    looped = adjacency + torch.eye(len(x)).double()
    if isinstance(layer, gnn.GINLayer):
        return layer.second(layer.first(looped @ x).relu())
    if isinstance(layer, gnn.GCNLayer):
        root = looped.sum(1).pow(-0.5)
        return root[:, None] * looped * root[None, :] @ x @ layer.weight.T + layer.bias
    outs = []
    for head in range(layer.heads):
        if isinstance(layer, gnn.GATv2Layer):
            z = layer.source(x).view(len(x), layer.heads, -1)[:, head]
            own = layer.target(x).view(len(x), layer.heads, -1)[:, head]
            score = functional.leaky_relu(own[:, None] + z, 0.2) @ layer.attention[head]
        else:
            z = x @ layer.weight[head].T
            score = z @ layer.source_attention[head] + (z @ layer.target_attention[head])[:, None]
            score = functional.leaky_relu(score, 0.2)
        score = score.masked_fill(looped == 0, -torch.inf)
        weight = looped * (score - score.amax(1, keepdim=True)).exp()
        outs.append(weight / weight.sum(1, keepdim=True) @ z)
    out = torch.cat(outs, 1) if layer.concatenate else torch.stack(outs).mean(0)
    out = out if layer.bias is None else out + layer.bias
    return out if layer.skip is None else out + layer.skip(x)


def dense_forward(model, adjacency, x, *, norm="none", jumping="none", **options):
    """Compute the logits of all nodes, in the order of the papers' equations."""
    pre_norm, pre_activation, residual = (
        options.get(name, False) for name in ("pre_norm", "pre_activation", "residual")
    )

    def normalized(index, rows):
        module = model.norms[index]
        if norm == "layer":
            return functional.layer_norm(rows, rows.shape[1:], module.weight, module.bias)
        rows = (rows - module.running_mean) / (module.running_var + module.eps).sqrt()
        return rows * module.weight + module.bias

    activation = functional.elu if isinstance(model, gnn.GAT) else functional.relu
    if options.get("input_linear"):
        x = x @ model.input_linear.weight.T + model.input_linear.bias
    hidden = []
    for index, layer in enumerate(model.layers):
        if pre_activation:
            # Li et al., 2020: normalization, activation, convolution, addition
            rows = activation(normalized(index, x) if norm != "none" else x)
            out = dense_layer(layer, adjacency, rows)
            x = x + out if residual else out
            hidden.append(x)
            continue
        if pre_norm:
            x = normalized(index, x)
        out = dense_layer(layer, adjacency, x)
        if residual:
            out = out + x @ model.residuals[index].weight.T + model.residuals[index].bias
        if index == len(model.layers) - 1 and not options.get("output_linear"):
            return out
        if norm != "none" and not pre_norm:
            out = normalized(index, out)
        x = activation(out)
        hidden.append(x)
    last = {"none": x, "sum": sum(hidden), "cat": torch.cat(hidden, 1)}[jumping]
    if pre_activation:
        last = activation(normalized(len(model.layers), last) if norm != "none" else last)
    return last @ model.output_linear.weight.T + model.output_linear.bias
