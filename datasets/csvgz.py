"""Read and write tables of numbers in csv.gz files, chunk by chunk.

The files have no header line, and all lines have the same number of columns. Error messages name
the file.
"""

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets.rows import CHUNK_BYTES, Array


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise a ValueError with a hint for what a damaged csv.gz raises."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no file {path}\n\nhint: OGB's layout requires it; download the dataset again"
        ) from None
    except EOFError:
        raise ValueError(f"{path} is truncated\n\nhint: download or write it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is not a gzip file, or is damaged: {error}\n\n"
            "hint: download it again, or compress it with gzip"
        ) from None
    except (ValueError, OverflowError, csv.Error) as error:
        if "\n\nhint: " in str(error):
            raise
        raise ValueError(
            f"{path} is not a table of numbers: {_first_line(error)}\n\n"
            "hint: lines are comma-separated numbers, equally many in each, without a header line"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def count_columns(path: Path) -> int:
    """Return the number of columns in the first line; 1 for an empty file."""
    with _readable(path), gzip.open(path) as file:
        return file.readline().count(b",") + 1


def read(
    path: Path, dtype: Any, columns: int | None = None, blank_is_nan: bool = False
) -> Iterator[Array]:
    """Read a csv.gz in (n, columns) chunks; an empty file has none.

    Args:
        path: of the file.
        dtype: float64 or int64.
        columns: expected number of columns; None accepts any.
        blank_is_nan: read an empty cell or line as NaN. Otherwise an empty cell is an error, and an
            empty line is skipped.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is truncated, not gzip, or not a table of numbers; the message names
            the line.
    """
    found = count_columns(path)
    if columns not in (None, found):
        raise ValueError(
            f"{path} has {found} columns, not {columns}\n\n"
            "hint: download or write it again in OGB's layout"
        )
    import pyarrow as pa
    from pyarrow import csv as arrow

    names = [str(number) for number in range(found)]
    missing = ["nan", "NaN", "NAN", *([""] if blank_is_nan else [])]
    with _readable(path), gzip.open(path) as file:
        if not file.peek(1):
            return
        reader = arrow.open_csv(
            file,
            arrow.ReadOptions(use_threads=False, column_names=names, block_size=CHUNK_BYTES // 4),
            arrow.ParseOptions(ignore_empty_lines=not blank_is_nan),
            arrow.ConvertOptions(
                column_types=dict.fromkeys(names, pa.from_numpy_dtype(dtype)),
                null_values=missing if np.dtype(dtype).kind == "f" else [],
            ),
        )
        with reader:
            for batch in reader:
                yield np.stack([column.to_numpy(zero_copy_only=False) for column in batch], axis=1)


def read_header(path: Path) -> dict[str, Array]:
    """Read a csv.gz with a header line and columns of integers, as (N,) int64 by column.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, or a cell is not an integer.
    """
    names, *rows = _lines(path)
    with _readable(path):
        table = np.array([[int(cell) for cell in row] for row in rows], np.int64)
        table = table.reshape(len(rows), len(names))
    return dict(zip(names, table.T, strict=True))


def read_flags(path: Path) -> list[tuple[str, bool]]:
    """Read a csv.gz with a header line and a line of True and False.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, or has other lines.
    """
    lines = _lines(path)
    if len(lines) != 2 or not set(lines[1]) <= {"True", "False"}:
        raise ValueError(
            f"{path} has {len(lines)} lines, not flags of names\n\n"
            "hint: a line of names, and a line of True and False, separated by commas"
        )
    return [(name, flag == "True") for name, flag in zip(*lines, strict=True)]


def read_words(path: Path, columns: int) -> list[list[str]]:
    """Read a csv.gz of words without a header line, such as names of types.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, or a line has another number of columns.
    """
    lines = _lines(path)
    if lines and len(lines[0]) != columns:
        raise ValueError(
            f"{path} has {len(lines[0])} columns, not {columns}\n\n"
            "hint: download or write it again in OGB's layout"
        )
    return lines


def _lines(path: Path) -> list[list[str]]:
    """Read a small table of words with equally many in each line, and at least one line."""
    with _readable(path), gzip.open(path, "rt", newline="") as file:
        lines = [line for line in csv.reader(file) if line]
    if not lines or any(len(line) != len(lines[0]) for line in lines):
        raise ValueError(
            f"{path} is empty, or its lines have different numbers of columns\n\n"
            "hint: download or write it again in OGB's layout"
        )
    return lines


def read_table(path: Path) -> Array:
    """Read a csv.gz as (N, columns) float64; an empty cell or line is NaN."""
    chunks = read(path, np.float64, blank_is_nan=True)
    return np.concatenate([np.empty((0, count_columns(path))), *chunks])


def read_column(path: Path) -> Array:
    """Read a csv.gz of one column as (N,) int64."""
    return np.concatenate([np.empty((0, 1), np.int64), *read_integers(path, 1)])[:, 0]


def read_integers(path: Path, columns: int) -> Iterator[Array]:
    """Read a csv.gz of integers in (n, columns) int64 chunks.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, or has a number that is not an integer.
    """
    done = 0
    # `numpy.savetxt` writes integers as 1.000e+00; integers that begin a file are not read again
    for dtype in (np.int64, np.float64):
        end = 0
        try:
            for chunk in read(path, dtype, columns):
                begin, end = end, end + len(chunk)
                with np.errstate(invalid="ignore"):
                    ids = chunk.astype(np.int64, copy=False)
                if (ids != chunk).any():
                    row, column = np.argwhere(ids != chunk)[0]
                    raise ValueError(
                        f"{path} has {chunk[row, column]} in line {begin + row + 1}, which is not "
                        "an integer\n\n"
                        "hint: node ids are integers that start at 0, without a header line"
                    )
                if end > done:
                    yield ids[max(0, done - begin) :]
                    done = end
            return
        except ValueError:
            if dtype is np.float64:
                raise


def write(path: Path, chunks: Iterable[Array]) -> None:
    """Write consecutive (n, columns) chunks; float32 values are read back exactly."""
    import pandas as pd

    with gzip.GzipFile(path, "wb", compresslevel=6, mtime=0) as file:
        for chunk in chunks:
            # nine digits identify every float32 value
            text = pd.DataFrame(chunk).to_csv(
                header=False, index=False, na_rep="nan", float_format="%.9g", lineterminator="\n"
            )
            file.write(text.encode())


def write_lines(path: Path, lines: Iterable[Iterable[object]]) -> None:
    """Write lines of words, numbers or flags, which may begin with a header."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    with gzip.GzipFile(path, "wb", compresslevel=6, mtime=0) as file:
        file.write(text.getvalue().encode())
