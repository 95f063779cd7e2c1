"""Compare all strategies on the same graph, model, links and random seeds, in virtual time.

    python -m bench.strategies.compare [METHOD ...] [--seeds N] [--slow-rank F] [--slow-link F]

Each run trains GraphSAGE as bench/strategies/task.py describes, with the options of `Setup`. A
recorded line has the test accuracy, the virtual time, the bytes that a rank sends, and its memory.
With `--slow-rank 3` the last rank computes 3 times as slowly as the others, and with `--slow-link
10` its link has a tenth of their bandwidth.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import nn

from bench import harness
from bench.strategies.task import Build, Setup, run
from gcnzc.compress import Blocks, Dense, RandomK, Sign, Threshold, TopK
from gcnzc.exchange import Group
from gcnzc.optim import (
    CO2,
    SAPS,
    A2CiD2,
    Averaged,
    BackupWorkers,
    DiLoCo,
    DistributedOptimizer,
    FedGLOMO,
    LocalSGD,
    MuLoCo,
    Muon,
    OneBitAdam,
    OneBitLamb,
    SelSync,
    SparseLoCo,
    StreamingDiLoCo,
    ZeroOneAdam,
    ZeroOneSchedule,
)

LR = 0.0015
# LAMB scales its updates by the norm of the weights, and SGD does not scale them at all, so they
# need other learning rates
LAMB_LR, SGD_LR = 0.006, 0.05


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return the update rule of all methods that do not have their own."""
    return torch.optim.Adam(model.parameters(), LR)


def _around(kind: Callable[..., DistributedOptimizer], **options: object) -> Build:
    return lambda model, group, steps: kind(adam(model), group, **options)


def _fedglomo(model: nn.Module, group: Group, steps: int) -> DistributedOptimizer:
    return FedGLOMO(torch.optim.SGD(model.parameters(), SGD_LR), group)


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
    "MuLoCo": lambda model, group, steps: MuLoCo(Muon(model.parameters(), LR, module=model), group),
    "SparseLoCo": _around(SparseLoCo),
    "SelSync": lambda model, group, steps: SelSync(adam(model), group),
    "top-k, 1 %": _around(Averaged, compress=TopK(0.01)),
    "random-k, 5 %": _around(Averaged, compress=RandomK(0.05)),
    "DCT, 1 %": _around(Averaged, compress=Threshold(0.01)),
    "DCT, 0.5 %": _around(Averaged, compress=Threshold(0.005)),
    "SAPS, 1 %": _around(SAPS),
    "SAPS, 10 %": _around(SAPS, density=0.1),
    "A2CiD2": _around(A2CiD2),
    "A2CiD2, overlapped": _around(A2CiD2, asynchronous=True),
    "backup workers": _around(BackupWorkers),
    "FedGLOMO": _fedglomo,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the methods."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "methods", nargs="*", metavar="METHOD", help="; ".join(METHODS).replace("%", "%%")
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--slow-rank", type=float, default=1.0, metavar="F")
    parser.add_argument("--slow-link", type=float, default=1.0, metavar="F")
    asked = parser.parse_args(argv)
    setup = Setup(slow_rank_factor=asked.slow_rank, slow_link_factor=asked.slow_link)
    unknown = set(asked.methods) - set(METHODS)
    if unknown:
        parser.error(f"no method {', '.join(sorted(unknown))}; use: {'; '.join(METHODS)}")
    torch.set_num_threads(1)
    for name in asked.methods or METHODS:
        for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
            result = run(setup, METHODS[name], seed)
            harness.record(
                "strategy_comparison",
                {
                    "method": name,
                    "seed": seed,
                    "graph": setup.graph,
                    "ranks": setup.world_size,
                    "mbit_per_s": setup.mbit_per_s,
                    "delay_s": setup.delay_s,
                    "step_s": setup.step_s,
                    "epochs": setup.epochs,
                    "slow_rank_factor": setup.slow_rank_factor,
                    "slow_link_factor": setup.slow_link_factor,
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
