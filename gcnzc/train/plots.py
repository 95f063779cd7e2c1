"""Plots of a run: training curves and the timeline of a trace."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gcnzc.system import files
from gcnzc.system.spans import Span
from gcnzc.train import record

# in drawing order: later spans cover earlier ones, of which they are a part
SPAN_COLOURS = {
    "sample": "C0",
    "gather": "C1",
    "compute": "C2",
    "wait": "lightgrey",
    "exchange": "C3",
    "beside": "C4",
}


STAGES = {
    "sample_s": "sample",
    "gather_s": "gather",
    "compute_s": "compute",
    "exchange_s": "exchange",
    "hidden_s": "overlapped exchange",
}


def curves(runs: Sequence[Path], out: Path) -> None:
    """Plot loss and scores by epoch, and a stacked bar of each run's seconds per epoch.

    Sampling and gathering overlap with compute, so a bar may be longer than the whole epoch, which
    a black line shows.

    Args:
        runs: run folders with a record.jsonl of at least one line.
        out: image to write; its suffix is the format.

    Raises:
        FileNotFoundError: a run has no record.
    """
    # without pyplot, which changes global state and may need a display
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    loss, score, time = figure.subplots(1, 3)
    for number, run in enumerate(runs):
        lines = record.read(run / "record.jsonl")
        if not lines:
            raise FileNotFoundError(
                f"no epochs in {run / 'record.jsonl'}\n\n"
                f"hint: `gcnzc train --out {run}` writes one line per epoch"
            )
        if any(not {"epoch", "loss", "metric"} <= line.keys() for line in lines):
            raise ValueError(
                f"{run / 'record.jsonl'} is damaged\n\n"
                f"hint: `gcnzc train --resume {run}` writes it again from the checkpoint"
            )
        prefix = f"{run.name} " if len(runs) > 1 else ""
        epochs = [line["epoch"] + 1 for line in lines]
        colour = f"C{number}"
        loss.plot(epochs, [line["loss"] for line in lines], colour, label=f"{prefix}training")
        metric = lines[0]["metric"]
        dashes = {"minibatch": ":", "valid": "-", "test": "--"}
        for part, style in dashes.items():
            seen = [line for line in lines if f"{part}_{metric}" in line]
            values = [line[f"{part}_{metric}"] for line in seen]
            shown = prefix + ("minibatches, with dropout" if part == "minibatch" else part)
            score.plot([line["epoch"] + 1 for line in seen], values, colour + style, label=shown)
        best = lines[0].get("best_possible_accuracy")
        if best is not None and metric == "accuracy" and number == 0:
            score.axhline(best, color="grey", linewidth=1, label="best possible")
        bottom = 0.0
        for index, (key, name) in enumerate(STAGES.items()):
            seconds = sum(line.get(key, 0.0) for line in lines) / len(lines)
            shown = name if number == 0 else "_"  # matplotlib keeps such names out of the legend
            time.bar(number, seconds, 0.5, bottom, color=f"C{index}", label=shown)
            bottom += seconds
        whole = sum(line["epoch_s"] for line in lines) / len(lines)
        shown = "whole epoch" if number == 0 else "_"
        time.plot([number - 0.4, number + 0.4], [whole, whole], "k", label=shown)
        score.set_ylabel({"rocauc": "ROC AUC", "auc": "ROC AUC", "mrr": "MRR"}.get(metric, metric))
    loss.set_ylabel("loss")
    time.set_ylabel("seconds per epoch")
    time.set_xticks(range(len(runs)), [run.name for run in runs], fontsize="small")
    # space for the legend
    time.set_xlim(-0.7, len(runs) + 0.3 * len(runs))
    for axis in (loss, score):
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    for axis in (loss, score, time):
        axis.legend(fontsize="small", loc="best" if axis is not time else "upper right")
    save(figure, out)


def timeline(spans: Sequence[Span], out: Path) -> None:
    """Plot when each stage ran, one lane per thread.

    Args:
        spans: spans of the traced steps.
        out: image to write; its suffix is the format.
    """
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (lane != "model", lane))
    origin_s = min(span.begin_s for span in spans)
    figure = Figure(figsize=(15, 1.2 + 0.5 * len(lanes)), layout="constrained")
    axis = figure.subplots()
    for name, colour in SPAN_COLOURS.items():
        for number, lane in enumerate(lanes):
            mine = [span for span in spans if (span.name, span.lane) == (name, lane)]
            parts = [(1e3 * (s.begin_s - origin_s), 1e3 * (s.end_s - s.begin_s)) for s in mine]
            axis.broken_barh(
                parts, (number - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.4
            )
        axis.barh(0, 0, color=colour, label="overlapped exchange" if name == "beside" else name)
    axis.set_yticks(range(len(lanes)), lanes)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("milliseconds")
    figure.legend(loc="outside right center")
    save(figure, out)


def save(figure: Figure, out: Path) -> None:
    """Write a figure to a file atomically."""
    with files.replacing(out) as partial:
        figure.savefig(partial, dpi=120)
