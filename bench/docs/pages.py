"""Write the tables of results into README.md and the pages of docs/.

    python -m bench.docs.pages

Pages have the comments `<!-- table: NAME -->` and `<!-- end of table -->` for each table. The text
between them is replaced by a table that is computed from the lines of `bench/results/`. NAME is the
name of a function in one of the modules `bench/docs/*_tables.py`.
"""

import re
import sys
from pathlib import Path

from bench.docs import (
    loading_tables,  # noqa: F401, which registers its tables
    network_tables,  # noqa: F401
    robustness_tables,  # noqa: F401
    strategy_tables,  # noqa: F401
    training_tables,  # noqa: F401
)
from bench.docs.table import TABLES

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if not {"_build", "_generated"} & {*path.parts}
]
PATTERN = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> int:
    """Write each page whose tables have changed, and print its path."""
    for page in PAGES:
        text = page.read_text()
        new = with_tables(text)
        if new != text:
            page.write_text(new)
            print(page.relative_to(ROOT))
    return 0


def with_tables(text: str) -> str:
    """Return a page's text with its tables recomputed."""
    return PATTERN.sub(lambda found: f"{found[1]}\n{TABLES[found[2]].render()}\n{found[3]}", text)


def tables_of(text: str) -> list[str]:
    """Return the names of the tables of a page."""
    return [found[2] for found in PATTERN.finditer(text)]


if __name__ == "__main__":
    sys.exit(main())
