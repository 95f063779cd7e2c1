"""Plots of a run: training curves and the timeline of a trace."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcnzc._files import replacing
from gcnzc.system.spans import Span
from gcnzc.train import record, run_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# in drawing order: later spans cover earlier ones, of which they are a part
SPAN_COLOURS = {
    "sample": "C0",
    "gather": "C1",
    "compute": "C2",
    "wait": "lightgrey",
    "exchange": "C3",
    "overlapped": "C4",
}


STAGES = {
    "sample_s": "sample",
    "gather_s": "gather",
    "compute_s": "compute",
    "exchange_s": "exchange",
    "hidden_s": "overlapped exchange",
}


# characters of the label of a run; and of one that needs at most half of the width of a panel
MAX_LABEL, LABEL_OF_HALF_PANEL = 41, 22


# characters of a run's name in the title
MAX_TITLE = 81


# lines of one panel; more runs take another row of panels
RUNS_PER_ROW = 5


SHOWN_METRICS = {
    "rocauc": "ROC AUC",
    "auc": "ROC AUC",
    "mrr": "MRR",
    "average_precision": "average precision",
    "f1_micro": "micro F1",
    "f1_macro": "macro F1",
}


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of a size in inches."""
    # on use: most processes draw nothing, and the import takes as long as half of torch's;
    # without pyplot, which changes global state and may need a display
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def curves(runs: Sequence[Path], out: Path) -> None:
    """Plot loss and scores by epoch, and the seconds of each stage per epoch.

    For one run, the scores of all splits are drawn; for several runs, only those of the validation
    split. A dot marks the epoch of the best model. Sampling and gathering overlap with compute, so
    a bar may be longer than the whole epoch, which a black line shows.

    Args:
        runs: run folders with a record.jsonl of at least one line.
        out: image to write; its suffix is the format.

    Raises:
        FileNotFoundError: a run has no record.
        ValueError: a record is damaged.
    """
    from matplotlib.ticker import MaxNLocator

    runs = list(dict.fromkeys(runs))
    records = {run: _read_record(run) for run in runs}
    labels = dict(zip(runs, run_labels(runs), strict=True))
    groups = _rows_of(runs)
    ratios = [3.4 * len(groups), 1.3 + 0.3 * len(runs)]
    figure = new_figure(9, 0.3 + sum(ratios))
    title = _title(runs[0]) if len(runs) == 1 else f"{len(runs)} runs"
    figure.suptitle(f"Training: {_shorten(title, MAX_TITLE)}")
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios)[:, 0]
    # the same limits in all rows, so that runs of different rows can be compared
    panels = upper.subplots(len(groups), 2, squeeze=False, sharex="col", sharey="col")
    for row, group in zip(panels, groups, strict=True):
        for run in group:
            name = labels[run] if len(runs) > 1 else ""
            _plot_run(row, records[run], name, f"C{runs.index(run) % 10}")
        if len(runs) > 1:
            # one entry of the legend for the dots of all runs
            row[1].plot([], [], "o", color="grey", label="best epoch")
        longest = max(len(labels[run]) for run in group)
        for axis in row:
            axis.set_xlabel("epoch")
            axis.tick_params(labelbottom=True)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.3)
            # above the panel, where it covers no curve
            place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "frameon": False}
            columns = 1 if len(runs) > 1 and longest > LABEL_OF_HALF_PANEL else 2
            axis.legend(fontsize="small", ncols=columns, **place)
    for axis in panels.flatten():
        # epochs count from 1; after all rows are drawn, which share the right limit
        axis.set_xlim(left=0.5)
    _plot_seconds(lower, {labels[run]: lines for run, lines in records.items()})
    save(figure, out)


def _rows_of(runs: Sequence[Path]) -> list[list[Path]]:
    """Distribute runs to rows of at most `RUNS_PER_ROW`, with the seeds of a run in one row."""
    seeds = [
        list(group)
        for _, group in groupby(
            runs, lambda run: run.parent if (run.parent / run_folder.RUNS).is_file() else run
        )
    ]
    rows: list[list[Path]] = []
    for group in seeds:
        if not rows or len(rows[-1]) + len(group) > RUNS_PER_ROW:
            rows.append([])
        for run in group:
            if len(rows[-1]) == RUNS_PER_ROW:
                rows.append([])
            rows[-1].append(run)
    return rows


def run_labels(runs: Sequence[Path]) -> list[str]:
    """Return a short, unique label for each run: its name, and its folder's if names are equal."""
    paths = [run.absolute().parts for run in runs]
    depth, most = 1, max(map(len, paths))
    while depth < most and len({parts[-depth:] for parts in paths}) < len(set(paths)):
        depth += 1
    labels = [_shorten("/".join(parts[-depth:]), MAX_LABEL) for parts in paths]
    # different names may have the same beginning and end
    repeated = {label for label in labels if labels.count(label) > 1}
    return [
        f"{number}: {label}" if label in repeated else label
        for number, label in enumerate(labels, 1)
    ]


def _shorten(name: str, most: int) -> str:
    """Replace the middle of a name of more than `most` characters by an ellipsis."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"


def _title(run: Path) -> str:
    """Return the name of a run; for a run of several, also that of their folder."""
    is_of_several = (run.absolute().parent / run_folder.RUNS).is_file()
    return "/".join(run.absolute().parts[-2:]) if is_of_several else run.name


def _read_record(run: Path) -> list[dict[str, Any]]:
    path, remedy = run / run_folder.RECORD, "give a run folder that `gcnzc train` wrote"
    if not run.is_dir():
        raise FileNotFoundError(f"there is no folder {run}\n\nhint: {remedy}")
    lines = record.read(path)
    if not lines:
        if (run / run_folder.CONFIG).is_file():
            remedy = f"`gcnzc train --resume {run}` trains the first epoch"
        raise FileNotFoundError(f"no epochs in {path}\n\nhint: {remedy}")
    for line in lines:
        scores = {f"{split}_{line.get('metric')}" for split in ("minibatch", "valid", "test")}
        # a score or a time may be absent, and one that is not defined is null
        values = [line.get(key) or 0 for key in (*STAGES, *scores)]
        values += [line.get(key) for key in ("epoch", "loss", "epoch_s")]
        if not all(isinstance(value, int | float) for value in values) or "metric" not in line:
            raise ValueError(
                f"{path} is damaged\n\n"
                f"hint: `gcnzc train --resume {run}` writes it again from the checkpoint"
            )
    return lines


def _plot_run(
    panels: "Sequence[Axes]", lines: Sequence[Mapping[str, Any]], name: str, colour: str
) -> None:
    """Plot the loss and the scores of one run; without a name, the scores of all splits."""
    loss, score = panels
    metric = lines[0]["metric"]
    shown = SHOWN_METRICS.get(metric, metric)
    loss.plot([line["epoch"] + 1 for line in lines], [line["loss"] for line in lines], colour)
    loss.lines[-1].set_label(name or "training")
    loss.set_ylabel("training loss")
    curve_labels = {"valid": "validation"}
    if not name:
        minibatch = {"minibatch": "training nodes, in training mode"}
        curve_labels = {**minibatch, **curve_labels, "test": "test"}
    for number, (split, words) in enumerate(curve_labels.items()):
        key = f"{split}_{metric}"
        seen = [line for line in lines if key in line]
        epochs = [line["epoch"] + 1 for line in seen]
        # a score that is not defined, of labels of one class, is null in the record
        values = [math.nan if line[key] is None else line[key] for line in seen]
        if not seen:
            continue
        score.plot(epochs, values, colour if name else f"C{number}", label=name or words)
        if split == "valid":
            # the first one, if no score is defined
            best = int(np.nanargmax(values)) if not np.isnan(values).all() else 0
            score.plot(epochs[best], values[best], "o", color=score.lines[-1].get_color())
            if not name:
                score.lines[-1].set_label(f"best epoch: {epochs[best]}")
    limit = lines[0].get("best_possible_accuracy")
    if limit is not None and metric == "accuracy" and not name:
        score.axhline(limit, color="grey", linewidth=1, label="best possible")
    score.set_ylabel(f"validation {shown}" if name else shown)


def _plot_seconds(figure: Any, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Plot a bar per run: the mean seconds of each stage in an epoch, by label of the run."""
    axis = figure.subplots()
    typical = [record.typical_lines(lines) for lines in records.values()]
    used = {key for lines in typical for line in lines for key in STAGES if line.get(key)}
    stages = [(key, f"C{index}") for index, key in enumerate(STAGES) if key in used]
    longest_s = max(sum(line["epoch_s"] for line in lines) / len(lines) for lines in typical)
    unit, scale = ("milliseconds", 1e3) if longest_s < 0.5 else ("seconds", 1.0)
    for number, lines in enumerate(typical):
        left = 0.0
        for key, colour in stages:
            seconds = scale * sum(line.get(key, 0.0) for line in lines) / len(lines)
            # matplotlib keeps names with an underscore out of the legend
            shown = STAGES[key] if number == 0 else "_"
            axis.barh(number, seconds, 0.5, left, color=colour, label=shown)
            left += seconds
        whole = scale * sum(line["epoch_s"] for line in lines) / len(lines)
        shown = "whole epoch (stages overlap)" if number == 0 else "_"
        axis.plot([whole, whole], [number - 0.4, number + 0.4], "k", label=shown)
    axis.set_yticks(range(len(records)), list(records), fontsize="small")
    axis.invert_yaxis()
    axis.set_xlabel(f"{unit} per epoch, mean of all but the first")
    figure.legend(loc="outside lower center", ncols=len(stages) + 1, fontsize="small")


def timeline(spans: Sequence[Span], out: Path) -> None:
    """Plot when each stage ran, one lane per thread.

    Args:
        spans: spans of the traced steps.
        out: image to write; its suffix is the format.
    """
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (lane != "model", lane))
    origin_s = min(span.begin_s for span in spans)
    figure = new_figure(9, 1.8 + 0.4 * len(lanes))
    steps = sum(span.name == "compute" and "worker" not in span.lane for span in spans)
    figure.suptitle(f"Timeline of {steps} steps" if steps else "Timeline")
    axis = figure.subplots()
    present = {span.name for span in spans}
    for name, colour in SPAN_COLOURS.items():
        if name not in present:
            continue
        for number, lane in enumerate(lanes):
            selected = [span for span in spans if (span.name, span.lane) == (name, lane)]
            parts = [(1e3 * (s.begin_s - origin_s), 1e3 * (s.end_s - s.begin_s)) for s in selected]
            axis.broken_barh(
                parts, (number - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.4
            )
        axis.barh(0, 0, color=colour, label="overlapped exchange" if name == "overlapped" else name)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("milliseconds")
    figure.legend(loc="outside lower center", ncols=len(SPAN_COLOURS), fontsize="small")
    save(figure, out)


def save(figure: "Figure", out: Path) -> None:
    """Write a figure to a file atomically."""
    with replacing(out) as partial:
        figure.savefig(partial, dpi=100)
