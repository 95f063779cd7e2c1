"""Compare our optimizers with DeepSpeed's, which run in a separate environment.

    python -m bench.network.deepspeed_peer --peer FOLDER [--seeds N] [--steps N]

FOLDER gets an environment with DeepSpeed 0.19.6, the last release that has 1-bit optimizers, unless
it is there; that takes minutes and the network. For each optimizer and seed, two workers of
DeepSpeed train over gloo on random gradients, and two of ours in lockstep on the same. Recorded are
the largest difference of an element of the parameters, and how far the workers of each are apart.

Left as it is, DeepSpeed does not run on a CPU. Its packing of bits is replaced by numpy's here, and
the shape of what it gathers is mended; its optimizers are not touched. They start with a call that
changes nothing, and ours one step later. The elements of a problem need no padding: DeepSpeed's
1-bit LAMB sends what its padding received again at the next step, which no other way does.
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
# that its workers may take for everything: importing it takes minutes on busy cores
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
    """Parameters, and gradients of every worker at every step, with a mean that lasts."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    # multiples of workers * lcm(workers, 8) elements: nothing to pad
    shapes = [(draw.randint(1, 6), 16 * draw.randint(1, 8)) for _ in range(draw.randint(2, 5))]
    scales = [10 ** draw.uniform(-2, 0) for _ in shapes]
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


class _Bits:
    """What DeepSpeed calls to pack signs, with numpy."""

    def load(self) -> "_Bits":
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
        # gloo wants one dimension of a lone scale
        return gather(parts, values.reshape(1) if values.dim() == 0 else values, **options)

    transport.PackbitsBuilder = _Bits
    # shared memory would be compiled first, for collectives that are not used here
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
                # what DeepSpeed's engine does before the optimizer
                communication.all_reduce(parameter.grad)
                parameter.grad /= WORKERS
        optimizer.step()
        history.append([parameter.detach().clone() for parameter in parameters])
    return history


# --- In ours


def make_environment(folder: Path) -> Path:
    """Return the Python of an environment with DeepSpeed, which is created if it is missing."""
    python = folder / "bin/python"
    # not imported, which takes long
    has_it = f"import importlib.metadata as m; assert m.version('deepspeed') == '{VERSION}'"
    if python.exists():
        found = subprocess.run([python, "-c", has_it], capture_output=True, check=False)
        if found.returncode == 0:
            return python
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "setuptools", "wheel"], check=True)
    subprocess.run([*pip, "torch==2.13.0", "numpy"], check=True)
    # any release for what they need, and then the one, whose setup looks for the installed torch
    subprocess.run([*pip, "--no-build-isolation", "deepspeed"], check=True)
    source = ["--no-build-isolation", "--no-deps", f"deepspeed=={VERSION}"]
    subprocess.run([*pip, *source], check=True)
    subprocess.run([python, "-c", has_it], check=True, capture_output=True)
    return python


def of_deepspeed(python: Path, tasks: list[dict[str, Any]]) -> list[list[list[list[Tensor]]]]:
    """Return DeepSpeed's parameters of each worker, for each problem, after each step."""
    with tempfile.TemporaryDirectory(prefix="deepspeed-peer-") as place:
        folder = Path(place)
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
            with (folder / f"talk{rank}").open("w") as talk:
                workers.append(
                    subprocess.Popen(
                        [python, "-m", "bench.network.deepspeed_peer", "--worker", str(folder)],
                        env=environment,
                        stdout=talk,
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
            talk = "\n".join((folder / f"talk{rank}").read_text() for rank in range(WORKERS))
            raise RuntimeError(f"DeepSpeed's workers failed, or are still there:\n{talk}")
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


def of_ours(task: dict[str, Any]) -> list[list[list[Tensor]]]:
    """Return our workers' parameters after each step; as in DeepSpeed, step 1 changes none."""
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
    """Return the largest difference of an element."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def main() -> None:
    """Run DeepSpeed and ours on the same problems, and record how far apart they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, help="DeepSpeed's environment, made if not there")
    parser.add_argument("--seeds", type=int, default=3, help="problems, from seed 0 on")
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
    for task, *theirs in zip(tasks, *of_deepspeed(python, tasks), strict=True):
        ours = of_ours(task)
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
