"""Draw the data flow diagram of docs/architecture.md, `docs/pictures/data_path.svg`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "data_path.svg"
WIDTH, HEIGHT, COLUMN, ROW, LEFT, TOP = 158, 62, 196, 104, 14, 34


@dataclass(frozen=True)
class Box:
    """A stage in a cell of the grid, with the files that implement it."""

    column: int
    row: int
    title: str
    files: tuple[str, ...] = ()

    @property
    def left(self) -> int:
        """Left edge, in pixels."""
        return LEFT + self.column * COLUMN

    @property
    def top(self) -> int:
        """Top edge, in pixels."""
        return TOP + self.row * ROW


BOXES = {
    "files": Box(0, 0, "OGB or .npz files"),
    "prepare": Box(1, 0, "gcnzc prepare", ("datasets", "gcnzc/graph/prepare.py")),
    "folder": Box(2, 0, "prepared folder", ("gcnzc/graph/load.py",)),
    "graph": Box(1, 1, "Graph", ("gcnzc/graph/graph.py",)),
    "table": Box(3, 1, "FeatureTable", ("gcnzc/features/table.py",)),
    "seeds": Box(0, 2, "seeds of an epoch", ("gcnzc/loader/seeds.py",)),
    "sampler": Box(1, 2, "sampler", ("gcnzc/sampling", "kernels/sample")),
    "batch": Box(2, 2, "blocks and node ids", ("gcnzc/sampling/batch.py",)),
    "gather": Box(3, 2, "gather", ("gcnzc/loader/transfer.py", "kernels/gather")),
    "model": Box(4, 2, "model", ("gcnzc/models", "kernels/aggregate")),
    "optimizer": Box(4, 3, "optimizer", ("gcnzc/optim",)),
    "compress": Box(3, 3, "compression", ("gcnzc/compress", "kernels/codec")),
    "exchange": Box(2, 3, "exchange", ("gcnzc/exchange",)),
    "others": Box(1, 3, "other workers"),
}
# start, end, label, and whether data flows in both directions
ARROWS = (
    ("files", "prepare", "", False),
    ("prepare", "folder", "", False),
    ("folder", "graph", "memory-mapped", False),
    ("folder", "table", "", False),
    ("graph", "sampler", "", False),
    ("seeds", "sampler", "", False),
    ("sampler", "batch", "", False),
    ("batch", "gather", "", False),
    ("table", "gather", "rows over PCIe", False),
    ("gather", "model", "", False),
    ("model", "optimizer", "gradients", False),
    ("optimizer", "compress", "", True),
    ("compress", "exchange", "", True),
    ("exchange", "others", "", True),
)
# column and row of a box, and the caption above it
GROUPS = (
    (0, 0, "once"),
    (0, 2, "threads, while the model computes"),
    (4, 2, "GPU or CPU"),
    (1, 3, "several workers"),
)


def svg() -> str:
    """Return the diagram as SVG."""
    width = LEFT + 4 * COLUMN + WIDTH + LEFT
    height = TOP + 3 * ROW + HEIGHT + LEFT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, *parts(width, height), "</svg>", ""])


def parts(width: int, height: int) -> Iterator[str]:
    """Yield the elements of the SVG."""
    yield "<title>The path of the data through gcnzc</title>"
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    for column, row, title in GROUPS:
        left, top = LEFT + column * COLUMN, TOP + row * ROW - 8
        yield f'<text x="{left}" y="{top}" fill="#777" font-size="11">{title}</text>'
    for begin, end, label, is_both in ARROWS:
        yield from arrow(BOXES[begin], BOXES[end], label, is_both)
    for box in BOXES.values():
        yield from box_of(box)


def box_of(box: Box) -> Iterator[str]:
    """Yield a rectangle with a title and files."""
    fill = "#e8f0fe" if box.files else "#f4f4f4"
    yield (
        f'<rect x="{box.left}" y="{box.top}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
        f'fill="{fill}" stroke="#4a6fa5"/>'
    )
    middle = box.left + WIDTH // 2
    first = box.top + HEIGHT // 2 + 5 - 8 * len(box.files)
    yield f'<text x="{middle}" y="{first}" text-anchor="middle" fill="#111">{box.title}</text>'
    for number, file in enumerate(box.files, start=1):
        yield (
            f'<text x="{middle}" y="{first + 16 * number}" text-anchor="middle" fill="#444" '
            f'font-size="11" font-family="monospace">{file.removeprefix("gcnzc/")}</text>'
        )


def arrow(begin: Box, end: Box, label: str, is_both: bool) -> Iterator[str]:
    """Yield an arrow between two boxes: horizontal in a row, otherwise vertical or diagonal."""
    if begin.row == end.row:
        forward = end.column > begin.column
        x1, x2 = (begin.left + WIDTH, end.left) if forward else (begin.left, end.left + WIDTH)
        y1 = y2 = begin.top + HEIGHT // 2
    else:
        side = (end.column > begin.column) - (end.column < begin.column)
        x1 = begin.left + WIDTH // 2 + side * WIDTH // 3
        x2 = end.left + WIDTH // 2 - side * WIDTH // 3
        y1, y2 = begin.top + HEIGHT, end.top
    yield f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#555"/>'
    yield head((x1, y1), (x2, y2))
    if is_both:
        yield head((x2, y2), (x1, y1))
    if label:
        yield (
            f'<text x="{(x1 + x2) // 2 + 8}" y="{(y1 + y2) // 2 + 4}" fill="#555" '
            f'font-size="11">{label}</text>'
        )


def head(begin: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the head of an arrow."""
    length = math.dist(begin, end)
    x, y = ((end[axis] - begin[axis]) / length for axis in (0, 1))
    back = end[0] - 9 * x, end[1] - 9 * y
    corners = (end, (back[0] - 4 * y, back[1] + 4 * x), (back[0] + 4 * y, back[1] - 4 * x))
    points = " ".join(f"{corner[0]:.1f},{corner[1]:.1f}" for corner in corners)
    return f'<polygon points="{points}" fill="#555"/>'
