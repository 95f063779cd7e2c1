"""Write the tables of files of docs/architecture.md.

    python -m bench.docs.architecture

The tables have the first paragraphs of the modules' docstrings.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- begin of bench/docs/architecture.py -->\n"
END = "<!-- end of bench/docs/architecture.py -->\n"
# in the order in which data passes through them, followed by the packages that use them
PACKAGES = (
    "system",
    "datasets",
    "graph",
    "features",
    "sampling",
    "loader",
    "models",
    "optim",
    "compress",
    "exchange",
    "train",
    "tune",
    "interop",
    "cli",
    "testing",
    "kernels",
)


def main() -> None:
    """Write the tables into the page."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(head + BEGIN + tables() + END + tail)


def tables() -> str:
    """Return a table of files for each package, in Markdown."""
    parts = []
    for package in PACKAGES:
        folder = ROOT / package if (ROOT / package).is_dir() else ROOT / "gcnzc" / package
        init = folder / "__init__.py"
        title = f"### {folder.relative_to(ROOT).as_posix()}/\n\n"
        title += f"{summary_of(init)}\n\n" if init.exists() else ""
        rows = [
            f"| `{path.relative_to(folder).as_posix()}` | {summary_of(path)} |\n"
            for path in sorted(folder.rglob("*.py"))
            if path != init
        ]
        parts.append(title + "| file | what it does |\n| --- | --- |\n" + "".join(rows))
    return "\n" + "\n".join(parts) + "\n"


@cache
def summary_of(path: Path) -> str:
    """Return the first paragraph of a module's docstring on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
