"""The nodes or edges that a DGL loader iterates over, of one type or several."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gcnzc.interop.dgl.blocks import Kind
from gcnzc.interop.dgl.hetero_arguments import find_type
from gcnzc.system.arguments import as_ids, describe


@dataclass(frozen=True, eq=False)
class Items:
    """Ids of nodes or edges by type; an item is an index of the ids of all types in their order.

    Attributes:
        by_type: for node types, or edge types, int64 ids on the host, without duplicates.
    """

    by_type: Mapping[Kind, Tensor]

    @cached_property
    def ids(self) -> Tensor:
        """(S,) int64 ids of all types."""
        return torch.cat([*self.by_type.values()])

    def select(self, items: Tensor) -> dict[Kind, Tensor]:
        """Return the ids of a minibatch by type, each in the order of the items.

        Types without items are left out, as in DGL.

        Args:
            items: (B,) int64 indices of `ids`.
        """
        ids = self.ids[items]
        ends = np.cumsum([len(own) for own in self.by_type.values()])
        types = torch.from_numpy(np.searchsorted(ends, items.numpy(), side="right"))
        found = {kind: ids[types == number] for number, kind in enumerate(self.by_type)}
        return {kind: own for kind, own in found.items() if len(own)}


def check_items(indices: Any, graph: Any, is_edges: bool) -> Items:
    """Return `indices` by type.

    Args:
        indices: a dict of ids by type, or ids if the graph has one type of nodes, or of edges.
        graph: a DGL graph.
        is_edges: whether they are edges.

    Raises:
        TypeError: ids are not integers.
        ValueError: a type is unknown or missing, or an id is out of range or occurs twice.
    """
    types = graph.canonical_etypes if is_edges else graph.ntypes
    if not isinstance(indices, Mapping):
        if len(types) > 1:
            what = "edge" if is_edges else "node"
            raise ValueError(
                f"indices is {describe(indices)}, but the graph has several {what} types\n\n"
                f"hint: a dict of ids by type, such as {{{types[0]!r}: ids}}"
            )
        return Items({types[0]: _check_ids("indices", indices, graph, types[0])})
    found: dict[Kind, Tensor] = {}
    for key, ids in indices.items():
        kind = find_type("indices", graph, key, is_edges)
        if kind in found:
            raise ValueError(f"indices has the type {kind!r} twice\n\nhint: remove one")
        found[kind] = _check_ids(f"indices[{key!r}]", ids, graph, kind)
    if not found:
        raise ValueError("indices is a dict without types\n\nhint: {'paper': ids}")
    return Items(found)


def _check_ids(name: str, indices: Any, graph: Any, kind: Kind) -> Tensor:
    ids = as_ids(name, indices, "a mask becomes ids with .nonzero().flatten()").cpu()
    if isinstance(kind, str):
        count, what = graph.num_nodes(kind), "nodes"
    else:
        count, what = graph.num_edges(kind), "edges"
    if len(ids):
        ordered = ids.sort().values
        if ordered[0] < 0 or ordered[-1] >= count:
            raise ValueError(
                f"{name} reach from {int(ordered[0])} to {int(ordered[-1])}, but the graph has "
                f"{count} {what}{_of(graph, kind)}\n\nhint: {what} are counted from 0"
            )
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice) > 0:
            raise ValueError(
                f"index {int(twice[0])} occurs twice in {name} ({len(twice)} duplicates in all)"
                "\n\nhint: indices.unique()"
            )
    return ids


def _of(graph: Any, kind: Kind) -> str:
    types = graph.ntypes if isinstance(kind, str) else graph.canonical_etypes
    return f" of type {kind}" if len(types) > 1 else ""
