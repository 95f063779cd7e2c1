"""Compile the kernels that most tests use into numba's cache, before processes start to test.

Otherwise each of these processes compiles them at the same time.
"""

import sys
import tempfile
from pathlib import Path

from gcnzc.cli import main
from tests.tiny_graph import tiny

MODELS = ("sage", "gcn", "gat", "gatv2")


def compile_kernels() -> None:
    """Train each model on a tiny graph."""
    with tempfile.TemporaryDirectory() as folder:
        graph = tiny().write(Path(folder) / "graph")
        for model in MODELS:
            words = ["--epochs", "1", "--hidden", "8", "--model", model]
            if main(["train", str(graph), *words, "--out", str(Path(folder) / model)]):
                sys.exit(1)


if __name__ == "__main__":
    compile_kernels()
