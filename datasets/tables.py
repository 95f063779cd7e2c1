"""A table with named columns that is read in chunks of rows; csv and Parquet files are tables.

`gcnzc.datasets.table_graph.open_table` opens a file or a folder.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gcnzc.datasets.rows import Array, Progress, no_progress

# recognized column names for edge endpoints
END_NAMES = (("source", "target"), ("src", "dst"), ("from", "to"), ("u", "v"))
# texts that mean a missing value in a column of numbers
MISSING = ("", "nan", "NaN", "NAN", "-nan", "-NaN", "NA", "N/A", "null", "None")
# integers below it are exact in float64
EXACT = 2**53

Texts: TypeAlias = tuple[Array, Array]
"""A column of n texts: (n,) codes, and the different texts, where "" stands for an empty cell"""


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a table."""

    first: int  # number of the first row
    texts: dict[str, Texts]  # by column
    numbers: Array  # (n, columns) float64; NaN for an empty cell


class Table(ABC):
    """A table with named columns.

    Args:
        path: of the file or folder.

    Raises:
        FileNotFoundError: there is no such file.
    """

    has_header = True
    """whether the columns have names; otherwise these are their numbers, "0", "1", ..."""
    index: Sequence[str] = ()
    """the columns that pandas wrote as the index of its table"""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            raise FileNotFoundError(
                f"no file {path}\n\nhint: paths in a .toml are relative to its folder"
            )

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """The names of the columns.

        Raises:
            ValueError: the names are not valid, or the file is damaged.
        """

    @abstractmethod
    def place(self, row: int, column: str | None = None) -> str:
        """Describe where a cell or a row is: the file, the line or the row, and the column."""

    @abstractmethod
    def _batches(
        self, texts: Sequence[str], numbers: Sequence[str], progress: Progress
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of rows and the Arrow arrays by column, for consecutive rows."""

    def chunks(
        self, texts: Sequence[str], numbers: Sequence[str] = (), progress: Progress = no_progress
    ) -> Iterator[Chunk]:
        """Read columns, as texts or as numbers.

        Args:
            texts: names of columns to read as texts.
            numbers: names of columns to read as numbers; empty cells are NaN.
            progress: called with the bytes read, or the rows of Parquet.

        Raises:
            ValueError: the file is damaged, a row has another number of cells than the header, or a
                cell is not a number. For such a cell of a csv file, the message names the line and
                the column; for Parquet, the column.
        """
        first = 0
        for num_rows, arrays in self._batches(texts, numbers, progress):
            columns = {name: self._texts(name, arrays[name]) for name in texts}
            values = np.empty((num_rows, len(numbers)), np.float64)
            for number, name in enumerate(numbers):
                values[:, number] = self._numbers(name, arrays[name])
            yield Chunk(first, columns, values)
            first += num_rows

    def find(self, name: str, what: str) -> str:
        """Return `name` if the table has such a column.

        Args:
            name: of the column.
            what: the key that names it, for the message.

        Raises:
            ValueError: there is no such column.
        """
        if name not in self.columns:
            raise ValueError(
                f"{self.path} has no column {name!r}, which {what} names\n\n"
                f"hint: its columns are {', '.join(self.columns)}"
            )
        return name

    def check_names(self, names: list[str]) -> list[str]:
        """Return the names of columns if no two are equal, and otherwise raise a ValueError."""
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(
                f"{self.path} has several columns {twice!r}\n\nhint: give each its own name"
            )
        return names

    def _texts(self, name: str, column: Any) -> Texts:
        """Convert an Arrow array to codes and different texts."""
        import pyarrow as pa

        kind = column.type
        if str(kind) in ("string_view", "binary_view"):
            column = column.cast(pa.large_binary() if "binary" in str(kind) else pa.large_string())
        if pa.types.is_decimal(kind):
            column = column.cast(pa.decimal256(76, kind.scale))
        if pa.types.is_nested(kind):
            raise self._wrong_text(name, kind)
        encoded = column if pa.types.is_dictionary(kind) else column.dictionary_encode()
        codes = encoded.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        # a dictionary may have values that no row has; -1 becomes the last place
        counts = np.bincount(codes + 1, minlength=len(encoded.dictionary) + 1)
        used = np.flatnonzero(counts[1:])
        place = np.full(len(encoded.dictionary) + 1, len(used))
        place[used] = np.arange(len(used))
        values = self._as_texts(name, encoded.dictionary.take(pa.array(used)))
        if counts[0]:
            values = np.append(values, "")
        return place[codes], values

    def _as_texts(self, name: str, values: Any) -> Array:
        """Return different values as texts: "" for a missing value."""
        import pyarrow as pa

        kind, types = values.type, pa.types
        is_binary = types.is_binary(kind) or types.is_large_binary(kind)
        is_binary = is_binary or types.is_fixed_size_binary(kind)
        is_text = types.is_string(kind) or types.is_large_string(kind)
        if is_text or is_binary or types.is_integer(kind):
            try:
                texts = values.cast(pa.large_string()).fill_null("")
            except pa.ArrowInvalid:
                raise self._wrong_text(name, kind, ", which is not UTF-8") from None
            found: Array = texts.to_numpy(zero_copy_only=False)
            return found.astype(object)
        is_number = types.is_floating(kind) or types.is_decimal(kind)
        if not (is_number or types.is_boolean(kind) or types.is_null(kind)):
            raise self._wrong_text(name, kind)
        if types.is_floating(kind):
            values = values.cast(pa.float64())
        texts = []
        for value in values.to_pylist():
            # NaN is not equal to itself
            if value is None or value != value:
                texts.append("")
            elif isinstance(value, bool):
                texts.append(str(value))
            elif (isinstance(value, Decimal) or abs(value) < EXACT) and value == int(value):
                texts.append(str(int(value)))
            else:
                raise self._wrong_text(name, kind, f" and the value {value}")
        return np.array(texts, object)

    def _wrong_text(self, name: str, kind: Any, why: str = "") -> ValueError:
        return ValueError(
            f"{self.path}: the column {name!r} has the type {kind}{why}\n\n"
            "hint: ids, labels and parts are integers, texts, or true and false"
        )

    def _numbers(self, name: str, column: Any) -> Array:
        """Convert an Arrow array to float64, NaN for a missing value."""
        import pyarrow as pa

        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        kind, types = column.type, pa.types
        kinds = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean)
        if not any(is_kind(kind) for is_kind in (*kinds, types.is_null)):
            known = column.drop_null()
            example = f", such as {str(known[0].as_py())!r:.40}" if len(known) else ""
            raise ValueError(
                f"{self.path}: the column {name!r} has the type {kind}{example}, which is not a "
                "number\n\n"
                "hint: list the columns of features; give a column of lists as several columns"
            )
        found: Array = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        return found


def is_number(text: str) -> bool:
    """Whether a text is a number, as Python reads it."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
