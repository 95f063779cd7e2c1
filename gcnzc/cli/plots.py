"""Figures of the commands that measure and predict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gcnzc.train.plots import save

# how far apart rows may begin, at the least: colour and name
UNITS = {
    16: ("C0", "a row is a multiple of 16 B"),
    8: ("C2", "of 8 B"),
    4: ("C1", "of 4 B"),
    2: ("C4", "of 2 B"),
    1: ("C5", "of 1 B"),
}


@dataclass(frozen=True)
class Efficiencies:
    """How much of what crosses the bus is rows: of each layout, bytes of a row and the share."""

    dtype: str  # of the rows' elements
    curves: Mapping[str, Sequence[tuple[int, float]]]  # as the model says
    measured: Mapping[str, Sequence[tuple[int, float]]]
    roofs: Mapping[str, float]  # shares that requests of one size reach, by what to call them


def efficiencies(shares: Efficiencies, out: Path) -> None:
    """Draw `shares` by the bytes of a row, a panel a layout, to a picture whose ending names it."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    panels = figure.subplots(1, len(shares.curves), sharey=True, squeeze=False)[0]
    seen = set()
    for axis, (layout, points) in zip(panels, shares.curves.items(), strict=True):
        for unit_bytes, (colour, _) in UNITS.items():
            mine = [point for point in points if gcd(point[0], 16) == unit_bytes]
            if mine:
                seen.add(unit_bytes)
                axis.plot(*zip(*mine, strict=True), ".", color=colour, markersize=2)
        for share in shares.roofs.values():
            axis.axhline(share, color="grey", linewidth=1, linestyle="--")
        for width, share in shares.measured.get(layout, ()):
            axis.plot(width, share, "kx", markersize=5)
        axis.set_title(layout, fontsize="medium")
        axis.set_xscale("log", base=2)
        axis.set_xticks([4, 32, 256, 2048, 8192], ["4", "32", "256", "2 Ki", "8 Ki"])
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    for name, share in shares.roofs.items():
        panels[0].text(4, share, name, color="grey", fontsize="x-small", va="bottom")
    panels[0].set_ylabel("bytes of rows for each byte on the bus")
    panels[len(panels) // 2].set_xlabel(
        f"bytes of a row of {shares.dtype}; rows lie side by side, pitched ones on lines of 128 B"
    )
    figure.suptitle(
        "How much of what the bus carries for a gather is rows, for each layout of lanes"
    )
    marks = [
        Line2D([], [], color=colour, marker="o", linestyle="", markersize=4, label=label)
        for unit_bytes, (colour, label) in UNITS.items()
        if unit_bytes in seen
    ]
    marks.append(
        Line2D([], [], color="grey", linestyle="--", linewidth=1, label="only such requests")
    )
    if any(shares.measured.values()):
        label = "measured; the dense read would be at its roof"
        marks.append(Line2D([], [], color="k", marker="x", linestyle="", label=label))
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize="small")
    save(figure, out)


@dataclass(frozen=True)
class HitRates:
    """How many of the rows of minibatches hot sets have: of each ranking, by share of all rows."""

    data: str  # name of the graph
    predicted: Mapping[str, Sequence[tuple[float, float]]]
    measured: Mapping[str, Sequence[tuple[float, float]]]


def hit_rates(rates: HitRates, out: Path) -> None:
    """Draw `rates` by the size of the hot set, to a picture whose ending names it."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axis = figure.subplots()
    shares: list[float] = []
    for number, (name, points) in enumerate(rates.predicted.items()):
        shares = [share for share, _ in points]
        axis.plot(*zip(*points, strict=True), f"C{number}.-", label=f"{name}, predicted")
        if seen := rates.measured.get(name):
            label = f"{name}, measured"
            axis.plot(*zip(*seen, strict=True), "k" + "x+"[number % 2], markersize=8, label=label)
    axis.plot(shares, shares, color="grey", linestyle="--", linewidth=1, label="rows at random")
    axis.set_xscale("log")
    axis.set_xticks(shares, [f"{100 * share:g} %" for share in shares])
    axis.minorticks_off()
    axis.set_ylim(0, 1)
    axis.set_xlabel("size of the hot set, of all rows")
    axis.set_ylabel("hit rate, of the rows of a minibatch")
    axis.set_title(f"{rates.data}: rows that need not cross the bus", fontsize="medium")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small", loc="upper left")
    save(figure, out)


@dataclass(frozen=True)
class StepTimes:
    """How long a step takes over links of several rates."""

    data: str  # name of the graph
    compute_s: Mapping[int, float]  # of a step without exchange, by the number of workers
    # of each number of workers and method: Mbit/s and seconds of a step
    curves: Mapping[int, Mapping[str, Sequence[tuple[float, float]]]]
    measured: Mapping[int, Sequence[tuple[float, float]]]  # of training, by the number of workers
    mbit_per_s: float | None = None  # that was asked for


def step_times(times: StepTimes, out: Path) -> None:
    """Draw `times` by the rate of the links, a panel a number of workers, to a picture."""
    figure = Figure(figsize=(1.6 + 3.8 * len(times.curves), 4.4), layout="constrained")
    panels = figure.subplots(1, len(times.curves), sharey=True, squeeze=False)[0]
    for axis, (workers, curves) in zip(panels, times.curves.items(), strict=True):
        for number, (method, points) in enumerate(curves.items()):
            # those that cost the same lie on one another
            style = ("-", "--", ":", "-.")[number % 4]
            axis.plot(*zip(*points, strict=True), style, color=f"C{number}", label=method)
        compute_s = times.compute_s[workers]
        axis.axhline(compute_s, color="grey", linewidth=1, label="without exchange")
        axis.axhline(
            workers * compute_s,
            color="k",
            linestyle="--",
            linewidth=1,
            label="as many seeds a second as one worker",
        )
        if seen := times.measured.get(workers):
            axis.plot(*zip(*seen, strict=True), "kx", markersize=8, label="measured")
        if times.mbit_per_s is not None:
            axis.axvline(times.mbit_per_s, color="lightgrey", linewidth=1, zorder=0)
        axis.set_title(f"{workers} workers", fontsize="medium")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("Mbit/s of each link")
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("seconds a step")
    figure.suptitle(f"{times.data}: a step by the rate of the links, below the dashes it pays")
    marks, labels = panels[0].get_legend_handles_labels()
    figure.legend(marks, labels, loc="outside lower center", ncols=3, fontsize="small")
    save(figure, out)
