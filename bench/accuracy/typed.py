"""Compare the accuracy on a generated typed graph with the best possible one, over several seeds.

    python -m bench.accuracy.typed [--nodes N] [--edges E] [--epochs N] [--seeds SEED ...]

The graph is that of `gcnzc.datasets.typed`: the class of a user depends on what it did before the
time of its label. The model is heterogeneous GraphSAGE of PyG, with a sum over neighbours, and the
minibatches are those of `gcnzc.interop.pyg.NeighborLoader`. Another row ignores times: as later
edges show the label, its accuracy is above the best one, which shows what a loader that samples
later edges would reach. The exit status is 1 if a mean accuracy is more than 2 points below the
best one, or if an accuracy with times is above it by more than three standard errors.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, Linear, SAGEConv

from bench import harness
from gcnzc.datasets.rows import allocate_in_memory
from gcnzc.datasets.typed import typed
from gcnzc.graph.stored_features import read_features
from gcnzc.interop.pyg import NeighborLoader

WITHIN = 0.02
FANOUTS = [16, 2]
BATCH_SIZE = 512


class Model(torch.nn.Module):
    """Two layers of SAGE convolutions, one for each edge type, whose results are added."""

    def __init__(
        self, metadata: tuple[list[str], list[tuple[str, str, str]]], columns: int, classes: int
    ) -> None:
        super().__init__()
        hidden = 32
        self.project = torch.nn.ModuleDict({name: Linear(columns, hidden) for name in metadata[0]})
        self.layers = torch.nn.ModuleList(
            HeteroConv(
                {each: SAGEConv(hidden, hidden, aggr="sum") for each in metadata[1]}, aggr="sum"
            )
            for _ in FANOUTS
        )
        self.classify = Linear(hidden, classes)

    def forward(self, batch: HeteroData) -> Tensor:
        """Return the logits of the seeds."""
        x = {name: self.project[name](rows) for name, rows in batch.x_dict.items()}
        for layer in self.layers:
            found = layer(x, batch.edge_index_dict)
            # types without in-edges keep their rows
            x |= {name: x[name] + rows.relu() for name, rows in found.items()}
        return self.classify(x["user"][: batch["user"].batch_size])


def make(nodes: int, edges: int, seed: int) -> tuple[HeteroData, dict[str, Tensor], float]:
    """Return a generated graph, its splits and the best possible accuracy."""
    graph = typed(nodes, edges, seed=seed)
    data = HeteroData()
    for name, rows in graph.node_features.items():
        data[name].x = read_features(rows, False, allocate_in_memory)
    for edge_type, ends in graph.edges.items():
        data[edge_type].edge_index = torch.stack([torch.from_numpy(ids).long() for ids in ends])
        data[edge_type].time = torch.from_numpy(graph.edge_time[edge_type])
    # reverse edges, so that each node type has in-edges
    for source, relation, target in (("brand", "makes", "item"), ("query", "asked_by", "user")):
        back = data[target, f"rev_{relation}", source]
        back.edge_index = data[source, relation, target].edge_index.flip(0)
        back.time = data[source, relation, target].time
    data["user"].y = torch.from_numpy(graph.labels["user"])
    data["user"].label_time = torch.from_numpy(graph.node_time["user"])
    split = {part: torch.from_numpy(own["user"]) for part, own in graph.split.items()}
    assert graph.best_accuracy is not None
    return data, split, graph.best_accuracy


def train(
    data: HeteroData, split: dict[str, Tensor], seed: int, epochs: int, with_times: bool
) -> float:
    """Train, and return the test accuracy of the epoch with the best validation accuracy."""
    torch.manual_seed(seed)

    def load(part: str) -> Any:
        times: dict[str, Any] = {}
        if with_times:
            times = {"time_attr": "time", "temporal_strategy": "last"}
            times["input_time"] = data["user"].label_time[split[part]]
        return NeighborLoader(
            data,
            FANOUTS,
            input_nodes=("user", split[part]),
            batch_size=BATCH_SIZE,
            shuffle=part == "train",
            seed=seed,
            **times,
        )

    loaders = {part: load(part) for part in split}
    model = Model(data.metadata(), data["user"].x.shape[1], int(data["user"].y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    steps = epochs * len(loaders["train"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=steps)

    def accuracy(part: str) -> float:
        right = 0
        with torch.no_grad():
            for batch in loaders[part]:
                right += int((model(batch).argmax(dim=1) == labels(batch)).sum())
        return right / len(split[part])

    found = []
    for epoch in range(epochs):
        for batch in loaders["train"]:
            loss = F.cross_entropy(model(batch), labels(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if epoch >= epochs // 2:
            found.append((accuracy("valid"), accuracy("test")))
    return max(found)[1]


def labels(batch: HeteroData) -> Tensor:
    """Return the labels of the seeds."""
    return batch["user"].y[: batch["user"].batch_size]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(argv)
    gaps, is_wrong = [], False
    for seed in options.seeds:
        data, split, best = make(options.nodes, options.edges, seed)
        for with_times in (True, False) if seed == options.seeds[0] else (True,):
            begin = time.perf_counter()
            found = train(data, split, seed, options.epochs, with_times)
            case = {
                "graph": "typed",
                "nodes": options.nodes,
                "edges": options.edges,
                "model": "PyG's HeteroConv of SAGEConv",
                "epochs": options.epochs,
                "times": with_times,
                "seed": seed,
            }
            seconds = time.perf_counter() - begin
            harness.record("typed", case, accuracy=found, best_accuracy=best, train_s=seconds)
            if with_times:
                gaps.append(best - found)
                error = (best * (1 - best) / len(split["test"])) ** 0.5
                is_wrong |= found > best + 3 * error
    is_wrong |= statistics.mean(gaps) > WITHIN
    print(json.dumps({"mean_gap": statistics.mean(gaps), "within": WITHIN, "wrong": is_wrong}))
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
