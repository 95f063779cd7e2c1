"""Test gcnzc with several versions of Python and torch, with and without DGL and PyG.

    python -m bench.robustness.matrix FOLDER                       every case
    python -m bench.robustness.matrix FOLDER --only "3.12 newest"  cases whose name starts with this
    python -m bench.robustness.matrix --list                       list the cases

A case is a version of Python, a version of torch, and how the versions of the other packages are
chosen: `constraints` takes those of constraints.txt, which are for Python 3.11 and later, and
`lowest` the oldest that pyproject.toml allows. The torch of constraints.txt is installed with the
Triton of constraints.txt, any other torch with the Triton that it requires. For each case, `uv`
creates an environment in FOLDER. The environment is removed at the end, but uv's cache keeps the
downloads, of which a torch with CUDA takes 5 GB. First with DGL, PyG and Lightning, then without
them, this program runs a selection of the tests of this checkout, with an empty cache of numba.
Tests that do not depend on these libraries run only once.

A recorded line has the numbers of tests that passed, failed and were skipped, and the versions. If
the environment cannot be created, because uv has no such Python or the requirements conflict, the
line has the reason in `not_made`, and the versions of the environment of this program.
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
# version of Python, version of torch, choice of the other versions
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
# tests that depend on the libraries, and tests that do not, which run once
TESTS = ("tests/interop",)
ONCE = (
    "tests/test_imports.py",
    "tests/sampling/test_neighbor.py",
    "tests/features/test_table.py",
    "tests/loader/test_loader.py",
    "tests/kernels/sample/test_sample.py",
    "tests/kernels/gather/test_gather.py",
    # versions of Triton compile kernels differently
    "tests/kernels/aggregate/test_compiles.py",
)
LIBRARIES = ("dgl", "torch-geometric", "lightning")


def main() -> None:
    """Test the cases of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where to create the environments")
    parser.add_argument("--only", default="", help="the start of a case's name")
    parser.add_argument(
        "--limit", type=int, default=900, help="time limit of one run of the tests, in seconds"
    )
    parser.add_argument("--keep", action="store_true", help="keep and reuse the environments")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.line:
        record_line(*json.loads(args.line))
        return
    cases = [case for case in CASES if " ".join(case).startswith(args.only)]
    if not cases:
        parser.error(f"no case starts with {args.only!r}; --list prints the cases")
    if args.list:
        print(*(" ".join(case) for case in cases), sep="\n")
        return
    if args.folder is None:
        parser.error("FOLDER is required; the environments are created there")
    if shutil.which("uv") is None:
        sys.exit("error: uv, which creates environments, is not installed\n\nhint: pip install uv")
    failed = 0
    for case in cases:
        failed += run_case(case, args.folder.resolve() / "-".join(case), args.limit, args.keep)
    sys.exit(failed > 0)


def run_case(case: tuple[str, str, str], environment: Path, limit: int, keep: bool) -> int:
    """Create an environment, test in it with and without the libraries, and record the results.

    Returns:
        The number of recorded lines with failures.
    """
    names = dict(zip(("asked_python", "asked_torch", "others"), case, strict=True))
    try:
        not_installed = create_environment(case, environment)
        lines = []
        for libraries in (True, False):
            if not libraries:
                uv("pip", "uninstall", "--python", environment, *LIBRARIES, "pytorch-lightning")
            lines.append(run_checks(environment, [*TESTS, *ONCE] if libraries else TESTS, limit))
            fields = {**names, "libraries": lines[-1].pop("libraries")}
            lines[-1] |= {"not_installed": not_installed if libraries else {}}
            record_from(environment / "bin/python", fields, lines[-1])
        return sum(bool(line["failures"]) for line in lines)
    except subprocess.CalledProcessError as error:
        record_from(Path(sys.executable), names, {"not_made": reason(error.stderr)})
        return 0
    finally:
        if not keep:
            shutil.rmtree(environment, ignore_errors=True)


def create_environment(case: tuple[str, str, str], environment: Path) -> dict[str, str]:
    """Install the requirements of pyproject.toml, the torch of the case, and the libraries.

    Returns:
        Names of the libraries that could not be installed, to the reasons.

    Raises:
        subprocess.CalledProcessError: uv has no such Python, or the requirements conflict.
    """
    python, torch, others = case
    # numba's cache is not updated if a function that a kernel calls has changed
    shutil.rmtree(environment / "numba", ignore_errors=True)
    if not (environment / "bin/python").exists():
        uv("venv", "--python", python, environment)
    required = ["torch" if torch == "newest" else f"torch=={torch}", "pytest>=8"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        if others == "constraints":
            constraints.writelines(pins(torch))
            constraints.flush()
        common = ["pip", "install", "--python", environment, "--constraint", constraints.name]
        if others == "lowest":
            common += ["--resolution", "lowest-direct"]
        uv(*common, "--requirement", ROOT / "pyproject.toml", *required)
        not_installed = {}
        for library, version in (("torch-geometric", ">=2.6"), ("lightning", ">=2.4")):
            try:
                # the other requirements keep the versions that are installed
                uv(*common, f"{library}{version}", *required)
            except subprocess.CalledProcessError as error:
                not_installed[library] = reason(error.stderr)
    if version_of(environment, "dgl") is None:
        not_installed["dgl"] = "pyproject.toml does not require it: no wheel for this Python"
    return not_installed


def pins(torch: str) -> list[str]:
    """Return the lines of constraints.txt, without torch and Triton if it has another torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    if f"torch=={torch}\n" in lines:
        return lines
    return [line for line in lines if not line.startswith(("torch==", "triton=="))]


def run_checks(environment: Path, tests: Sequence[str], limit: int) -> dict[str, Any]:
    """Run tests, and return the fields of the record."""
    begin = time.perf_counter()
    versions = {name: version_of(environment, name) for name in (*LIBRARIES, *OTHERS)}
    counts, failures = run_tests(environment, tests, limit)
    return {
        "libraries": [name for name in LIBRARIES if versions[name]],
        **counts,
        "failures": failures,
        "seconds": round(time.perf_counter() - begin, 1),
        "versions": versions,
    }


# recorded in addition to the versions that every record has
OTHERS = ("scipy", "pandas", "scikit-learn", "networkx", "matplotlib", "rich", "pytest")


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
            return {"passed": 0, "failed": 0, "skipped": 0}, [f"tests took longer than {limit} s"]
        if not report.exists():
            return {"passed": 0, "failed": 0, "skipped": 0}, [last_line(done.stdout + done.stderr)]
        counts: dict[str, int] = {"passed": 0, "failed": 0, "skipped": 0}
        causes: dict[str, list[str]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            outcomes = {child.tag: child for child in case}
            error = outcomes.get("failure", outcomes.get("error"))
            if error is not None:
                name = f"{case.get('classname')}::{case.get('name')}"
                causes.setdefault(first_line(error.get("message") or ""), []).append(name)
                counts["failed"] += 1
            else:
                counts["skipped" if "skipped" in outcomes else "passed"] += 1
    failures = [
        f"{len(names)} tests, the first is {names[0]}: {cause}" for cause, names in causes.items()
    ]
    if done.returncode not in (0, 1):
        failures.append(f"pytest exited with {done.returncode}: {last_line(done.stdout)}")
    return counts, failures


def run_python(
    environment: Path, words: Sequence[str], folder: Path, limit: int
) -> subprocess.CompletedProcess[str]:
    """Run Python in the environment, with this checkout first on its path."""
    own = {
        "PYTHONPATH": str(ROOT),
        "NUMBA_CACHE_DIR": str(environment / "numba"),
        "GCNZC_CACHE": str(environment / "gcnzc"),
        # do not import packages from the user's folder
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
    """Run uv. A CalledProcessError has its output."""
    subprocess.run(["uv", "--quiet", *words], capture_output=True, text=True, check=True)


def record_from(python: Path, case: dict[str, Any], result: dict[str, Any]) -> None:
    """Record a line in the process of an environment, so that it has the environment's versions."""
    words = [str(python), "-m", "bench.robustness.matrix", "--line", json.dumps([case, result])]
    subprocess.run(words, cwd=ROOT, check=True)


def record_line(case: dict[str, Any], result: dict[str, Any]) -> None:
    """Record a line with the versions of this environment."""
    # imports torch, which the environment of the parent process may lack
    from bench.harness import record

    record("matrix", case, **result)


def reason(text: str) -> str:
    """Return the message of uv on one line."""
    words = text.replace("\u2570\u2500\u25b6", "").replace("\u00d7", "").split()
    return " ".join(words)[:400]


def first_line(text: str) -> str:
    """Return the first line of a test's failure message."""
    return text.strip().partition("\n")[0][:300]


def last_line(text: str) -> str:
    """Return the last line of a program's output."""
    return (text.strip().splitlines() or ["no output"])[-1][:300]


if __name__ == "__main__":
    main()
