"""Run PyG's and DGL's own tests of their loaders with the drop-in loaders.

    git clone --depth 1 --branch 2.8.0 https://github.com/pyg-team/pytorch_geometric PYG
    git clone --depth 1 --branch v2.1.0 https://github.com/dmlc/dgl DGL
    python -m bench.robustness.peer_tests --pyg PYG --dgl DGL

The checkouts are of the tags closest to the versions of the installed packages. Only their test
folders are read, and this repository has no copy of them. Every test runs once with gcnzc's loaders
and once with the library's own loaders (see peer_plugin.py). Tests that construct one of these
loaders, and skipped tests, are counted:

- passed;
- rejected: a loader of gcnzc raised an error that names the unsupported feature;
- failed: any other error, which is a bug;
- skipped: a requirement of the test is missing, which the reason names.

PyG's own loaders need pyg-lib, which has no wheels for most versions of torch.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench import harness

ROOT = Path(__file__).parents[2]
SUITES = {
    "pyg": (
        "test/loader/test_neighbor_loader.py",
        "test/loader/test_link_neighbor_loader.py",
        "test/loader/test_zip_loader.py",
        "test/loader/test_cache.py",
        "test/loader/test_imbalanced_sampler.py",
        "test/loader/test_mixin.py",
        "test/loader/test_prefetch.py",
        "test/nn/conv/test_hgt_conv.py",
        "test/nn/conv/test_pna_conv.py",
        "test/nn/models/test_basic_gnn.py",
        "test/utils/test_trim_to_layer.py",
    ),
    "dgl": (
        "tests/python/pytorch/dataloading/test_dataloader.py",
        "tests/python/pytorch/dataloading/test_spot_target.py",
    ),
}
LIBRARIES = {"pyg": "torch_geometric", "dgl": "dgl"}
# time limit of all tests of a library
SUITE_LIMIT_S = 3600

Outcome = Mapping[str, Any]


def run_tests(
    peer: str, loaders: str, checkout: Path, files: Iterable[str] | None = None
) -> list[Outcome]:
    """Run the tests of a library.

    Args:
        peer: "pyg" or "dgl".
        loaders: "gcnzc", or "own" for the library's.
        checkout: folder of the library's repository.
        files: paths of test files in it; those of `SUITES` if None.

    Returns:
        The lines of peer_plugin.py for tests that constructed a loader or were skipped.

    Raises:
        RuntimeError: pytest stopped before all tests had run.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        paths = [str(ROOT), str(checkout / "tests")]
        plugins = ["-p", "bench.robustness.peer_plugin", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *plugins, "-c", os.devnull, "-W", "ignore", "-q"]
        command += ["--rootdir", str(checkout), "--report", str(report)]
        command += ["--peer", peer, "--loaders", loaders]
        command += [str(checkout / file) for file in files or SUITES[peer]]
        run = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "DGLBACKEND": "pytorch"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SUITE_LIMIT_S,
            check=False,
        )
        if run.returncode not in (0, 1):
            raise RuntimeError(f"pytest exited with {run.returncode}\n{run.stdout}\n{run.stderr}")
        lines = [json.loads(line) for line in report.read_text().splitlines()]
    return [line for line in lines if line["loaders"] or line["outcome"] == "skipped"]


def summarize(outcomes: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    """Count the outcomes by test file, and collect the reasons of tests that did not pass."""
    files: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        file, test = outcome["test"].split("::", 1)
        line = files.setdefault(file, {"outcomes": Counter(), "reasons": {}, "failures": {}})
        line["outcomes"][outcome["outcome"]] += 1
        if outcome["outcome"] == "failed":
            line["failures"][test] = outcome["reason"]
        elif outcome["outcome"] != "passed":
            line["reasons"].setdefault(outcome["outcome"], Counter())[outcome["reason"]] += 1
    return files


def record_tests(peer: str, loaders: str, checkout: Path) -> None:
    """Run the tests of a library, and record a line for each test file."""
    version = installed_version(peer)
    for file, line in summarize(run_tests(peer, loaders, checkout)).items():
        counts = {name: line["outcomes"][name] for name in ("passed", "rejected", "failed")}
        counts |= {name: line["outcomes"][name] for name in ("skipped", "xfailed")}
        harness.record(
            "peer_tests",
            {"peer": peer, "file": file, "loaders": loaders, "version": version},
            **counts,
            reasons=line["reasons"],
            failures=line["failures"],
        )


def installed_version(peer: str) -> str:
    """Return the installed version of the library."""
    return importlib.metadata.version(LIBRARIES[peer])


def main() -> None:
    """Run the tests of the checkouts that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pyg", type=Path, metavar="FOLDER", help="a checkout of PyG")
    parser.add_argument("--dgl", type=Path, metavar="FOLDER", help="a checkout of DGL")
    arguments = parser.parse_args()
    for peer in SUITES:
        checkout = getattr(arguments, peer)
        for loaders in ("gcnzc", "own") if checkout is not None else ():
            record_tests(peer, loaders, checkout.resolve())


if __name__ == "__main__":
    main()
