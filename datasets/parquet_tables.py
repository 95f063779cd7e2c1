"""Tables in Parquet: a file, or a folder of part files as pandas, Spark and dask write it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcnzc.datasets.rows import CHUNK_BYTES, Progress
from gcnzc.datasets.tables import Table

if TYPE_CHECKING:
    import pandas as pd

PARQUET = (".parquet", ".pq")
# names that pandas and dask give to an index without a name
_NO_NAME = re.compile(r"__index_level_\d+__|__null_dask_index__")


class ParquetTable(Table):
    """A table in a Parquet file, or in the part files of a folder.

    The parts are read in the order of their paths; numbers in these are compared as numbers. Files
    and folders whose names begin with `_` or `.` are no parts. A folder `key=value` adds the column
    `key` to its parts.
    """

    @cached_property
    def columns(self) -> list[str]:
        """See `Table.columns`."""
        names = [*self._schema.names, *self._folder_values(self._parts[0])]
        return self.check_names(names + [name for name in [self._range_name] if name is not None])

    @cached_property
    def index(self) -> list[str]:  # type: ignore[override]
        """The columns that pandas or dask wrote as the index of the table."""
        known = (self._schema.pandas_metadata or {}).get("index_columns", [])
        names = [name for name in self._schema.names if name in known or _NO_NAME.fullmatch(name)]
        return names if self._range_name is None else [self._range_name]

    def column(self, name: str) -> "pd.Series[Any]":
        """Read a column with the dtype that pandas has for it."""
        import pandas as pd

        with _readable(self.path):
            parts = [batch[name].to_pandas() for _, batch in self._read([name], CHUNK_BYTES)]
        return pd.concat(parts, ignore_index=True) if parts else pd.Series(dtype=object)

    def place(self, row: int, column: str | None = None) -> str:
        """See `Table.place`."""
        part = next(number for number, end in enumerate(self._ends) if row < end)
        before = self._ends[part - 1] if part else 0
        where = f"{self._parts[part]}, row {row - before}"
        return where if column is None else f"{where}, column {column!r}"

    @cached_property
    def _parts(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        if (self.path / "_delta_log").is_dir():
            raise ValueError(
                f"{self.path} is a Delta table, whose files may have rows that were deleted\n\n"
                "hint: write it as Parquet, for example with DeltaTable(...).to_pandas()"
            )
        parts = []
        for file in self.path.rglob("*"):
            own = file.relative_to(self.path).parts
            is_hidden = any(name[0] in "._" and "=" not in name for name in own)
            if file.is_file() and not is_hidden:
                parts.append(file)
        wrong = next((part for part in parts if not _is_parquet(part)), None)
        if wrong is not None or not parts:
            found = f"the file {wrong.name}" if wrong else "no files"
            raise ValueError(
                f"{self.path} is not a folder of Parquet files: it has {found}\n\n"
                "hint: all of its files are parts of one table; those whose names begin with _ or "
                ". are not read"
            )
        return sorted(parts, key=lambda part: _with_numbers(str(part.relative_to(self.path))))

    @cached_property
    def _schema(self) -> Any:
        return self._footers[0][0]

    @cached_property
    def _range_name(self) -> str | None:
        """The column of an index that pandas stores as a range; None for the rows' numbers."""
        first, are_own, are_joined = 0, True, True
        for schema, count in self._footers:
            name, values = _range_of(schema, count) or (None, range(first, first + count))
            if name is not None:
                return name
            are_own = are_own and values == range(count)
            are_joined = are_joined and values == range(first, first + count)
            first += count
        is_stored = "__index_level_0__" in self._schema.names
        return None if are_own or are_joined or is_stored else "__index_level_0__"

    @cached_property
    def _footers(self) -> list[tuple[Any, int]]:
        """The schema and the number of rows of each part."""
        from pyarrow import parquet

        footers = []
        for part in self._parts:
            with _readable(part):
                found = parquet.read_metadata(part)
                footers.append((found.schema.to_arrow_schema(), found.num_rows))
        return footers

    @cached_property
    def _ends(self) -> list[int]:
        """The number of rows up to the end of each part."""
        return list(accumulate(count for _, count in self._footers))

    def _folder_values(self, part: Path) -> dict[str, str | None]:
        """Return the columns that the folders `key=value` around a part add."""
        from pyarrow import dataset, schema, string

        folders = part.relative_to(self.path).parts[:-1] if part != self.path else ()
        keys = [name.partition("=")[0] for name in folders if "=" in name]
        keys = [key for key in keys if key not in self._schema.names]
        hive = dataset.HivePartitioning(schema([(key, string()) for key in keys]))
        found: Mapping[str, str | None] = dataset.get_partition_keys(
            hive.parse("/".join([*folders, ""]))
        )
        return {key: found.get(key) for key in keys}

    def _batches(
        self, texts: Sequence[str], numbers: Sequence[str], progress: Progress
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        step, done = CHUNK_BYTES // (8 * (len(numbers) + 2 * len(texts) + 1)) * 4, 0
        with _readable(self.path):
            for num_rows, arrays in self._read([*texts, *numbers], max(1, step)):
                yield num_rows, arrays
                done += num_rows
                progress(f"read {self.path.name}", done, self._ends[-1])

    def _read(self, names: Sequence[str], step: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of rows and the Arrow arrays by column, for at most `step` rows."""
        import pyarrow as pa
        from pyarrow import parquet

        for part in self._parts:
            added = self._folder_values(part)
            with _readable(part), parquet.ParquetFile(part) as file:
                found = [*file.schema_arrow.names, *added]
                own = _range_of(file.schema_arrow, file.metadata.num_rows)
                if own is not None and self._range_name is not None:
                    found.append(self._range_name)
                if set(found) != set(self.columns):
                    raise ValueError(
                        f"{part} has the columns {', '.join(found)}, but {self._parts[0]} has "
                        f"{', '.join(self.columns)}\n\nhint: the parts of a table have the same "
                        "columns"
                    )
                stored = [name for name in names if name in file.schema_arrow.names]
                first = 0
                # without a column of the file, batches have no rows
                for batch in file.iter_batches(step, columns=stored or found[:1]):
                    arrays = {name: batch.column(name) for name in stored}
                    for name in set(names) - set(stored):
                        if name in added:
                            value = pa.scalar(_as_integer(added[name]))
                            arrays[name] = pa.repeat(value, batch.num_rows)
                        elif own is not None:
                            rows = own[1][first : first + batch.num_rows]
                            arrays[name] = pa.array(np.arange(rows.start, rows.stop, rows.step))
                    first += batch.num_rows
                    yield batch.num_rows, arrays


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise a ValueError with a hint for what damaged files raise."""
    try:
        yield
    # NotImplementedError: of pyarrow, for types and encodings that it does not read
    except (ValueError, OSError, NotImplementedError) as error:
        if "\n\nhint: " in str(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{path} cannot be read: {reason}\n\nhint: write or download it again"
        ) from None


def _range_of(schema: Any, count: int) -> tuple[str | None, range] | None:
    """Return the name and the values of an index that pandas stores as a range; None without one.

    Other programs keep it when they change the number of rows; then it is no index, as for pandas.
    """
    for each in (schema.pandas_metadata or {}).get("index_columns", []):
        if isinstance(each, dict):
            values = range(each["start"], each["stop"], each["step"])
            return (each["name"], values) if len(values) == count else None
    return None


def _is_parquet(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(4) == b"PAR1"


def _with_numbers(path: str) -> list[str | int]:
    """Return a key of sorting that compares numbers in paths as numbers."""
    pieces = re.split("([0-9]+)", path)
    return [int(piece) if number % 2 else piece for number, piece in enumerate(pieces)]


def _as_integer(text: str | None) -> str | int | None:
    """Return a text as an integer if it is one, without leading zeros."""
    is_integer = text is not None and re.fullmatch("0|-?[1-9][0-9]{0,17}", text)
    return int(text) if text is not None and is_integer else text
