"""Predict the items of the last day of ecomm_temporal, compared with popularity, over seeds.

    python -m bench.accuracy.ecomm [--epochs N] [--seeds SEED ...] [--rivals PYTHON]

1,476 users, 34,505 items and ten days of four behaviours, known by the day. A model is trained on
the days before the last; for each user of the last day it ranks all items by what happened before.
It is one that users write in PyG: embeddings of users and items, one SAGE convolution for each
behaviour and direction, `LinkNeighborLoader` with the latest neighbours before the day of an edge,
and a softmax over the items of the minibatch. Rows:

    gcnzc             the model with `gcnzc.interop.pyg.LinkNeighborLoader`
    pyg               the same with PyG's own loader; PYTHON is that of an environment with pyg-lib
    popularity        items by their number of behaviours in the last three days of training
    own items         the items of the same user, the latest first, then by popularity

Recall@K and the mean reciprocal rank are means over the different (user, item) pairs of the day.
Half of these items, and 22 % of the pairs, occur earlier.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

ARCHIVE = Path(__file__).parents[3] / "shared/data/ecomm_temporal/ecomm_temporal.npz"
CUTOFFS = (20, 50, 100)
LABELLED = ("user", "any", "item")
HIDDEN, FANOUT, BATCH_SIZE = 64, 20, 1024


def read() -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return the numbers of users and items; and user, item, kind and day of each behaviour."""
    with np.load(ARCHIVE) as archive:
        is_item = archive["node_type"] == 1
        position = np.where(is_item, is_item.cumsum() - 1, (~is_item).cumsum() - 1)
        user, item = position[archive["edge_index"]]
        found = {"user": user, "item": item, "kind": archive["edge_type"].astype(np.int64)}
        found["day"] = archive["edge_time"] - archive["edge_time"].min()
        sizes = {"user": int((~is_item).sum()), "item": int(is_item.sum())}
    return sizes, {key: torch.from_numpy(values) for key, values in found.items()}


def build(sizes: dict[str, int], found: dict[str, Tensor]) -> HeteroData:
    """Return the graph with an edge type for each behaviour and direction."""
    data = HeteroData()
    for name, count in sizes.items():
        data[name].num_nodes = count
    for kind in range(4):
        chosen = found["kind"] == kind
        pairs = torch.stack([found["user"][chosen], found["item"][chosen]])
        for edge_type, edges in (
            (("user", f"does_{kind}", "item"), pairs),
            (("item", f"done_{kind}", "user"), pairs.flip(0)),
        ):
            # PyG's sampler expects the edges of a node in the order of their times
            order = torch.argsort(found["day"][chosen], stable=True)
            data[edge_type].edge_index = edges[:, order]
            data[edge_type].time = found["day"][chosen][order]
    return data


class Model(torch.nn.Module):
    """Embeddings of users and items, and one layer of convolutions."""

    def __init__(self, data: HeteroData) -> None:
        super().__init__()
        self.rows = torch.nn.ModuleDict(
            {name: torch.nn.Embedding(data[name].num_nodes, HIDDEN) for name in data.node_types}
        )
        for each in self.rows.values():
            torch.nn.init.normal_(each.weight, std=0.1)
        self.layer = HeteroConv(
            {each: SAGEConv(HIDDEN, HIDDEN, root_weight=False) for each in data.edge_types},
            aggr="sum",
        )
        self.scale = torch.nn.Parameter(torch.tensor(10.0))

    def forward(self, batch: HeteroData) -> dict[str, Tensor]:
        """Return the normalized rows of all users and items of a minibatch."""
        x = {name: table(batch[name].n_id) for name, table in self.rows.items()}
        found = self.layer(x, batch.edge_index_dict)
        return {name: F.normalize(rows + found.get(name, 0), dim=1) for name, rows in x.items()}


def train(
    sizes: dict[str, int], found: dict[str, Tensor], seed: int, epochs: int, loaders: Any
) -> dict[str, float]:
    """Train on all days but the last, and return the figures of the last."""
    torch.manual_seed(seed)
    data, last = build(sizes, found), int(found["day"].max())
    # the first day has no history
    rows = torch.nonzero((found["day"] > 0) & (found["day"] < last))[:, 0]
    pairs = torch.stack([found["user"][rows], found["item"][rows]])
    times = {"time_attr": "time", "temporal_strategy": "last"}
    loader = loaders.LinkNeighborLoader(
        data,
        [FANOUT],
        edge_label_index=(LABELLED, pairs),
        # nothing of the same day
        edge_label_time=found["day"][rows] - 1,
        batch_size=BATCH_SIZE,
        shuffle=True,
        **times,
    )
    model = Model(data)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for _ in range(epochs):
        for batch in loader:
            x = model(batch)
            user, item = batch[LABELLED].edge_label_index
            scores = model.scale * x["user"][user] @ x["item"][item].T
            # other pairs of the same item are no negatives
            same = batch["item"].n_id[item]
            is_other = (same[:, None] == same) & ~torch.eye(len(same), dtype=torch.bool)
            loss = F.cross_entropy(
                scores.masked_fill(is_other, -torch.inf), torch.arange(len(user))
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    users, items = test_pairs(found)
    known, place = users.unique(return_inverse=True)
    with torch.no_grad():
        x = {}
        for name, ids in (("user", known), ("item", torch.arange(sizes["item"]))):
            parts = loaders.NeighborLoader(
                data,
                [FANOUT],
                input_nodes=(name, ids),
                input_time=torch.full((len(ids),), last - 1),
                batch_size=4096,
                **times,
            )
            x[name] = torch.cat([model(b)[name][: b[name].batch_size] for b in parts])
        return figures(x["user"] @ x["item"].T, place, items)


def test_pairs(found: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the users and items of the last day, each pair once."""
    is_last = found["day"] == found["day"].max()
    pairs = torch.stack([found["user"][is_last], found["item"][is_last]]).unique(dim=1)
    return pairs[0], pairs[1]


def figures(scores: Tensor, place: Tensor, items: Tensor) -> dict[str, float]:
    """Return recall@K and the mean reciprocal rank; of equal scores half are better.

    Args:
        scores: of all items, in a row for each user.
        place: row of each pair.
        items: item of each pair.
    """
    ranks = []
    for chosen, own in zip(place.split(256), items.split(256), strict=True):
        some = scores[chosen]
        value = some.gather(1, own[:, None])
        better, equal = (some > value).sum(dim=1), (some == value).sum(dim=1) - 1
        ranks.append(1 + better + equal / 2)
    rank = torch.cat(ranks)
    recalls = {f"recall_at_{k}": float((rank <= k).float().mean()) for k in CUTOFFS}
    return recalls | {"mrr": float((1 / rank).mean())}


def baselines(sizes: dict[str, int], found: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Return the figures of popularity, and of the items of the same user."""
    last = int(found["day"].max())
    is_recent = (found["day"] < last) & (found["day"] >= last - 3)
    popular = torch.bincount(found["item"][is_recent], minlength=sizes["item"]).float()
    users, items = test_pairs(found)
    known, place = users.unique(return_inverse=True)
    latest = torch.zeros(sizes["user"], sizes["item"])
    before = found["day"] < last
    index = found["user"][before] * sizes["item"] + found["item"][before]
    latest.view(-1).scatter_reduce_(0, index, 1.0 + found["day"][before], "amax")
    own = latest[known] + popular / (1 + popular.max())
    return {
        "popularity": figures(popular[None], torch.zeros_like(place), items),
        "own items": figures(own, place, items),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status: 1 if popularity is better."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rivals", type=Path, help="Python of an environment with PyG and pyg-lib")
    parser.add_argument("--loader", choices=["gcnzc", "pyg"], default="gcnzc")
    options = parser.parse_args(argv)
    sizes, found = read()
    if options.loader == "pyg":
        # in an environment without gcnzc, whose caller records the results
        from torch_geometric import loader as theirs

        for seed in options.seeds:
            print(json.dumps(timed(sizes, found, seed, options.epochs, theirs)), flush=True)
        return 0
    from bench import harness
    from gcnzc.interop import pyg as ours

    popular = baselines(sizes, found)
    for name, own in popular.items():
        harness.record("ecomm", {"method": name}, **own)
    is_worse = False
    for seed in options.seeds:
        own = timed(sizes, found, seed, options.epochs, ours)
        case = {"method": "gcnzc", "epochs": options.epochs, "seed": seed}
        harness.record("ecomm", case, **own)
        is_worse |= own["mrr"] < popular["popularity"]["mrr"]
    if options.rivals is not None:
        command = [str(options.rivals), "-m", "bench.accuracy.ecomm", "--loader", "pyg"]
        command += ["--epochs", str(options.epochs), "--seeds", *map(str, options.seeds)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        for seed, line in zip(options.seeds, done.stdout.splitlines(), strict=True):
            case = {"method": "pyg", "epochs": options.epochs, "seed": seed}
            harness.record("ecomm", case, **json.loads(line))
    return int(is_worse)


def timed(
    sizes: dict[str, int], found: dict[str, Tensor], seed: int, epochs: int, loaders: Any
) -> dict[str, float]:
    """Return the figures of `train`, and how long it took."""
    begin = time.perf_counter()
    return train(sizes, found, seed, epochs, loaders) | {"train_s": time.perf_counter() - begin}


if __name__ == "__main__":
    sys.exit(main())
