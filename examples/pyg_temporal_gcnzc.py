"""What users buy next, with heterogeneous GraphSAGE on PyG and neighbourhoods before a time."""

import torch
import torch.nn.functional as F
from read_typed import OPTIONS, read
from sklearn.metrics import roc_auc_score
from gcnzc.interop.pyg import LinkNeighborLoader
from torch_geometric.nn import HeteroConv, Linear, SAGEConv

BUYS = ("user", "buys", "item")


class Model(torch.nn.Module):
    """Two layers of a convolution for each edge type, whose results are added."""

    def __init__(self, metadata, hidden):
        super().__init__()
        self.project = torch.nn.ModuleDict({name: Linear(-1, hidden) for name in metadata[0]})
        self.layers = torch.nn.ModuleList(
            HeteroConv({each: SAGEConv(hidden, hidden) for each in metadata[1]}, aggr="sum")
            for _ in range(2)
        )
        self.ends = torch.nn.ModuleDict({name: Linear(hidden, hidden) for name in ("user", "item")})

    def forward(self, batch):
        """Return the logit of each labelled edge."""
        edges = batch.edge_index_dict
        x = {name: self.project[name](rows) for name, rows in batch.x_dict.items()}
        for layer in self.layers:
            # types without in-edges keep their rows
            x |= {name: x[name] + rows.relu() for name, rows in layer(x, edges).items()}
        user, item = batch[BUYS].edge_label_index
        return (self.ends["user"](x["user"])[user] * self.ends["item"](x["item"])[item]).sum(dim=1)


def main():
    """Train on the purchases of a time, and print the ROC AUC of later ones."""
    torch.manual_seed(OPTIONS.seed)
    data, _, _ = read()
    edges, times = data[BUYS].edge_index, data[BUYS].time
    first, last = torch.quantile(times.double(), torch.tensor([0.4, 0.9]).double())

    def load(chosen):
        return LinkNeighborLoader(
            data,
            [6, 2],
            edge_label_index=(BUYS, edges[:, chosen]),
            # the purchase itself is not part of its neighbourhood
            edge_label_time=times[chosen] - 1,
            neg_sampling="binary",
            time_attr="time",
            temporal_strategy="last",
            batch_size=256,
            shuffle=True,
        )

    train, test = load((times > first) & (times <= last)), load(times > last)
    model, optimizer = Model(data.metadata(), 32), None
    for _ in range(OPTIONS.epochs or 3):
        for batch in train:
            loss = F.binary_cross_entropy_with_logits(model(batch), batch[BUYS].edge_label.float())
            # the first minibatch sets the sizes of the parameters
            optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        scored = [(model(batch), batch[BUYS].edge_label) for batch in test]
    scores, labels = (torch.cat(parts) for parts in zip(*scored, strict=True))
    print(f"auc {roc_auc_score(labels, scores):.4f}")


main()
