"""Classes of nodes with GraphSAGE on DGL: sampled training, then a test with all neighbours."""

import time
from itertools import pairwise
from statistics import median

import dgl
import torch
import torch.nn.functional as F
from dgl.dataloading import DataLoader
from dgl.nn import SAGEConv
from read_npz import option, read
from torch import nn


class SAGE(nn.Module):
    """Three layers of the mean of the neighbours."""

    def __init__(self, num_features, num_hidden, num_classes):
        super().__init__()
        sizes = [num_features, num_hidden, num_hidden, num_classes]
        self.layers = nn.ModuleList(
            SAGEConv(here, there, "mean") for here, there in pairwise(sizes)
        )

    def forward(self, blocks, x):
        """Logits of the last block's destinations."""
        for block, layer in zip(blocks, self.layers, strict=True):
            x = layer(block, x)
            if layer is not self.layers[-1]:
                x = F.dropout(x.relu(), 0.5, self.training)
        return x


def main():
    """Train, and print what came of it."""
    torch.manual_seed(option("seed", 0))
    edges, features, labels, split = read()
    graph = dgl.graph((edges[0], edges[1]), num_nodes=len(labels))
    graph.ndata["feat"], graph.ndata["label"] = features, labels

    sampler = dgl.dataloading.NeighborSampler(
        [15, 10, 5], prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = DataLoader(graph, split["train"], sampler, batch_size=512, shuffle=True)

    model = SAGE(features.shape[1], 128, int(labels.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    seconds, waits = [], []
    for _ in range(option("epochs", 10)):
        model.train()
        begin = began_s = time.perf_counter()
        waited_s = 0.0
        for _, _, blocks in loader:
            waited_s += time.perf_counter() - began_s
            logits = model(blocks, blocks[0].srcdata["feat"])
            loss = F.cross_entropy(logits, blocks[-1].dstdata["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            began_s = time.perf_counter()
        seconds.append(time.perf_counter() - begin)
        waits.append(waited_s)

    model.eval()
    with torch.no_grad():
        guesses = model([graph] * 3, features).argmax(dim=1)
    accuracy = (guesses == labels)[split["test"]].float().mean()
    print(f"accuracy {accuracy:.4f}")
    print(f"epoch {median(seconds):.4f} s, {median(waits):.4f} s of it waiting")


main()
