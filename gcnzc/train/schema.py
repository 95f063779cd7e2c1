"""What the model of a run reads and predicts: its features, and its classes or label columns."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from gcnzc.graph.dataset import Dataset
from gcnzc.system import files
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.run_folder import SCHEMA


@dataclass(frozen=True)
class Schema:
    """Numbers and names of the inputs and outputs of a model."""

    num_classes: int
    """of each label column"""
    num_label_columns: int
    """1 for classes"""
    num_features: Mapping[str, int]
    """columns of features by node type; the only type of other graphs is empty"""
    features: Sequence[str] | None = None
    """names of the columns of features; None if they have none"""
    classes: Sequence[str] | None = None
    """names of the classes; None if they have none"""
    node_types: Sequence[str] | None = None
    """of a heterogeneous graph, in their order"""
    edge_types: Sequence[Sequence[str]] | None = None
    """of a heterogeneous graph, in their order"""
    target: str | None = None
    """in node classification on a heterogeneous graph, the type of the nodes"""

    @property
    def num_outputs(self) -> int:
        """The columns of the logits: classes, or label columns if there are several."""
        return self.num_classes if self.num_label_columns == 1 else self.num_label_columns

    @property
    def is_multi_label(self) -> bool:
        """Whether nodes have several labels, each 0 or 1, instead of a class."""
        return self.num_label_columns > 1


def schema_of(data: Dataset | HeteroDataset) -> Schema:
    """Return the schema of models that are trained on a graph."""
    num_label_columns = 1 if data.labels.ndim == 1 else data.labels.shape[1]
    names, types = data.names, dict[str, Any]()
    tables: Mapping[str, Any] = {} if data.table is None else {"": data.table}
    if isinstance(data, HeteroDataset):
        tables = data.table.tables
        node_types, edge_types = data.graph.metadata()
        types = {
            "node_types": node_types,
            "edge_types": list(map(list, edge_types)),
            "target": data.target or None,
        }
    columns = {name: table.num_columns for name, table in tables.items()}
    sizes = data.num_classes, num_label_columns, columns
    return Schema(*sizes, names.features, names.classes, **types)


def write_schema(run: Path, data: Dataset | HeteroDataset) -> None:
    """Write the schema of a new run to its folder."""
    files.write_json(run / SCHEMA, asdict(schema_of(data)))


def read_schema(run: Path) -> Schema:
    """Read the schema of a run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged.
    """
    path, remedy = run / SCHEMA, "restore it from a copy, or train again"
    if not path.is_file():
        raise FileNotFoundError(f"the run in {run} has no {SCHEMA}\n\nhint: {remedy}")
    try:
        schema = Schema(**files.read_json(path, remedy))
    except TypeError as error:
        raise ValueError(f"{path} is damaged: {error}\n\nhint: {remedy}") from None
    classes, num_classes, columns = schema.classes, schema.num_classes, schema.num_label_columns
    valid = {
        # a graph for link prediction may have no labels
        "num_classes": type(num_classes) is int and num_classes >= 0,
        "num_label_columns": type(columns) is int and columns >= 1,
        "num_features": isinstance(schema.num_features, dict),
        "features": _are_names(schema.features),
        "classes": _are_names(classes) and len(classes or ()) in (0, schema.num_outputs),
        "target": isinstance(schema.target, str | None),
    }
    for name, is_valid in valid.items():
        if not is_valid:
            value = getattr(schema, name)
            raise ValueError(f"{path} is damaged: {name} is {value!r:.100}\n\nhint: {remedy}")
    return schema


def _are_names(value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return value is None or is_list


def check_graph(schema: Schema, data: Dataset | HeteroDataset, source: Path) -> None:
    """Check that a graph has the features and classes that the model was trained with.

    Args:
        schema: of the run.
        data: the graph.
        source: its folder.

    Raises:
        ValueError: both have names, and one differs; or a number of features differs.
    """
    if isinstance(data, HeteroDataset):
        own, theirs = ([of.node_types, of.edge_types] for of in (schema_of(data), schema))
        if own != theirs:
            raise ValueError(
                f"{source} has the types {own}, but the model was trained with {theirs}\n\n"
                "hint: a model fits only graphs with the same node types and edge types, in the "
                "same order"
            )
    for what, trained, here, key in (
        ("column of features", schema.features, data.names.features, "features"),
        ("class", schema.classes, data.names.classes, "classes"),
    ):
        if trained is None or here is None:
            continue
        for number, (expected, found) in enumerate(zip_longest(trained, here, fillvalue="absent")):
            if found != expected:
                raise ValueError(
                    f"{source}: {what} {number} is {str(found)!r}, but the model was trained with "
                    f"{expected!r}\n\n"
                    f"hint: prepare the graph again with {key} in the order of the run, which "
                    f"{SCHEMA} in its folder lists"
                )
    columns = schema_of(data).num_features
    for name in {**schema.num_features, **columns}:
        count, trained_count = columns.get(name, 0), schema.num_features.get(name, 0)
        if count != trained_count:
            of = f" of node type {name!r}" if name else ""
            raise ValueError(
                f"{source} has {count} columns of features{of}, but the model was trained with "
                f"{trained_count}\n\nhint: a model fits only graphs with the same features; "
                "without DATA, the graph of the run is used"
            )
