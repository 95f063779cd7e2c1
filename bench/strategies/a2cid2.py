"""Measure the agreement of ranks that train with A2CiD2.

    python -m bench.strategies.a2cid2 [--seeds 3] [--archives FOLDER]

All ranks are simulated in one process, with virtual time: a step takes 10 ms, and links have
100 Mbit/s and 1 ms of latency.

A case trains a classifier of the nodes of amazon_photo on a ring of 8 ranks: two layers on
features that are averaged over two hops. The ranks have the nodes of a few labels each, or random
nodes. Each case is trained with and without momentum, with
equal numbers of exchanges, in rounds or overlapped with the steps of ranks whose speeds differ by
up to 20 %. A record has the consensus error, which is the root mean square of the ranks' distances
from their mean over the second half of the run, and the test accuracy after `finalize`.
`data parallel` averages the parameters of all ranks after every step.
"""

import argparse
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from bench import harness
from gcnzc.exchange import Algorithm, Compute, Group, Link, Now, lockstep
from gcnzc.optim import A2CiD2, LocalMethod, LocalSGD

ARCHIVES = Path(__file__).parents[3] / "shared" / "data"
GRAPH = "amazon_photo"
RANKS, STEPS, BATCH = 8, 120, 32
LR, MOMENTUM, HIDDEN = 0.02, 0.9, 32
STEP_S, LINK = 0.01, Link(bytes_per_s=12.5e6, delay_s=0.001)
# steps from one sample of the consensus error to the next
SAMPLE_EVERY = 4
METHODS = {
    "data parallel": None,
    "rounds": {"eta": 0.0},
    "rounds, momentum": {},
    "overlapped": {"asynchronous": True, "eta": 0.0},
    "overlapped, momentum": {"asynchronous": True},
}
SHARDS = ("labels", "random")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--archives", type=Path, default=ARCHIVES, help="folder of NAME/NAME.npz")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    for shards in SHARDS:
        for method in METHODS:
            for seed in range(asked.seeds):
                measure_agreement(asked.archives, shards, method, seed)


@cache
def read_nodes(archives: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read features (N, F) averaged over two hops, labels, and training and test nodes."""
    data = np.load(archives / GRAPH / f"{GRAPH}.npz")
    count, columns = data["feat_shape"].tolist()
    rows = np.repeat(np.arange(count), np.diff(data["feat_indptr"]))
    dense = np.zeros((count, columns), dtype=np.float32)
    dense[rows, data["feat_indices"]] = data["feat_data"]
    features = torch.from_numpy(dense)
    edges = torch.from_numpy(data["edge_index"])
    loops = torch.arange(count).expand(2, -1)
    whole = torch.cat([edges, loops], dim=1)
    degrees = torch.bincount(whole[1], minlength=count).float()
    adjacency = torch.sparse_coo_tensor(
        whole.flip(0), 1 / degrees[whole[1]], (count, count), check_invariants=True
    ).coalesce()
    for _ in range(2):
        features = adjacency @ features
    features = (features - features.mean(0)) / (features.std(0) + 1e-6)
    indices = (torch.from_numpy(data[f"made_{part}_idx"]) for part in ("train", "test"))
    return features, torch.from_numpy(data["node_label"]), *indices


def divide_nodes(archives: Path, shards: str, seed: int) -> list[Tensor]:
    """Return the training nodes of each rank."""
    _, labels, train, _ = read_nodes(archives)
    generator = torch.Generator().manual_seed(seed)
    nodes = train[torch.randperm(len(train), generator=generator)]
    if shards == "labels":
        nodes = nodes[labels[nodes].argsort(stable=True)]
    return list(nodes.chunk(RANKS))


def make_model(columns: int, classes: int, seed: int) -> nn.Module:
    """Return the classifier; initial parameters depend on the seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(columns, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))


def make_optimizer(method: str, model: nn.Module, group: Group) -> LocalMethod:
    """Return an optimizer of one of `METHODS`."""
    inner = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    options = METHODS[method]
    if options is None:
        return LocalSGD(inner, group, local_steps=1)
    return A2CiD2(inner, group, topology="ring", **options)


def measure_agreement(archives: Path, shards: str, method: str, seed: int) -> None:
    """Train one case, and record it."""
    features, labels, _, test = read_nodes(archives)
    parts = divide_nodes(archives, shards, seed)
    models = [make_model(features.shape[1], int(labels.max()) + 1, seed) for _ in parts]
    optimizers = [
        make_optimizer(method, model, Group(rank, RANKS)) for rank, model in enumerate(models)
    ]
    samples: list[list[Tensor]] = [[] for _ in parts]

    def batches(rank: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        for _ in range(STEPS):
            chosen = torch.randint(len(parts[rank]), (BATCH,), generator=generator)
            yield parts[rank][chosen]

    def train(rank: int) -> Algorithm[float]:
        model, optimizer = models[rank], optimizers[rank]
        yield from optimizer.broadcast_model_algorithm()
        speed = 1 + 0.2 * rank / RANKS if method.startswith("overlapped") else 1.0
        for step, nodes in enumerate(batches(rank)):
            yield Compute(STEP_S * speed)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features[nodes]), labels[nodes])
            loss.backward()
            yield from optimizer.algorithm()
            if step >= STEPS // 2 and step % SAMPLE_EVERY == 0:
                samples[rank].append(optimizer.parameters)
        end: float = yield Now()
        yield from optimizer.finalize_algorithm()
        return end

    outcome = lockstep([train(rank) for rank in range(RANKS)], LINK)
    vectors = torch.stack([torch.stack(each) for each in samples])
    distances = (vectors - vectors.mean(0)).square().sum(-1).mean().sqrt()
    with torch.no_grad():
        is_right = models[0](features[test]).argmax(1) == labels[test]
    harness.record(
        "a2cid2",
        {"part": "agreement", "shards": shards, "method": method, "ranks": RANKS, "seed": seed},
        consensus_error=float(distances),
        test_accuracy_percent=100 * float(is_right.float().mean()),
        steps=STEPS,
        exchanges_of_rank_0=getattr(optimizers[0], "num_pairs", STEPS),
        simulated_s=max(outcome.results),
    )


if __name__ == "__main__":
    main()
