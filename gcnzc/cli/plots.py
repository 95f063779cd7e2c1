"""Plots of `gcnzc pcie`, `gcnzc cache-forecast` and `gcnzc cost`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

from gcnzc.train.plots import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# colour and label by the largest power of two, up to 16, that divides the bytes of a row
UNITS = {
    16: ("C0", "predicted, row a multiple of 16 B"),
    8: ("C2", "predicted, row a multiple of 8 B"),
    4: ("C1", "predicted, row a multiple of 4 B"),
    2: ("C4", "predicted, row a multiple of 2 B"),
    1: ("C5", "predicted, row of odd size"),
}
# titles of the panels that need more than the layout's name
LAYOUTS = {"pitched": "pitched (rows padded to 128 B)"}


@dataclass(frozen=True)
class Efficiencies:
    """Points (bytes per row, efficiency) of each layout; efficiency is row bytes per bus byte."""

    dtype: str  # of the features
    curves: Mapping[str, Sequence[tuple[int, float]]]  # predicted
    measured: Mapping[str, Sequence[tuple[int, float]]]
    roofs: Mapping[str, float]  # efficiency if all requests have one size, by label


def efficiencies(shares: Efficiencies, out: Path) -> None:
    """Plot the efficiency by bytes per row, one panel per layout, to the image `out`."""
    from matplotlib.lines import Line2D

    columns = 3
    rows = -(-(len(shares.curves) + 1) // columns)  # one place is the legend's
    figure = new_figure(9, 0.7 + 2.8 * rows)
    places = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    panels = places[: len(shares.curves)]
    for unused in places[len(panels) :]:
        unused.set_axis_off()
    seen = set()
    for axis, (layout, points) in zip(panels, shares.curves.items(), strict=True):
        for unit_bytes, (colour, _) in UNITS.items():
            selected = [point for point in points if gcd(point[0], 16) == unit_bytes]
            if selected:
                seen.add(unit_bytes)
                axis.plot(*zip(*selected, strict=True), ".", color=colour, markersize=2.5)
        for name, share in shares.roofs.items():
            axis.axhline(share, color="grey", linewidth=1, linestyle="--")
            axis.text(4, share, name, color="grey", fontsize="x-small", va="bottom")
        for width, share in shares.measured.get(layout, ()):
            axis.plot(width, share, "kx", markersize=5)
        axis.set_title(LAYOUTS.get(layout, layout), fontsize="medium")
        axis.set_xscale("log", base=2)
        axis.set_xticks([4, 32, 256, 2048, 8192], ["4", "32", "256", "2 Ki", "8 Ki"])
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    # panels without another one below them have the labels of the axis
    for axis in panels[-columns:]:
        axis.tick_params(labelbottom=True)
    figure.supxlabel(f"bytes per row ({shares.dtype})", fontsize="medium")
    figure.supylabel("bytes of rows per byte on the bus", fontsize="medium")
    figure.suptitle("Efficiency of feature gathers on the PCIe bus, by layout")
    marks = [
        Line2D([], [], color=colour, marker="o", linestyle="", markersize=4, label=label)
        for unit_bytes, (colour, label) in UNITS.items()
        if unit_bytes in seen
    ]
    if any(shares.measured.values()):
        label = "measured, relative to a dense read"
        marks.append(Line2D([], [], color="k", marker="x", linestyle="", label=label))
    dashes = "predicted if all requests\nhave this size"
    marks.append(Line2D([], [], color="grey", linestyle="--", linewidth=1, label=dashes))
    places[-1].legend(handles=marks, loc="center", fontsize="small")
    save(figure, out)


@dataclass(frozen=True)
class HitRates:
    """Points (cached share of the rows, hit rate) of feature caches, by cache policy."""

    data: str  # name of the graph
    predicted: Mapping[str, Sequence[tuple[float, float]]]
    measured: Mapping[str, Sequence[tuple[float, float]]]


def hit_rates(rates: HitRates, out: Path) -> None:
    """Plot hit rates by cache size, to the image `out`."""
    figure = new_figure(7, 4.6)
    axis = figure.subplots()
    shares: list[float] = []
    for number, (name, points) in enumerate(rates.predicted.items()):
        shares = [share for share, _ in points]
        # policies of equal hit rates overlap, so their lines and markers differ
        line, mark = ("-", "x") if number == 0 else ("--", "+")
        label = f"{name}, predicted"
        axis.plot(*zip(*points, strict=True), f"C{number}{line}", label=label)
        if seen := rates.measured.get(name):
            label = f"{name}, measured"
            axis.plot(*zip(*seen, strict=True), f"C{number}{mark}", markersize=9, label=label)
    axis.plot(shares, shares, color="grey", linestyle="--", linewidth=1, label="random rows cached")
    axis.set_xscale("log")
    axis.set_xticks(shares, [f"{100 * share:g} %" for share in shares])
    axis.minorticks_off()
    axis.set_ylim(0, 1)
    axis.set_xlabel("size of the feature cache, as a fraction of all rows")
    axis.set_ylabel("hit rate")
    axis.set_title(f"{rates.data}: hit rate of the feature cache", fontsize="medium")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small", loc="upper left")
    save(figure, out)


LINES_PER_PANEL = 5


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step by network bandwidth."""

    data: str  # name of the graph
    compute_s: Mapping[int, float]  # seconds per step without exchange, by number of workers
    # points (Mbit/s, seconds per step), by number of workers and method
    curves: Mapping[int, Mapping[str, Sequence[tuple[float, float]]]]
    # measured points of averaged gradients, by number of workers
    measured: Mapping[int, Sequence[tuple[float, float]]]
    mbit_per_s: float | None = None  # bandwidth to mark; none if None


def step_times(times: StepTimes, out: Path) -> None:
    """Plot seconds per step by bandwidth to the image `out`.

    One column of panels per number of workers, one row per group of methods. Methods whose times
    agree within 2 percent for all numbers of workers share a line.
    """
    methods = list(next(iter(times.curves.values())))
    averaging = [method for method in methods if is_averaging(method)]
    others = [method for method in methods if method not in averaging]
    titles = {"averaged gradients": averaging, "compressed or less frequent updates": others}
    rows = [
        (title, lines[begin : begin + LINES_PER_PANEL])
        for title, group in titles.items()
        for lines in [_merge_equal(times, group)]
        for begin in range(0, len(lines), LINES_PER_PANEL)
    ]
    width = 2.6 + 2.3 * len(times.curves)
    figure = new_figure(width, 0.5 + 2.9 * len(rows))
    figure.suptitle(f"{times.data}: predicted time of a training step")
    parts = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for part, (title, lines) in zip(parts, rows, strict=True):
        part.suptitle(title, fontsize="medium")
        panels = part.subplots(1, len(times.curves), sharey=True, squeeze=False)[0]
        for axis, workers in zip(panels, times.curves, strict=True):
            _plot_step_times(axis, times, workers, lines)
        panels[0].set_ylabel("seconds per step")
        handles, labels = panels[0].get_legend_handles_labels()
        part.legend(handles, labels, loc="outside right center", fontsize="small")
    save(figure, out)


def is_averaging(method: str) -> bool:
    """Return whether a method averages gradients in every step."""
    return method.startswith("averaged")


def _merge_equal(times: StepTimes, methods: Sequence[str]) -> list[list[str]]:
    """Return groups of methods whose times agree within 2 percent for all numbers of workers."""
    groups: list[list[str]] = []
    for method in methods:
        for group in groups:
            pairs = (
                zip(curves[method], curves[group[0]], strict=True)
                for curves in times.curves.values()
            )
            if all(abs(one[1] / other[1] - 1) < 0.02 for points in pairs for one, other in points):
                group.append(method)
                break
        else:
            groups.append([method])
    return groups


def _plot_step_times(
    axis: "Axes", times: StepTimes, workers: int, lines: Sequence[Sequence[str]]
) -> None:
    """Plot one line per group of methods for one number of workers, and the limits."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    for number, methods in enumerate(lines):
        points = times.curves[workers][methods[0]]
        names = [method.removeprefix("averaged, ") for method in methods]
        style = ("-", "--", ":", "-.")[number % 4]  # lines overlap where times are equal
        axis.plot(*zip(*points, strict=True), style, color=f"C{number}", label=",\n".join(names))
    compute_s = times.compute_s[workers]
    axis.axhline(compute_s, color="grey", linewidth=1, linestyle=":", label="without exchange")
    whole = workers * compute_s
    axis.axhline(whole, color="k", linewidth=1, linestyle="--", label="throughput\nof one worker")
    if is_averaging(lines[0][0]) and (seen := times.measured.get(workers)):
        axis.plot(*zip(*seen, strict=True), "kx", markersize=8, label="measured")
    if times.mbit_per_s is not None:
        label = f"{times.mbit_per_s:g} Mbit/s"
        axis.axvline(times.mbit_per_s, color="lightgrey", linewidth=1, zorder=0, label=label)
    axis.set_title(f"{workers} workers", fontsize="medium")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("bandwidth in Mbit/s")
    axis.grid(alpha=0.3)
