"""What the model of a run reads and predicts: its features, and its classes or label columns."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gcnzc.graph.dataset import Dataset
from gcnzc.system import files
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.run_folder import SCHEMA

# fields whose keys in the file have another name, as in prepared folders
STORED_KEYS = {"num_label_columns": "num_tasks"}
FIELDS = {key: field for field, key in STORED_KEYS.items()}


@dataclass(frozen=True)
class Schema:
    """Numbers and names of the inputs and outputs of a model."""

    num_classes: int
    """of each label column"""
    num_label_columns: int
    """1 for classes"""
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
    names = data.names
    schema = Schema(data.num_classes, num_label_columns, names.features, names.classes)
    if isinstance(data, Dataset):
        return schema
    node_types, edge_types = data.graph.metadata()
    return dataclasses.replace(
        schema,
        node_types=node_types,
        edge_types=list(map(list, edge_types)),
        target=data.target or None,
    )


def write_schema(run: Path, data: Dataset | HeteroDataset) -> None:
    """Write the schema of a new run to its folder."""
    fields = dataclasses.asdict(schema_of(data))
    if isinstance(data, Dataset):
        del fields["node_types"], fields["edge_types"], fields["target"]
    files.write_json(run / SCHEMA, {STORED_KEYS.get(key, key): fields[key] for key in fields})


def read_schema(run: Path) -> Schema:
    """Read the schema of a run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged.
    """
    path, remedy = run / SCHEMA, "restore it from a copy, or train again"
    if not path.is_file():
        raise FileNotFoundError(f"the run in {run} has no {SCHEMA}\n\nhint: {remedy}")
    stored = files.read_json(path, remedy)
    try:
        schema = Schema(**{FIELDS.get(key, key): value for key, value in stored.items()})
        _check(schema)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}\n\nhint: {remedy}") from None
    return schema


def _check(schema: Schema) -> None:
    """Raise a TypeError if the fields are inconsistent."""
    # a graph for link prediction may have no labels
    for name, least in (("num_classes", 0), ("num_label_columns", 1)):
        value = getattr(schema, name)
        if type(value) is not int or value < least:
            raise TypeError(f"{STORED_KEYS.get(name, name)} is {value!r:.100}")
    for name, count in (("features", None), ("classes", schema.num_outputs)):
        names = getattr(schema, name)
        if names is None:
            continue
        is_list = isinstance(names, list) and all(isinstance(each, str) for each in names)
        if not is_list or (count is not None and len(names) != count):
            number = "" if count is None else f"{count} "
            raise TypeError(f"{name} is {names!r:.100}, not a list of {number}names")
    if not isinstance(schema.target, str | None):
        raise TypeError(f"target is {schema.target!r:.100}")


def check_names(schema: Schema, data: Dataset | HeteroDataset, source: Path) -> None:
    """Check that features and classes of a graph have the names that the model was trained with.

    Args:
        schema: of the run.
        data: the graph.
        source: its folder.

    Raises:
        ValueError: both have names, and one differs.
    """
    if isinstance(data, HeteroDataset):
        own, theirs = ([of.node_types, of.edge_types] for of in (schema_of(data), schema))
        if own != theirs:
            raise ValueError(
                f"{source} has the types {own}, but the model was trained with {theirs}\n\n"
                "hint: a model fits only graphs with the same node types and edge types, in the "
                "same order"
            )
    names = data.names
    for what, trained, here, key in (
        ("column of features", schema.features, names.features, "features"),
        ("class", schema.classes, names.classes, "classes"),
    ):
        if trained is None or here is None or list(trained) == list(here):
            continue
        longer = max(len(trained), len(here))
        number = next(i for i in range(longer) if trained[i : i + 1] != here[i : i + 1])
        found, expected = (
            str((*each[number : number + 1], "absent")[0]) for each in (here, trained)
        )
        raise ValueError(
            f"{source}: {what} {number} is {found!r}, but the model was trained with "
            f"{expected!r}\n\n"
            f"hint: prepare the graph again with {key} in the order of the run, which "
            f"{SCHEMA} in its folder lists"
        )
