"""A graph as the sampling kernels take it: addresses, sizes and Philox keys by edge type.

A graph with one node type and one edge type is a graph like any other.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import gcnzc.kernels.sample.layout as field
from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.kernels.structure.csc import VERIFY_HINT

MAX_DEGREE = 2**32 - 1  # a position is computed from a 32-bit random word

# what a derived key is for
RELATION_KEY, TYPE_KEY = 1, 2

# columns of the table with the addresses of arrays of a `Relation`
ADDRESSES = {
    "indptr": field.INDPTR,
    "indices": field.INDICES,
    "edge_ids": field.EDGE_IDS,
    "edge_time": field.EDGE_TIME,
    "node_time": field.NODE_TIME,
    "weight": field.WEIGHT,
}


@dataclass(frozen=True, eq=False)
class Relation:
    """One edge type for `GraphTables`; tensors are contiguous on the host.

    Attributes:
        src: number of the node type of the sources.
        dst: number of the node type of the destinations.
        indptr: (N_dst + 1,) int64 offsets of the columns.
        indices: (E,) int32 or int64 sources. Both are checked where they are read.
        key: two words below 2**32, which the random choices depend on.
        edge_ids: (E,) int64 ids of the edges in `indices`; None for their positions.
        edge_time: (E,) int64 times of the edges in `indices`.
        node_time: (N_src,) int64 times of the sources. With times, each column is sorted by the
            later of the time of the edge and of its source.
        weight: (E,) float32, finite and not negative, of the edges in `indices`.
    """

    src: int
    dst: int
    indptr: Tensor
    indices: Tensor
    key: tuple[int, int]
    edge_ids: Tensor | None = None
    edge_time: Tensor | None = None
    node_time: Tensor | None = None
    weight: Tensor | None = None


class InvalidColumn(ValueError):
    """The in-edges of a node have offsets or sources out of range.

    Attributes:
        relation: number of the edge type.
        node: the destination.
        array: "indptr" or "indices".
        wrong: what is wrong.
    """

    def __init__(self, relation: int, node: int, array: str, wrong: str) -> None:
        super().__init__(f"{wrong}\n\n{VERIFY_HINT}")
        self.relation, self.node, self.array, self.wrong = relation, node, array, wrong


class GraphTables:
    """Addresses of the arrays of a graph, which this object keeps alive.

    Args:
        num_nodes: T numbers of nodes.
        relations: R edge types.
        type_keys: for disjoint subgraphs T keys like those of the edge types.

    Raises:
        ValueError: a node has 2**32 in-edges or more.
    """

    def __init__(
        self,
        num_nodes: Sequence[int],
        relations: Sequence[Relation],
        type_keys: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.num_nodes, self.relations = tuple(num_nodes), tuple(relations)
        self.type_keys = tuple(type_keys)
        self.num_keys = sum(num_nodes)
        self.types = np.zeros((len(num_nodes), field.NUM_TYPE_COLUMNS), np.int64)
        self.types[:, field.FIRST_KEY] = np.cumsum([0, *num_nodes])[:-1]
        self.types[:, field.NUM_NODES] = num_nodes
        self._table = np.zeros((len(relations), field.NUM_RELATION_COLUMNS), np.int64)
        for row, each in zip(self._table, relations, strict=True):
            _check_degrees(each)
            row[[field.IS_WIDE, field.NUM_EDGES, field.SRC, field.DST]] = (
                each.indices.dtype == torch.int64,
                len(each.indices),
                each.src,
                each.dst,
            )
            row[[field.KEY_0, field.KEY_1]] = each.key
        self._arrays = [getattr(each, name) for each in relations for name in ADDRESSES]
        self._addresses: list[int] = []

    def table(self) -> NDArray[np.int64]:
        """Return the (R, NUM_RELATION_COLUMNS) int64 table of edge types, without excluded edges.

        torch moves tensors in place, as to shared memory when they are sent to another process.
        """
        addresses = [0 if each is None else each.data_ptr() for each in self._arrays]
        if addresses != self._addresses:
            table = self._table.copy()  # other threads may be using the old one
            table[:, [*ADDRESSES.values()]] = np.reshape(addresses, (-1, len(ADDRESSES)))
            self._table, self._addresses = table, addresses
        return self._table

    def find_damage(self, r: int, nodes: Tensor) -> InvalidColumn:
        """Return what is wrong with the first of `nodes` whose in-edges are out of range."""
        relation, num_src = self.relations[r], self.num_nodes[self.relations[r].src]
        num_edges = len(relation.indices)
        for node in nodes.tolist():
            begin, end = relation.indptr[node : node + 2].tolist()
            if not 0 <= begin <= end <= num_edges:
                return InvalidColumn(
                    r,
                    node,
                    "indptr",
                    f"the edges into node {node} are numbered from {begin} to {end}, but the graph "
                    f"has {num_edges} edges",
                )
            column = relation.indices[begin:end]
            wrong = column[(column < 0) | (column >= num_src)][:4].tolist()
            if wrong:
                return InvalidColumn(
                    r,
                    node,
                    "indices",
                    f"node {node} has the in-neighbours {wrong} in a graph of {num_src} nodes",
                )
        raise AssertionError("the kernel reported a column without damage")


def derive_key(seed: int, purpose: int, *names: str) -> tuple[int, int]:
    """Return a Philox key that depends on the seed and on the name of a node or edge type."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest()
    low, high = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    words = philox4x32_reference(low, high, purpose, 0, *split_key(seed))
    return int(words[0]), int(words[1])


def _check_degrees(relation: Relation) -> None:
    # reading all degrees of a large graph takes a second; skip it if no degree can be too large
    if len(relation.indices) > MAX_DEGREE and int(relation.indptr.diff().max()) > MAX_DEGREE:
        raise ValueError(
            f"a node has more than {MAX_DEGREE} in-edges of one type, too many to sample from\n\n"
            "hint: remove duplicate edges"
        )
