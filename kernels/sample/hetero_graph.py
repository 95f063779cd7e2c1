"""A heterogeneous graph as the sampling kernels take it: addresses, sizes and keys by edge type."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gcnzc.kernels.philox import philox4x32_reference, split_key
from gcnzc.kernels.sample import MAX_DEGREE
from gcnzc.kernels.sample.hetero_layout import NUM_COLUMNS

# what a derived key is for
RELATION_KEY, TYPE_KEY = 1, 2


@dataclass(frozen=True, eq=False)
class Relation:
    """One edge type for `HeteroTables`; tensors are contiguous on the host.

    Attributes:
        src: number of the node type of the sources.
        dst: number of the node type of the destinations.
        indptr: (N_dst + 1,) int64 offsets of the columns.
        indices: (E,) int32 or int64 sources. Both are checked where they are read.
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
    edge_ids: Tensor | None = None
    edge_time: Tensor | None = None
    node_time: Tensor | None = None
    weight: Tensor | None = None


class HeteroTables:
    """A graph for `sample_hetero`: addresses of the arrays, which this object keeps alive.

    Args:
        num_nodes: T numbers of nodes.
        node_types: T names, which the random words depend on.
        relations: R edge types.
        edge_types: R names, which the random words depend on.
        seed: 64-bit seed of the random choices.

    Raises:
        ValueError: a node has 2**32 in-edges or more, or the seed does not fit 64 bits.
    """

    def __init__(
        self,
        num_nodes: Sequence[int],
        node_types: Sequence[str],
        relations: Sequence[Relation],
        edge_types: Sequence[Sequence[str]],
        seed: int,
    ) -> None:
        self.num_nodes, self.relations = tuple(num_nodes), tuple(relations)
        self.num_keys = sum(num_nodes)
        self.first_keys = np.cumsum([0, *num_nodes])[:-1]
        self.type_keys = [derive_key(seed, TYPE_KEY, name) for name in node_types]
        self.table = np.zeros((len(relations), NUM_COLUMNS), np.int64)
        for row, relation, names in zip(self.table, relations, edge_types, strict=True):
            _check_degrees(relation)
            row[:] = (
                relation.indptr.data_ptr(),
                relation.indices.data_ptr(),
                relation.indices.dtype == torch.int64,
                len(relation.indices),
                relation.dst,
                relation.src,
                num_nodes[relation.dst],
                num_nodes[relation.src],
                _address(relation.edge_time),
                _address(relation.node_time),
                _address(relation.weight),
                _address(relation.edge_ids),
                *derive_key(seed, RELATION_KEY, *names),
                *(0, 0),  # no excluded edges
            )


def derive_key(seed: int, purpose: int, *names: str) -> tuple[int, int]:
    """Return a Philox key that depends on the seed and on the name of a node or edge type."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest()
    low, high = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    words = philox4x32_reference(low, high, purpose, 0, *split_key(seed))
    return int(words[0]), int(words[1])


def _address(array: Tensor | None) -> int:
    return 0 if array is None else array.data_ptr()


def _check_degrees(relation: Relation) -> None:
    # positions are computed from 32-bit random words
    if len(relation.indices) > MAX_DEGREE and int(relation.indptr.diff().max()) > MAX_DEGREE:
        raise ValueError(
            f"a node has more than {MAX_DEGREE} in-edges of one type, too many to sample from\n\n"
            "hint: remove duplicate edges"
        )
