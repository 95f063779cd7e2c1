"""Dense computations of the formulas of heterogeneous layers, and graphs to compute them on."""

import torch
from torch import Tensor

from gcnzc.graph import Graph
from gcnzc.graph.stores import EdgeType

PAPER, AUTHOR, FIELD = "paper", "author", "field"
WRITES, CITES = (AUTHOR, "writes", PAPER), (PAPER, "cites", PAPER)
WRITTEN, ABOUT = (PAPER, "written", AUTHOR), (FIELD, "about", PAPER)
NEVER, TOUCHES = (AUTHOR, "never", PAPER), (PAPER, "touches", FIELD)
SIZES = {PAPER: 23, AUTHOR: 17, FIELD: 5}
COLUMNS = {PAPER: 7, AUTHOR: 3, FIELD: 4}


def academic(*edge_types: EdgeType, seed: int = 0) -> Graph:
    """A graph of three node types, with repeated edges, nodes without in-edges, no NEVER edges."""
    generator = torch.Generator().manual_seed(seed)
    edges = {}
    for each in edge_types or (WRITES, CITES, WRITTEN, ABOUT, NEVER, TOUCHES):
        count = 0 if each == NEVER else 40
        # the last destination has no in-edges
        ends = [
            torch.randint(0, size, (count,), generator=generator)
            for size in (SIZES[each[0]], SIZES[each[2]] - 1)
        ]
        edges[each] = {"edge_index": torch.stack(ends)}
    return Graph.from_arrays({name: {"num_nodes": n} for name, n in SIZES.items()}, edges)


def features(seed: int = 1) -> dict[str, Tensor]:
    """Features of all nodes in float64."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(SIZES[name], columns, generator=generator, dtype=torch.float64)
        for name, columns in COLUMNS.items()
    }


def edge_index(graph: Graph) -> dict[EdgeType, Tensor]:
    """PyG's edge_index_dict."""
    return {each: graph.edges(each).edge_index() for each in graph.edge_types}


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """The model in float64, with all parameters at random."""
    model = model.double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for part in model.parameters():
            part.copy_(torch.randn(part.shape, generator=generator) / 2)
    return model
