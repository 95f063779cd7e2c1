"""Find the weights and features of edges in a graph object, which prepared folders do not store."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# attributes of a PyG `Data`
PYG_NAMES = ("edge_weight", "edge_attr")


def names_of_values(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the values that distinguish edges: those that are not all 1.

    Args:
        values: weights or features of the edges by name; None for a name without values.
    """
    return tuple(name for name, each in values.items() if each is not None and not _are_one(each))


def note_of_values(names: tuple[str, ...]) -> str:
    """Return the message that these values are not stored."""
    return (
        f"not stored: {', '.join(names)}; a prepared folder has no weights and no features of "
        "edges, so all edges count the same"
    )


def values_of_networkx(graph: Any) -> dict[str, Any]:
    """Return the weights of the edges of a networkx graph; an edge without one has weight 1."""
    return {"weight": [weight for *_, weight in graph.edges(data="weight", default=1)]}


def values_of_pyg(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights and features of the edges of a PyG `Data`, as a dict."""
    return {name: attributes.get(name) for name in PYG_NAMES}


def values_of_dgl(graph: Any) -> dict[str, Any]:
    """Return the edge data of a DGL graph, except ids of DGL's and masks."""
    return {
        f"edata[{name!r}]": value
        for name, value in graph.edata.items()
        if not name.startswith("_") and not name.endswith("_mask")
    }


def values_of_table(table: Any, ends: tuple[Any, Any]) -> dict[str, Any]:
    """Return the columns of a pandas table of edges, except those of their ends."""
    columns = [column for column in table.columns if column not in ends]
    return {f"column {column}": table[column].to_numpy() for column in columns}


def _are_one(values: Any) -> bool:
    if isinstance(values, Tensor):
        return values.layout == torch.strided and bool((values == 1).all())
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        return False
    return array.dtype.kind in "biuf" and bool((array == 1).all())
