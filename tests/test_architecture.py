"""The architecture page lists every file with its docstring."""

import re

from bench.docs import architecture

LIMIT = 900  # lines of a module
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


def test_the_diagram_names_existing_files():
    picture = architecture.ROOT / "docs" / "pictures" / "data_path.svg"
    files = re.findall(r'"monospace">([^<]*)<', picture.read_text())
    assert len(files) > 10
    for file in files:
        assert any((architecture.ROOT / folder / file).exists() for folder in ("", "gcnzc")), file


def test_modules_have_at_most_900_lines_and_a_first_sentence():
    wrong = []
    for path in FILES:
        name = path.relative_to(architecture.ROOT).as_posix()
        if not architecture.summary_of(path).endswith((".", "`")):
            wrong.append(f"the first sentence of {name} has no end")
        lines = len(path.read_text().splitlines())
        if lines > LIMIT:
            wrong.append(f"{name} has {lines} lines")
    assert not wrong
