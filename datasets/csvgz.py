"""Tables of numbers in csv.gz files, read and written chunk by chunk.

There is no heading, and a line has as many numbers as the first one. What is wrong with a file is
told in words that name it.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gcnzc.datasets.rows import Array, chunk_rows


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What a broken csv.gz raises, in words."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no file {path}\n\nhint: OGB's layout has it; get the set again"
        ) from None
    except EOFError:
        raise ValueError(f"{path} is cut short\n\nhint: get or write it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is no gzip file: {error}\n\nhint: get it again, or compress it with gzip"
        ) from None
    except (ValueError, OverflowError) as error:
        if "\n\nhint: " in str(error):
            raise
        raise ValueError(
            f"{path} is no table of numbers: {_first_line(error)}\n\n"
            "hint: lines of numbers between commas, as many in each line, and no heading"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def count_columns(path: Path) -> int:
    """Numbers in the first line; 1 if the file is empty."""
    with _readable(path), gzip.open(path) as file:
        return file.readline().count(b",") + 1


def read(
    path: Path, dtype: Any, columns: int | None = None, blank_is_nan: bool = False
) -> Iterator[Array]:
    """The numbers of a csv.gz, in (n, columns) chunks; none if the file is empty.

    Args:
        path: of the file.
        dtype: that numbers are parsed as; None takes whatever fits each column of a chunk.
        columns: how many there must be.
        blank_is_nan: an empty cell or line is NaN, instead of wrong or nothing.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is cut short, no gzip, or no table of numbers.
    """
    found = count_columns(path)
    if columns not in (None, found):
        raise ValueError(
            f"{path} has {found} columns, not {columns}\n\n"
            "hint: get or write it again in OGB's layout"
        )
    with _readable(path), gzip.open(path) as file:
        if not file.peek(1):
            return
        reader = pd.read_csv(
            file,
            header=None,
            dtype=dtype,
            chunksize=chunk_rows(found, 8),
            skip_blank_lines=not blank_is_nan,
            # else a line with too few numbers would be filled up with NaN
            keep_default_na=False,
            na_values=["nan", "NaN", "NAN", *([""] if blank_is_nan else [])],
        )
        with reader:
            for frame in reader:
                yield frame.to_numpy()


def read_table(path: Path) -> Array:
    """All numbers of a csv.gz, (N, columns) float64; an empty cell or line is NaN."""
    chunks = read(path, np.float64, blank_is_nan=True)
    return np.concatenate([np.empty((0, count_columns(path))), *chunks])


def read_column(path: Path) -> Array:
    """All numbers of a csv.gz of one column, (N,) int64."""
    return np.concatenate([np.empty((0, 1), np.int64), *read_integers(path, 1)])[:, 0]


def read_integers(path: Path, columns: int) -> Iterator[Array]:
    """The whole numbers of a csv.gz, in (n, columns) int64 chunks."""
    done = 0
    with _readable(path):
        for chunk in read(path, None, columns):
            ids = chunk
            if chunk.dtype.kind == "f":
                with np.errstate(invalid="ignore"):
                    ids = chunk.astype(np.int64)
            if chunk.dtype.kind not in "if" or (ids != chunk).any():
                raise ValueError(_not_whole(path, chunk, done))
            yield ids.astype(np.int64, copy=False)
            done += len(chunk)


def _not_whole(path: Path, chunk: Array, first: int) -> str:
    for line, cells in enumerate(chunk.tolist(), start=first + 1):
        for cell in cells:
            if not _is_whole(cell):
                return (
                    f"{path} has {cell!r} in line {line}, which is no whole number\n\n"
                    "hint: node ids are whole numbers that count from 0, and there is no heading"
                )
    return f"{path} has numbers that are no node ids\n\nhint: they count from 0, up to 2**63 - 1"


def _is_whole(cell: Any) -> bool:
    try:
        return float(cell).is_integer()
    except ValueError:
        return False


def write(path: Path, chunks: Iterable[Array]) -> None:
    """Write (n, columns) chunks, one behind the other; float32 survives bit for bit."""
    with gzip.GzipFile(path, "wb", compresslevel=6, mtime=0) as file:
        for chunk in chunks:
            # nine digits tell every float32 from its neighbours
            text = pd.DataFrame(chunk).to_csv(
                header=False, index=False, na_rep="nan", float_format="%.9g", lineterminator="\n"
            )
            file.write(text.encode())
