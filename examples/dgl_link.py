"""Which edges there are, with GraphSAGE on DGL: minibatches of edges, one negative for each."""

import time
from statistics import median

import dgl
import torch
import torch.nn.functional as F
from dgl.dataloading import DataLoader
from dgl.nn import SAGEConv
from read_npz import option, read
from sklearn.metrics import roc_auc_score
from torch import nn


class SAGE(nn.Module):
    """Two layers of the mean of the neighbours; an edge's score is the product of its ends."""

    def __init__(self, num_features, num_hidden):
        super().__init__()
        self.layers = nn.ModuleList(
            [SAGEConv(num_features, num_hidden, "mean"), SAGEConv(num_hidden, num_hidden, "mean")]
        )
        self.decoder = nn.Sequential(
            nn.Linear(num_hidden, num_hidden), nn.ReLU(), nn.Linear(num_hidden, 1)
        )

    def forward(self, blocks, x):
        """Rows of the last block's destinations."""
        x = self.layers[0](blocks[0], x).relu()
        return self.layers[1](blocks[1], x)

    def score(self, rows, pairs):
        """Logits of pairs of rows."""
        return self.decoder(rows[pairs[0]] * rows[pairs[1]]).squeeze(-1)


def main():
    """Train on nine tenths of the edges, and print the ROC AUC of the others."""
    torch.manual_seed(option("seed", 0))
    edges, features, labels, _ = read()
    edges = edges[:, edges[0] < edges[1]]
    edges = edges[:, torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(0))]
    test, train = edges.tensor_split([edges.shape[1] // 10], dim=1)
    graph = dgl.graph((torch.cat([train[0], train[1]]), torch.cat([train[1], train[0]])))
    graph = dgl.add_nodes(graph, len(labels) - graph.num_nodes())
    graph.ndata["feat"] = features

    sampler = dgl.dataloading.as_edge_prediction_sampler(
        dgl.dataloading.NeighborSampler([10, 5], prefetch_node_feats=["feat"]),
        exclude="reverse_id",
        reverse_eids=torch.arange(graph.num_edges()).roll(train.shape[1]),
        negative_sampler=dgl.dataloading.negative_sampler.Uniform(1),
    )
    ids = torch.arange(train.shape[1])
    loader = DataLoader(graph, ids, sampler, batch_size=2048, shuffle=True)

    model = SAGE(features.shape[1], 128)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    seconds, waits = [], []
    for _ in range(option("epochs", 3)):
        begin = began_s = time.perf_counter()
        waited_s = 0.0
        for _, positives, negatives, blocks in loader:
            waited_s += time.perf_counter() - began_s
            rows = model(blocks, blocks[0].srcdata["feat"])
            logits = torch.cat(
                [model.score(rows, positives.edges()), model.score(rows, negatives.edges())]
            )
            labels = torch.arange(2.0).flip(0).repeat_interleave(len(logits) // 2)
            loss = F.binary_cross_entropy_with_logits(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            began_s = time.perf_counter()
        seconds.append(time.perf_counter() - begin)
        waits.append(waited_s)

    model.eval()
    with torch.no_grad():
        rows = model([graph] * 2, features)
        others = torch.randint(len(rows), test.shape)
        logits = torch.cat([model.score(rows, test), model.score(rows, others)])
    auc = roc_auc_score(torch.arange(2).flip(0).repeat_interleave(len(logits) // 2), logits)
    print(f"auc {auc:.4f}")
    print(f"epoch {median(seconds):.4f} s, {median(waits):.4f} s of it waiting")


main()
