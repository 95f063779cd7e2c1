"""A small random graph, in every format that can be read."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.ogb_folders import write_nodes
from gcnzc.datasets.rows import Rows, allocate_in_memory


def rows_of(table: Rows) -> NDArray[Any]:
    """All rows of a table that is read in chunks."""
    return np.concatenate([chunk.copy() for chunk in table.chunks(allocate_in_memory)])


def edges_of(graph: Any) -> NDArray[Any]:
    """All edges of a generated graph."""
    return np.concatenate(list(graph.edge_chunks()), axis=1)


@dataclass(frozen=True)
class Tiny:
    edge_index: NDArray[Any]
    labels: NDArray[Any]
    features: NDArray[Any] | None
    split: dict[str, NDArray[Any]]

    def write(self, path: Path, **how: Any) -> Path:
        """In OGB's layout."""
        write_nodes(path, self.edge_index, self.labels, self.split, features=self.features, **how)
        return path

    def write_npz(self, path: Path, **more: Any) -> Path:
        """As an archive."""
        arrays = {"edge_index": self.edge_index, "node_label": self.labels}
        if self.features is not None:
            arrays["node_feat"] = self.features
        arrays |= {f"{part}_idx": ids for part, ids in self.split.items()}
        np.savez(path, **(arrays | more))
        return path

    def but(self, **changes: Any) -> "Tiny":
        return replace(self, **changes)


def tiny(num_nodes: int = 40, num_edges: int = 200, num_columns: int = 5, seed: int = 0) -> Tiny:
    random = np.random.default_rng(seed)
    order = random.permutation(num_nodes)
    split = {"train": order[: num_nodes // 2], "valid": order[-4:-2], "test": order[-2:]}
    labels = random.integers(3, size=num_nodes)
    labels[:3] = 0, 1, 2
    return Tiny(
        random.integers(num_nodes, size=(2, num_edges)),
        labels,
        random.standard_normal((num_nodes, num_columns)).astype(np.float32),
        split,
    )
