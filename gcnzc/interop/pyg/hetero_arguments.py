"""Check the arguments of the PyG loaders that concern heterogeneous graphs."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from torch import Tensor

from gcnzc.features.table import FeatureTable
from gcnzc.graph.hetero.graph import EdgeType, HeteroGraph
from gcnzc.graph.hetero.times import as_times
from gcnzc.interop.options import check_tables
from gcnzc.interop.pyg.arguments import check_edges, check_node_ids
from gcnzc.interop.pyg.hetero_graph import Key, TypedGraph
from gcnzc.interop.pyg.importing import import_pyg
from gcnzc.sampling.hetero import DEFAULT, Strategy, SubgraphType, check_num_neighbors
from gcnzc.system.arguments import check_choice, check_flag, describe

SUBGRAPH_TYPES = ("directional", "bidirectional", "induced")
STRATEGIES = ("uniform", "last")


@dataclass(frozen=True)
class Sampling:
    """How a loader samples; see `gcnzc.sampling.HeteroSampler`.

    Attributes:
        num_neighbors: for `HeteroSampler`, with at least one hop.
        num_hops: the number of hops that the user gave, which may be 0.
    """

    num_neighbors: Any
    num_hops: int
    replace: bool
    weighted: bool
    disjoint: bool
    temporal: Strategy | None
    subgraph_type: SubgraphType


@dataclass(frozen=True)
class SamplingArguments:
    """PyG's arguments about sampling, which its node loader and its link loader share.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument has an unknown value.
    """

    replace: bool = False
    subgraph_type: str = "directional"
    directed: bool = True
    disjoint: bool = False
    temporal_strategy: str = "uniform"
    time_attr: str | None = None
    weight_attr: str | None = None

    def __post_init__(self) -> None:
        """Check the types and values."""
        # a member of PyG's enumeration, or its value
        subgraph_type = getattr(self.subgraph_type, "value", self.subgraph_type)
        object.__setattr__(self, "subgraph_type", subgraph_type)
        check_choice("subgraph_type", subgraph_type, SUBGRAPH_TYPES)
        check_choice("temporal_strategy", self.temporal_strategy, STRATEGIES)
        for name in ("replace", "directed", "disjoint"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        for name in ("time_attr", "weight_attr"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} is {describe(value)}, not the name of an attribute")

    @property
    def is_plain(self) -> bool:
        """Whether neighbours are sampled uniformly, without replacement, in one subgraph."""
        return replace(self, temporal_strategy="uniform") == SamplingArguments()

    def keep_in(self, loader: Any) -> None:
        """Set attributes of a loader that are named like the arguments.

        Lightning reads them to reconstruct the loader.
        """
        for own in fields(self):
            setattr(loader, own.name, getattr(self, own.name))

    def sampling(self, typed: TypedGraph, num_neighbors: Any) -> Sampling:
        """Return how to sample from a graph.

        Raises:
            TypeError: `num_neighbors` has a wrong type.
            ValueError: `num_neighbors` does not fit the graph.
        """
        fanouts, num_hops = _fanouts(typed.graph, num_neighbors)
        return Sampling(
            fanouts,
            num_hops,
            replace=self.replace,
            weighted=self.weight_attr is not None,
            disjoint=self.disjoint,
            temporal=None if typed.time is None else cast(Strategy, self.temporal_strategy),
            # `directed=False` is PyG's older form of this argument
            subgraph_type=cast(SubgraphType, self.subgraph_type if self.directed else "induced"),
        )


def _fanouts(graph: HeteroGraph, given: Any) -> tuple[Any, int]:
    """Return the numbers of neighbours for `HeteroSampler`, and the number of hops."""
    if isinstance(given, import_pyg().sampler.base.NumNeighbors):
        default = given.default
        given = given.values
        if default is not None:
            given = {**given, DEFAULT: default}
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 0:
        # `HeteroSampler` needs at least one hop: without any, one hop of no neighbours
        return [0], 0
    if isinstance(given, Mapping):
        given = {_edge_type(key): own for key, own in given.items()}
    found = check_num_neighbors(graph, given)
    return given, len(next(iter(found.values()), ()))


def _edge_type(key: Any) -> Any:
    """Return an edge type, which PyG also writes without the relation "to", as a triple."""
    is_pair = isinstance(key, tuple) and len(key) == 2
    return (key[0], "to", key[1]) if is_pair else key


def check_typed_nodes(
    input_nodes: Any, input_id: Tensor | None, graph: HeteroGraph
) -> tuple[str, Tensor, Tensor | None]:
    """Return the type of the nodes to iterate over, their ids, and their input ids.

    Raises:
        TypeError: there is no node type, or the ids have a wrong type.
        ValueError: the node type is unknown, or there are neither ids nor a mask of its nodes.
    """
    hint = "hint: 'paper', or a pair such as ('paper', mask)"
    node_type, nodes = input_nodes, None
    if isinstance(input_nodes, list | tuple) and len(input_nodes) == 2:
        node_type, nodes = input_nodes
    if not isinstance(node_type, str):
        what = "a dict" if isinstance(input_nodes, Mapping) else describe(input_nodes)
        raise TypeError(f"input_nodes is {what}, without a node type\n\n{hint}")
    if node_type not in graph.node_types:
        raise ValueError(
            f"input_nodes has the node type {node_type!r:.100}, which the data does not have"
        )
    return node_type, *check_node_ids(nodes, input_id, graph.num_nodes(node_type))


def check_times(
    name: str, given: Any, typed: TypedGraph | None, num_items: int, node_type: str | None = None
) -> Tensor | None:
    """Return the times of the items, int64; None if none are given.

    Args:
        name: of the argument.
        given: as given by the user.
        typed: the graph; None if sampling is not temporal.
        num_items: the number of items.
        node_type: the type of the items if they are nodes, which may have times of their own.

    Raises:
        ValueError: there are times but no `time_attr`, or the reverse, or the times are wrong.
    """
    if typed is not None and typed.time is None:
        typed = None
    if given is None:
        if typed is not None and (node_type is None or typed.graph.nodes(node_type).time is None):
            of = "" if node_type is None else f", and the nodes of type {node_type!r} have no times"
            raise ValueError(f"time_attr was given, but {name!r} is not set{of}")
        return None
    if typed is None:
        raise ValueError(f"{name} was given without time_attr")
    return as_times(name, given, num_items, typed.graph.time_unit, is_limit=True)


def check_typed_edges(given: Any, data: Any, graph: HeteroGraph) -> tuple[EdgeType, Tensor]:
    """Return the type of the edges to iterate over, and the (2, E) edges.

    Raises:
        TypeError: there is no edge type, or the edges have a wrong type.
        ValueError: the edge type is unknown, or an edge has ids that are not nodes.
    """
    hint = "hint: an edge type, or a pair such as (('user', 'buys', 'item'), edge_label_index)"
    is_type = isinstance(given, list | tuple) and all(isinstance(name, str) for name in given)
    named, edges = (given, None) if is_type or not isinstance(given, list | tuple) else given[:2]
    is_type = isinstance(named, list | tuple) and all(isinstance(name, str) for name in named)
    if not is_type or len(named) not in (2, 3) or (named is not given and len(given) != 2):
        raise TypeError(f"edge_label_index is {describe(given)}, without an edge type\n\n{hint}")
    edge_type = _canonical_type(tuple(named), graph)
    num_nodes = []
    for node_type in edge_type[::2]:
        if node_type not in graph.node_types:
            raise ValueError(
                f"edge_label_index has the node type {node_type!r:.100}, which the data does not "
                "have"
            )
        num_nodes.append(graph.num_nodes(node_type))
    if edges is None:
        edges = data[graph.edge_type(edge_type)].edge_index
    if isinstance(edges, import_pyg().EdgeIndex):
        edges = edges.as_tensor()
    found = check_edges(edges, max(num_nodes))
    for ids, node_type, number in zip(found, edge_type[::2], num_nodes, strict=True):
        if len(ids) and int(ids.max()) >= number:
            raise ValueError(
                f"edge_label_index has the {node_type!r} node {int(ids.max())}, but the data has "
                f"{number}"
            )
    return edge_type, found


def _canonical_type(names: tuple[str, ...], graph: HeteroGraph) -> EdgeType:
    """Return an edge type given without its relation: the only one, or else "to", as in PyG."""
    if len(names) == 3:
        return names
    found = [each for each in graph.edge_types if (each[0], each[2]) == names]
    return found[0] if len(found) == 1 else (names[0], "to", names[1])


def times_crc32(times: Tensor | None) -> int:
    """Return a number that identifies the times of items, for a loader's state."""
    return zlib.crc32(b"" if times is None else times.numpy().tobytes())


def check_typed_tables(tables: Any, graph: HeteroGraph) -> Mapping[Key, FeatureTable] | None:
    """Check that `tables` is None or has tables by pairs of a type and an attribute's name.

    Raises:
        TypeError: it is not a mapping of tables.
        ValueError: a key is not such a pair.
    """
    check_tables(tables)
    kinds: list[Any] = [*graph.node_types, *graph.edge_types]
    for key in tables or {}:
        if not (isinstance(key, tuple) and len(key) == 2 and key[0] in kinds):
            raise ValueError(f"tables has the key {key!r:.200}, not a pair of a type and a name")
    return cast("Mapping[Key, FeatureTable] | None", tables)
