"""Progress is a bar on a terminal and plain lines elsewhere."""

import io
import re

import pytest
from rich.console import Console

from gcnzc.train import progress
from gcnzc.train.progress import Reporter


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_are_printed_every_ten_seconds(clock):
    text = io.StringIO()
    with Reporter(Console(file=text)).task("count") as advance:
        for done in range(1, 31):
            clock[0] += 1
            advance(done, 30, "fast")
    assert text.getvalue().splitlines() == [
        "count  10/30  fast",
        "count  20/30  fast",
        "count  30/30  fast",
    ]


def test_a_terminal_shows_a_bar():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    with Reporter(console).task("count") as advance:
        advance(3, 3, "loss 0.5")
    assert "count" in text.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue())
    assert "3/3 loss 0.5" in plain


def test_text_is_not_interpreted_as_markup():
    text = io.StringIO()
    Reporter(Console(file=text)).say("[red] is a word [1, 2]")
    assert text.getvalue() == "[red] is a word [1, 2]\n"
