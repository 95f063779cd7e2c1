"""The page that says which file does what agrees with the files."""

import architecture
import pytest

LIMIT = 500  # lines of a module
FILES = [
    path
    for folder in ("gcnzc", "kernels")
    for path in sorted((architecture.ROOT / folder).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
]


def test_the_page_has_every_file_with_what_its_docstring_says():
    page = architecture.PAGE.read_text()
    inner = page.partition(architecture.BEGIN)[2].partition(architecture.END)[0]
    assert inner == architecture.tables(), "run `python bench/architecture.py`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_module_fits_its_first_sentence(path):
    assert architecture.summary_of(path).endswith((".", "`"))
    name = path.relative_to(architecture.ROOT).as_posix()
    lines = len(path.read_text().splitlines())
    assert lines <= LIMIT, f"{name} has {lines} lines"
