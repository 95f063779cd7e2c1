"""The page of promises names tests that exist, and at least one of each row that is not slow."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"


@cache
def find_tests(file: str) -> dict[str, bool]:
    """Return the tests of a file, and whether each is slow as a whole."""
    tree = ast.parse((ROOT / file).read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    marks = {node.name: [ast.unparse(each) for each in node.decorator_list] for node in found}
    return {
        name: "pytest.mark.slow" in those
        for name, those in marks.items()
        if name.startswith("test_")
    }


def test_each_promise_has_tests_that_exist_and_one_that_is_not_slow():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row not in ("| promise | tests |", "| --- | --- |")]
    assert len(rows) >= 40
    wrong = []
    for row in rows:
        promise, _, tests = row.strip("| ").partition(" | ")
        named = re.findall("`([^`]+)::([^`]+)`", tests)
        missing = [
            f"{file}::{name}"
            for file, name in named
            if not (ROOT / file).exists() or name not in find_tests(file)
        ]
        wrong += [f"no test {name} of the promise: {promise}" for name in missing]
        if not missing and all(find_tests(file)[name] for file, name in named):
            wrong.append(f"no test in CI of the promise: {promise}")
    assert not wrong, "\n".join(wrong)
