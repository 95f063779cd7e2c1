"""Results of a run: its JSON line, its curves, and the progress line of an epoch."""

import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gcnzc.exchange import run as run_algorithm
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.features.cache import CachedTable
from gcnzc.optim import DistributedOptimizer, DropCompute
from gcnzc.optim.compute_deadline import TOLERANCE
from gcnzc.system import files, machine
from gcnzc.train import record
from gcnzc.train.callbacks import Callback
from gcnzc.train.config import TrainConfig
from gcnzc.train.errors import Interrupted, SavedRun
from gcnzc.train.output_files import format_unsaved_error
from gcnzc.train.plots import curves
from gcnzc.train.run_folder import CURVES, RESULT
from gcnzc.train.state import Run
from gcnzc.train.tasks.base import flatten_scores
from gcnzc.tune import pcie_bench


def _options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of a run, except paths and time limits."""
    excluded = {"data", "out", "resume", "config", "timeout_s", "restarts"}
    excluded |= {"checkpoint_every_s", "keep"}
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


class Result(Callback):
    """Sets the result of a run; worker 0 also writes it and the curves to the run folder."""

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        if run.is_first and run.lines:
            run.files.attempt(CURVES, lambda: curves([run.folder], run.folder / CURVES))
        if isinstance(run.stopped, Interrupted):
            return
        run.result = line = result_of(run)
        line["unsaved"] = run.files.causes()
        if run.is_first:
            run.files.attempt(RESULT, lambda: files.write_json(run.folder / RESULT, line))
            line["unsaved"] = run.files.causes()


def interruption(run: Run) -> Interrupted:
    """Return the error of a run that a signal has ended; a collective call."""
    if not any(run_algorithm(all_gather_scalar(len(run.files.failures)), run.group)):
        return SavedRun(run.position, run.folder, run.received_signal())
    message = "worker 0 could not write all files"
    if run.is_first:
        message = format_unsaved_error(run.folder, run.files.causes())
    return Interrupted(f"stopped {run.position}; {message}")


def result_of(run: Run) -> dict[str, Any]:
    """Return the result of a run."""
    epochs = len(run.lines)
    typical = record.typical_lines(run.lines)

    def mean(key: str) -> float:
        return float(sum(line[key] for line in typical) / len(typical))

    data, task, config = run.data, run.task, run.config
    gathered, seconds = mean("payload_bytes"), mean("gather_s")
    line: dict[str, Any] = {
        "run": str(run.folder),
        "data": data.name,
        "task": config.graph.task.name,
        "model": config.model.model.name,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "metric": task.metric,
        "evaluation": task.evaluator.method,
        **flatten_scores(run.best["scores"]),
        "best_epoch": run.best["epoch"] + 1,
        "epochs": epochs,
        "epoch_s": mean("epoch_s"),
        "sample_s": mean("sample_s"),
        "gather_s": seconds,
        "compute_s": mean("compute_s"),
        "wait_s": mean("wait_s"),
        "exchange_s": mean("exchange_s"),
        "hidden_s": mean("hidden_s"),
        "seeds_per_s": len(task.seeds) / mean("epoch_s"),
        "payload_bytes": sum(line["payload_bytes"] for line in run.lines) // epochs,
        "gather_bytes_per_s": gathered / seconds if seconds else 0.0,
        "gather_roof_bytes_per_s": _peak_read_rate(run),
        "workers": run.group.world_size,
        "bytes_sent": sum(line["bytes_sent"] for line in run.lines),
        "seed": config.loading.seed,
        "device": str(run.device),
        "options": _options(config),
        # seconds of this command, which may have resumed the run
        "total_s": time.perf_counter() - run.began,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_gpu_memory_bytes": _peak_gpu_memory_bytes(run.device),
        **machine.machine(),
    }
    if isinstance(run.table, CachedTable):
        for key in ("hit_rate", "peer_hit_rate"):
            hit = sum(line[key] * line["payload_bytes"] for line in run.lines)
            line[key] = hit / sum(line["payload_bytes"] for line in run.lines)
        line["predicted_hit_rate"] = run.table.predicted_hit_rate
        line["bytes_saved"] = sum(line["bytes_saved"] for line in run.lines) // epochs
    if "dropped_share" in run.lines[0]:
        # all epochs have the same number of minibatches
        line["dropped_share"] = sum(each["dropped_share"] for each in run.lines) / epochs
    if task.best_accuracy is not None:
        line["best_possible_accuracy"] = task.best_accuracy
    return line


def _peak_read_rate(run: Run) -> float | None:
    """Return the measured peak of a GPU reading host memory; None if no GPU does in this run."""
    is_read = run.table.device != run.device
    return pcie_bench.peak_read_rate(run.device) if is_read else None
