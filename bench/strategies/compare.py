"""Compare all strategies on the same graph, model, links and random seeds, in virtual time.

    python -m bench.strategies.compare [METHOD ...] [--seeds N]

Each run trains GraphSAGE as bench/strategies/task.py describes, with the options of `SETUP`. A
recorded line has the test accuracy, the virtual time, the bytes that a rank sends, and its memory.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import nn

from bench import harness
from bench.strategies.task import Build, Setup, run
from gcnzc.compress import Blocks, Dense, Sign
from gcnzc.exchange import Group
from gcnzc.optim import (
    CO2,
    Averaged,
    DiLoCo,
    DistributedOptimizer,
    LocalSGD,
    OneBitAdam,
    OneBitLamb,
    Recipe,
    Strategy,
    StreamingDiLoCo,
    ZeroOneAdam,
    ZeroOneSchedule,
    selsync,
)

SETUP = Setup()
LR = 0.0015
# LAMB scales its updates by the norm of the weights, so it needs another learning rate
LAMB_LR = 0.006


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return the update rule of all methods that do not have their own."""
    return torch.optim.Adam(model.parameters(), LR)


def _around(kind: Callable[..., DistributedOptimizer], **options: object) -> Build:
    return lambda model, group, steps: kind(adam(model), group, **options)


def _recipe(make: Callable[..., Recipe], **options: object) -> Build:
    return lambda model, group, steps: Strategy(adam(model), make(**options), group)


def _zero_one_adam(model: nn.Module, group: Group, steps: int) -> DistributedOptimizer:
    schedule = ZeroOneSchedule.for_run(steps)
    return ZeroOneAdam(
        model.parameters(), LR, weight_decay=0.0, schedule=schedule, group=group, total_steps=steps
    )


METHODS: dict[str, Build] = {
    "average": _around(Averaged),
    "average, bfloat16": _around(Averaged, compress=Dense(torch.bfloat16)),
    "average, int8": _around(Averaged, compress=Blocks("int8")),
    "average, sign": _around(Averaged, compress=Sign()),
    "1-bit Adam": lambda model, group, steps: OneBitAdam(
        model.parameters(), LR, weight_decay=0.0, group=group, total_steps=steps
    ),
    "1-bit LAMB": lambda model, group, steps: OneBitLamb(
        model.parameters(), LAMB_LR, weight_decay=0.0, group=group, total_steps=steps
    ),
    "0/1 Adam": _zero_one_adam,
    "local SGD": _around(LocalSGD),
    "DiLoCo": _around(DiLoCo),
    "Streaming DiLoCo": _around(StreamingDiLoCo),
    "Streaming DiLoCo, float4": _around(StreamingDiLoCo, compress=Blocks("float4_e3m0", 1024)),
    "CO2": _around(CO2),
    "SelSync": _recipe(selsync),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the methods."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="; ".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(argv)
    unknown = set(asked.methods) - set(METHODS)
    if unknown:
        parser.error(f"no method {', '.join(sorted(unknown))}; use: {'; '.join(METHODS)}")
    torch.set_num_threads(1)
    for name in asked.methods or METHODS:
        for seed in range(asked.seeds):
            result = run(SETUP, METHODS[name], seed)
            harness.record(
                "strategy_comparison",
                {
                    "method": name,
                    "seed": seed,
                    "graph": SETUP.graph,
                    "ranks": SETUP.world_size,
                    "mbit_per_s": SETUP.mbit_per_s,
                    "delay_s": SETUP.delay_s,
                    "step_s": SETUP.step_s,
                    "epochs": SETUP.epochs,
                },
                accuracy=result.accuracy,
                simulated_s=result.seconds,
                sent_bytes=result.bytes_sent,
                state_bytes=result.state_bytes,
                steps=result.steps,
                losses=[round(each, 4) for each in result.losses],
                epoch_ends_s=[round(each, 4) for each in result.epoch_ends_s],
            )


if __name__ == "__main__":
    main()
