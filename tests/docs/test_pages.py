"""The code of README and of the documentation runs, and its commands exist."""

import dataclasses
import importlib.util
import re
import shlex
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

import gcnzc
from bench.network import cluster
from gcnzc.cli import main
from gcnzc.cli.parser import parse
from gcnzc.graph import EdgeShares
from gcnzc.optim import ZeroOneSchedule
from gcnzc.train import record, run_folder
from gcnzc.train.config import TrainConfig

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "_generated" not in path.parts and "_build" not in path.parts
}
# a block of Python, or what must run before the next one, in a comment that readers do not see
CODE = re.compile(r"^```python\n(.*?)^```$|^<!-- setup\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# pages that need another library
NEEDS = {"torch_geometric": "torch_geometric", "gcnzc.interop.dgl": "dgl", "lightning": "lightning"}
WITH_CODE = [name for name, text in PAGES.items() if CODE.search(text)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small prepared graphs under the names that pages use."""
    folder = tmp_path_factory.mktemp("pages")
    random = np.random.default_rng(0)
    nodes = np.arange(300)
    np.savez(
        folder / "small.npz",
        edge_index=random.integers(300, size=(2, 2000)),
        node_feat=random.standard_normal((300, 8), dtype=np.float32),
        node_label=nodes % 4,
        train_idx=nodes[:200],
        valid_idx=nodes[200:250],
        test_idx=nodes[250:],
    )
    for name in ("arxiv", "products"):
        gcnzc.prepare(folder / "small.npz", folder / "data" / name, bidirected=True)
    gcnzc.prepare(
        folder / "small.npz", folder / "data/pairs", bidirected=True, edge_split=EdgeShares()
    )
    return folder / "data"


def enter_folder(path, data, monkeypatch):
    """Work in an empty folder with the prepared graphs of `data`."""
    monkeypatch.chdir(path)
    (path / "data").mkdir()
    for graph in data:
        (path / "data" / graph.name).symlink_to(graph)


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_code_of_a_page_runs(page, data, tmp_path, monkeypatch):
    blocks = [found[1] or found[2] for found in CODE.finditer(PAGES[page])]
    code = "\n".join(blocks)
    for word, library in NEEDS.items():
        if word in code and importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    if "from bench.network.cluster import" in code and (reason := cluster.can_make()):
        pytest.skip(reason)
    if "torch_geometric" in code:
        # without the warnings of its own import
        importlib.import_module("gcnzc.interop.pyg")
    enter_folder(tmp_path, data.iterdir(), monkeypatch)
    exec(compile(code, page, "exec"), {"__name__": "page"})


def commands_of(text):
    """The commands of the console blocks, without prompts and comments."""
    for found in CONSOLE.finditer(text):
        for line in found[1].replace("\\\n", " ").splitlines():
            assert line.startswith(("$ ", "# ")), f"{line!r} has no prompt"
            yield shlex.split(line[2:], comments=line.startswith("$"))


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if CONSOLE.search(text)])
def test_the_commands_of_a_page_exist(page, monkeypatch):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    # of runs and files that a reader has
    monkeypatch.setattr(run_folder, "read_config", lambda path: TrainConfig())
    for command, *words in commands_of(PAGES[page]):
        if command == "gcnzc":
            parse(words)
        elif command == "torchrun" and "gcnzc" in words:
            parse(words[words.index("gcnzc") + 1 :])
        elif command == "make":
            assert {word for word in words if "=" not in word} <= {*targets}, words
        elif command == "python" and words[0] == "-m" and words[1].startswith("bench."):
            assert (ROOT / words[1].replace(".", "/")).with_suffix(".py").exists(), words[1]


@pytest.mark.parametrize(
    "page",
    [
        "docs/quickstart.md",
        "docs/tutorials/own_graph.md",
        "docs/tutorials/hetero.md",
        "docs/howto/deep_models.md",
        pytest.param("docs/howto/link_prediction.md", marks=pytest.mark.slow),
    ],
)
def test_the_commands_of_a_page_run(page, data, tmp_path, monkeypatch, capsys):
    given = [data / name for name in ("arxiv", "products")]
    enter_folder(tmp_path, given, monkeypatch)
    if page in ("docs/tutorials/own_graph.md", "docs/tutorials/hetero.md"):
        # the folders and the archive
        scope: dict = {}
        for block in CODE.finditer(PAGES[page]):
            exec(block[1], scope)
    for _, *words in commands_of(PAGES[page]):
        if "--download" not in words:
            assert main(words) == 0, f"{' '.join(words)}: {capsys.readouterr().err}"


def test_links_lead_to_pages_and_files():
    for name, text in PAGES.items():
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", text):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}"


def test_the_readme_fits_on_two_screens_and_names_no_unknown_address():
    text = PAGES["README.md"]
    assert len(text.splitlines()) < 120
    assert not re.findall(r"https?://\S+", text)


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for name, text in PAGES.items():
        for entries in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL):
            folder = Path(name).parent
            paths = [line for line in entries.split() if not line.startswith(":")]
            listed |= {(folder / f"{path}.md").as_posix() for path in paths}
    pages = {name for name in PAGES if name.startswith("docs/")} - {"docs/index.md"}
    assert pages <= listed, f"not in docs/index.md: {pages - listed}"


def test_the_files_of_a_run_folder_are_listed():
    named = {value for key, value in vars(run_folder).items() if key.isupper()} | {record.LAUNCH}
    text = PAGES["docs/reference/commands.md"]
    assert not [name for name in named if f"`{name}" not in text]


def test_the_fields_for_deepspeed_users_exist():
    rows = PAGES["docs/coming_from.md"].split("with these fields:")[1].splitlines()[1:]
    rows = list(takewhile(lambda row: "gradient_clipping" not in row, rows))
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[2])}
    fields = {field.name for field in dataclasses.fields(ZeroOneSchedule)}
    assert len(rows) == 3
    assert named <= fields
