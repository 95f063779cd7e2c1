"""Plots of `gcnzc pcie`, `gcnzc cache-forecast` and `gcnzc cost`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gcnzc.train.plots import save

# colour and label by the largest power of two, up to 16, that divides the bytes of a row
UNITS = {
    16: ("C0", "a row is a multiple of 16 B"),
    8: ("C2", "of 8 B"),
    4: ("C1", "of 4 B"),
    2: ("C4", "of 2 B"),
    1: ("C5", "of 1 B"),
}


@dataclass(frozen=True)
class Efficiencies:
    """Points (bytes per row, efficiency) of each layout; efficiency is row bytes per bus byte."""

    dtype: str  # of the features
    curves: Mapping[str, Sequence[tuple[int, float]]]  # predicted
    measured: Mapping[str, Sequence[tuple[int, float]]]
    roofs: Mapping[str, float]  # efficiency if all requests have one size, by label


def efficiencies(shares: Efficiencies, out: Path) -> None:
    """Plot the efficiency by bytes per row, one panel per layout, to the image `out`."""
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
    panels[0].set_ylabel("bytes of rows per byte on the bus")
    panels[len(panels) // 2].set_xlabel(
        f"bytes per row of {shares.dtype}; rows without padding, except pitched: aligned to 128 B"
    )
    figure.suptitle("Efficiency of a gather on the PCIe bus, by layout of lanes")
    marks = [
        Line2D([], [], color=colour, marker="o", linestyle="", markersize=4, label=label)
        for unit_bytes, (colour, label) in UNITS.items()
        if unit_bytes in seen
    ]
    marks.append(
        Line2D([], [], color="grey", linestyle="--", linewidth=1, label="all requests of one size")
    )
    if any(shares.measured.values()):
        label = "measured, relative to a dense read"
        marks.append(Line2D([], [], color="k", marker="x", linestyle="", label=label))
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize="small")
    save(figure, out)


@dataclass(frozen=True)
class HitRates:
    """Points (cached share of the rows, hit rate) of feature caches, by cache policy."""

    data: str  # name of the graph
    predicted: Mapping[str, Sequence[tuple[float, float]]]
    measured: Mapping[str, Sequence[tuple[float, float]]]


def hit_rates(rates: HitRates, out: Path) -> None:
    """Plot hit rates by cache size, to the image `out`."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axis = figure.subplots()
    shares: list[float] = []
    for number, (name, points) in enumerate(rates.predicted.items()):
        shares = [share for share, _ in points]
        axis.plot(*zip(*points, strict=True), f"C{number}.-", label=f"{name}, predicted")
        if seen := rates.measured.get(name):
            label = f"{name}, measured"
            axis.plot(*zip(*seen, strict=True), "k" + "x+"[number % 2], markersize=8, label=label)
    axis.plot(shares, shares, color="grey", linestyle="--", linewidth=1, label="random rows cached")
    axis.set_xscale("log")
    axis.set_xticks(shares, [f"{100 * share:g} %" for share in shares])
    axis.minorticks_off()
    axis.set_ylim(0, 1)
    axis.set_xlabel("size of the feature cache, as a share of all rows")
    axis.set_ylabel("hit rate")
    axis.set_title(f"{rates.data}: hit rate of the feature cache", fontsize="medium")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small", loc="upper left")
    save(figure, out)


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step by network bandwidth."""

    data: str  # name of the graph
    compute_s: Mapping[int, float]  # seconds per step without exchange, by number of workers
    # points (Mbit/s, seconds per step), by number of workers and method
    curves: Mapping[int, Mapping[str, Sequence[tuple[float, float]]]]
    measured: Mapping[int, Sequence[tuple[float, float]]]  # measured points, by number of workers
    mbit_per_s: float | None = None  # bandwidth to mark; none if None


def step_times(times: StepTimes, out: Path) -> None:
    """Plot seconds per step by bandwidth, one panel per number of workers, to the image `out`."""
    figure = Figure(figsize=(1.6 + 3.8 * len(times.curves), 4.4), layout="constrained")
    panels = figure.subplots(1, len(times.curves), sharey=True, squeeze=False)[0]
    for axis, (workers, curves) in zip(panels, times.curves.items(), strict=True):
        for number, (method, points) in enumerate(curves.items()):
            # curves of equal cost overlap, so their dashes differ
            style = ("-", "--", ":", "-.")[number % 4]
            axis.plot(*zip(*points, strict=True), style, color=f"C{number}", label=method)
        compute_s = times.compute_s[workers]
        axis.axhline(compute_s, color="grey", linewidth=1, label="without exchange")
        axis.axhline(
            workers * compute_s,
            color="k",
            linestyle="--",
            linewidth=1,
            label="same throughput as one worker",
        )
        if seen := times.measured.get(workers):
            axis.plot(*zip(*seen, strict=True), "kx", markersize=8, label="measured")
        if times.mbit_per_s is not None:
            axis.axvline(times.mbit_per_s, color="lightgrey", linewidth=1, zorder=0)
        axis.set_title(f"{workers} workers", fontsize="medium")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("bandwidth in Mbit/s")
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("seconds per step")
    figure.suptitle(f"{times.data}: time of a step; workers pay off below the dashed line")
    marks, labels = panels[0].get_legend_handles_labels()
    figure.legend(marks, labels, loc="outside lower center", ncols=3, fontsize="small")
    save(figure, out)
