"""Minibatches: sampled subgraphs as blocks, with their features and labels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self

from gcnzc.graph.graph import NODE, Graph
from gcnzc.system.spans import Span, Stage

# returns copies of tensors of one dtype
CopyTensors: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Compact:
    """Base of minibatches and their blocks, of whose tensors `pickle` copies no other elements.

    The tensors are views of larger vectors, which it would copy whole for each view.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {name: _compact(value) for name, value in vars(self).items()}


def _compact(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _compact(own) for key, own in value.items()}
    if isinstance(value, Tensor) and value.nbytes < value.untyped_storage().nbytes():
        return value.clone()
    return value


@dataclass(frozen=True, repr=False)
class Block(Compact):
    """The bipartite graph of one layer: sampled in-edges of targets (destination nodes), as CSC.

    Attributes:
        indptr: (num_dst + 1,) int64 offsets in `indices`; 64 bits, because a block of full
            neighbourhoods can have more than 2**31 edges.
        indices: (num_edges,) int32 positions of the sources in `nodes`.
        num_src: number of sources.
        num_dst: number of targets.
        nodes: (num_src,) int64 node ids in the graph. The first `num_dst` are the targets.
        graph: the graph that the edges were sampled from. A pickled block has its in-degrees
            instead.
        edge_ids: (num_edges,) int64 positions in `graph.indices`, if the sampler returns them.
        degrees: (num_src,) int64 in-degrees in the whole graph, if the loader computes them.
        is_full_batch: whether the block is the same in each step, as in full-batch training. Layers
            then may compute in another order, which rounds differently.
    """

    indptr: Tensor
    indices: Tensor
    num_src: int
    num_dst: int
    nodes: Tensor
    graph: Graph | None = None
    edge_ids: Tensor | None = None
    degrees: Tensor | None = None
    is_full_batch: bool = False

    @property
    def num_edges(self) -> int:
        """Number of sampled edges."""
        return self.indices.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.indices.device

    @cached_property
    def in_degrees(self) -> Tensor:
        """In-degrees of the source nodes in the whole graph, (num_src,) int64 on `device`.

        If the loader did not compute them, the first access does, which synchronizes with the GPU.

        Raises:
            RuntimeError: the block has no graph.
        """
        if self.degrees is not None:
            return self.degrees
        if self.graph is None:
            raise RuntimeError(
                "the block has no graph to read in-degrees from\n\n"
                "hint: set block.graph or block.degrees with dataclasses.replace"
            )
        nodes = self.nodes.cpu()
        begins, ends = self.graph.indptr[nodes], self.graph.indptr[nodes + 1]
        return (ends - begins).to(self.nodes.device)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self.graph is not None:
            state.pop("in_degrees", None)
            state |= {"graph": None, "degrees": _compact(self.in_degrees)}
        return state

    def __repr__(self) -> str:
        return f"Block(num_src={self.num_src}, num_dst={self.num_dst}, num_edges={self.num_edges})"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Block":
        """Return a copy of the block with its tensors on `device`; the graph stays on the host."""
        moved = {
            name: value.to(device, non_blocking=non_blocking)
            for name in ("indptr", "indices", "nodes", "edge_ids", "degrees")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)


@dataclass(repr=False)
class Batch(Compact):
    """A minibatch: a sampled subgraph, with the features and labels that a loader adds.

    Attributes:
        nodes: (B,) int64 node ids: the seeds, then the other nodes in order of first appearance.
        seeds: (S,) int64 ids of the seed nodes, a view of `nodes`.
        blocks: one for each layer, input layer first. The sources of `blocks[0]` are `nodes`, the
            targets of `blocks[-1]` are `seeds`.
        x: (B, D) features of `nodes`.
        y: (S,) or (S, T) labels of the seeds; for link prediction (P,) float32, 1 for edges and 0
            for negatives.
        pairs: for link prediction, (2, P) int64 positions in `seeds` of the pairs to score.
        items: int64 on the host: the elements of the loader's `seeds` in this minibatch.
        times: seconds that the loader's threads spent on this minibatch, by keys that end in `_s`.
        spans: start, end and thread of that work.
        stages: timed work on CUDA streams, finished or pending.
    """

    nodes: Tensor
    seeds: Tensor
    blocks: tuple[Block, ...]
    x: Tensor | None = None
    y: Tensor | None = None
    pairs: Tensor | None = None
    items: Tensor | None = None
    times: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)

    def node_ids(self) -> dict[str, Tensor]:
        """Return the ids of all nodes by node type, of which there is one."""
        return {NODE: self.nodes}

    def copy_tensors(self, nodes: Mapping[str, Tensor], copy: CopyTensors) -> Self:
        """Return a minibatch of copies of the tensors but `x` and `items`; views remain views.

        Args:
            nodes: copies of `node_ids`.
            copy: returns copies of tensors of one dtype.
        """
        own = nodes[NODE]
        return replace(
            self,
            nodes=own,
            seeds=own[: len(self.seeds)],
            blocks=_copy_blocks(self.blocks, own, copy),
            y=None if self.y is None else copy([self.y])[0],
            pairs=None if self.pairs is None else copy([self.pairs])[0],
        )

    def set_features(self, x: Mapping[str, Tensor]) -> None:
        """Set `x` to the features by node type; no features leave it unchanged."""
        self.x = x.get(NODE, self.x)

    def __repr__(self) -> str:
        """Return the blocks and the shapes of the tensors, without their elements."""
        tensors = {name: getattr(self, name) for name in ("seeds", "nodes", "x", "y", "pairs")}
        shapes = [f"{name}={tuple(of.shape)}" for name, of in tensors.items() if of is not None]
        return f"Batch({', '.join(shapes)}, blocks={self.blocks})"


def _copy_blocks(blocks: Sequence[Block], nodes: Tensor, copy: CopyTensors) -> tuple[Block, ...]:
    # the degrees of each block are a prefix of the outermost block's
    degrees = copy([blocks[0].degrees])[0] if blocks and blocks[0].degrees is not None else None
    return tuple(
        replace(
            block,
            indptr=copy([block.indptr])[0],
            indices=copy([block.indices])[0],
            edge_ids=None if block.edge_ids is None else copy([block.edge_ids])[0],
            nodes=nodes[: block.num_src],
            degrees=None if degrees is None else degrees[: block.num_src],
        )
        for block in blocks
    )
