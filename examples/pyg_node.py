"""Classes of nodes with GraphSAGE on PyG: sampled training, then a test with all neighbours."""

import time
from statistics import median

import torch
import torch.nn.functional as F
from read_npz import option, read
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE


def main():
    """Train, and print what came of it."""
    torch.manual_seed(option("seed", 0))
    edges, features, labels, split = read()
    data = Data(x=features, edge_index=edges, y=labels)

    loader = NeighborLoader(
        data, [5, 10, 15], input_nodes=split["train"], batch_size=512, shuffle=True
    )

    model = GraphSAGE(features.shape[1], 128, 3, int(labels.max()) + 1, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    seconds, waits = [], []
    for _ in range(option("epochs", 10)):
        model.train()
        begin = began_s = time.perf_counter()
        waited_s = 0.0
        for batch in loader:
            waited_s += time.perf_counter() - began_s
            logits = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = F.cross_entropy(logits, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            began_s = time.perf_counter()
        seconds.append(time.perf_counter() - begin)
        waits.append(waited_s)

    model.eval()
    with torch.no_grad():
        guesses = model(data.x, data.edge_index).argmax(dim=1)
    accuracy = (guesses == labels)[split["test"]].float().mean()
    print(f"accuracy {accuracy:.4f}")
    print(f"epoch {median(seconds):.4f} s, {median(waits):.4f} s of it waiting")


main()
