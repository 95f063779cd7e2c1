"""Labels and splits of the rows of pandas tables, from their columns.

Notation: N rows, T columns of labels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcnzc.datasets.part_names import part_of
from gcnzc.graph.hetero.times import to_dates
from gcnzc.system.arguments import describe

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
        raise ValueError(
            f"{name} has no labels: all {len(column)} values are missing\n\n"
            "hint: check how the table was read; omit it from labels= if its rows have none"
        )
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
        raise ValueError(
            f"{name} has the keys {', '.join(map(repr, starts)) or 'none'}\n\n"
            "hint: the times at which two parts begin, {'valid': time, 'test': time}; earlier rows "
            "are train"
        )
    dates = to_dates(column)
    times = column.to_numpy() if dates is None else dates
    cuts = [_cut(f"{name}[{part!r}]", named[part], dates is not None) for part in ("valid", "test")]
    if cuts[0] > cuts[1]:
        raise ValueError(
            f"{name}: test begins at {cuts[1]}, before valid at {cuts[0]}\n\n"
            "hint: the validation rows are between both times"
        )
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
    kind = "a date, such as pandas.Timestamp('2024-01-31')" if is_date else "an integer"
    raise ValueError(f"{name} is {describe(value)}\n\nhint: {kind}, like the times of the table")


def names_of(given: str | Sequence[str]) -> list[str]:
    """Return one name, or several, as a list."""
    return [given] if isinstance(given, str) else list(given)
