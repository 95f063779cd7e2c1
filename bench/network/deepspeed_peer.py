"""Compare our optimizers with DeepSpeed's, which run in a separate environment.

    python -m bench.network.deepspeed_peer --peer FOLDER [--seeds N] [--steps N]

FOLDER is the environment with DeepSpeed 0.19.6, the last release that has 1-bit optimizers. It is
created if it does not exist, which takes minutes and needs network access. For each optimizer and
seed, two DeepSpeed workers train over gloo on random gradients, and two of ours train on the same
gradients in lockstep. Each line has the largest difference between an element of DeepSpeed's and
of our parameters, and the largest difference between the workers of each.

Unmodified, these optimizers do not run on a CPU. Two parts of DeepSpeed's communication are
replaced: bits are packed by numpy, and a scalar tensor is reshaped to one dimension before it is
gathered. The optimizers themselves are unchanged. Their first call to `step` does not change the
parameters, so ours start at step 1. The size of each parameter is chosen so that no padding is
needed, because DeepSpeed's 1-bit LAMB sends the padding that it received at the next step,
which no other optimizer does.
"""

import argparse
import importlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

WORKERS = 2
VERSION = "0.19.6"
# time limit of DeepSpeed's workers; on busy cores, importing DeepSpeed alone takes minutes
LIMIT_S = 900.0
# DeepSpeed's name of an optimizer, and its options
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "OnebitAdam": {"freeze_step": 12},
    "OnebitLamb": {"freeze_step": 12, "max_coeff": 0.3, "min_coeff": 0.01},
    "ZeroOneAdam": {
        "var_freeze_step": 12,
        "var_update_scaler": 2,
        "local_step_scaler": 4,
        "local_step_clipper": 4,
    },
}
COMMON: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.01}
MODULES = {"OnebitAdam": "adam", "OnebitLamb": "lamb", "ZeroOneAdam": "zoadam"}


def problem(optimizer: str, seed: int, steps: int) -> dict[str, Any]:
    """Return random initial parameters, and each worker's gradients with means that are fixed."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    # multiples of workers * lcm(workers, 8) elements: nothing to pad
    shapes = [(rng.randint(1, 6), 16 * rng.randint(1, 8)) for _ in range(rng.randint(2, 5))]
    scales = [10 ** rng.uniform(-2, 0) for _ in shapes]
    means = [torch.randn(shape, generator=generator) for shape in shapes]

    def gradients() -> list[Tensor]:
        pairs = zip(means, scales, strict=True)
        return [
            scale * (mean + torch.randn(mean.shape, generator=generator)) for mean, scale in pairs
        ]

    return {
        "optimizer": optimizer,
        "seed": seed,
        "init": [torch.randn(shape, generator=generator) for shape in shapes],
        "gradients": [[gradients() for _ in range(steps)] for _ in range(WORKERS)],
    }


# --- In DeepSpeed's environment


class _NumpyPackbits:
    """Packs signs with numpy; replaces DeepSpeed's `PackbitsBuilder`."""

    def load(self) -> "_NumpyPackbits":
        return self

    def packbits(self, values: Tensor, _count: int, _rank: int) -> Tensor:
        import numpy as np

        return torch.from_numpy(np.packbits((values >= 0).numpy()))

    def unpackbits(self, packed: Tensor, _count: int, _rank: int) -> Tensor:
        import numpy as np

        return torch.from_numpy(np.unpackbits(packed.numpy())).float() * 2 - 1


def work(folder: Path) -> None:
    """Train one worker of DeepSpeed on each problem, and save its parameters after every step."""
    rank = int(os.environ["RANK"])
    import deepspeed
    import deepspeed.comm as communication
    import deepspeed.comm.torch as backend
    import deepspeed.runtime.comm.compressed as transport

    gather = communication.all_gather

    def all_gather(parts: list[Tensor], values: Tensor, **options: Any) -> Any:
        # gloo does not gather tensors without dimensions
        return gather(parts, values.reshape(1) if values.dim() == 0 else values, **options)

    transport.PackbitsBuilder = _NumpyPackbits
    # do not compile the shared-memory extension, whose collectives are not used here
    backend.build_shm_op = lambda: None
    communication.all_gather = all_gather
    deepspeed.init_distributed(
        dist_backend="gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=WORKERS,
    )
    tasks = torch.load(folder / "tasks.pt", weights_only=True)
    torch.save([trained(task, rank) for task in tasks], folder / f"{rank}.pt")


def trained(task: dict[str, Any], rank: int) -> list[list[Tensor]]:
    """Return the parameters of a DeepSpeed worker after each step."""
    import deepspeed.comm as communication

    name = task["optimizer"]
    module = importlib.import_module(f"deepspeed.runtime.fp16.onebit.{MODULES[name]}")
    parameters = [nn.Parameter(values) for values in task["init"]]
    engine = SimpleNamespace(mpu=None, local_rank=rank, enable_backward_allreduce=True)
    options = COMMON | OPTIMIZERS[name]
    make = getattr(module, name)
    optimizer = make(parameters, deepspeed=engine, comm_backend_name="compressed", **options)
    history = []
    for gradients in task["gradients"][rank]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
            if engine.enable_backward_allreduce:
                # DeepSpeed's engine averages gradients before it calls the optimizer
                communication.all_reduce(parameter.grad)
                parameter.grad /= WORKERS
        optimizer.step()
        history.append([parameter.detach().clone() for parameter in parameters])
    return history


# --- In ours


def make_environment(folder: Path) -> Path:
    """Return the Python of an environment with DeepSpeed, which is created if it is missing."""
    python = folder / "bin/python"
    # read the version from the metadata, since importing DeepSpeed is slow
    has_it = f"import importlib.metadata as m; assert m.version('deepspeed') == '{VERSION}'"
    if python.exists():
        found = subprocess.run([python, "-c", has_it], capture_output=True, check=False)
        if found.returncode == 0:
            return python
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "setuptools", "wheel"], check=True)
    subprocess.run([*pip, "torch==2.13.0", "numpy"], check=True)
    # the newest release first, for its dependencies; then VERSION, whose setup needs torch
    subprocess.run([*pip, "--no-build-isolation", "deepspeed"], check=True)
    source = ["--no-build-isolation", "--no-deps", f"deepspeed=={VERSION}"]
    subprocess.run([*pip, *source], check=True)
    subprocess.run([python, "-c", has_it], check=True, capture_output=True)
    return python


def run_deepspeed(python: Path, tasks: list[dict[str, Any]]) -> list[list[list[list[Tensor]]]]:
    """Return DeepSpeed's parameters of each worker, for each problem, after each step."""
    with tempfile.TemporaryDirectory(prefix="deepspeed-peer-") as temporary:
        folder = Path(temporary)
        torch.save(tasks, folder / "tasks.pt")
        workers = []
        for rank in range(WORKERS):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORKERS),
                "DS_ACCELERATOR": "cpu",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            with (folder / f"output{rank}").open("w") as output_file:
                workers.append(
                    subprocess.Popen(
                        [python, "-m", "bench.network.deepspeed_peer", "--worker", str(folder)],
                        env=environment,
                        stdout=output_file,
                        stderr=subprocess.STDOUT,
                    )
                )
        end = time.monotonic() + LIMIT_S
        while any(worker.poll() is None for worker in workers) and time.monotonic() < end:
            time.sleep(0.1)
            if any(worker.poll() for worker in workers):
                break
        for worker in workers:
            worker.kill()
        if any(worker.wait() for worker in workers):
            output = "\n".join((folder / f"output{rank}").read_text() for rank in range(WORKERS))
            raise RuntimeError(f"DeepSpeed's workers failed or exceeded {LIMIT_S:g} s:\n{output}")
        return [torch.load(folder / f"{rank}.pt") for rank in range(WORKERS)]


def maker(task: dict[str, Any]) -> Callable[[list[nn.Parameter], Any], Any]:
    """Return a function that creates our equivalent of a DeepSpeed optimizer."""
    from bench.network.deepspeed_oracles import (
        DeepSpeedSchedule,
        OneBitAdamDeepSpeed,
        OneBitLambDeepSpeed,
        PaddedSign,
        ZeroOneAdamDeepSpeed,
    )

    name, lengths = task["optimizer"], tuple(values.numel() for values in task["init"])
    own = OPTIMIZERS[name]
    if name == "ZeroOneAdam":
        schedule = DeepSpeedSchedule(*own.values())
        return lambda parameters, group: ZeroOneAdamDeepSpeed(
            parameters, schedule=schedule, group=group, **COMMON
        )
    options = {
        "warmup": own["freeze_step"],
        "bias_correction": False,
        "variance_floor": 0.0,
        **COMMON,
    }
    if name == "OnebitAdam":
        return lambda parameters, group: OneBitAdamDeepSpeed(
            parameters, compress=PaddedSign(lengths), group=group, **options
        )
    options["trust_range"] = (own["min_coeff"], own["max_coeff"])
    return lambda parameters, group: OneBitLambDeepSpeed(
        parameters, compress=PaddedSign((sum(lengths),)), group=group, **options
    )


def run_ours(task: dict[str, Any]) -> list[list[list[Tensor]]]:
    """Return our workers' parameters after each step; step 1 changes none, as in DeepSpeed."""
    from gcnzc.exchange import Group, lockstep

    make = maker(task)
    models = [[nn.Parameter(each.clone()) for each in task["init"]] for _ in range(WORKERS)]
    optimizers = [make(model, Group(rank, WORKERS)) for rank, model in enumerate(models)]
    history: list[list[list[Tensor]]] = [[task["init"]] for _ in models]
    for optimizer in optimizers:
        optimizer.steps = 1
    for step in range(1, len(task["gradients"][0])):
        for model, gradients in zip(models, task["gradients"], strict=True):
            for parameter, gradient in zip(model, gradients[step], strict=True):
                parameter.grad = gradient.clone()
        lockstep([optimizer.algorithm() for optimizer in optimizers])
        for model, steps in zip(models, history, strict=True):
            steps.append([parameter.detach().clone() for parameter in model])
    return history


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest absolute difference between elements."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def main() -> None:
    """Run DeepSpeed's optimizers and ours on the same problems, and record the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, help="DeepSpeed's environment, created if missing")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, starting at 0")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    if options.peer is None:
        parser.error("--peer FOLDER")
    from bench.harness import record

    python = make_environment(options.peer.absolute())
    tasks = [
        problem(name, seed, options.steps)
        for name in options.optimizers
        for seed in range(options.seeds)
    ]
    for task, *theirs in zip(tasks, *run_deepspeed(python, tasks), strict=True):
        ours = run_ours(task)
        apart = [
            max(difference(ours[rank][step], theirs[rank][step]) for rank in range(WORKERS))
            for step in range(options.steps)
        ]
        record(
            "deepspeed_peer",
            {name: task[name] for name in ("optimizer", "seed")} | {"steps": options.steps},
            workers=WORKERS,
            elements=sum(each.numel() for each in task["init"]),
            largest_parameter=max(float(each.abs().max()) for each in ours[0][-1]),
            largest_difference=max(apart),
            equal_steps=next((step for step, gap in enumerate(apart) if gap), options.steps),
            deepspeeds_workers_apart=difference(theirs[0][-1], theirs[1][-1]),
            our_workers_apart=difference(ours[0][-1], ours[1][-1]),
            deepspeed=VERSION,
        )


if __name__ == "__main__":
    main()
