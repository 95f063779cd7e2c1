"""The page that says which file does what agrees with the files."""

import pytest

from bench.docs import architecture, data_path

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
    assert inner == architecture.tables(), "run `python -m bench.docs.architecture`"


def test_the_diagram_is_current_and_names_existing_files():
    assert data_path.PICTURE.read_text() == data_path.svg(), (
        "run `python -m bench.docs.architecture`"
    )
    for box in data_path.BOXES.values():
        for file in box.files:
            assert (data_path.ROOT / file).exists(), file


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_module_fits_its_first_sentence(path):
    assert architecture.summary_of(path).endswith((".", "`"))
    name = path.relative_to(architecture.ROOT).as_posix()
    lines = len(path.read_text().splitlines())
    assert lines <= LIMIT, f"{name} has {lines} lines"
