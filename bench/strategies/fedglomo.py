"""Compare FedGLOMO with federated averaging on heterogeneous shards, with a sample of the ranks.

    python -m bench.strategies.fedglomo [--rounds 100] [--seeds 3]

Of 8 ranks, 2 take part in a round of 8 local steps. Each rank has points of two of eight classes;
the model is a perceptron with one hidden layer. All methods use the same minibatches and the same
participants, and are quantized to int8. `fedavg` has no momentum, `fedlomo` only the local one, and
`global` only the global one.

A line has the training loss over all shards, for the learning rate of `RATES` with which the
method has the smallest mean loss over the last five rounds, at four equal budgets: rounds,
evaluations of gradients, bytes, and virtual time. The last three are those of `fedavg` at the end
of its rounds.
The virtual time is that of `lockstep`, with links of 100 Mbit/s and a fixed time per evaluation.
"""

import argparse
import copy
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench import harness
from gcnzc.compress import Blocks
from gcnzc.exchange import Algorithm, Compute, Group, Link, Now, lockstep
from gcnzc.optim import FedGLOMO

RANKS, PARTICIPANTS, LOCAL_STEPS = 8, 2, 8
COLUMNS, HIDDEN, POINTS, BATCH = 20, 32, 400, 16
RATES = (0.05, 0.1, 0.2, 0.4)
LINK = Link(bytes_per_s=12.5e6, delay_s=0.001)
EVALUATION_S = 0.01
# name of each method: its options
METHODS: dict[str, dict[str, float]] = {
    "fedavg": {"round_weight": 1.0, "local_momentum": 0.0},
    "fedlomo": {"round_weight": 1.0, "local_momentum": 0.8},
    "global": {"round_weight": 0.5, "local_momentum": 0.0},
    "fedglomo": {"round_weight": 0.5, "local_momentum": 0.8},
    "fedglomo 0.2": {"round_weight": 0.2, "local_momentum": 0.8},
}
# rounds whose losses are averaged, as the loss varies with the participants
LAST = 5


@dataclass
class Progress:
    """The state after a round of all ranks together."""

    loss: float
    evaluations: int
    num_bytes: int
    seconds: float


class Problem:
    """The shards of all ranks, with as many models and optimizers."""

    def __init__(self, seed: int, lr: float, options: dict[str, float]) -> None:
        generator = torch.Generator().manual_seed(seed)
        centers = torch.randn(RANKS, COLUMNS, generator=generator)
        labels = [
            torch.randint(0, 2, (POINTS,), generator=generator).add(rank) % RANKS
            for rank in range(RANKS)
        ]
        noise = torch.randn(RANKS, POINTS, COLUMNS, generator=generator)
        self.shards = [(centers[own] + 1.5 * noise[rank], own) for rank, own in enumerate(labels)]
        torch.manual_seed(seed)
        first = nn.Sequential(nn.Linear(COLUMNS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, RANKS))
        self.models = [copy.deepcopy(first) for _ in range(RANKS)]
        compress = Blocks("int8", stochastic=True)
        self.optimizers = [
            FedGLOMO(
                torch.optim.SGD(model.parameters(), lr),
                Group(rank, RANKS),
                local_steps=LOCAL_STEPS,
                round_weight=options["round_weight"],
                local_momentum=options["local_momentum"],
                participants=PARTICIPANTS,
                seed=seed,
                compress=compress,
            )
            for rank, model in enumerate(self.models)
        ]
        self.seed, self.evaluations = seed, 0

    def steps(self, rank: int, rounds: int, seen: list[Progress]) -> Algorithm[None]:
        """Take the rounds of one rank; rank 0 appends to `seen` after each."""
        model, optimizer = self.models[rank], self.optimizers[rank]
        inputs, labels = self.shards[rank]
        yield from optimizer.broadcast_model_algorithm()
        for step in range(rounds * LOCAL_STEPS):
            generator = torch.Generator().manual_seed((self.seed * 10**5 + step) * RANKS + rank)
            rows = torch.randint(0, POINTS, (BATCH,), generator=generator)
            calls = 0

            def closure(rows: Tensor = rows) -> float:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(inputs[rows]), labels[rows])
                loss.backward()
                return loss.item()

            optimizer.closure = closure
            yield from optimizer.algorithm()
            self.evaluations += calls
            yield Compute(calls * EVALUATION_S)
            if rank == 0 and (step + 1) % LOCAL_STEPS == 0:
                seen.append(Progress(self.loss(), 0, 0, (yield Now())))

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean loss of rank 0's model over all shards."""
        return statistics.mean(
            float(functional.cross_entropy(self.models[0](inputs), labels))
            for inputs, labels in self.shards
        )

    def run(self, rounds: int) -> list[Progress]:
        """Take the rounds of all ranks."""
        seen: list[Progress] = []
        before = self.evaluations
        outcome = lockstep([self.steps(rank, rounds, seen) for rank in range(RANKS)], LINK)
        # each round has as many evaluations, except the first, and as many bytes
        sent = sum(
            entry.bytes_sent for ledger in outcome.ledgers for entry in ledger.entries.values()
        )
        for number, each in enumerate(seen, 1):
            each.evaluations = (self.evaluations - before) * number // len(seen)
            each.num_bytes = sent * number // len(seen)
        return seen


def main() -> None:
    """Record the training losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    case = {"ranks": RANKS, "participants": PARTICIPANTS, "local_steps": LOCAL_STEPS}
    record_losses(case, asked.rounds, asked.seeds)


def record_losses(case: dict[str, Any], rounds: int, seeds: int) -> None:
    """Record the losses of all methods, each with its best learning rate."""
    budget: list[Progress] = []
    for method, options in METHODS.items():
        runs = {
            lr: [Problem(seed, lr, options).run(rounds) for seed in range(seeds)] for lr in RATES
        }
        last = {
            lr: statistics.mean(loss_within(run, "loss", math.inf) for run in found)
            for lr, found in runs.items()
        }
        lr = min(last, key=lambda each: last[each])
        budget = budget or [run[-1] for run in runs[lr]]
        losses: dict[str, Any] = {
            "loss_at_equal_rounds": [loss_within(run, "loss", math.inf) for run in runs[lr]]
        }
        for name in ("evaluations", "num_bytes", "seconds"):
            losses[f"loss_at_equal_{name}"] = [
                loss_within(run, name, getattr(end, name))
                for run, end in zip(runs[lr], budget, strict=True)
            ]
        harness.record(
            "fedglomo",
            {"part": "train", "method": method, **case, "rounds": rounds},
            lr=lr,
            **losses,
            **{f"{name}_mean": statistics.mean(each) for name, each in losses.items()},
            evaluations=runs[lr][0][-1].evaluations,
            bytes_sent=runs[lr][0][-1].num_bytes,
            simulated_s=runs[lr][0][-1].seconds,
            loss_of_each_lr={str(each): last[each] for each in RATES},
        )


def loss_within(run: Sequence[Progress], name: str, budget: float) -> float:
    """Return the mean loss after the last `LAST` rounds within a budget."""
    within = [each.loss for each in run if getattr(each, name) <= budget * (1 + 1e-9)]
    return statistics.mean(within[-LAST:])


if __name__ == "__main__":
    main()
