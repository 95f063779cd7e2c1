"""Tables in the terminal have aligned columns."""

from gcnzc.cli.output import align_columns


def test_columns_are_aligned_and_rows_may_be_short():
    rows = [["name", "s", ""], ["a", "12.5", "note"], ["long name", "3"]]
    assert align_columns(rows, left=(0,)) == [
        "name          s",
        "a          12.5  note",
        "long name     3",
    ]
