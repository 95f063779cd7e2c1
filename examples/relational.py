"""Whether a customer buys within a week, from the tables of a shop, as in RelBench.

    python examples/relational.py

The script generates the tables. A prediction at a cutoff uses only the orders before it: the
cutoff is the time of the seed, and temporal sampling returns nothing later.
"""

import argparse

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import nn

from gcnzc.graph import Table, from_tables
from gcnzc.sampling import Sampler

WEEK = pd.Timedelta(days=7)
OF_CUSTOMER = ("order", "f2p_customer_id", "customer")
OF_PRODUCT = ("product", "rev_f2p_product_id", "order")


def make_tables(num_customers, num_products=200, days=120, seed=0):
    """Return tables of customers, products and orders.

    Some products are consumed and ordered again after some days; customers leave at some time.
    """
    random = np.random.default_rng(seed)
    period = np.where(random.random(num_products) < 0.5, random.integers(8, 30, num_products), 0)
    products = pd.DataFrame(
        {
            "product_id": [f"p{i}" for i in range(num_products)],
            "price": random.lognormal(2, 0.5, num_products),
            "days_of_use": period.astype(float),
        }
    )
    start = random.integers(0, days, num_customers)
    rows = []
    for customer in range(num_customers):
        day, product = float(start[customer]), int(random.integers(num_products))
        rate, leaves = random.gamma(2, 12), random.exponential(90)
        while day < days and day - start[customer] < leaves:
            rows.append((customer, f"p{product}", day))
            if period[product] and random.random() < 0.8:
                day += period[product] * random.uniform(0.9, 1.1)
            else:
                day, product = day + random.exponential(rate), int(random.integers(num_products))
    orders = pd.DataFrame(rows, columns=["customer_id", "product_id", "day"])
    orders["date"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(orders.pop("day"), unit="D")
    customers = pd.DataFrame({"customer_id": np.arange(num_customers)})
    return customers, products, orders.sort_values("date", ignore_index=True)


def make_task(orders, cutoffs):
    """Return a table of customers with an order before a cutoff: do they buy within a week?"""
    parts = []
    for cutoff in cutoffs:
        before = orders[orders["date"] <= cutoff]
        after = orders[(orders["date"] > cutoff) & (orders["date"] <= cutoff + WEEK)]
        known = np.sort(before["customer_id"].unique())
        counts = before.groupby("customer_id").size()
        parts.append(
            pd.DataFrame(
                {
                    "customer_id": known,
                    "cutoff": cutoff,
                    "buys": np.isin(known, after["customer_id"]).astype(float),
                    "orders_before": counts[known].to_numpy(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def seconds(dates):
    """Return dates as seconds since 1970, the unit of the graph's times, rounded up."""
    ticks = dates.to_numpy().astype("datetime64[ns]").astype(np.int64)
    return torch.tensor(-(-ticks // 10**9))


class Model(nn.Module):
    """A customer is the sum of its latest orders, with their products and ages."""

    def __init__(self, num_features, size=32):
        super().__init__()
        self.order = nn.Sequential(
            nn.Linear(num_features + 3, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU()
        )
        self.classify = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))

    def forward(self, batch, features, time_of):
        """Return a logit for each seed."""
        product, order = batch.edge_index(OF_PRODUCT)
        rows = torch.zeros(len(batch.nodes["order"]), features.shape[1])
        rows = rows.index_add(0, order, features[batch.nodes["product"][product]])
        order, customer = batch.edge_index(OF_CUSTOMER)
        age = (batch.seed_times[customer] - time_of[batch.nodes["order"][order]]).float() / 86400
        # days until the product is used up
        left = rows[order, 1] * 30 - age
        about = torch.stack([age / 30, (1 + age).log(), left / 7], dim=1)
        found = self.order(torch.cat([rows[order], about], dim=1))
        total = torch.zeros(len(batch.seeds["customer"]), found.shape[1])
        return self.classify(total.index_add(0, customer, found))[:, 0]


def main():
    """Train on earlier cutoffs, and print the ROC AUC at the last cutoff."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--customers", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    customers, products, orders = make_tables(options.customers, seed=options.seed)
    graph = from_tables(
        {
            "customer": Table(customers, "customer_id"),
            "product": Table(products, "product_id", features=["price", "days_of_use"]),
            "order": Table(
                orders,
                foreign_keys={"customer_id": "customer", "product_id": "product"},
                time="date",
            ),
        }
    )
    # the latest 16 orders of a customer, then the product of each
    fanouts = {"default": [0, 0], OF_CUSTOMER: [0, 16], OF_PRODUCT: [1, 0]}
    sampler = Sampler(graph, fanouts, options.seed, temporal="last", time="node", once=True)
    features = graph.nodes("product").features / torch.tensor([20.0, 30.0])
    time_of = graph.nodes("order").time

    last = orders["date"].max().floor("D") - WEEK
    train = make_task(orders, [last - week * WEEK for week in range(1, 7)])
    test = make_task(orders, [last])

    def sample(task, rows, epoch=0):
        chosen = task.iloc[rows]
        # row i of the table of customers is node i
        seeds = torch.tensor(chosen["customer_id"].to_numpy())
        return sampler.sample(("customer", seeds), epoch, seconds(chosen["cutoff"]))

    labels = torch.tensor(train["buys"].to_numpy(np.float32))
    model = Model(features.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for epoch in range(options.epochs):
        for rows in torch.randperm(len(train)).split(256):
            logits = model(sample(train, rows.numpy(), epoch), features, time_of)
            loss = F.binary_cross_entropy_with_logits(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        logits = model(sample(test, np.arange(len(test))), features, time_of)
    print(f"auc {roc_auc_score(test['buys'], logits):.4f}")
    print(f"number of orders: auc {roc_auc_score(test['buys'], test['orders_before']):.4f}")


main()
