"""The tables of the documentation are those of the recorded results."""

import re

import pytest

from bench.docs import pages
from bench.docs.table import measured

PAGES = {path.relative_to(pages.ROOT).as_posix(): path.read_text() for path in pages.PAGES}
# figures that a measurement gives, with their unit
MEASURED = re.compile(
    r"\d[\d.,]* ?(?:seeds/s|seed nodes/s|GB/s|times (?:as|less|more|fewer|faster)|points)|\d ± \d"
)


@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if "<!-- table:" in text])
def test_a_page_has_the_tables_of_the_recorded_lines(name):
    assert pages.with_tables(PAGES[name]) == PAGES[name], "run `python -m bench.docs.pages`"


def test_every_table_is_on_a_page():
    shown = [table for text in PAGES.values() for table in pages.tables_of(text)]
    assert sorted(set(shown)) == sorted(pages.TABLES)


# the log keeps figures of trials that no file has
def test_no_measured_figure_is_typed_outside_of_a_table():
    prose = {name: pages.PATTERN.sub("", text) for name, text in PAGES.items()}
    found = {name: MEASURED.findall(text) for name, text in prose.items() if name != "docs/log.md"}
    assert not {name: figures for name, figures in found.items() if figures}


def test_a_caption_names_machine_date_commits_and_command():
    line = {"time": "2026-11-20T10:00:00Z", "cpu": "A", "cores": 2, "torch": "2.13.0+cpu"}
    line |= {"commit": "abc", "gpu": "none"}
    text = measured([line, line | {"commit": "def-dirty", "gpu": "H"}], "x")
    assert text == (
        "A and H, 2 cores, torch 2.13.0, 2026-11-20, commits `abc`, `def-dirty`. "
        "Measured by `python -m x`."
    )
