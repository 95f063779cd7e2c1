"""Measure training steps of gcnzc: its loader and its models."""

import torch
from serve import BATCH_SIZE, FANOUTS, arrays, serve
from steps import CLASSES, DROPOUT, HEADS, HIDDEN, KINDS, LAYERS, labels, train

import gcnzc
from gcnzc.features.table import FeatureTable
from gcnzc.graph.graph import Graph
from gcnzc.loader.loader import Loader
from gcnzc.models import GAT, GCN, SAGE
from gcnzc.sampling.neighbor import Sampler
from gcnzc.system.malloc import freed_memory


def build_model(kind, columns):
    """Return a model of a kind."""
    if kind == "gat":
        sizes = (columns, HIDDEN // HEADS, CLASSES, LAYERS, DROPOUT)
        return GAT(*sizes, heads=HEADS, output_heads=1, skip=False)
    return {"sage": SAGE, "gcn": GCN}[kind](columns, HIDDEN, CLASSES, LAYERS, DROPOUT)


def make(folder):
    """Return the measured configurations by name, and versions."""
    indptr, indices, features = arrays(folder)
    graph, table = Graph(indptr, indices, check=False), FeatureTable(torch.from_numpy(features))
    sampler, y = Sampler(graph, FANOUTS), labels(graph.num_nodes)

    def steps(kind):
        def batches(seeds):
            torch.manual_seed(0)
            loader = Loader(
                graph,
                table,
                torch.from_numpy(seeds),
                FANOUTS,
                BATCH_SIZE,
                labels=y,
                shuffle=False,
                sampler=sampler,
                in_degrees=kind == "gcn",
            )
            # as in `gcnzc train`
            with freed_memory(kept=True):
                yield from train(
                    build_model(kind, table.num_columns),
                    (
                        (
                            (batch.blocks, batch.x),
                            batch.y,
                            (len(batch.nodes), sum(block.num_edges for block in batch.blocks)),
                        )
                        for batch in loader
                    ),
                )

        return batches

    versions = {"gcnzc": gcnzc.__version__, "torch": torch.__version__}
    return {kind: steps(kind) for kind in KINDS}, versions


serve(make)
