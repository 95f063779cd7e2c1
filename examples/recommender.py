"""Recommend items from tables of users, items and behaviours: recall@20 and MRR of the last day.

    python examples/recommender.py

The script generates a shop. Each behaviour is a row, and so a node, with the time at which it
happened; only behaviours before a time are sampled to recommend at that time.
"""

import argparse

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

from gcnzc.graph import Table, from_tables
from gcnzc.sampling import Sampler

DAY = 86400
KINDS = ("view", "cart", "buy")
OF_USER = ("behaviour", "f2p_user_id", "user")
OF_ITEM = ("item", "rev_f2p_item_id", "behaviour")
K = 20


def make_shop(num_users, num_items, days=10, seed=0):
    """Return tables of users, items and behaviours; tastes of users change from day to day."""
    random = np.random.default_rng(seed)
    category = random.integers(20, size=num_items)
    popularity = 1 / (1 + random.permutation(num_items)) ** 0.5
    taste = random.integers(20, size=(num_users, days))
    for day in range(1, days):
        keeps = random.random(num_users) < 0.8
        taste[keeps, day] = taste[keeps, day - 1]
    by_category = [np.flatnonzero(category == each) for each in range(20)]
    rows = []
    for day in range(days):
        for user in np.flatnonzero(random.random(num_users) < 0.6):
            for _ in range(random.integers(1, 6)):
                liked = by_category[taste[user, day]] if random.random() < 0.8 else None
                liked = np.arange(num_items) if liked is None or not len(liked) else liked
                item = random.choice(liked, p=popularity[liked] / popularity[liked].sum())
                kind = random.choice(3, p=(0.6, 0.2, 0.2))
                rows.append((user, item, kind, day * DAY + random.integers(DAY)))
    behaviours = pd.DataFrame(rows, columns=["user_id", "item_id", "kind", "time"])
    behaviours["user_id"] += 1000
    users = pd.DataFrame({"user_id": 1000 + np.arange(num_users)})
    items = pd.DataFrame({"item_id": np.arange(num_items)})
    return users, items, behaviours.sort_values("time", ignore_index=True)


class Recommender(nn.Module):
    """A user is the weighted mean of the items of its latest behaviours."""

    def __init__(self, num_items, size=32):
        super().__init__()
        self.items = nn.Embedding(num_items, size)
        self.kinds = nn.Embedding(len(KINDS), 1)
        self.bias = nn.Parameter(torch.zeros(num_items))
        nn.init.normal_(self.items.weight, std=0.1)
        nn.init.zeros_(self.kinds.weight)

    def forward(self, batch, kind_of, time_of):
        """Return the scores of all items for each seed."""
        num_seeds = len(batch.seeds["user"])
        # one item for each behaviour
        item, behaviour = batch.edge_index(OF_ITEM)
        rows = torch.zeros(len(batch.nodes["behaviour"]), self.items.weight.shape[1])
        rows = rows.index_add(0, behaviour, self.items(batch.nodes["item"][item]))
        behaviour, user = batch.edge_index(OF_USER)
        ids = batch.nodes["behaviour"][behaviour]
        age = (batch.seed_times[user] - time_of[ids]) / DAY
        weight = (self.kinds(kind_of[ids])[:, 0] - age.float()).exp()[:, None]
        total = torch.full((num_seeds, 1), 1e-6).index_add(0, user, weight)
        mean = torch.zeros(num_seeds, rows.shape[1]).index_add(0, user, weight * rows[behaviour])
        return mean / total @ self.items.weight.T * 10 + self.bias


def evaluate(scores, items):
    """Return recall@K and the mean reciprocal rank of the bought items."""
    own = scores.gather(1, items[:, None])
    rank = 1 + (scores > own).sum(dim=1)
    return float((rank <= K).float().mean()), float((1 / rank).mean())


def main():
    """Train on all days but the last, and print the figures of the purchases of the last."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    users, items, behaviours = make_shop(options.users, options.items, seed=options.seed)
    graph = from_tables(
        {
            "user": Table(users, "user_id"),
            "item": Table(items, "item_id"),
            "behaviour": Table(
                behaviours, foreign_keys={"user_id": "user", "item_id": "item"}, time="time"
            ),
        }
    )
    # the latest 20 behaviours of a user, then the item of each
    fanouts = {"default": [0, 0], OF_USER: [0, 20], OF_ITEM: [1, 0]}
    sampler = Sampler(graph, fanouts, options.seed, temporal="last", time="node", once=True)

    # rows are nodes: row i of a table is node i
    user_of = torch.from_numpy(pd.Index(users["user_id"]).get_indexer(behaviours["user_id"]))
    item_of = torch.tensor(behaviours["item_id"].to_numpy())
    kind_of = torch.tensor(behaviours["kind"].to_numpy())
    time_of = torch.tensor(behaviours["time"].to_numpy())
    last_day = int(time_of.max()) // DAY * DAY
    train = torch.nonzero((kind_of == KINDS.index("buy")) & (time_of < last_day))[:, 0]
    test = torch.nonzero((kind_of == KINDS.index("buy")) & (time_of >= last_day))[:, 0]

    def sample(rows, epoch=0, at=None):
        # the purchase itself is not part of its neighbourhood
        times = time_of[rows] - 1 if at is None else torch.full((len(rows),), at)
        return sampler.sample(("user", user_of[rows]), epoch, times)

    model = Recommender(options.items)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(options.epochs):
        for rows in train[torch.randperm(len(train))].split(256):
            loss = F.cross_entropy(model(sample(rows, epoch), kind_of, time_of), item_of[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        # what is known when the last day begins
        scores = model(sample(test, at=last_day - 1), kind_of, time_of)
    recall, mrr = evaluate(scores, item_of[test])
    counts = torch.bincount(item_of[train], minlength=options.items).float()
    ties = torch.rand(len(counts)) / 2
    popular, popular_mrr = evaluate((counts + ties).expand(len(test), -1), item_of[test])
    print(f"recall@{K} {recall:.4f}, mrr {mrr:.4f}")
    print(f"popularity: recall@{K} {popular:.4f}, mrr {popular_mrr:.4f}")


main()
