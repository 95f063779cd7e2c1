"""Render the documentation's tables from the lines of `bench/results/`.

A table is a function that returns the cells of a row by heading, decorated by a `Table` that says
which lines of a file of results belong to a row. If a case was measured more than once, the newest
line is shown. A caption states the machine, the date, the commits and the command.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


class Line(dict[str, Any]):
    """A line of results, whose fields are also attributes."""

    __getattr__ = dict.__getitem__


@dataclass(frozen=True)
class Row:
    """The lines of a row of a table.

    Its attributes are also the fields of its last line.

    Attributes:
        key: the values of the fields that identify the row.
        lines: the newest line of each case of the row.
        all: the lines of the whole table.
        title: name of the row, if the table has names.
    """

    key: tuple[Any, ...]
    lines: list[Line]
    all: list[Line]
    title: str | None = None

    def __getattr__(self, name: str) -> Any:
        return self.lines[-1][name]

    def at(self, **fields: Any) -> Line | None:
        """Return the row's line with these fields, or None."""
        return find(self.lines, **fields)

    def across(
        self,
        field: str,
        head: str | Mapping[Any, str],
        cell: Callable[[Line], object],
        values: Iterable[Any] | None = None,
    ) -> dict[str, object]:
        """Return columns that show the same of the row's lines, for each value of a field.

        Args:
            field: name of the field; each column shows the newest line with its value.
            head: heading, with {} for the value, or headings by value.
            cell: the cell of a line.
            values: values in the order of the columns; the sorted values of all lines by default.
        """
        if isinstance(head, str):
            values = values or sorted({line[field] for line in self.all})
            head = {value: head.format(value) for value in values}
        lines = {value: self.at(**{field: value}) for value in head}
        return {head[value]: line and cell(line) for value, line in lines.items()}

    def of(self, name: str, scale: float = 1) -> list[float]:
        """Return a scaled field of each line."""
        return [scale * line[name] for line in self.lines]

    def mean(self, name: str, scale: float = 1) -> float:
        """Return the mean of a scaled field."""
        return statistics.mean(self.of(name, scale))

    def median(self, name: str, scale: float = 1) -> float:
        """Return the median of a scaled field."""
        return statistics.median(self.of(name, scale))

    def spread(self, name: str, scale: float = 1, digits: int = 2) -> str:
        """Return the mean of a scaled field, and the standard deviation of more than one value."""
        values = self.of(name, scale)
        shown = f"{statistics.mean(values):.{digits}f}"
        return f"{shown} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else shown


Cells = dict[str, object] | None  # by heading; None leaves the row out, and a cell empty
TABLES: dict[str, "Table"] = {}


def measured(lines: Sequence[Line], command: str) -> str:
    """Return a caption that states where figures were measured."""
    days = _distinct(line["time"][:10] for line in lines)
    cpus = _distinct(line["cpu"].replace("(R)", "") for line in lines)
    gpus = [gpu for gpu in _distinct(line["gpu"] for line in lines) if gpu != "none"]
    commits = _distinct(line["commit"] for line in lines)
    parts = [
        " and ".join([*cpus, *gpus]),
        f"{' or '.join(map(str, _distinct(line['cores'] for line in lines)))} cores",
        f"torch {' and '.join(_distinct(line['torch'].split('+')[0] for line in lines))}",
        days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
        f"commit{'s' * (len(commits) > 1)} {', '.join(f'`{each}`' for each in commits)}",
    ]
    return f"{', '.join(parts)}. Measured by `python -m {command}`."


def computed(lines: Sequence[Line], command: str) -> str:
    """Return a caption that states by which command figures were computed."""
    commits = ", ".join(_distinct(f"`{line['commit']}`" for line in lines))
    return f"Computed by `python -m {command}` at commit {commits}; nothing was measured."


def compiled(lines: Sequence[Line], command: str) -> str:
    """Return a caption that states the versions of the compilers."""
    archs: dict[str, set[str]] = {}
    for line in lines:
        if "ptxas" in line:
            archs.setdefault(line["ptxas"], set()).add(f"sm_{line['arch']}")
    compilers = [f"Triton {', '.join(_distinct(line['triton'] for line in lines))}"]
    compilers += [f"ptxas {each} (for {', '.join(sorted(archs[each]))})" for each in sorted(archs)]
    days = ", ".join(_distinct(line["time"][:10] for line in lines))
    commits = ", ".join(_distinct(f"`{line['commit']}`" for line in lines))
    return (
        f"{', '.join(compilers)}, {days}, commit {commits}. Computed by `python -m {command}`; "
        "nothing was measured on a GPU."
    )


def uncaptioned(_lines: Sequence[Line], _command: str) -> str:
    """Return no caption."""
    return ""


def by_key(row: Row) -> tuple[Any, ...]:
    """Sort rows by the fields that identify them."""
    return row.key


@dataclass
class Table:
    """A decorator of the function that returns the cells of a row; it registers the table.

    Attributes:
        source: name of a file of results, or a function that returns lines.
        by: names of the fields that identify a row.
        command: the command that measured the lines, after `python -m`.
        among: further fields that identify a line among those of its row.
        where: whether the table has a line.
        pick: chooses one of the lines of a row, such as the fastest configuration.
        rows: titles by the row's key; the table has these rows in this order.
        sort: sorts rows, which otherwise are in the order of their first lines.
        caption: computes the caption.
        notes: computes further text below the table.
    """

    source: str | Callable[[], Iterable[Line]]
    by: str
    command: str
    among: str = ""
    where: Callable[[Line], bool] | None = None
    pick: Callable[[list[Line]], Line] | None = None
    rows: Mapping[Any, str] | None = None
    sort: Callable[[Row], Any] | None = None
    caption: Callable[[Sequence[Line], str], str] = measured
    notes: Callable[[Sequence[Line]], str] | None = None

    def __call__(self, cells: Callable[[Any], Cells]) -> Callable[[Any], Cells]:
        """Register the table by the name of the function."""
        self.cells = cells
        TABLES[cells.__name__] = self
        return cells

    def render(self) -> str:
        """Return the table in Markdown."""
        rows = {row.key: (row, cells) for row in self.grouped() if (cells := self.cells(row))}
        lines = [line for row, _ in rows.values() for line in row.lines]
        heads = next(cells for _, cells in rows.values())
        text = markdown(list(heads), [cells.values() for _, cells in rows.values()])
        notes = self.notes(lines) if self.notes else ""
        return f"{text}{notes}\n{self.caption(lines, self.command)}\n".rstrip("\n") + "\n"

    def grouped(self) -> list[Row]:
        """Return the rows."""
        lines = read(self.source) if isinstance(self.source, str) else self.source()
        names = self.by.split()
        groups: dict[tuple[Any, ...], list[Line]] = {}
        for line in newest(filter(self.where, lines), *names, *self.among.split()).values():
            groups.setdefault(tuple(line[name] for name in names), []).append(line)
        if self.pick:
            groups = {key: [self.pick(found)] for key, found in groups.items()}
        titles: dict[tuple[Any, ...], str | None] = dict.fromkeys(groups)
        if self.rows is not None:
            given = {key if len(names) > 1 else (key,): each for key, each in self.rows.items()}
            titles = {key: title for key, title in given.items() if key in groups}
        everything = [line for key in titles for line in groups[key]]
        rows = [Row(key, groups[key], everything, title) for key, title in titles.items()]
        return sorted(rows, key=self.sort) if self.sort else rows


def read(name: str) -> list[Line]:
    """Return the lines of a file of results, oldest first."""
    lines = (RESULTS / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(text, object_hook=Line) for text in lines]


def newest(lines: Iterable[Line], *keys: str) -> dict[Any, Line]:
    """Return the newest line by the values of `keys`, among the lines that have all keys."""
    found: dict[Any, Line] = {}
    for line in lines:
        if all(key in line for key in keys):
            case = tuple(line[key] for key in keys)
            found[case if len(keys) > 1 else case[0]] = line
    return found


def find(lines: Iterable[Line], **fields: Any) -> Line | None:
    """Return the newest line with these fields, or None."""
    found = [line for line in lines if all(line.get(name) == fields[name] for name in fields)]
    return found[-1] if found else None


def markdown(heads: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Format a Markdown table; None is an empty cell."""
    cells = [heads, ["---"] * len(heads), *rows]
    shown = (["" if cell is None else str(cell) for cell in row] for row in cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in shown) + "\n"


def significant(number: float, digits: int = 3) -> str:
    """Format a number with a number of significant digits, without an exponent."""
    shown = float(f"{number:.{digits}g}")
    return f"{shown:,.0f}" if abs(shown) >= 10 ** (digits - 1) else f"{shown:g}"


def spread(
    line: Mapping[str, Any], name: str = "test_percent", unit: str = "spread_percent"
) -> str:
    """Format a mean and its standard deviation, which were recorded."""
    return f"{line[name]:.2f} ± {line[unit]:.2f}" if line[unit] is not None else f"{line[name]:.2f}"


def in_bytes(number: float) -> str:
    """Format a size with a binary unit."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:g} {unit}"
    return f"{number} B"


def _distinct(values: Iterable[Any]) -> list[Any]:
    return sorted(set(values))
