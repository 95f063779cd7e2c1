"""Convert dicts of arrays and edge lists to the nodes and edges of a type."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gcnzc.datasets.names import Names
from gcnzc.datasets.source import describe_gap
from gcnzc.graph import values
from gcnzc.graph.stores import EdgeStore, EdgeType, NodeStore
from gcnzc.graph.times import TimeUnit, as_times, to_dates
from gcnzc.graph.values import check_length
from gcnzc.kernels.structure.bipartite import bipartite_csc, sort_by_time
from gcnzc.system.arguments import check_integer, describe

_log = logging.getLogger("gcnzc")
NODE_KEYS = ("num_nodes", "features", "labels", "split", "time", "keys", "classes")
EDGE_KEYS = ("edge_index", "features", "time", "weight")


def have_dates(nodes: Mapping[str, Any], edges: Mapping[EdgeType, Any]) -> bool:
    """Return whether times are dates.

    Raises:
        ValueError: those of some types are dates, and those of others are integers.
    """
    # the first type with integers and the first one with dates
    first: dict[bool, str] = {}
    for what, given_by_type in (("node", nodes), ("edge", edges)):
        for each, given in given_by_type.items():
            time = given.get("time") if isinstance(given, Mapping) else None
            if time is None or not _length(time):
                continue
            name, is_date = f"{what} type {each!r}", to_dates(time) is not None
            # `as_times` rejects other values
            if is_date or values.to_array(f"time of {name}", time).dtype.kind in "iuf":
                first.setdefault(is_date, name)
    if len(first) == 2:
        raise ValueError(
            f"the times of {first[True]} are dates, but those of {first[False]} are integers of an "
            "unknown unit\n\nhint: convert the integers to dates, for example with "
            "pandas.to_datetime; if they count seconds since 1970, pass time_unit='s'; likewise "
            "'ms', 'us' and 'ns'"
        )
    return True in first


def sorted_kinds(
    stores: Mapping[str, NodeStore], edges: Mapping[EdgeType, EdgeStore], edge_type: EdgeType
) -> tuple[str, ...]:
    """Return the kinds of time by which the columns of a new graph are sorted."""
    has_edge_time = edges[edge_type].time is not None
    has_node_time = stores[edge_type[0]].time is not None
    if has_edge_time and has_node_time:
        return ("both",)
    return ("both", "edge") if has_edge_time else ("both", "node")


def node_store(node_type: str, given: Any, unit: TimeUnit | None) -> NodeStore:
    """Return the nodes of a type from the values of `Graph.from_arrays`."""
    name = f"of node type {node_type!r}"
    if not isinstance(given, Mapping):
        given = {"num_nodes": given}
    _check_keys(f"node type {node_type!r}", given, NODE_KEYS)
    count = given.get("num_nodes")
    if count is None:
        count = next(
            (
                _length(given[key])
                for key in ("features", "labels", "time", "keys")
                if given.get(key) is not None
            ),
            None,
        )
    if count is None:
        raise ValueError(
            f"the number of nodes {name} is unknown: it has no num_nodes, features, labels, time "
            "or keys"
        )
    count = check_integer(f"num_nodes {name}", count, 0)

    def convert(function: Any, key: str, *more: Any) -> Any:
        value = given.get(key)
        return None if value is None else function(f"{key} {name}", value, count, *more)

    labels, keys, classes = convert(values.as_labels, "labels"), convert(as_keys, "keys"), None
    if (
        labels is not None
        and given.get("classes") is None
        and (gap := describe_gap(labels.numpy()))
    ):
        _log.warning("node type %r: %s", node_type, gap)
    if given.get("classes") is not None:
        classes = as_class_names(f"classes {name}", given["classes"], labels)
    has_names = keys is not None or classes is not None
    return NodeStore(
        count,
        features=convert(values.as_features, "features"),
        labels=labels,
        split=convert(values.as_split, "split") or {},
        time=convert(as_times, "time", unit),
        names=Names(keys, classes) if has_names else None,
    )


def _length(value: Any) -> int:
    # SciPy matrices have no length
    return int(value.shape[0]) if hasattr(value, "tocsr") else len(value)


def edge_store(
    edge_type: EdgeType, given: Any, nodes: Mapping[str, NodeStore], unit: TimeUnit | None
) -> EdgeStore:
    """Return the edges of a type from the values of `Graph.from_arrays`."""
    name = f"of edge type {edge_type}"
    if not isinstance(given, Mapping):
        given = {"edge_index": given}
    _check_keys(f"edge type {edge_type}", given, EDGE_KEYS)
    if given.get("edge_index") is None:
        raise ValueError(f"edge type {edge_type} has no edge_index of shape (2, E)")
    src, dst = _ends(f"edge_index {name}", given["edge_index"])
    source, target = nodes[edge_type[0]], nodes[edge_type[2]]
    try:
        indptr, indices, order = bipartite_csc(src, dst, source.num_nodes, target.num_nodes)
    except IndexError as error:
        place = int(error.args[0])
        raise ValueError(
            f"edge {place} {name} goes from {src[place]} to {dst[place]}, but {edge_type[0]!r} has "
            f"{source.num_nodes} nodes and {edge_type[2]!r} has {target.num_nodes}\n\n"
            "hint: ids are numbered from 0 in each type; num_nodes= of a type sets its size"
        ) from None

    def convert(function: Any, key: str, *more: Any) -> Any:
        value = given.get(key)
        return None if value is None else function(f"{key} {name}", value, len(src), *more)

    time, weight = convert(as_times, "time", unit), convert(values.as_weights, "weight")
    node_time = None if source.time is None else source.time.numpy()
    if time is not None or node_time is not None:
        sort_by_time(indptr, indices, order, None if time is None else time.numpy(), node_time)
    ids = torch.from_numpy(order)
    is_in_order = bool((np.diff(order) == 1).all()) and (not len(order) or order[0] == 0)
    return EdgeStore(
        torch.from_numpy(indptr),
        torch.from_numpy(indices),
        edge_ids=None if is_in_order else ids,
        features=convert(values.as_features, "features"),
        time=None if time is None else time[ids],
        weight=None if weight is None else weight[ids],
    )


def _ends(name: str, given: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    if isinstance(given, tuple | list) and len(given) == 2:
        ends = [values.to_array(name, ids) for ids in given]
    else:
        pair = values.to_array(name, given)
        if pair.ndim != 2 or len(pair) != 2:
            raise ValueError(f"{name} has shape {pair.shape}, not (2, E)")
        ends = list(pair)
    if any(ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size) for ids in ends):
        raise ValueError(
            f"{name} has the types {ends[0].dtype} and {ends[1].dtype} and the shapes "
            f"{ends[0].shape} and {ends[1].shape}, not (E,) integers"
        )
    if len(ends[0]) != len(ends[1]):
        raise ValueError(f"{name} has {len(ends[0])} sources and {len(ends[1])} destinations")
    dtype = np.int32 if all(ids.dtype == np.int32 for ids in ends) else np.int64
    return ends[0].astype(dtype, copy=False), ends[1].astype(dtype, copy=False)


def _check_keys(what: str, given: Mapping[str, Any], keys: tuple[str, ...]) -> None:
    unknown = [key for key in given if key not in keys]
    if unknown:
        raise ValueError(f"{what} has the key {unknown[0]!r:.100}, not of {', '.join(keys)}")


def as_keys(name: str, value: Any, count: int) -> NDArray[Any] | None:
    """Return ids of nodes as (N,) int64, or as text; None if they are 0 to N - 1 in this order.

    Args:
        name: of the values, for messages.
        value: (N,) integers or values of any kind, such as a column of a table; the text of a value
            is its `str`.
        count: N.

    Raises:
        ValueError: an id is missing or occurs twice, or the shape is wrong.
    """
    import pandas

    given = value.cpu().numpy() if isinstance(value, Tensor) else value
    if isinstance(given, str) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) != 1:
        raise ValueError(f"{name} are {describe(value)}, not one key for each node")
    index = pandas.Index(given, tupleize_cols=False)
    check_length(name, np.empty(len(index), np.int8), count, dimensions=(1,))
    if index.hasnans:
        raise ValueError(f"{name} have missing values")
    if getattr(index.dtype, "kind", "O") in "iu" and (not count or index.max() < 2**63):
        keys: NDArray[Any] = index.to_numpy().astype(np.int64, copy=False)
    else:
        keys = np.empty(count, object)
        keys[:] = [str(each) for each in index]
        _check_characters(name, keys)
        index = pandas.Index(keys, dtype=object)
    if not index.is_unique:
        raise ValueError(f"{name} have {str(index[index.duplicated()][0])!r:.100} twice")
    are_positions = keys.dtype.kind == "i" and bool((keys == np.arange(count)).all())
    return None if are_positions else keys


def _check_characters(name: str, texts: Iterable[str]) -> None:
    """Raise a ValueError if a text has a NUL, at which numpy ends texts."""
    if wrong := next((each for each in texts if "\0" in each), None):
        raise ValueError(f"{name} have {wrong!r:.100}, which has a NUL character")


def as_class_names(name: str, value: Any, labels: Tensor | None) -> list[str]:
    """Return names of classes, or of several columns of labels.

    Args:
        name: of the values, for messages.
        value: the name of each class; or of each of the T columns of labels, if there are several.
        labels: (N,) int64, or (N, T).

    Raises:
        ValueError: there are no classes, a name occurs twice, or their number does not fit the
            labels.
    """
    if labels is None or (labels.ndim == 1 and labels.is_floating_point()):
        raise ValueError(f"{name} are given, but the nodes have no class labels")
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"{name} are {describe(value)}, not a list of names")
    found = [str(each) for each in value]
    _check_characters(name, found)
    if len(set(found)) < len(found):
        twice = next(each for each in found if found.count(each) > 1)
        raise ValueError(f"{name} have {twice!r:.100} twice")
    columns = labels.shape[1] if labels.ndim == 2 else 1
    if columns > 1:
        fits, wanted = len(found) == columns, f"{columns} columns of labels"
    else:
        last = int(labels.nan_to_num(-1).max()) if labels.numel() else -1
        fits, wanted = len(found) > last, f"{last + 1} or more classes"
    if not fits:
        raise ValueError(f"{len(found)} names are given as {name} for {wanted}")
    return found
