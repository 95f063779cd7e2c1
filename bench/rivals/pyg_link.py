"""Train link prediction for one seed with PyG: its link loader, GraphSAGE layers and MLP.

    python pyg_link.py FOLDER OPTIONS

FOLDER is a prepared folder with a split of edges. OPTIONS is a JSON object with the keys hidden,
fanouts, batch_size, epochs, lr, seed and norm_over. In training, batch normalization is over "all"
nodes of a minibatch, or over the nodes whose neighbours were sampled ("drawn"), as norm_over says.
The program prints the results as a JSON object.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch_geometric
import torch_sparse
from scipy.stats import rankdata
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.nn import MLP, SAGEConv
from torch_geometric.sampler import NegativeSampling


class SAGE(torch.nn.Module):
    """Two GraphSAGE layers with mean aggregation, and an MLP on the product of two embeddings."""

    def __init__(self, columns, hidden):
        super().__init__()
        self.layers = torch.nn.ModuleList([SAGEConv(columns, hidden), SAGEConv(hidden, hidden)])
        self.norm = torch.nn.BatchNorm1d(hidden)
        self.decoder = MLP([hidden, hidden, hidden, 1], norm=None)

    def forward(self, x, edge_index, norm_over="all"):
        """Return the embeddings of all nodes, (N, hidden)."""
        x = self.layers[0](x, edge_index)
        if norm_over == "drawn":
            # the outermost nodes have no sampled neighbours, and the next layer does not use them
            is_sampled = torch.zeros(len(x), dtype=torch.bool)
            is_sampled[edge_index[1]] = True
            normalized = torch.zeros_like(x)
            normalized[is_sampled] = self.norm(x[is_sampled])
            x = normalized.relu()
        else:
            x = self.norm(x).relu()
        return self.layers[1](x, edge_index)

    def scores(self, source, target):
        """Return the logits of edges."""
        return self.decoder(source * target).squeeze(-1)


def main(folder, options):
    """Train, and return the test AUC of the epoch with the best validation AUC."""
    torch.manual_seed(options["seed"])
    data, links = read(folder)
    loader = LinkNeighborLoader(
        data,
        options["fanouts"][::-1],
        edge_label_index=links["train"],
        neg_sampling=NegativeSampling("triplet", 1),
        batch_size=options["batch_size"],
        shuffle=True,
    )
    model = SAGE(data.x.shape[1], options["hidden"])
    optimizer = torch.optim.Adam(model.parameters(), options["lr"])
    best, begin = {"valid_auc": 0.0}, time.perf_counter()
    for epoch in range(options["epochs"]):
        model.train()
        for batch in loader:
            rows = model(batch.x, batch.edge_index, options["norm_over"])
            source = rows[batch.src_index]
            logits = torch.stack(
                [
                    model.scores(source, rows[end])
                    for end in (batch.dst_pos_index, batch.dst_neg_index)
                ]
            )
            labels = torch.tensor([[1.0], [0.0]]).expand_as(logits)
            loss = binary_cross_entropy_with_logits(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            rows = model(data.x, data.edge_index)
            scores = {f"{part}_auc": auc(model, rows, links, part) for part in ("valid", "test")}
        if scores["valid_auc"] > best["valid_auc"]:
            best = scores | {"best_epoch": epoch + 1}
    return best | {
        "run_s": time.perf_counter() - begin,
        "torch_geometric": torch_geometric.__version__,
        "torch_sparse": torch_sparse.__version__,
        "rival_torch": torch.__version__,
    }


def read(folder):
    """Return the graph for message passing, and the node pairs of each file in links/ by name."""
    meta = json.loads((folder / "meta.json").read_text())
    indptr, indices = np.load(folder / "indptr.npy"), np.load(folder / "indices.npy")
    targets = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    edges = torch.from_numpy(np.stack([indices.astype(np.int64), targets]))
    features = np.load(folder / "features.npy")[:, : meta["features"]["columns"]]
    links = {
        path.stem: torch.from_numpy(np.load(path).astype(np.int64))
        for path in (folder / "links").glob("*.npy")
    }
    return Data(x=torch.from_numpy(features.copy()), edge_index=edges), links


def auc(model, rows, links, part):
    """Return the area under the ROC curve, computed from the ranks of the positive edges."""
    positives, negatives = (
        model.scores(rows[pairs[0]], rows[pairs[1]])
        for pairs in (links[part], links[f"{part}_negatives"])
    )
    ranks = rankdata(torch.cat([positives, negatives]).numpy())[: len(positives)]
    # pairs of a positive and a negative edge in which the positive edge has the higher score
    ordered_pairs = ranks.sum() - len(positives) * (len(positives) + 1) / 2
    return float(ordered_pairs / (len(positives) * len(negatives)))


print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
