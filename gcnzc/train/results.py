"""Results of a run: its JSON line, its curves, and the progress line of an epoch."""

import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gcnzc.features.cache import CachedTable
from gcnzc.optim import DistributedOptimizer, DropCompute
from gcnzc.optim.compute_deadline import TOLERANCE
from gcnzc.system import files, machine
from gcnzc.train import record
from gcnzc.train.config import TrainConfig
from gcnzc.train.evaluation import flatten_scores
from gcnzc.train.plots import curves
from gcnzc.train.run_folder import CURVES, RESULT
from gcnzc.train.tracing import draw_trace
from gcnzc.train.trainer import Trainer
from gcnzc.tune import pcie_bench


def _options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of a run, except paths and time limits."""
    excluded = ("data", "out", "resume", "config", "timeout_s", "restarts", "checkpoint_every_s")
    return {name: value for name, value in config.to_dict().items() if name not in excluded}


def _peak_gpu_memory_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def format_epoch(line: Mapping[str, Any], epochs: int) -> str:
    """Return the progress line that is printed after an epoch."""
    metric = line["metric"]
    words = [f"epoch {line['epoch'] + 1}/{epochs}", f"loss {line['loss']:.4f}"]
    for name in ("minibatch", "valid", "test"):
        if f"{name}_{metric}" in line:
            words.append(f"{name} {line[f'{name}_{metric}']:.4f}")
    words.append(f"{line['seeds'] / line['epoch_s']:,.0f} seeds/s")
    if "dropped_share" in line:
        words.append(f"dropped {line['dropped_share']:.0%}")
    words.append(f"waited {line['wait_s'] / line['epoch_s']:.0%} of {line['epoch_s']:.1f} s")
    return "  ".join(words)


def format_drop_warning(
    line: Mapping[str, Any], optimizer: DistributedOptimizer, earlier: Sequence[Mapping[str, Any]]
) -> str:
    """Return a warning if DropCompute has dropped more than its limit in an epoch; else "".

    With a fixed threshold, the limit is the default of `max_dropped`. Only the first such epoch of
    a run has a warning.

    Args:
        line: of the epoch, see `EpochStats.figures`.
        optimizer: the optimizer of the run.
        earlier: the lines of the earlier epochs.
    """
    if not isinstance(optimizer, DropCompute):
        return ""
    limit = optimizer.deadline.max_dropped
    if optimizer.deadline.requested_s is None:
        # a measured threshold may drop more; above this limit, it is measured again
        limit *= TOLERANCE
    if line.get("dropped_share", 0.0) <= limit or any(
        each.get("dropped_share", 0.0) > limit for each in earlier
    ):
        return ""
    remedy = (
        "Use a larger --strategy dropcompute:threshold=SECONDS, or auto, which aims at no "
        f"more than {limit:.0%}"
    )
    if optimizer.deadline.requested_s is None:
        remedy = "The steps take longer than when the threshold was measured"
    return (
        f"{line['dropped_share']:.0%} of the minibatches of epoch {line['epoch'] + 1} were "
        f"dropped, more than {limit:.0%}; their seeds were not used. {remedy}"
    )


def write_result(trainer: Trainer) -> dict[str, Any]:
    """Return the result of a run; worker 0 also writes it and the curves to the run folder."""
    epochs = len(trainer.lines)
    typical = record.typical_lines(trainer.lines)

    def mean(key: str) -> float:
        return float(sum(line[key] for line in typical) / len(typical))

    data, task, config = trainer.data, trainer.task, trainer.config
    gathered, seconds = mean("payload_bytes"), mean("gather_s")
    line: dict[str, Any] = {
        "run": str(trainer.folder),
        "data": data.name,
        "task": config.graph.task.name,
        "model": config.model.model.name,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "metric": task.metric,
        "evaluation": task.evaluator.method,
        **flatten_scores(trainer.best["scores"]),
        "best_epoch": trainer.best["epoch"] + 1,
        "epochs": epochs,
        "epoch_s": mean("epoch_s"),
        "sample_s": mean("sample_s"),
        "gather_s": seconds,
        "compute_s": mean("compute_s"),
        "wait_s": mean("wait_s"),
        "exchange_s": mean("exchange_s"),
        "hidden_s": mean("hidden_s"),
        "seeds_per_s": len(task.seeds) / mean("epoch_s"),
        "payload_bytes": sum(line["payload_bytes"] for line in trainer.lines) // epochs,
        "gather_bytes_per_s": gathered / seconds if seconds else 0.0,
        "gather_roof_bytes_per_s": _peak_read_rate(trainer),
        "workers": trainer.group.world_size,
        "bytes_sent": sum(line["bytes_sent"] for line in trainer.lines),
        "seed": config.loading.seed,
        "device": str(trainer.device),
        "options": _options(config),
        # seconds of this command, which may have resumed the run
        "total_s": time.perf_counter() - trainer.began,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_gpu_memory_bytes": _peak_gpu_memory_bytes(trainer.device),
        **machine.machine(),
    }
    if isinstance(trainer.table, CachedTable):
        for key in ("hit_rate", "peer_hit_rate"):
            hit = sum(line[key] * line["payload_bytes"] for line in trainer.lines)
            line[key] = hit / sum(line["payload_bytes"] for line in trainer.lines)
        line["predicted_hit_rate"] = trainer.table.predicted_hit_rate
        line["bytes_saved"] = sum(line["bytes_saved"] for line in trainer.lines) // epochs
    if "dropped_share" in trainer.lines[0]:
        # all epochs have the same number of minibatches
        line["dropped_share"] = sum(each["dropped_share"] for each in trainer.lines) / epochs
    if task.best_accuracy is not None:
        line["best_possible_accuracy"] = task.best_accuracy
    # the run may have ended before --trace steps were recorded
    draw_trace(trainer)
    if trainer.is_rank_zero:
        attempt = trainer.files.attempt
        attempt(CURVES, lambda: curves([trainer.folder], trainer.folder / CURVES))
        line["unsaved"] = trainer.files.causes()
        attempt(RESULT, lambda: files.write_json(trainer.folder / RESULT, line))
    return line | {"unsaved": trainer.files.causes()}


def _peak_read_rate(trainer: Trainer) -> float | None:
    """Return the measured peak of a GPU reading host memory; None if no GPU does in this run."""
    is_read = trainer.table.device != trainer.device
    return pcie_bench.peak_read_rate(trainer.device) if is_read else None
