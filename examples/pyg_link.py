"""Which edges there are, with GraphSAGE on PyG: minibatches of edges, one negative for each."""

import time
from statistics import median

import torch
import torch.nn.functional as F
from read_npz import option, read
from sklearn.metrics import roc_auc_score
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.nn import MLP, GraphSAGE


def main():
    """Train on nine tenths of the edges, and print the ROC AUC of the others."""
    torch.manual_seed(option("seed", 0))
    edges, features, _, _ = read()
    edges = edges[:, edges[0] < edges[1]]
    edges = edges[:, torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(0))]
    test, train = edges.tensor_split([edges.shape[1] // 10], dim=1)
    data = Data(x=features, edge_index=torch.cat([train, train.flip(0)], dim=1))

    loader = LinkNeighborLoader(
        data,
        [5, 10],
        edge_label_index=train,
        neg_sampling="binary",
        batch_size=2048,
        shuffle=True,
    )

    model = GraphSAGE(features.shape[1], 128, 2, 128)
    decoder = MLP([128, 128, 1], norm=None)

    def scores(rows, pairs):
        return decoder(rows[pairs[0]] * rows[pairs[1]]).squeeze(-1)

    optimizer = torch.optim.Adam([*model.parameters(), *decoder.parameters()], lr=0.003)
    seconds, waits = [], []
    for _ in range(option("epochs", 3)):
        begin = began_s = time.perf_counter()
        waited_s = 0.0
        for batch in loader:
            waited_s += time.perf_counter() - began_s
            rows = model(batch.x, batch.edge_index)
            logits = scores(rows, batch.edge_label_index)
            loss = F.binary_cross_entropy_with_logits(logits, batch.edge_label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            began_s = time.perf_counter()
        seconds.append(time.perf_counter() - begin)
        waits.append(waited_s)

    model.eval()
    with torch.no_grad():
        rows = model(data.x, data.edge_index)
        others = torch.randint(len(rows), test.shape)
        logits = torch.cat([scores(rows, test), scores(rows, others)])
    auc = roc_auc_score(torch.arange(2).flip(0).repeat_interleave(len(logits) // 2), logits)
    print(f"auc {auc:.4f}")
    print(f"epoch {median(seconds):.4f} s, {median(waits):.4f} s of it waiting")


main()
