"""Measure training steps of gcnzc: its loader, its models and torch's Adam."""

import torch
from serve import (
    BATCH_SIZE,
    CLASSES,
    DROPOUT,
    FANOUTS,
    HEADS,
    HIDDEN,
    LEARNING_RATE,
    arrays,
    labels,
    serve,
)
from torch.nn.functional import cross_entropy

import gcnzc
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.loader.loader import Loader
from gcnzc.models import GAT, GCN, SAGE
from gcnzc.sampling.neighbor import Sampler


def build_model(kind, columns):
    """Return a model of three layers."""
    if kind == "gat":
        return GAT(
            columns, HIDDEN // HEADS, CLASSES, 3, heads=HEADS, output_heads=1, dropout=DROPOUT,
            skip=False,
        )  # fmt: skip
    return {"sage": SAGE, "gcn": GCN}[kind](columns, HIDDEN, CLASSES, 3, DROPOUT)


def make(folder):
    """Return the measured configurations by name, and versions."""
    indptr, indices, features = arrays(folder)
    graph, table = Graph(indptr, indices, check=False), FeatureTable(torch.from_numpy(features))
    sampler, y = Sampler(graph, FANOUTS), labels(graph.num_nodes)

    def train(kind):
        def batches(seeds):
            torch.manual_seed(0)
            model = build_model(kind, table.num_columns)
            optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
            loader = Loader(
                graph, table, torch.from_numpy(seeds), FANOUTS, BATCH_SIZE, labels=y,
                shuffle=False, sampler=sampler, in_degrees=kind == "gcn",
            )  # fmt: skip
            for batch in loader:
                optimizer.zero_grad()
                cross_entropy(model(batch.blocks, batch.x), batch.y).backward()
                optimizer.step()
                yield len(batch.nodes), sum(block.num_edges for block in batch.blocks)

        return batches

    versions = {"gcnzc": gcnzc.__version__, "torch": torch.__version__}
    return {kind: train(kind) for kind in ("sage", "gcn", "gat")}, versions


serve(make)
