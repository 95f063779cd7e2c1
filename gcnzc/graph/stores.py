"""The nodes of one type, and the edges of one type, of a graph.

The edges of a type are stored in CSC format: column `i` has the sources of the in-edges of
destination `i`. Features of edges are stored in the order of the edge ids, which are the positions
in the edge list that the graph was built from; times and weights, which the sampler reads, in the
order of the columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.datasets.names import Names, NamesFolder, as_integers, read_names
from gcnzc.features.table import FeatureTable

EdgeType: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, eq=False)
class NodeStore:
    """The nodes of one type; tensors are on the host.

    Attributes:
        num_nodes: N.
        features: (N, D), each row contiguous, or sparse CSR; None without features, and for
            quantized features.
        quantized: quantized features.
        labels: (N,) or (N, T), int64 with -1 for no label, or float32.
        split: int64 ids of the "train", "valid" and "test" nodes.
        time: (N,) int64: a node is visible to seeds that are not earlier.
        names: ids of the nodes in their source, such as the primary keys of a table, and names of
            the classes; or the folder whose subfolder `mapping` has them, which is read when they
            are needed. None if nodes and classes are numbers.
    """

    num_nodes: int
    features: Tensor | None = None
    quantized: FeatureTable | None = None
    labels: Tensor | None = None
    split: Mapping[str, Tensor] = field(default_factory=dict)
    time: Tensor | None = None
    names: Names | NamesFolder | None = None

    @cached_property
    def table(self) -> FeatureTable | None:
        """The features as a `FeatureTable`, quantized or not; None without features."""
        return self.quantized if self.features is None else FeatureTable(self.features)

    @cached_property
    def keys(self) -> NDArray[Any] | None:
        """(N,) ids of the nodes in their source, int64 or str; None if they are 0 to N - 1.

        Raises:
            ValueError: the file of the ids is damaged, or their number is not N.
        """
        found = self.read_names("nodes").nodes
        if found is None:
            return None
        found = np.asarray(found)
        integers = found if found.dtype.kind == "i" else as_integers(found)
        if integers is None:
            return np.array(found, dtype=str)
        return None if bool((integers == np.arange(len(integers))).all()) else integers

    @cached_property
    def classes(self) -> Sequence[str] | None:
        """Names of the classes, or of the label columns if there are several; None without names.

        Raises:
            ValueError: the file of the names is damaged.
        """
        return self.read_names("classes").classes

    def read_names(self, *kinds: str) -> Names:
        """Return the names of some kinds, "nodes", "classes" or "features", as the source has them.

        Raises:
            ValueError: a file of names is damaged, or the number of ids of nodes is not N.
        """
        names = self.names if isinstance(self.names, Names) else read_names(self.names, kinds)
        if names.nodes is not None and len(names.nodes) != self.num_nodes:
            source, hint = "names.nodes", "give one id for each node"
            if isinstance(self.names, NamesFolder):
                source, hint = str(self.names.path), "prepare the folder again from its source"
            raise ValueError(
                f"{source} has {len(names.nodes):,} ids for {self.num_nodes:,} nodes\n\n"
                f"hint: {hint}"
            )
        return names


@dataclass(frozen=True, eq=False)
class EdgeStore:
    """The edges of one type, in CSC format; tensors are on the host.

    Attributes:
        indptr: (N_dst + 1,) int64 offsets of the columns.
        indices: (E,) sources, int32 for fewer than 2**31 source nodes, otherwise int64.
        edge_ids: (E,) int64 ids of the edges in `indices`; None if they are the positions.
        features: (E, D) by edge id; None without features, and for quantized features.
        quantized: quantized features by edge id.
        time: (E,) int64 times of the edges in `indices`.
        weight: (E,) float32 sampling weights of the edges in `indices`, at least 0.
    """

    indptr: Tensor
    indices: Tensor
    edge_ids: Tensor | None = None
    features: Tensor | None = None
    quantized: FeatureTable | None = None
    time: Tensor | None = None
    weight: Tensor | None = None

    @property
    def num_edges(self) -> int:
        """E."""
        return self.indices.shape[0]

    @cached_property
    def table(self) -> FeatureTable | None:
        """The features as a `FeatureTable`, quantized or not; None without features."""
        return self.quantized if self.features is None else FeatureTable(self.features)

    @cached_property
    def positions(self) -> Tensor | None:
        """(E,) int64 positions in `indices` by edge id; None if the ids are the positions."""
        if self.edge_ids is None:
            return None
        positions = torch.empty_like(self.edge_ids)
        positions[self.edge_ids] = torch.arange(self.num_edges)
        return positions

    def edge_index(self) -> Tensor:
        """Return the (2, E) int64 sources and destinations in the order of the edge ids."""
        targets = torch.arange(len(self.indptr) - 1).repeat_interleave(self.indptr.diff())
        columns = torch.stack([self.indices.long(), targets])
        if self.edge_ids is None:
            return columns
        ordered = torch.empty_like(columns)
        ordered[:, self.edge_ids] = columns
        return ordered
