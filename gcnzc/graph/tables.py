"""Build graphs from the tables of a relational database.

Each table is a node type, and each row a node. A foreign key is an edge type from the rows that
have it to the rows that it refers to, and a second edge type in the reverse direction, with the
names that RelBench gives them (Robinson et al., 2024, https://arxiv.org/abs/2407.20060).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcnzc.datasets.source import part_of
from gcnzc.graph.graph import Graph
from gcnzc.graph.times import TimeUnit, to_dates
from gcnzc.graph.values import first_true
from gcnzc.system.arguments import check_flag, check_kind, describe


@dataclass(frozen=True, eq=False)
class Table:
    """A table of a database.

    Attributes:
        frame: a `pandas.DataFrame`; rows are nodes in this order.
        primary_key: column whose values identify the rows; None if no other table refers to it.
        foreign_keys: for each column with keys of another table, the name of that table.
        time: column with the time of a row: integers or dates; None for a table that is always
            visible.
        features: columns of numbers that become the features, in this order.
    """

    frame: Any
    primary_key: str | None = None
    foreign_keys: Mapping[str, str] = field(default_factory=dict)
    time: str | None = None
    features: Sequence[str] = ()


def from_tables(
    tables: Mapping[str, Any],
    *,
    labels: Mapping[str, str | Sequence[str]] | None = None,
    splits: Mapping[str, str | Mapping[str, Any]] | None = None,
    reverse: bool = True,
    time_unit: TimeUnit | None = None,
    name: str = "graph",
) -> Graph:
    """Build a graph from pandas tables with primary and foreign keys::

        gcnzc.graph.from_tables({
            "customer": Table(customers, primary_key="id"),
            "order": Table(orders, foreign_keys={"customer_id": "customer"}, time="date"),
        })

    This graph has the edge types ("order", "f2p_customer_id", "customer") and ("customer",
    "rev_f2p_customer_id", "order"). A row without a key (None or NaN) has no edge.

    Row `i` of a table is node `i` of its type, for keys of any type; features, times and labels
    have the order of the rows. The index of the table is ignored, but its levels can be named as
    columns. The node of a key is its position in the column,
    `pandas.Index(frame[primary_key]).get_indexer([key])[0]`.

    Bytes are read as text in UTF-8, and decimals as numbers.

    The graph and its prepared folder have the primary keys, see `NodeStore.keys`, and the names of
    the classes: the categories of a categorical, or the names of several columns of labels.
    Functions and commands that predict read and write the keys as ids of nodes.

    Args:
        tables: for each node type a `Table`, or a table of RelBench, such as
            `database.table_dict`.
        labels: for tables with labels, the name of the column: integers or booleans, which are
            classes, -1 for missing values; a categorical, whose classes are the positions of its
            categories; or floating-point numbers, which are classes if none has a fraction. Several
            names are columns of labels.
        splits: for tables with a split, the name of a column of the words "train", "valid" and
            "test"; or the times at which parts begin, `{"valid": time, "test": time}`, integers or
            dates like those of the table: rows before "valid" are train.
        reverse: add the reverse edge type of every foreign key.
        time_unit: unit of the times, "s", "ms", "us" or "ns", to which dates are converted, in UTC;
            fractions are rounded up. Default: seconds if all times are dates; see `from_arrays`.
        name: of the graph.

    Raises:
        TypeError: a table has the wrong type.
        ValueError: a column or table does not exist, a primary key is missing or not unique, a
            foreign key has no row, a time is missing, a column of labels is a feature, or labels
            or splits have other values. The message names the table, the column and the value.
    """
    reverse = check_flag("reverse", reverse)
    if not isinstance(tables, Mapping) or not tables:
        raise TypeError(f"tables is {describe(tables)}, not a dict of tables by name")
    known = {each: _as_table(each, table) for each, table in tables.items()}
    keys = {each: _primary_keys(each, table) for each, table in known.items()}
    nodes: dict[str, Any] = {}
    for each, table in known.items():
        nodes[each] = {"num_nodes": len(table.frame), "features": _features(each, table)}
        if keys[each] is not None:
            nodes[each]["keys"] = keys[each]
        if table.time is not None:
            nodes[each]["time"] = _column(each, table, table.time, "time")
    for each, table, given in _tables_of("labels", labels, known):
        nodes[each]["labels"], nodes[each]["classes"] = _labels(each, table, given)
    for each, table, given in _tables_of("splits", splits, known):
        nodes[each]["split"] = _split(each, table, given)
    edges: dict[tuple[str, str, str], Any] = {}
    for each, table in known.items():
        for key, other in table.foreign_keys.items():
            if other not in known:
                raise ValueError(
                    f"foreign key {key!r} of table {each!r} refers to the table {other!r:.100}, "
                    "which is not given"
                )
            primary_key = known[other].primary_key
            rows, targets = _resolve(each, table, key, other, primary_key, keys[other])
            edges[each, f"f2p_{key}", other] = rows, targets
            if reverse:
                edges[other, f"rev_f2p_{key}", each] = targets, rows
    return Graph.from_arrays(nodes, edges, name=name, time_unit=time_unit)


def _as_table(name: str, table: Any) -> Table:
    if hasattr(table, "fkey_col_to_pkey_table"):
        table = Table(table.df, table.pkey_col, table.fkey_col_to_pkey_table, table.time_col)
    if not isinstance(table, Table) or not hasattr(table.frame, "columns"):
        raise TypeError(
            f"table {name!r} is {describe(table)}, not Table(frame) with a pandas.DataFrame"
        )
    if not len(table.frame):
        raise ValueError(f"table {name!r} has no rows")
    return table


def _column(name: str, table: Table, column: str, meaning: str) -> Any:
    frame = table.frame
    if column in frame.index.names and column not in frame.columns:
        frame = frame.index.to_frame(index=False)
    if column not in frame.columns:
        raise ValueError(f"table {name!r} has no column {column!r:.100} for its {meaning}")
    found = frame[column]
    if found.ndim != 1:
        raise ValueError(f"table {name!r} has {found.shape[1]} columns {column!r:.100}")
    try:
        return _plain_values(found)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"column {column!r} of table {name!r} has {error.object!r:.100}, which is not UTF-8\n\n"
            "hint: convert the column to text or numbers"
        ) from None


def _plain_values(column: Any) -> Any:
    """Return a column of bytes as text, and one of decimals as numbers; others unchanged."""
    import pandas

    if hasattr(column, "cat"):
        categories = column.cat.categories.to_series()
        plain = _plain_values(categories)
        return column if plain is categories else column.cat.rename_categories(plain.to_list())
    is_arrow = isinstance(column.dtype, pandas.ArrowDtype)
    if column.dtype != object and not (is_arrow and column.dtype.type in (bytes, Decimal)):
        return column
    kind = pandas.api.types.infer_dtype(column.astype(object), skipna=True)
    if kind == "bytes":
        return column.astype(object).map(bytes.decode, na_action="ignore")
    if kind == "decimal":
        known = column.dropna()
        is_whole = all(
            each.is_finite() and each == int(each) and abs(each) < 2**63 for each in known
        )
        found = pandas.Series(index=range(len(column)), dtype="Int64" if is_whole else "float64")
        found[column.notna().to_numpy()] = [
            int(each) if is_whole else float(each) for each in known
        ]
        return found
    return column


def _features(name: str, table: Table) -> NDArray[np.float32] | None:
    if not table.features:
        return None
    columns = []
    for each in table.features:
        column = _column(name, table, each, "features").to_numpy()
        if column.dtype.kind not in "fiub":
            raise ValueError(f"column {each!r} of table {name!r} has {column.dtype}, not numbers")
        with np.errstate(over="ignore"):
            converted = column.astype(np.float32)
        if (row := first_true(~np.isfinite(converted))) is not None:
            value = column[row]
            raise ValueError(
                f"column {each!r} of table {name!r} is {'NaN' if np.isnan(value) else value} in "
                f"row {row}"
            )
        columns.append(converted)
    return np.stack(columns, axis=1)


def _tables_of(
    argument: str, given: Mapping[str, Any] | None, known: Mapping[str, Table]
) -> Iterator[tuple[str, Table, Any]]:
    """Yield (name, table, value) for each table in `given`."""
    if given is None:
        return
    check_kind(argument, given, Mapping, "a dict by table, such as {'customer': 'column'}")
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{argument} has the table {name!r:.100}, which is not given")
        yield name, known[name], value


def _labels(name: str, table: Table, given: Any) -> tuple[NDArray[Any], list[str] | None]:
    """Return the labels, and the names of their classes or columns, if there are some."""
    names = names_of(given)
    leaked = [each for each in names if each in table.features]
    if leaked:
        raise ValueError(
            f"column {leaked[0]!r} of table {name!r} is both a feature and the label\n\n"
            "hint: remove it from features, which would show the label to the model"
        )
    columns = {
        f"column {each!r} of table {name!r}": _column(name, table, each, "labels") for each in names
    }
    if not columns:
        raise ValueError(f"labels[{name!r}] has no columns")
    return labels_of(columns), find_class_names(columns, names)


def _split(name: str, table: Table, given: Any) -> Any:
    if isinstance(given, str):
        return _column(name, table, given, "split").astype(object)
    check_kind(f"splits[{name!r}]", given, (str, Mapping))
    if table.time is None:
        raise ValueError(f"splits[{name!r}] has times, but table {name!r} has none")
    return split_by_time(f"splits[{name!r}]", _column(name, table, table.time, "time"), given)


def _primary_keys(name: str, table: Table) -> Any:
    """Return the primary keys of a table as a `pandas.Index`; None if it has no primary key."""
    if table.primary_key is None:
        return None
    import pandas

    index = pandas.Index(_column(name, table, table.primary_key, "primary key"))
    if index.hasnans or not index.is_unique:
        wrong = "missing values"
        if not index.hasnans:
            wrong = f"{_plain(index[index.duplicated()][0])!r} twice"
        raise ValueError(f"primary key {table.primary_key!r} of table {name!r} has {wrong}")
    return index


def _resolve(
    name: str, table: Table, key: str, other: str, primary_key: str | None, index: Any
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows that have a foreign key, and the rows that they refer to."""
    import pandas

    given = _column(name, table, key, "foreign key")
    if index is None:
        raise ValueError(
            f"foreign key {key!r} of table {name!r} refers to table {other!r}, which has no "
            "primary key"
        )
    rows = np.flatnonzero(given.notna().to_numpy())
    values = given.iloc[rows]
    if index.dtype.kind in "iu" and values.dtype.kind == "f":
        # pandas stores integers with missing values as floating-point numbers
        numbers = values.to_numpy()
        is_whole = (numbers == np.floor(numbers)) & (np.abs(numbers) < EXACT)
        if not is_whole.all():
            place = int((~is_whole).argmax())
            raise ValueError(
                f"foreign key {key!r} of table {name!r} is {_plain(numbers[place])!r} in row "
                f"{rows[place]}, which is not an exact integer\n\n"
                "hint: use pandas' Int64, which has missing values"
            )
        values = values.astype(np.int64)
    targets = index.get_indexer(pandas.Index(values)).astype(np.int64)
    if (targets < 0).any():
        place = int((targets < 0).argmax())
        raise ValueError(
            f"foreign key {key!r} of table {name!r} is {_plain(values.iloc[place])!r} in row "
            f"{rows[place]}, but table {other!r} has no such {primary_key!r}"
        )
    return rows, targets


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python one, for messages."""
    return value.item() if isinstance(value, np.generic) else value


# integers below it are exact in float64
EXACT = 2**53


def labels_of(columns: Mapping[str, Any]) -> NDArray[Any]:
    """Return the labels in columns of a table.

    Args:
        columns: by their names for messages, one or several `pandas.Series`: integers or booleans,
            also with missing values; categoricals, whose classes are the positions of the
            categories; or floating-point numbers, which are classes if none has a fraction.

    Returns:
        (N,), or (N, T) of several columns: int64 classes, -1 for missing values; or float64, NaN
        for missing values, if a column has numbers with fractions.

    Raises:
        ValueError: a column has text, dates or other values, or only missing ones.
    """
    found = [_classes_or_numbers(name, column) for name, column in columns.items()]
    if len(found) == 1:
        return found[0]
    if any(each.dtype.kind == "f" for each in found):
        found = [
            each if each.dtype.kind == "f" else np.where(each == -1, np.nan, each) for each in found
        ]
    return np.stack(found, axis=1)


def find_class_names(columns: Mapping[str, Any], names: Sequence[str]) -> list[str] | None:
    """Return the categories of a column of labels, or the names of several; None without names.

    Args:
        columns: see `labels_of`.
        names: of the columns in the table.
    """
    if len(columns) > 1:
        return [str(each) for each in names]
    (column,) = columns.values()
    return [str(each) for each in column.cat.categories] if hasattr(column, "cat") else None


def _classes_or_numbers(name: str, column: Any) -> NDArray[Any]:
    if len(column) and column.isna().all():
        raise ValueError(f"{name} has no labels: all {len(column)} values are missing")
    if hasattr(column, "cat"):
        return np.asarray(column.cat.codes.to_numpy(), np.int64)
    if column.dtype == object:
        # such as booleans with None
        column = column.convert_dtypes()
    is_missing = column.isna().to_numpy()
    kind, present = getattr(column.dtype, "kind", "O"), column[~is_missing]
    if kind == "f":
        numbers = present.to_numpy(np.float64)
        is_whole = (numbers == np.floor(numbers)) & (np.abs(numbers) < EXACT)
        # pandas stores integers with missing values as floating-point numbers; a column without
        # missing values is the same task
        if not is_whole.all():
            found = np.full(len(column), np.nan)
            found[~is_missing] = numbers
            return found
    elif kind not in "iub":
        raise ValueError(
            f"{name} has type {column.dtype}\n\nhint: labels are numbers; "
            "frame[column].astype('category') maps other values to classes"
        )
    classes = np.full(len(column), -1)
    dtype = np.uint64 if kind == "u" else np.int64
    classes[~is_missing] = np.minimum(present.to_numpy(dtype), np.iinfo(np.int64).max)
    return classes


def split_by_time(
    name: str, column: Any, starts: Mapping[str, Any]
) -> dict[str, NDArray[np.bool_]]:
    """Return masks of the train, valid and test rows, by their time.

    Args:
        name: of the split, for messages.
        column: a `pandas.Series` of integers or dates.
        starts: the times at which "valid" and "test" begin, integers or dates like the column;
            earlier rows are train.

    Raises:
        ValueError: a name or a time is wrong, or test begins before valid.
    """
    named = {part_of(key): value for key, value in starts.items()}
    if set(named) != {"valid", "test"} or len(starts) != 2:
        raise ValueError(f"{name} has the keys {[*starts]}, not 'valid' and 'test'")
    dates = to_dates(column)
    times = column.to_numpy() if dates is None else dates
    cuts = [_cut(f"{name}[{part!r}]", named[part], dates is not None) for part in ("valid", "test")]
    if cuts[0] > cuts[1]:
        raise ValueError(f"{name}: test begins at {cuts[1]}, before valid at {cuts[0]}")
    is_train, is_test = times < cuts[0], times >= cuts[1]
    return {"train": is_train, "valid": (times >= cuts[0]) & ~is_test, "test": is_test}


def _cut(name: str, value: Any, is_date: bool) -> Any:
    """Return a time that can be compared with those of the table."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    # NaN is not equal to itself
    if is_number and not is_date and value == value:
        return value
    if not is_number and is_date and not isinstance(value, bool):
        import pandas

        try:
            # in UTC; a missing date cannot begin a part
            moment = pandas.Timestamp(value).to_datetime64()
        except (TypeError, ValueError):
            moment = np.datetime64("NaT")
        if not np.isnat(moment):
            return moment
    kind = "a date" if is_date else "an integer"
    raise ValueError(f"{name} is {describe(value)}, not {kind} like the times of the table")


def names_of(given: str | Sequence[str]) -> list[str]:
    """Return one name, or several, as a list."""
    return [given] if isinstance(given, str) else list(given)
