"""Compile the kernels that most tests use into numba's cache, before processes start to test.

Otherwise each of these processes compiles them at the same time, and each of the workers that a
test starts.

    python -m tests.compile_kernels {models,optimizers}
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import gcnzc
from gcnzc.cli import main
from gcnzc.exchange import lockstep
from gcnzc.graph.graph import Graph
from gcnzc.models import gnn
from gcnzc.sampling.neighbor import Sampler
from tests import typed_papers
from tests.optim.methods import METHODS
from tests.tiny_graph import tiny

MODELS = ("sage", "gcn", "gat", "gatv2")
TYPED_MODELS = ("rgcn", "rgat", "hgt")
# of optimizers: enough for an exchange with compression, also of local steps
STEPS = 6


def run(*words: str) -> None:
    """Run a command of gcnzc; exit if it fails."""
    if main(list(words)):
        sys.exit(1)


def train_models(folder: Path) -> None:
    """Train each model on a tiny graph, and compute its gradients in float64."""
    graph = tiny().write(folder / "graph")
    for model in MODELS:
        words = ["--epochs", "1", "--hidden", "8", "--model", model]
        run("train", str(graph), *words, "--out", str(folder / model))
    random = Graph.from_edges(torch.randint(40, (200,)), torch.randint(40, (200,)), 40)
    batch = Sampler(random, [3, 3]).sample(torch.arange(20), epoch=0)
    x = torch.randn(40, 5, dtype=torch.float64, requires_grad=True)
    for kind in (gnn.SAGE, gnn.GCN, gnn.GAT, gnn.GATv2):
        model = kind(5, 8, 3, num_layers=2).double()
        model(batch.blocks, x[batch.nodes]).sum().backward()


def train_optimizers(folder: Path) -> None:
    """Train each optimizer with two ranks, link prediction, and models of typed graphs."""
    for method in METHODS.values():
        models = [nn.Linear(40, 3) for _ in range(2)]
        optimizers = method.optimizers(models)
        for _ in range(STEPS):
            for model in models:
                model(torch.randn(4, 40)).square().mean().backward()
            lockstep([optimizer.algorithm() for optimizer in optimizers])
        lockstep([optimizer.finalize_algorithm() for optimizer in optimizers])
    sizes = ["--epochs", "1", "--hidden", "8", "--fanouts", "4,4"]
    link, edges = ["--task", "link"], str(folder / "edges")
    run("prepare", str(tiny().write(folder / "graph")), edges, *link)
    run("train", edges, *link, *sizes, "--out", str(folder / "link"))
    gcnzc.prepare(typed_papers.build(), folder / "papers")
    for model in TYPED_MODELS:
        run("train", str(folder / "papers"), *sizes, "--model", model, "--out", str(folder / model))


GROUPS = {"models": train_models, "optimizers": train_optimizers}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        GROUPS[sys.argv[1]](Path(temporary))
