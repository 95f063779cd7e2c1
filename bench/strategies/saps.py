"""Measure SAPS-PSGD on two islands of fast links that are joined by slow ones, in virtual time.

    python -m bench.strategies.saps pairs [--rounds N] [--seeds N]
    python -m bench.strategies.saps accuracy [--seeds N] [--epochs N]
                                   [--methods METHOD ...] [--shards KIND ...]

Eight ranks are two islands of four. Links within an island have 100 Mbit/s, those between islands
10 Mbit/s, all with 1 ms of latency.

`pairs` compares random matchings with those of SAPS-PSGD for several windows: the bandwidth of the
slowest pair of a round, averaged over the rounds, the second eigenvalue of the expected mixing
matrix, and the time of a round. An all-reduce of the same values is there for comparison. A model
has 207,000 parameters, of which all or 1 % are exchanged.

`accuracy` trains GraphSAGE on amazon_photo with 8 simulated ranks. The training nodes are divided
at random, or by label, so that each rank has nodes of few classes. All methods have the same
epochs, minibatches and learning rate. A record has the test accuracy of the model after `finalize`
and the exchange time of a step.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gcnzc
from bench import harness
from bench.network.strategies import prepared
from gcnzc.exchange import Algorithm, Group, Link, SendReceive, SizeOnly, Sum, lockstep
from gcnzc.exchange.topology import (
    NEVER,
    Edge,
    Matrix,
    bandwidth_matching,
    bottleneck_threshold,
    expected_mixing,
    find_peer,
    random_matching,
    second_eigenvalue,
)
from gcnzc.optim import Averaged, DistributedOptimizer, Strategy, saps

RANKS = 8
FAST, SLOW = 100.0, 10.0  # Mbit/s
DELAY_S = 0.001
PARAMETERS = 207_000
WINDOWS = (2, 4, 8, 16)
METHODS: dict[str, Callable[..., DistributedOptimizer]] = {
    "all-reduce": lambda inner, group, seed: Averaged(inner, group),
    "saps 1": lambda *each: _saps(1.0, *each),
    "saps 0.1": lambda *each: _saps(0.1, *each),
    "saps 0.01": lambda *each: _saps(0.01, *each),
    # equal bandwidths: pairs are random while they connect the ranks
    "random pairs 0.1": lambda *each: _saps(0.1, *each, knows_bandwidth=False),
}
SHARDS = ("random", "by label")
GRAPH, FANOUTS, HIDDEN, BATCH, LR = "amazon_photo", [5, 5], 64, 32, 0.003


def main(argv: Sequence[str] | None = None) -> None:
    """Run the requested part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["pairs", "accuracy"])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--shards", nargs="+", choices=SHARDS, default=SHARDS)
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    if asked.part == "pairs":
        pairs(asked.rounds, asked.seeds)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = gcnzc.load(prepared(Path(folder), GRAPH))
        for shards in asked.shards:
            for method in asked.methods:
                accuracy(data, shards, method, asked.seeds, asked.epochs)


def bandwidths() -> Matrix:
    """Return the bandwidth of each pair in Mbit/s, (8, 8), 0 on the diagonal."""
    is_first = np.arange(RANKS) < RANKS // 2
    found = np.where(is_first[:, None] == is_first, FAST, SLOW)
    np.fill_diagonal(found, 0)
    return found


def links() -> dict[tuple[int, int], Link]:
    """Return the links of the two islands."""
    return {
        (sender, receiver): Link(float(rate) * 1e6 / 8, DELAY_S)
        for (sender, receiver), rate in np.ndenumerate(bandwidths())
        if sender != receiver
    }


def pairs(rounds: int, seeds: int) -> None:
    """Compare the matchings, and an all-reduce."""
    for window in (None, *WINDOWS):
        found = [_matchings(window, rounds, seed) for seed in range(seeds)]
        rate = bandwidths()
        bottlenecks = [np.mean([min(rate[e] for e in each) for each in of]) for of in found]
        for keep in (1.0, 0.01):
            count = round(keep * PARAMETERS)
            seconds = [_exchange_s(of, count) for of in found]
            harness.record(
                "saps",
                {"part": "pairs", "ranks": RANKS, "keep": keep}
                | {"pairs": "random" if window is None else "saps", "window": window},
                bottleneck_mbit_per_s=float(np.mean(bottlenecks)),
                second_eigenvalue=statistics.mean(
                    second_eigenvalue(expected_mixing(RANKS, of)) for of in found
                ),
                round_ms=1e3 * statistics.mean(seconds),
                rounds_ms=[1e3 * each for each in seconds],
                rounds=rounds,
                seeds=seeds,
            )

    def all_reduce() -> Algorithm[Any]:
        return (yield Sum(SizeOnly(PARAMETERS)))

    outcome = lockstep([all_reduce() for _ in range(RANKS)], links=links())
    harness.record(
        "saps",
        {"part": "pairs", "ranks": RANKS, "keep": 1.0, "pairs": "all-reduce", "window": None},
        round_ms=1e3 * max(outcome.seconds),
    )


def _matchings(window: int | None, rounds: int, seed: int) -> list[list[Edge]]:
    """Return the matchings of SAPS-PSGD, or random ones if the window is None."""
    if window is None:
        return [random_matching(RANKS, seed, round=number) for number in range(rounds)]
    rate = bandwidths()
    last_met, threshold = np.full((RANKS, RANKS), NEVER), bottleneck_threshold(rate)
    found = []
    for number in range(rounds):
        matching = bandwidth_matching(
            rate, last_met, seed, round=number, window=window, threshold=threshold
        )
        for low, high in matching:
            last_met[low, high] = last_met[high, low] = number
        found.append(matching)
    return found


def _exchange_s(matchings: Sequence[Sequence[Edge]], count: int) -> float:
    """Return the virtual seconds of a round in which pairs exchange `count` values."""

    def rank_of(rank: int) -> Algorithm[None]:
        for matching in matchings:
            peer = find_peer(matching, rank)
            yield SendReceive(SizeOnly(count), rank if peer is None else peer)

    outcome = lockstep([rank_of(rank) for rank in range(RANKS)], links=links())
    return max(outcome.seconds) / len(matchings)


def _saps(
    keep: float, inner: Any, group: Group, seed: int, *, knows_bandwidth: bool = True
) -> DistributedOptimizer:
    bandwidth = bandwidths() if knows_bandwidth else None
    return Strategy(inner, saps(keep, bandwidth, seed=seed), group)


def accuracy(data: Any, shards: str, method: str, seeds: int, epochs: int) -> None:
    """Train by one method over several seeds."""
    found = [_train(data, shards, METHODS[method], seed, epochs) for seed in range(seeds)]
    tests = [each["test_percent"] for each in found]
    harness.record(
        "saps",
        {"part": "accuracy", "graph": GRAPH, "shards": shards, "method": method, "ranks": RANKS},
        test_percent=statistics.mean(tests),
        spread_percent=statistics.stdev(tests) if len(tests) > 1 else None,
        tests_percent=tests,
        # the mean of the ranks' own models before `finalize`
        own_percent=statistics.mean(each["own_percent"] for each in found),
        exchange_ms=1e3 * statistics.mean(each["exchange_s"] for each in found),
        sent_bytes=found[0]["sent_bytes"],
        parameters=found[0]["parameters"],
        steps=found[0]["steps"],
        epochs=epochs,
        options=f"fanouts {FANOUTS}, hidden {HIDDEN}, batch {BATCH} per rank, AdamW, lr {LR}",
    )


def _train(
    data: Any, shards: str, make: Callable[..., DistributedOptimizer], seed: int, epochs: int
) -> dict[str, Any]:
    """Train the model of 8 ranks, and test it."""
    models, optimizers, loaders = [], [], []
    for rank, nodes in enumerate(_divide(data, shards, seed)):
        torch.manual_seed(seed)
        model = gcnzc.models.SAGE(
            data.table.num_columns, HIDDEN, data.num_classes, num_layers=len(FANOUTS)
        )
        inner = torch.optim.AdamW(model.parameters(), lr=LR)
        models.append(model)
        optimizers.append(make(inner, Group(rank, RANKS), seed))
        loaders.append(
            gcnzc.Loader(
                data.graph,
                data.table,
                nodes,
                fanouts=FANOUTS,
                batch_size=BATCH,
                labels=data.labels,
                seed=RANKS * seed + rank,
                device="cpu",
            )
        )
    # the same number of steps on all ranks
    per_epoch = min(map(len, loaders))

    def rank_of(rank: int) -> Algorithm[None]:
        model, optimizer = models[rank], optimizers[rank]
        yield from optimizer.broadcast_model_algorithm()
        for _ in range(epochs):
            for _, batch in zip(range(per_epoch), loaders[rank], strict=False):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch.blocks, batch.x), batch.y).backward()
                yield from optimizer.algorithm()

    outcome = lockstep([rank_of(rank) for rank in range(RANKS)], links=links())
    own = [_test(data, model) for model in models[:2]]
    lockstep([each.finalize_algorithm() for each in optimizers])
    steps = epochs * per_epoch
    return {
        "test_percent": _test(data, models[0]),
        "own_percent": statistics.mean(own),
        # `Compute` is absent, so that all of the virtual time is that of exchanges
        "exchange_s": max(outcome.seconds) / steps,
        "sent_bytes": max(ledger.bytes_sent for ledger in outcome.ledgers) / steps,
        "parameters": sum(each.numel() for each in models[0].parameters()),
        "steps": steps,
    }


def _divide(data: Any, shards: str, seed: int) -> list[Tensor]:
    """Return the training nodes of each rank, equally many."""
    train = torch.as_tensor(data.split["train"])
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    train = train[order]
    if shards == "by label":
        train = train[torch.as_tensor(data.labels)[train].argsort(stable=True)]
    return list(train[: len(train) // RANKS * RANKS].view(RANKS, -1))


def _test(data: Any, model: nn.Module) -> float:
    """Return the accuracy on the test nodes, without sampling, in percent."""
    logits = gcnzc.inference(model, data.graph, data.table, torch.device("cpu"))
    nodes = torch.as_tensor(data.split["test"])
    labels = torch.as_tensor(data.labels)[nodes]
    return float((logits[nodes].argmax(1) == labels).float().mean()) * 100


if __name__ == "__main__":
    main()
