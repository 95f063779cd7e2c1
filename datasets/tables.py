"""A table with named columns that is read in chunks of rows; csv and Parquet files are tables.

`gcnzc.datasets.table_graph.open_table` opens a file or a folder.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gcnzc.datasets.rows import Array, Progress, no_progress

# recognized column names for edge endpoints
END_NAMES = (("source", "target"), ("src", "dst"), ("from", "to"), ("u", "v"))
# texts that mean a missing value in a column of numbers
MISSING = ("", "nan", "NaN", "NAN", "-nan", "-NaN", "NA", "N/A", "null", "None")

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
            RuntimeError: the file is Parquet, and pyarrow is not installed.
        """

    @abstractmethod
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
            RuntimeError: the file is Parquet, and pyarrow is not installed.
        """

    @abstractmethod
    def place(self, row: int, column: str | None = None) -> str:
        """Describe where a cell or a row is: the file, the line or the row, and the column."""

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


def is_number(text: str) -> bool:
    """Whether a text is a number, as Python reads it."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
