"""Compare R-GCN on graphs with words as a node type to GCN with the words as features.

    python -m bench.training.hetero [GRAPH ...] [--seeds N] [--archives FOLDER]

The nonzero features of a graph of papers become edges from words to papers. Papers have no
features, and words have trainable embeddings, so R-GCN must learn from edges what GCN reads from
features. Both models use the same split; after every tenth step all nodes are evaluated with all
neighbours, and the model with the best validation accuracy is tested. GCN trains on the whole
graph, R-GCN on one minibatch of all training nodes per epoch, in which each paper has a sample of
its words. The exit status is 1 if the mean of R-GCN is more than 1 point below that of GCN.

FOLDER contains archives NAME/NAME.npz for `gcnzc prepare`.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench import harness
from bench.training.accuracy import parse, parser_of
from gcnzc.graph import Graph
from gcnzc.graph.dataset import Dataset
from gcnzc.graph.load import load
from gcnzc.graph.prepare import prepare
from gcnzc.models import GCN, RGCN
from gcnzc.sampling import Sampler, build_full_hetero_blocks, build_hetero_blocks
from gcnzc.sampling.full import build_full_blocks, find_layer_nodes

MARGIN = 1.0  # points of test accuracy that R-GCN may be below GCN
EVALUATE_EVERY = 10  # steps
WORD, PAPER = "word", "paper"


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of both models on a graph."""

    gcn_steps: int = 100
    gcn_hidden: int = 64
    gcn_lr: float = 0.01
    gcn_weight_decay: float = 5e-4
    steps: int = 150
    hidden: int = 256
    dropout: float = 0.6
    lr: float = 0.0005  # of the matrices
    embedding_lr: float = 0.01
    weight_decay: float = 5e-4  # of the matrices
    embedding_weight_decay: float = 1e-4
    words: int = 3  # sampled for each paper
    # The first layer averages the words of a paper. With one layer more than GCN, its other layers
    # are those of GCN.
    layers: int = 3


# chosen by validation accuracy
GRAPHS = {
    "cora": Settings(),
    "coauthor_cs": Settings(
        gcn_steps=80,
        gcn_lr=0.05,
        gcn_weight_decay=0.0,
        steps=80,
        hidden=128,
        dropout=0.5,
        lr=0.003,
        embedding_lr=0.03,
        weight_decay=0.0,
        embedding_weight_decay=0.0,
        words=20,
        layers=2,
    ),
}


class WordModel(nn.Module):
    """An R-GCN with an embedding of each word; papers have no features.

    As in GCN, papers have self loops instead of a matrix for their own rows. The matrices of the
    first layer begin as the identity, so that embeddings correspond to the rows of GCN's first
    matrix.
    """

    def __init__(self, graph: Graph, dataset: Dataset, settings: Settings, seed: int) -> None:
        super().__init__()
        columns, layers = settings.hidden, settings.layers
        self.words = nn.Parameter(0.03 * torch.randn(graph.nodes(WORD).num_nodes, columns))
        self.papers = torch.zeros(graph.nodes(PAPER).num_nodes, columns)
        self.model = RGCN(
            graph.metadata(),
            {WORD: columns, PAPER: columns},
            columns,
            dataset.num_classes,
            PAPER,
            layers,
            settings.dropout,
            input_linear=False,
            root_weight=False,
        )
        with torch.no_grad():
            self.model.layers[0].weight.copy_(torch.eye(columns))
        fanouts = {"in": [settings.words] * layers, "cites": [-1] * layers}
        self.sampler = Sampler(graph, fanouts[::-1], seed, edge_ids=True)
        self.blocks = build_full_hetero_blocks(graph, layers, targets=[PAPER])
        self.settings = settings

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of matrices and embeddings."""
        own = self.settings
        groups = [
            {
                "params": [self.words],
                "lr": own.embedding_lr,
                "weight_decay": own.embedding_weight_decay,
            },
            {"params": list(self.model.parameters())},
        ]
        return torch.optim.Adam(groups, own.lr, weight_decay=own.weight_decay)

    def forward(self, seeds: Tensor, step: int) -> Tensor:
        """Return the logits of seeds, with a sample of their words."""
        batch = self.sampler.sample((PAPER, seeds), step)
        x = {WORD: self.words[batch.nodes[WORD]], PAPER: self.papers[batch.nodes[PAPER]]}
        return self.model(build_hetero_blocks(batch), x)

    def predict(self) -> Tensor:
        """Return the logits of all papers."""
        return self.model(self.blocks, {WORD: self.words, PAPER: self.papers})


class FeatureModel(nn.Module):
    """A GCN with the words of papers as sparse features.

    The features are multiplied by the first matrix here, and the first layer of the model has the
    identity instead.
    """

    def __init__(self, dataset: Dataset, settings: Settings) -> None:
        super().__init__()
        graph, columns = dataset.graph, settings.gcn_hidden
        features = dense_features(dataset).to_sparse()
        self.words, self.values = features.indices(), features.values()
        self.weight = nn.Parameter(torch.empty(features.shape[1], columns))
        self.model = GCN(columns, columns, dataset.num_classes, 2, 0.5)
        identity = self.model.layers[0].weight
        with torch.no_grad():
            nn.init.xavier_uniform_(self.weight)
            identity.copy_(torch.eye(columns))
        identity.requires_grad_(False)
        needed = find_layer_nodes(graph, torch.arange(graph.num_nodes), 2)
        self.blocks = build_full_blocks(graph, needed)
        self.size, self.settings = features.shape, settings

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        own = self.settings
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.Adam(trained, own.gcn_lr, weight_decay=own.gcn_weight_decay)

    def forward(self, seeds: Tensor, step: int) -> Tensor:
        """Return the logits of seeds."""
        return self.predict()[seeds]

    def predict(self) -> Tensor:
        """Return the logits of all papers."""
        values = functional.dropout(self.values, 0.5, self.training)
        x = torch.sparse_coo_tensor(
            self.words, values, self.size, is_coalesced=True, check_invariants=False
        )
        return self.model(self.blocks, torch.sparse.mm(x, self.weight))


def dense_features(dataset: Dataset) -> Tensor:
    """Return the features of all nodes in float32."""
    table = dataset.table
    assert table is not None, "the graph has features"
    return table.gather(torch.arange(dataset.graph.num_nodes)).float()


def typed_graph(dataset: Dataset) -> Graph:
    """Return the graph of papers, with self loops, and of the words that they contain."""
    features = dense_features(dataset)
    papers, words = features.nonzero(as_tuple=True)
    loops = torch.arange(len(features))
    sources, targets = (torch.cat([ends.long(), loops]) for ends in dataset.graph.coo())
    return Graph.from_arrays(
        {PAPER: {"num_nodes": len(features)}, WORD: {"num_nodes": features.shape[1]}},
        {
            (PAPER, "cites", PAPER): {"edge_index": torch.stack([sources, targets])},
            (WORD, "in", PAPER): {"edge_index": torch.stack([words, papers])},
        },
        name=dataset.name,
    )


def train(
    make: Callable[[], WordModel | FeatureModel], dataset: Dataset, steps: int, seed: int
) -> dict[str, Any]:
    """Train a model, and return the accuracies of the step with the best validation accuracy."""
    torch.manual_seed(seed)
    model, seeds = make(), dataset.split["train"]
    optimizer = model.optimizer()
    best: dict[str, Any] = {"valid": -1.0}
    begin_s = time.perf_counter()
    for step in range(1, steps + 1):
        model.train()
        optimizer.zero_grad()
        functional.cross_entropy(model(seeds, step), dataset.labels[seeds]).backward()
        optimizer.step()
        if step % EVALUATE_EVERY == 0:
            model.eval()
            with torch.no_grad():
                found = model.predict().argmax(1)
            scores = {
                part: 100 * float((found[ids] == dataset.labels[ids]).float().mean())
                for part, ids in dataset.split.items()
            }
            if scores["valid"] > best["valid"]:
                best = scores | {"step": step}
    parameters = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return best | {"run_s": time.perf_counter() - begin_s, "parameters": parameters}


def measure(name: str, archives: Path, seeds: int) -> bool:
    """Train both models on a graph, record the results, and return whether R-GCN is close."""
    settings = GRAPHS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        prepare(archives / name / f"{name}.npz", path, normalize_features=True)
        dataset = load(path)
        typed = typed_graph(dataset)
        means = {}
        for kind in ("gcn", "rgcn"):
            results = [_train_one(kind, typed, dataset, settings, seed) for seed in range(seeds)]
            tests = [result["test"] for result in results]
            means[kind] = statistics.mean(tests)
            harness.record(
                "hetero_words",
                {"graph": name, "model": kind},
                test_percent=means[kind],
                spread_percent=statistics.stdev(tests),
                tests_percent=[round(test, 2) for test in tests],
                valid_percent=statistics.mean(result["valid"] for result in results),
                best_steps=[result["step"] for result in results],
                run_s=statistics.mean(result["run_s"] for result in results),
                parameters=results[0]["parameters"],
                settings=asdict(settings),
            )
    return means["rgcn"] >= means["gcn"] - MARGIN


def _train_one(
    kind: str, typed: Graph, dataset: Dataset, settings: Settings, seed: int
) -> dict[str, Any]:
    if kind == "gcn":
        return train(lambda: FeatureModel(dataset, settings), dataset, settings.gcn_steps, seed)
    return train(lambda: WordModel(typed, dataset, settings, seed), dataset, settings.steps, seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare the models on the requested graphs, and return the exit status."""
    asked = parse(parser_of(__doc__), argv, GRAPHS)
    is_close = [measure(name, asked.archives, asked.seeds) for name in asked.graphs]
    return int(not all(is_close))


if __name__ == "__main__":
    sys.exit(main())
