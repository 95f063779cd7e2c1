"""Measure what 1-bit optimizers do with elements whose first gradient comes after the warm-up.

    python -m bench.strategies.late_elements [--kinds embedding ...]

Two ranks train a small model for 600 steps, in lockstep in one process. Until step 200 a part of it
has no gradients: rows of an embedding, a module, experts of a mixture, or the first layers, which
are frozen. The control is the same run, except that these elements have gradients in the warm-up,
too. Recorded are, with the seed 0:

    loss                            mean of the last ten steps
    uncompressed_loss               the same of AdamW or LAMB without compression
    control_loss                    the same of the control
    control_loss_of_as_many_steps   of the control when this part had as many steps with gradients
                                    as it has without the warm-up at the end
    late_step                       largest step of late elements, in learning rates
    control_step                    largest step of the same tensors in the control
    bytes_per_late_step             what a rank sends in a step while the late elements settle
    bytes_per_step                  the same in the last hundred steps

Losses and largest steps that are not finite are null.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bench import harness
from gcnzc.exchange import Group, lockstep
from gcnzc.optim import Averaged, OneBitAdam, OneBitLamb, ZeroOneAdam, ZeroOneSchedule

STEPS, LATE, BATCH, RANKS = 600, 200, 64, 2
COLUMNS, ROWS, HIDDEN, EXPERTS = 8, 40, 16, 4
LAST = 10


class WithEmbedding(nn.Module):
    """Only rows 0 to 7 of the embedding are looked up at first."""

    late = "table"

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(COLUMNS, COLUMNS), nn.Embedding(64, COLUMNS)

    def forward(self, x: Tensor, ids: Tensor, is_late: bool) -> Tensor:  # noqa: D102
        return self.linear(x) + self.table(ids if is_late else ids % 8)


class WithLateModule(nn.Module):
    """The second layer is not used at first."""

    late = "second"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, COLUMNS)

    def forward(self, x: Tensor, ids: Tensor, is_late: bool) -> Tensor:  # noqa: D102
        hidden = self.first(x)
        return self.second(hidden) if is_late else hidden


class WithExperts(nn.Module):
    """Only two of four experts get examples at first."""

    late = "experts"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, COLUMNS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(COLUMNS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, COLUMNS))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, ids: Tensor, is_late: bool) -> Tensor:  # noqa: D102
        hidden = out = self.first(x)
        expert = ids % (EXPERTS if is_late else EXPERTS // 2)
        for number, module in enumerate(self.experts):
            rows = (expert == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, module(hidden[rows]))
        return out


class WithFrozenLayer(nn.Module):
    """The first layer is not trained at first."""

    late = "first"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(COLUMNS, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.third = nn.Linear(HIDDEN, COLUMNS)

    def forward(self, x: Tensor, ids: Tensor, is_late: bool) -> Tensor:  # noqa: D102
        hidden = self.first(x).tanh()
        return self.third(self.second(hidden if is_late else hidden.detach()).tanh())


KINDS = {
    "embedding": WithEmbedding,
    "module": WithLateModule,
    "experts": WithExperts,
    "unfrozen layer": WithFrozenLayer,
}
Make = Callable[[Iterable[nn.Parameter], Group, float, int], torch.optim.Optimizer]
ADAM: Make = lambda p, group, lr, _: Averaged(torch.optim.AdamW(p, lr), group=group)  # noqa: E731
LAMB: Make = lambda p, group, lr, _: OneBitLamb(p, lr, warmup=2 * STEPS, group=group)  # noqa: E731
# name of each optimizer, and the uncompressed one beside it
METHODS: dict[str, tuple[Make, Make]] = {
    "1-bit Adam": (lambda p, group, lr, w: OneBitAdam(p, lr, warmup=w, group=group), ADAM),
    "1-bit LAMB": (lambda p, group, lr, w: OneBitLamb(p, lr, warmup=w, group=group), LAMB),
    "0/1 Adam": (
        lambda p, group, lr, w: ZeroOneAdam(
            p, lr, schedule=ZeroOneSchedule.for_run(STEPS, w), group=group
        ),
        ADAM,
    ),
}


@dataclass
class Run:
    """What was measured in a run."""

    losses: list[float] = field(default_factory=list)
    late_step: float = 0.0
    """the largest step of a late element, in units of the learning rate"""
    tensor_step: float = 0.0
    """the largest step of an element of their tensors"""
    bytes_sent: list[int] = field(default_factory=list)
    """by a rank in each step"""

    def loss(self, before_end: int = 0) -> float:
        """Return the mean loss of the last steps, or of those some steps before."""
        end = len(self.losses) - before_end
        return statistics.mean(self.losses[end - LAST : end])


def train(
    kind: str,
    make: Make,
    lr: float,
    warmup: int,
    seed: int = 0,
    *,
    is_control: bool = False,
    num_steps: int = STEPS,
    late_from: int = LATE,
) -> Run:
    """Train a model on two ranks, and return what was measured."""
    models = []
    for _ in range(RANKS):
        torch.manual_seed(seed)
        models.append(KINDS[kind]())
    groups = [Group(rank, RANKS) for rank in range(RANKS)]
    optimizers = [
        make(model.parameters(), group, lr, warmup)
        for model, group in zip(models, groups, strict=True)
    ]
    generators = [torch.Generator().manual_seed(RANKS * seed + rank) for rank in range(RANKS)]
    watched = {n: p for n, p in models[0].named_parameters() if n.startswith(models[0].late)}
    had_gradient = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in watched.items()}
    run = Run()
    for step in range(num_steps):
        is_late = step >= late_from or (is_control and step < warmup)
        losses = []
        for model, generator in zip(models, generators, strict=True):
            x = torch.randn(BATCH, COLUMNS, generator=generator)
            ids = torch.randint(0, ROWS, (BATCH,), generator=generator)
            model.zero_grad()
            loss = (model(x, ids, is_late).sum(1) - x.sum(1)).square().mean()
            loss.backward()
            losses.append(loss.item())
            for name, parameter in model.named_parameters():
                if step < late_from and name in watched and parameter.grad is not None:
                    had_gradient[name] |= parameter.grad != 0
        before = {name: parameter.detach().clone() for name, parameter in watched.items()}
        outcome = lockstep([optimizer.algorithm() for optimizer in optimizers])
        run.bytes_sent.append(outcome.ledgers[0].bytes_sent)
        run.losses.append(statistics.mean(losses))
        for name, parameter in watched.items():
            moved = (parameter.detach() - before[name]).abs() / lr
            late = moved[~had_gradient[name]]
            run.tensor_step = _largest(run.tensor_step, moved)
            run.late_step = _largest(run.late_step, late)
    return run


def _largest(before: float, values: Tensor) -> float:
    """Return the largest of all, or NaN if there is one."""
    return float(torch.cat([torch.tensor([before]), values.flatten()]).max())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kind in options.kinds:
        for method, (make, exact) in METHODS.items():
            for lr in (1e-2, 1e-3):
                uncompressed = train(kind, exact, lr, 0)
                for warmup in (STEPS // 10, 3 * STEPS // 10):
                    late = train(kind, make, lr, warmup)
                    control = train(kind, make, lr, warmup, is_control=True)
                    case = {"kind": kind, "method": method, "lr": lr, "warmup": warmup, "seed": 0}
                    harness.record(
                        "late_elements",
                        case,
                        loss=_finite(late.loss()),
                        uncompressed_loss=_finite(uncompressed.loss()),
                        control_loss=_finite(control.loss()),
                        control_loss_of_as_many_steps=_finite(control.loss(warmup)),
                        late_step=_finite(late.late_step),
                        control_step=_finite(control.tensor_step),
                        bytes_per_late_step=statistics.mean(late.bytes_sent[LATE : LATE + warmup]),
                        bytes_per_step=statistics.mean(late.bytes_sent[-100:]),
                    )


if __name__ == "__main__":
    main()
