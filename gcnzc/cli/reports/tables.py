"""Format tables as lines of text."""

from collections.abc import Collection, Sequence


def align_columns(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Format rows as lines of text with aligned columns; a row may have fewer cells than others.

    Args:
        rows: the cells of each row.
        left: the columns that are aligned left; the others are aligned right.
    """
    widths = [
        max(len(row[column]) for row in rows if column < len(row))
        for column in range(max(map(len, rows)))
    ]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    ]
