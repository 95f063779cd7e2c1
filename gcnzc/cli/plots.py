"""The plot of `gcnzc pcie`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path

from gcnzc.train.plots import new_figure, save

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
