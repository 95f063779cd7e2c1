"""Run PyG's and DGL's own tests of their loaders with the drop-in loaders.

    git clone --depth 1 --branch 2.8.0 https://github.com/pyg-team/pytorch_geometric PYG
    git clone --depth 1 --branch v2.1.0 https://github.com/dmlc/dgl DGL
    python -m bench.robustness.peer_tests --pyg PYG --dgl DGL

The checkouts are of the tags closest to the installed packages; only their test folders are read,
and nothing of them is in this repository. Every test runs once with gcnzc's loaders and once with
the library's own (see peer_plugin.py). A test counts if it constructs one of these loaders:

- passed;
- rejected: a loader of gcnzc raised the error that names what it does not support;
- failed: in any other way, which must not happen;
- skipped: something else is missing, which the line names.

Without pyg-lib, which most versions of torch have no wheel of, PyG's own loaders draw nothing.
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
# in which all tests of a library must end
SUITE_LIMIT_S = 3600

Outcome = Mapping[str, Any]


def run_tests(
    peer: str, loaders: str, checkout: Path, files: Iterable[str] | None = None
) -> list[Outcome]:
    """Run the tests of a library.

    Args:
        peer: "pyg" or "dgl".
        loaders: "gcnzc", or "own" for the library's.
        checkout: of the library's repository.
        files: of tests in it; those of `SUITES` if None.

    Returns:
        What peer_plugin.py reports of each test that constructed a loader or was skipped.

    Raises:
        RuntimeError: the tests did not run to their end.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        paths = [str(ROOT), str(checkout / "tests")]
        command = [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "bench.robustness.peer_plugin",
                "-p",
                "no:cacheprovider",
            ),
            *("-c", os.devnull, "--rootdir", str(checkout), "-W", "ignore", "-q"),
            *("--peer", peer, "--loaders", loaders, "--report", str(report)),
            *(str(checkout / file) for file in files or SUITES[peer]),
        ]
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
            raise RuntimeError(f"pytest ended with {run.returncode}\n{run.stdout}\n{run.stderr}")
        lines = [json.loads(line) for line in report.read_text().splitlines()]
    return [line for line in lines if line["loaders"] or line["outcome"] == "skipped"]


def summarize(outcomes: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    """Count the outcomes of each file of tests, with the reasons of those that did not pass."""
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
    """Run the tests of a library, and append a line for each file of them."""
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
    """Run what the command line asks for."""
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
