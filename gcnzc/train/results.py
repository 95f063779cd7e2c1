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
from gcnzc.train.epoch_stats import TIMES
from gcnzc.train.errors import Interrupted, SavedRun
from gcnzc.train.output_files import format_unsaved_error
from gcnzc.train.plots import curves
from gcnzc.train.run_folder import CURVES, RESULT
from gcnzc.train.state import Run
from gcnzc.train.tasks.base import flatten_scores
from gcnzc.tune import pcie_bench

# options of a run that its result does not have: paths and time limits
HIDDEN = {"data", "out", "resume", "config", "timeout_s", "restarts", "checkpoint_every_s", "keep"}


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
    limit, is_measured = optimizer.deadline.max_dropped, optimizer.deadline.requested_s is None
    remedy = (
        "Use a larger --strategy dropcompute:threshold=SECONDS, or auto, which aims at no "
        f"more than {limit:.0%}"
    )
    if is_measured:  # it may drop more; above this limit, it is measured again
        limit *= TOLERANCE
        remedy = "The steps take longer than when the threshold was measured"
    dropped = [each.get("dropped_share", 0.0) for each in (line, *earlier)]
    if dropped[0] <= limit or max(dropped[1:], default=0.0) > limit:
        return ""
    return (
        f"{dropped[0]:.0%} of the minibatches of epoch {line['epoch'] + 1} were "
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
    lines, typical = run.lines, record.typical_lines(run.lines)

    def mean_of(key: str, of: Sequence[Mapping[str, Any]]) -> float:
        return float(sum(line[key] for line in of) / len(of))

    data, task, config = run.data, run.task, run.config
    options = {name: each for name, each in config.to_dict().items() if name not in HIDDEN}
    seconds = {key: mean_of(key, typical) for key in ("epoch_s", *TIMES)}
    gathered, is_on_gpu = mean_of("payload_bytes", typical), run.device.type == "cuda"
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
        "epochs": len(lines),
        **seconds,
        "seeds_per_s": len(task.seeds) / seconds["epoch_s"],
        "payload_bytes": int(mean_of("payload_bytes", lines)),
        "gather_bytes_per_s": gathered / seconds["gather_s"] if seconds["gather_s"] else 0.0,
        "gather_roof_bytes_per_s": _peak_read_rate(run),
        "workers": run.group.world_size,
        "bytes_sent": sum(line["bytes_sent"] for line in lines),
        "seed": config.loading.seed,
        "device": str(run.device),
        "options": options,
        # seconds of this command, which may have resumed the run
        "total_s": time.perf_counter() - run.began,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_gpu_memory_bytes": torch.cuda.max_memory_allocated(run.device) if is_on_gpu else None,
        **machine.machine(),
    }
    if isinstance(run.table, CachedTable):
        for key in ("hit_rate", "peer_hit_rate"):
            hit = sum(line[key] * line["payload_bytes"] for line in lines)
            line[key] = hit / sum(line["payload_bytes"] for line in lines)
        line["predicted_hit_rate"] = run.table.predicted_hit_rate
        line["bytes_saved"] = int(mean_of("bytes_saved", lines))
    if "dropped_share" in lines[0]:
        # all epochs have the same number of minibatches
        line["dropped_share"] = mean_of("dropped_share", lines)
    if task.best_accuracy is not None:
        line["best_possible_accuracy"] = task.best_accuracy
    return line


def _peak_read_rate(run: Run) -> float | None:
    """Return the measured peak of a GPU reading host memory; None if no GPU does in this run."""
    is_read = run.table.device != run.device
    return pcie_bench.peak_read_rate(run.device) if is_read else None
