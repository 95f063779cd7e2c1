"""Compare FedGLOMO with federated averaging on heterogeneous shards, with a sample of the ranks.

    python -m bench.strategies.fedglomo [--rounds 100] [--seeds 3] [--parts train variance]

Of 8 ranks, 2 take part in a round of 8 local steps. Each rank has points of two of eight classes;
the model is a perceptron with one hidden layer. All methods use the same minibatches and the same
participants, and are quantized to int8. `fedavg` has no momentum, `fedlomo` only the local one, and
`global` only the global one.

`train` records the training loss over all shards, for the learning rate of `RATES` with which the
method has the smallest mean loss over the last five rounds, at four equal budgets: rounds,
evaluations of gradients, bytes, and virtual time. The last three are those of `fedavg` at the end
of its rounds.
The virtual time is that of `lockstep`, with links of 100 Mbit/s and a fixed time per evaluation.

`variance` records how much the vector that is subtracted from the parameters varies over all pairs
of participants, given the past of a run with FedGLOMO, and how far it is from the mean difference
of all ranks: for the global momentum u, and for the mean difference of the participants, which
federated averaging subtracts. Both are means over rounds, without quantization. FedGLOMO evaluates
twice as many gradients in a local step as federated averaging, and sends twice as many elements, so
both are also compared with those of federated averaging with twice as many participants. Without
the part `train`, the learning rates are those of the recorded lines.
"""

import argparse
import copy
import itertools
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
from gcnzc.optim import Strategy, fedglomo
from gcnzc.train import record

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
PARTS = ("train", "variance")
# rounds of `variance` that are not measured
WARM_UP = 5


@dataclass
class Progress:
    """The state after a round of all ranks together."""

    loss: float
    evaluations: int
    num_bytes: int
    seconds: float


class Problem:
    """The shards of all ranks, with as many models and optimizers."""

    def __init__(self, seed: int, lr: float, options: dict[str, float], *, is_exact: bool) -> None:
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
        compress = None if is_exact else Blocks("int8", stochastic=True)
        self.optimizers = [
            Strategy(
                torch.optim.SGD(model.parameters(), lr),
                fedglomo(
                    LOCAL_STEPS,
                    options["round_weight"],
                    options["local_momentum"],
                    participants=PARTICIPANTS,
                    seed=seed,
                    compress=compress,
                ),
                Group(rank, RANKS),
            )
            for rank, model in enumerate(self.models)
        ]
        self.seed, self.evaluations = seed, 0

    def steps(self, rank: int, begin: int, end: int, seen: list[Progress]) -> Algorithm[None]:
        """Take rounds `begin` to `end` of one rank; rank 0 appends to `seen` after each."""
        model, optimizer = self.models[rank], self.optimizers[rank]
        inputs, labels = self.shards[rank]
        yield from optimizer.broadcast_model_algorithm()
        for step in range(begin * LOCAL_STEPS, end * LOCAL_STEPS):
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

    def run(self, begin: int, end: int) -> list[Progress]:
        """Take rounds `begin` to `end` of all ranks."""
        seen: list[Progress] = []
        before = self.evaluations
        outcome = lockstep([self.steps(rank, begin, end, seen) for rank in range(RANKS)], LINK)
        # each round has as many evaluations, except the first, and as many bytes
        sent = sum(
            entry.bytes_sent for ledger in outcome.ledgers for entry in ledger.entries.values()
        )
        for number, each in enumerate(seen, 1):
            each.evaluations = (self.evaluations - before) * number // len(seen)
            each.num_bytes = sent * number // len(seen)
        return seen


def main() -> None:
    """Record the training losses and the variances."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    case = {"ranks": RANKS, "participants": PARTICIPANTS, "local_steps": LOCAL_STEPS}
    if "train" in asked.parts:
        record_losses(case, asked.rounds, asked.seeds)
    if "variance" in asked.parts:
        rates = {
            line["method"]: line["lr"]
            for line in record.read(harness.RESULTS / "fedglomo.jsonl")
            if line["part"] == "train"
        }
        record_variances(case, asked.rounds, asked.seeds, rates)


def record_losses(case: dict[str, Any], rounds: int, seeds: int) -> None:
    """Record the losses of all methods, each with its best learning rate."""
    budget: list[Progress] = []
    for method, options in METHODS.items():
        runs = {
            lr: [Problem(seed, lr, options, is_exact=False).run(0, rounds) for seed in range(seeds)]
            for lr in RATES
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


def record_variances(
    case: dict[str, Any], rounds: int, seeds: int, rates: dict[str, float]
) -> None:
    """Record how the subtracted vectors vary over the pairs of participants."""
    for method in ("global", "fedglomo", "fedglomo 0.2"):
        ratios: dict[str, list[float]] = {
            f"{name}_of_{other}": []
            for other in ("fedavgs", "fedavgs_at_equal_cost")
            for name in ("variance", "square_error")
        }
        for seed in range(seeds):
            problem = Problem(seed, rates[method], METHODS[method], is_exact=True)
            problem.run(0, WARM_UP)
            sums = torch.zeros(3, 2, dtype=torch.float64)
            for number in range(WARM_UP, rounds):
                sums += variances(problem, number, METHODS[method]["round_weight"])
                problem.run(number, number + 1)
            for each, value in zip(
                ratios.values(), (sums[:1] / sums[1:]).flatten().tolist(), strict=True
            ):
                each.append(value)
        means: dict[str, Any] = {
            f"{name}_mean": statistics.mean(each) for name, each in ratios.items()
        }
        harness.record(
            "fedglomo",
            {"part": "variance", "method": method, **case, "rounds": rounds},
            lr=rates[method],
            **dict[str, Any](ratios),
            **means,
        )


def variances(problem: Problem, number: int, weight: float) -> Tensor:
    """Return (3, 2) float64: the variance and the square error of vectors.

    They are u, and the mean differences of as many and of twice as many participants.

    Args:
        problem: before round `number`; does not change.
        number: of the round.
        weight: the weight of the current round.
    """
    other = copy.deepcopy(problem)
    vectors: list[Tensor] = []
    for optimizer in other.optimizers:
        update: Any = optimizer.recipe.update
        update.participants.count = None
        momentum = update.momentum.double()
        _keep_sent(update, vectors)
    other.run(number, number + 1)
    sent = torch.stack(vectors).double()
    differences, changes = sent.chunk(2, dim=1)
    means, larger = (_means_of_sets(differences, size) for size in (PARTICIPANTS, 2 * PARTICIPANTS))
    corrected = momentum + _means_of_sets(changes, PARTICIPANTS)
    updates = weight * means + (1 - weight) * corrected
    target = differences.mean(0)
    return torch.tensor(
        [
            [
                float((each - each.mean(0)).square().sum(1).mean()),
                float((each - target).square().sum(1).mean()),
            ]
            for each in (updates, means, larger)
        ],
        dtype=torch.float64,
    )


def _means_of_sets(vectors: Tensor, size: int) -> Tensor:
    """Return (sets, elements): the mean vector of each set of `size` ranks."""
    sets = itertools.combinations(range(RANKS), size)
    return torch.stack([vectors[list(ranks)].mean(0) for ranks in sets])


def _keep_sent(update: Any, vectors: list[Tensor]) -> None:
    """Append the vector that each call of `update.read` writes to `vectors`."""
    read = update.read

    def keep(out: Tensor) -> None:
        read(out)
        vectors.append(out[: update.num_elements].clone())

    update.read = keep


if __name__ == "__main__":
    main()
