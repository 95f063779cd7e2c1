"""The list of error messages in the documentation is generated from the code."""

import ast
import re

import pytest

from bench.docs import messages


@pytest.fixture(scope="module")
def text():
    return "\n".join(messages.lines())


def test_every_part_of_the_list_has_messages_with_their_remedies(text):
    _, *parts = text.split("### ")
    assert [part.splitlines()[0] for part in parts] == list(messages.PARTS)
    for part in parts:
        rows = [line for line in part.splitlines() if line.startswith("| ")]
        assert len(rows) > 10
        assert all(row.replace("\\|", "").count("|") == 3 for row in rows)


def test_values_of_a_message_have_the_names_of_their_variables():
    tree = ast.parse('f"{path} has {self.rows} rows, not {1 + 2}\\n\\nhint: give {rows}"')
    assert list(messages.texts_of(tree)) == [
        "{path} has {rows} rows, not {...}\n\nhint: give {rows}"
    ]


def test_a_cell_is_one_line_without_markup():
    assert messages.cell("a|b *c*\n `d_*`") == r"a\|b \*c\* `d_*`"


def test_no_message_has_a_role_of_myst(text):
    # {name} before code would be one, which the site has not
    assert not re.search(r"(?<!\\)\{\w+\}`", text)
