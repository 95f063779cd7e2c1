"""Test gcnzc with several versions of Python and torch, with and without DGL and PyG.

    python -m bench.robustness.matrix FOLDER                       every case
    python -m bench.robustness.matrix FOLDER --only "3.12 newest"  the cases that begin so
    python -m bench.robustness.matrix --list                       list the cases

A case is a Python, a torch, and how the versions of the other packages are chosen: `constraints`
are those of constraints.txt, which are for Python 3.11 and later, `lowest` the oldest that
pyproject.toml allows. The pinned torch comes with the pinned Triton, any other torch with the
Triton that it requires. For each case, `uv` makes an environment in FOLDER, removes it in the
end, and leaves its downloads in its own cache: a torch with CUDA takes 5 GB there. Then once with
DGL and PyG, and once with neither, the same things are done from this checkout:

- a selection of the tests, with a cache of numba that no other environment used; those
  that no library can make a difference to run in the first round only;
- commands: a small graph is made, and a model trained on it, of its nodes and of its edges;
- what needs a library is asked for. It works where the library is there; elsewhere it must end in
  the error that names what to install.

A line holds how many tests passed, failed and were skipped, which commands did not do what they
should, and the versions. Where there is no such Python, or packages do not go together, it says so
in `not_made` instead, and its versions are those of what ran this.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# the Python, the torch and how the others are chosen
CASES = (
    ("3.10", "2.4.0", "lowest"),
    ("3.10", "2.4.0", "constraints"),
    ("3.10", "newest", "constraints"),
    ("3.11", "2.4.0", "constraints"),
    ("3.11", "2.13.0", "constraints"),
    ("3.11", "newest", "constraints"),
    ("3.12", "2.4.0", "constraints"),
    ("3.12", "newest", "constraints"),
    ("3.13", "2.4.0", "constraints"),
    ("3.13", "2.5.0", "constraints"),
    ("3.13", "newest", "constraints"),
)
# those that a library may make a difference to, and others, which run once
TESTS = ("tests/interop",)
ONCE = (
    "tests/test_imports.py",
    "tests/sampling/test_neighbor.py",
    "tests/features/test_table.py",
    "tests/loader/test_loader.py",
    "tests/kernels/sample/test_sample.py",
    "tests/kernels/gather/test_gather.py",
    # what Triton compiles differs from one version to the next
    "tests/kernels/codec/test_signs.py",
    "tests/kernels/gather/test_compiles.py",
    "tests/kernels/test_compiles.py",
    "tests/kernels/aggregate/test_compiles.py",
)
# in which a command must end
COMMAND_S = 300
# name of the package, and what it is called where it is imported
LIBRARIES = {"dgl": "dgl", "torch-geometric": "torch_geometric", "lightning": "lightning"}
SMALL = ("--hidden", "16", "--layers", "2", "--fanouts", "5,5", "--batch-size", "256")
GRAPH = ("--nodes", "2000", "--edges", "10000", "--num-features", "16", "--classes", "4")
EVERY_MODULE = """
import importlib, pkgutil, gcnzc
# these import PyG and Lightning themselves
theirs = ("gcnzc.interop.pyg", "gcnzc.interop.lightning", "gcnzc.__main__")
def check(package):
    if not package.startswith(theirs):
        raise
for module in pkgutil.walk_packages(gcnzc.__path__, "gcnzc.", check):
    if not module.name.startswith(theirs):
        importlib.import_module(module.name)
"""
NODES_FROM_PYG = """
import torch
from gcnzc.interop.pyg import NeighborLoader
from torch_geometric.data import Data
data = Data(x=torch.rand(9, 2), edge_index=torch.randint(0, 9, (2, 40)))
assert sum(b.batch_size for b in NeighborLoader(data, num_neighbors=[2, 2], batch_size=4)) == 9
"""
NODES_FROM_DGL = """
import torch
from gcnzc.interop.dgl import DataLoader, import_dgl
dgl = import_dgl()
graph = dgl.graph((torch.randint(0, 9, (40,)), torch.randint(0, 9, (40,))), num_nodes=9)
loader = DataLoader(graph, torch.arange(9), dgl.dataloading.NeighborSampler([2, 2]), batch_size=4)
assert sum(len(outputs) for inputs, outputs, blocks in loader) == 9
"""
WITH_LIGHTNING = "from gcnzc.interop.lightning import DataModule"


def main() -> None:
    """Do what was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="of the environments")
    parser.add_argument("--only", default="", help="the words that a case's name begins with")
    parser.add_argument("--limit", type=int, default=900, help="seconds for one run of the tests")
    parser.add_argument("--keep", action="store_true", help="leave the environments, and use them")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.line:
        record_here(*json.loads(args.line))
        return
    cases = [case for case in CASES if " ".join(case).startswith(args.only)]
    if not cases:
        parser.error(f"no case begins with {args.only!r}; --list names them")
    if args.list:
        print(*(" ".join(case) for case in cases), sep="\n")
        return
    if args.folder is None:
        parser.error("where may the environments lie? Name a folder")
    if shutil.which("uv") is None:
        sys.exit("error: there is no uv, which makes environments\n\nhint: pip install uv")
    bad = 0
    for case in cases:
        bad += run_case(case, args.folder.resolve() / "-".join(case), args.limit, args.keep)
    sys.exit(bad > 0)


def run_case(case: tuple[str, str, str], environment: Path, limit: int, keep: bool) -> int:
    """Make an environment, and record what works in it with and without the libraries.

    Returns:
        How many lines say that something failed.
    """
    names = dict(zip(("asked_python", "asked_torch", "others"), case, strict=True))
    try:
        missing = make_environment(case, environment)
        lines = []
        for libraries in (True, False):
            if not libraries:
                uv("pip", "uninstall", "--python", environment, *LIBRARIES, "pytorch-lightning")
            lines.append(try_out(environment, [*TESTS, *ONCE] if libraries else TESTS, limit))
            told = {**names, "libraries": lines[-1].pop("libraries")}
            lines[-1] |= {"not_installed": missing if libraries else {}}
            record_there(environment / "bin/python", told, lines[-1])
        return sum(bool(line["failures"]) for line in lines)
    except subprocess.CalledProcessError as error:
        record_there(Path(sys.executable), names, {"not_made": reason(error.stderr)})
        return 0
    finally:
        if not keep:
            shutil.rmtree(environment, ignore_errors=True)


def make_environment(case: tuple[str, str, str], environment: Path) -> dict[str, str]:
    """Install what pyproject.toml asks for, with this torch, and the libraries.

    Returns:
        Libraries that could not be installed, and why.

    Raises:
        subprocess.CalledProcessError: there is no such Python, or packages do not go together.
    """
    python, torch, others = case
    # numba does not notice that a kernel which another one uses has changed
    shutil.rmtree(environment / "numba", ignore_errors=True)
    if not (environment / "bin/python").exists():
        uv("venv", "--python", python, environment)
    wanted = ["torch" if torch == "newest" else f"torch=={torch}", "pytest>=8"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        if others == "constraints":
            constraints.writelines(pins(torch))
            constraints.flush()
        common = ["pip", "install", "--python", environment, "--constraint", constraints.name]
        if others == "lowest":
            common += ["--resolution", "lowest-direct"]
        uv(*common, "--requirement", ROOT / "pyproject.toml", *wanted)
        missing = {}
        for library, version in (("torch-geometric", ">=2.6"), ("lightning", ">=2.4")):
            try:
                # with what is there already, whose versions must stay
                uv(*common, f"{library}{version}", *wanted)
            except subprocess.CalledProcessError as error:
                missing[library] = reason(error.stderr)
    if version_of(environment, "dgl") is None:
        missing["dgl"] = "pyproject.toml asks for none: it has no wheel for this Python"
    return missing


def pins(torch: str) -> list[str]:
    """Return the lines of constraints.txt, without torch and Triton for another torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    if f"torch=={torch}\n" in lines:
        return lines
    return [line for line in lines if not line.startswith(("torch==", "triton=="))]


def try_out(environment: Path, tests: Sequence[str], limit: int) -> dict[str, Any]:
    """Run tests and the commands."""
    begin = time.perf_counter()
    versions = {name: version_of(environment, name) for name in (*LIBRARIES, *OTHERS)}
    counts, failures = run_tests(environment, tests, limit)
    wrong = run_commands(environment, {name for name in LIBRARIES if versions[name]})
    return {
        "libraries": [name for name in LIBRARIES if versions[name]],
        **counts,
        "commands": len(commands(Path())),
        "commands_wrong": len(wrong),
        "failures": failures + wrong,
        "seconds": round(time.perf_counter() - begin, 1),
        "versions": versions,
    }


# beside those that every record has
OTHERS = ("scipy", "pandas", "scikit-learn", "networkx", "matplotlib", "tyro", "rich", "pytest")


def run_tests(
    environment: Path, tests: Sequence[str], limit: int
) -> tuple[dict[str, int], list[str]]:
    """Run the tests, and return the counts of outcomes and the names of failures."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        try:
            done = run_python(environment, words, ROOT, limit)
        except subprocess.TimeoutExpired:
            return {"passed": 0, "failed": 0, "skipped": 0}, [f"tests ran longer than {limit} s"]
        if not report.exists():
            return {"passed": 0, "failed": 0, "skipped": 0}, [last_line(done.stdout + done.stderr)]
        counts: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
        causes: dict[str, list[str]] = {}
        for test in ElementTree.parse(report).iter("testcase"):
            outcomes = {child.tag: child for child in test}
            bad = outcomes.get("failure", outcomes.get("error"))
            if bad is not None:
                name = f"{test.get('classname')}::{test.get('name')}"
                causes.setdefault(first_line(bad.get("message") or ""), []).append(name)
            kind = "failed" if bad is not None else "skipped" if "skipped" in outcomes else "passed"
            counts[kind] += 1
    failures = [f"{len(names)} as {names[0]}: {cause}" for cause, names in causes.items()]
    if done.returncode not in (0, 1):
        failures.append(f"pytest ended with {done.returncode}: {last_line(done.stdout)}")
    return counts, failures


def commands(folder: Path) -> list[tuple[str, list[str], str]]:
    """Return the commands by name: arguments of `python`, and the library that each needs."""
    graph, links = str(folder / "graph"), str(folder / "links")
    train = ["-m", "gcnzc", "train", *SMALL, "--epochs"]
    return [
        ("every module imports", ["-c", EVERY_MODULE], ""),
        ("make", ["-m", "gcnzc", "make", graph, *GRAPH], ""),
        ("check", ["-m", "gcnzc", "check"], ""),
        ("train", [*train, "2", graph], ""),
        ("prepare", ["-m", "gcnzc", "prepare", graph, links, "--task", "link"], ""),
        ("train --task link", [*train, "1", "--task", "link", links], ""),
        ("train --sampler dgl", [*train, "1", "--sampler", "dgl", graph], "dgl"),
        ("interop.dgl", ["-c", NODES_FROM_DGL], "dgl"),
        ("interop.pyg", ["-c", NODES_FROM_PYG], "torch-geometric"),
        ("interop.lightning", ["-c", WITH_LIGHTNING], "lightning"),
    ]


def run_commands(environment: Path, there: set[str]) -> list[str]:
    """Run the commands; say which did not do what they should."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for name, words, library in commands(Path(folder)):
            try:
                done = run_python(environment, words, Path(folder), COMMAND_S)
            except subprocess.TimeoutExpired:
                wrong.append(f"{name}: ran longer than {COMMAND_S} s")
                continue
            if not library or library in there:
                if done.returncode != 0:
                    wrong.append(f"{name}: {last_line(done.stderr)}")
            elif not refuses(done, library, environment):
                wrong.append(f"{name}: does not say how to install {library}: {done.stderr[-300:]}")
    return wrong


def refuses(done: subprocess.CompletedProcess[str], library: str, environment: Path) -> bool:
    """Whether a command or an import ends in an error whose hint is how to install the library."""
    hint = f"pip install {library}"
    if library == "dgl" and "3.13" in python_of(environment):
        hint = "use Python 3.12"
    _, found, told = done.stderr.rpartition("\nhint: ")
    return done.returncode == 1 and bool(found) and hint in told.replace("'", "")


def run_python(
    environment: Path, words: Sequence[str], folder: Path, limit: int
) -> subprocess.CompletedProcess[str]:
    """Run Python in the environment, with this checkout first on its path."""
    own = {
        "PYTHONPATH": str(ROOT),
        "NUMBA_CACHE_DIR": str(environment / "numba"),
        "GCNZC_CACHE": str(environment / "gcnzc"),
        # what is not installed here is not to be taken from the user's folder
        "PYTHONNOUSERSITE": "1",
    }
    return subprocess.run(
        [environment / "bin/python", *words],
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def python_of(environment: Path) -> str:
    """Return the name of the folder of the environment's packages."""
    [packages] = (environment / "lib").glob("python3*")
    return packages.name


def version_of(environment: Path, package: str) -> str | None:
    """Return a package's version from its metadata, or None."""
    name = package.replace("-", "_")
    folder = environment / "lib" / python_of(environment) / "site-packages"
    for found in folder.glob("*.dist-info"):
        named, _, version = found.name.removesuffix(".dist-info").partition("-")
        if named.lower() == name:
            return version
    return None


def uv(*words: str | Path) -> None:
    """Run uv; a CalledProcessError holds what it said."""
    subprocess.run(["uv", "--quiet", *words], capture_output=True, text=True, check=True)


def record_there(python: Path, case: dict[str, Any], told: dict[str, Any]) -> None:
    """Record a line from an environment, whose versions the record then has."""
    words = [str(python), "-m", "bench.robustness.matrix", "--line", json.dumps([case, told])]
    subprocess.run(words, cwd=ROOT, check=True)


def record_here(case: dict[str, Any], told: dict[str, Any]) -> None:
    """Record a line."""
    # it imports torch, which need not be where this script is started
    from bench.harness import record

    record("matrix", case, **told)


def reason(text: str) -> str:
    """Return the message of uv on one line."""
    words = text.replace("\u2570\u2500\u25b6", "").replace("\u00d7", "").split()
    return " ".join(words)[:400]


def first_line(text: str) -> str:
    """Return the first line of a test's failure message."""
    return text.strip().partition("\n")[0][:300]


def last_line(text: str) -> str:
    """Return the last line of a program's output."""
    return (text.strip().splitlines() or ["it said nothing"])[-1][:300]


if __name__ == "__main__":
    main()
