"""Classes of users with heterogeneous GraphSAGE on PyG, from what happened before a time."""

import torch
import torch.nn.functional as F
from read_typed import OPTIONS, read
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import HeteroConv, Linear, SAGEConv


class Model(torch.nn.Module):
    """Two layers of a convolution for each edge type, whose results are added."""

    def __init__(self, metadata, hidden, num_classes):
        super().__init__()
        self.project = torch.nn.ModuleDict({name: Linear(-1, hidden) for name in metadata[0]})
        self.layers = torch.nn.ModuleList(
            HeteroConv(
                {each: SAGEConv(hidden, hidden, aggr="sum") for each in metadata[1]}, aggr="sum"
            )
            for _ in range(2)
        )
        self.classify = Linear(hidden, num_classes)

    def forward(self, x, edges):
        """Return the logits of all users of a minibatch."""
        x = {name: self.project[name](rows) for name, rows in x.items()}
        for layer in self.layers:
            # types without in-edges keep their rows
            x |= {name: x[name] + rows.relu() for name, rows in layer(x, edges).items()}
        return self.classify(x["user"])


def main():
    """Train, and print the accuracy on the test users and the best possible one."""
    torch.manual_seed(OPTIONS.seed)
    data, split, best = read()

    def load(part, shuffle):
        return NeighborLoader(
            data,
            [12, 4],
            input_nodes=("user", split[part]),
            input_time=data["user"].label_time[split[part]],
            time_attr="time",
            temporal_strategy="last",
            batch_size=128,
            shuffle=shuffle,
        )

    train, test = load("train", True), load("test", False)
    model = Model(data.metadata(), 32, int(data["user"].y.max()) + 1)
    optimizer = None
    for _ in range(OPTIONS.epochs or 5):
        for batch in train:
            logits = model(batch.x_dict, batch.edge_index_dict)[: batch["user"].batch_size]
            loss = F.cross_entropy(logits, batch["user"].y[: batch["user"].batch_size])
            # the first minibatch sets the sizes of the parameters
            optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model.eval()
    right = 0
    with torch.no_grad():
        for batch in test:
            size = batch["user"].batch_size
            guesses = model(batch.x_dict, batch.edge_index_dict)[:size].argmax(dim=1)
            right += int((guesses == batch["user"].y[:size]).sum())
    print(f"accuracy {right / len(split['test']):.4f}")
    print(f"best possible accuracy {best:.4f}")


main()
