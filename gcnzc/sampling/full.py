"""Blocks with all neighbours, as views of one graph in CSC format.

Layer l of L computes the outputs of the targets T_l, which are the nodes that layer l + 1 reads:
T_L are the seeds, and each set contains the next one. The nodes are ordered by these sets, the
seeds first. The targets of each block are then a prefix of its sources, and the edges of all blocks
are prefixes of the same arrays.

Notation: N nodes of the graph, S seeds, L layers.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.kernels.structure.csc import mark_sources, select_columns
from gcnzc.sampling.batch import Block


@dataclass(frozen=True)
class LayerNodes:
    """The nodes that the layers of a model read to compute the outputs of seeds.

    Attributes:
        nodes: (n,) int64 on the host: the seeds, then the other nodes of each set in order.
        counts: L + 1 numbers of nodes: layer l reads the first `counts[l]`, and computes the first
            `counts[l + 1]`.
    """

    nodes: Tensor
    counts: tuple[int, ...]

    def is_whole_graph(self, graph: Graph) -> bool:
        """Return whether the seeds are all nodes in order, so that no node is renumbered."""
        num_nodes = graph.num_nodes
        return self.counts[-1] == num_nodes and bool((self.nodes == torch.arange(num_nodes)).all())


def find_layer_nodes(graph: Graph, seeds: Tensor, num_layers: int) -> LayerNodes:
    """Return the nodes that each layer reads, with all neighbours.

    Args:
        graph: its arrays are checked first, see `Graph.check`.
        seeds: (S,) int64 on the host: distinct node ids.
        num_layers: L, at least 1.

    Raises:
        ValueError: the graph has an offset or a source out of range.
    """
    graph.check()
    is_read = torch.zeros(graph.num_nodes, dtype=torch.bool)
    is_read[seeds] = True
    parts, counts = [seeds], [len(seeds)]
    for _ in range(num_layers):
        is_known = is_read.clone()
        mark_sources(graph.indptr, graph.indices, parts[-1], is_read)
        parts.append((is_read & ~is_known).nonzero().flatten())
        counts.append(counts[-1] + len(parts[-1]))
    return LayerNodes(torch.cat(parts), tuple(reversed(counts)))


def build_full_blocks(
    graph: Graph, needed: LayerNodes, device: torch.device | str = "cpu"
) -> tuple[Block, ...]:
    """Return one block per layer, with all in-edges of its targets.

    If the seeds are all nodes in order, the blocks on the host are `graph.indptr` and
    `graph.indices` themselves. Layers with the same targets have the same tensors, so that what the
    backward pass needs, such as the transposed block, is computed once for all of them.

    Args:
        graph: the whole graph.
        needed: from `find_layer_nodes`.
        device: device of the blocks.
    """
    nodes, counts = needed.nodes, needed.counts
    if needed.is_whole_graph(graph):
        indptr, indices = graph.indptr, graph.indices
    else:
        number_of = torch.empty(graph.num_nodes, dtype=graph.indices.dtype)
        number_of[nodes] = torch.arange(len(nodes), dtype=number_of.dtype)
        indptr, indices = select_columns(graph.indptr, graph.indices, nodes[: counts[1]], number_of)
    num_edges = [int(indptr[count]) for count in counts[1:]]
    indptr, indices, nodes = (part.to(device) for part in (indptr, indices, nodes))
    blocks: list[Block] = []
    for layer, (num_src, num_dst) in enumerate(pairwise(counts)):
        if layer and (num_src, num_dst) == (blocks[-1].num_src, blocks[-1].num_dst):
            blocks.append(blocks[-1])
            continue
        block = Block(
            indptr[: num_dst + 1],
            indices[: num_edges[layer]],
            num_src,
            num_dst,
            nodes[:num_src],
            graph,
            is_full_batch=True,
        )
        blocks.append(block)
    return tuple(blocks)
