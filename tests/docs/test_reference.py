"""The API reference: every public name is documented, with an example that runs."""

import doctest
import importlib
import importlib.util
import re
import types
from pathlib import Path

import pytest

from tests.programs import output_of_compiled

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference" / "api"
PAGES = {path.stem: path.read_text() for path in FOLDER.glob("*.md")}
PACKAGES = (
    *(
        "",
        ".compress",
        ".exchange",
        ".features",
        ".graph",
        ".interop.dgl",
        ".interop.pyg",
    ),
    *(".loader", ".models", ".optim", ".sampling", ".testing", ".train"),
)
# public names of modules without `__all__`
OTHERS = (
    "gcnzc.interop.graphbolt.feature",
    "gcnzc.interop.lightning.DataModule",
    "gcnzc.interop.pyg.sampler.NeighborSampler",
)
DIRECTIVE = re.compile(r"^\.\. auto\w+:: ([\w.]+)", re.MULTILINE)
EXAMPLE = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def public_objects():
    """The objects that packages export, by one of their paths."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(f"gcnzc{package}")
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, types.ModuleType) and name != "__version__":
                found.setdefault(id(value), f"{module.__name__}.{name}")
    return found


def resolve(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_every_public_name_is_in_the_reference():
    documented = [path for text in PAGES.values() for path in DIRECTIVE.findall(text)]
    assert len(documented) == len(set(documented)), "a name is documented twice"
    shown = {id(resolve(path)) for path in documented}
    missing = [path for key, path in public_objects().items() if key not in shown]
    missing += [path for path in OTHERS if path not in documented]
    assert not missing, f"no entry in docs/reference/api/ for {', '.join(missing)}"


@pytest.mark.parametrize("page", PAGES)
def test_every_entry_has_an_example_that_uses_it(page):
    entries = re.split("^##+ ", PAGES[page], flags=re.MULTILINE)
    for entry in filter(DIRECTIVE.search, entries):
        name = DIRECTIVE.search(entry)[1].rpartition(".")[2]
        examples = "".join(EXAMPLE.findall(entry))
        assert re.search(rf"\b{name}\b", examples), f"{name} has no example"


def run_examples(page):
    """Return what the examples of a page print that it does not show."""
    text = "\n".join(EXAMPLE.findall(PAGES[page]))
    test = doctest.DocTestParser().get_doctest(text, {}, page, f"{page}.md", 0)
    output = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=output.append)
    return "".join(output)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "testing"])
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    if page == "interop":
        for library in ("dgl", "torch_geometric", "lightning"):
            if importlib.util.find_spec(library) is None:
                pytest.skip(f"{library} is not installed")
    monkeypatch.chdir(tmp_path)
    output = run_examples(page)
    assert not output, output


@pytest.mark.compiled
def test_the_examples_of_compiled_kernels_run():
    run = "import sys; from tests.docs.test_reference import run_examples as run"
    output_of_compiled("-c", f"{run}; sys.exit(run('testing') or 0)", PYTHONPATH=str(ROOT))


@pytest.mark.compiled
def test_the_code_of_the_guide_to_compiled_kernels_runs(tmp_path):
    guide = ROOT / "docs" / "howto" / "test_triton_kernels.md"
    blocks = re.findall(r"^```py\n(.*?)^```$", guide.read_text(), re.MULTILINE | re.DOTALL)
    # Triton reads the source of a kernel from its file
    (tmp_path / "guide.py").write_text("\n".join(blocks))
    assert len(blocks) == 6
    output_of_compiled("-W", "error", tmp_path / "guide.py", PYTHONPATH=str(ROOT))
