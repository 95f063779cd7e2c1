"""The loader inside of a drop-in loader, whose sampler prepares another library's minibatches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from typing_extensions import Self

from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.loader.loader import Loader
from gcnzc.loader.transfer import Transfer
from gcnzc.sampling.batch import ONE_TYPE, Batch

T = TypeVar("T")

# `Loader` requires a graph, and uses it only for minibatches of its own samplers
NO_GRAPH = Graph.from_edges(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), 1)


@dataclass
class LibraryBatch(Batch):
    """A minibatch of `InnerLoader`, with the other parts of the library's in `parts`."""

    parts: Any = None


class InnerLoader(Loader):
    """A `Loader` that can gather the features of several node types.

    Args:
        graph: see `Loader`.
        tables: features by the node types of the minibatches. Those of `ONE_TYPE` are gathered for
            any device, and those of other types only for a GPU.
        args, kwargs: the other arguments of `Loader`.
    """

    def __init__(
        self, graph: Graph, tables: Mapping[str, FeatureTable], *args: Any, **kwargs: Any
    ) -> None:
        self.tables = tables
        super().__init__(graph, tables.get(ONE_TYPE), *args, **kwargs)

    def with_sampler(self, sampler: Any) -> Self:
        """Return a loader with another sampler, and the same streams and memory."""
        other = share_attributes(self)
        other.sampler = sampler
        return other

    def _open_transfer(self, table: Any, *args: Any, **kwargs: Any) -> Transfer:
        return super()._open_transfer(self.tables, *args, **kwargs)


def share_attributes(loader: T) -> T:
    """Return a loader with the same attributes; `copy.copy` would construct another."""
    other = object.__new__(type(loader))
    vars(other).update(vars(loader))
    return other
