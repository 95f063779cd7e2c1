"""Minibatches: blocks of sampled edges and the nodes they join."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from gcnzc.graph.graph import Graph
from gcnzc.system.spans import Span, Stage


@dataclass(frozen=True)
class Block:
    """One hop: the in-edges kept of the first `num_dst` of `num_src` nodes, by local numbers."""

    indptr: Tensor  # (num_dst + 1,) int64, since all neighbours of many nodes can pass 2**31 edges
    indices: Tensor  # (num_edges,) int32 places among the sources
    num_src: int
    num_dst: int
    nodes: Tensor  # (num_src,) int64 ids in the graph; the destinations are the first of them
    graph: Graph | None = None  # where the edges were drawn from
    edge_ids: Tensor | None = None  # (num_edges,) int64 positions in `graph.indices`, if asked for
    degrees: Tensor | None = None  # (num_src,) int64 in the whole graph, if a loader was asked to

    @property
    def num_edges(self) -> int:
        """Edges that were kept."""
        return self.indices.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the numbers lie."""
        return self.indices.device

    @cached_property
    def in_degrees(self) -> Tensor:
        """(num_src,) int64 in the whole graph, where `nodes` lie.

        Computed at the first use, for which work on a GPU is waited for, unless a loader has.

        Raises:
            RuntimeError: the block has no graph.
        """
        if self.degrees is not None:
            return self.degrees
        if self.graph is None:
            raise RuntimeError("a block without its graph does not know the degrees in it")
        nodes = self.nodes.cpu()
        begins, ends = self.graph.indptr[nodes], self.graph.indptr[nodes + 1]
        return (ends - begins).to(self.nodes.device)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Block":
        """The same block with its numbers on `device`; its graph stays where it is."""
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name in ("indptr", "indices", "nodes", "edge_ids", "degrees")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)


@dataclass
class Batch:
    """A sampled neighbourhood, and what a loader adds to it."""

    nodes: Tensor  # (B,) int64 ids: the seeds, then every other node in order of first appearance
    seeds: Tensor  # (S,) int64 ids, a view of `nodes`
    blocks: tuple[
        Block, ...
    ]  # blocks[0]'s sources are `nodes`, blocks[-1]'s destinations the seeds
    x: Tensor | None = None  # (B, D) features of `nodes`
    y: Tensor | None = None  # (S,) or (S, T) labels of the seeds; with pairs (P,) float32, 1 or 0
    pairs: Tensor | None = None  # (2, P) int64 places among the seeds: edges, or not, by `y`
    items: Tensor | None = None  # int64, on the host: the loader's seeds that this was made from
    times: dict[str, float] = field(default_factory=dict)  # seconds of worker threads, by "..._s"
    spans: list[Span] = field(default_factory=list)  # when that was, and in which thread
    stages: list[Stage] = field(default_factory=list)  # of a GPU's streams, past or to come
