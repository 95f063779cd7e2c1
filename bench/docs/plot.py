"""Draw the figures of the benchmark pages from `bench/results/` into `docs/pictures/`.

    python -m bench.docs.plot

If a case was measured more than once, its newest line is drawn.
"""

from collections.abc import Callable, Iterable, Sequence
from math import gcd
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from bench.docs.network_tables import default_lines
from bench.docs.table import Line, newest, read
from gcnzc.features.pcie_traffic import HEADER_BYTES, traffic
from gcnzc.kernels.gather.lanes import LAYOUTS

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SYSTEMS = {"ours": "gcnzc", "dgl": "DGL", "pyg": "PyG", "graphbolt": "GraphBolt"}
# rows of panels of a figure of strategies; each also shows adamw, which exchanges float32 gradients
METHODS = {
    "averaged gradients": ("adamw bfloat16", "adamw int8"),
    "compressed momenta": ("onebit-adam", "onebit-lamb", "zero-one-adam"),
    "local steps": ("local-sgd", "diloco", "co2", "co2 48"),
    "streamed fragments": ("streaming-diloco", "streaming-diloco fp4"),
}
RATES = (10.0, 1000.0)
# the panels of `strategy_comparison`; each also has the reference, "average"
FAMILIES = {
    "compressed gradients": ("average, int8", "average, sign", "1-bit Adam", "0/1 Adam"),
    "some of the gradients": ("top-k, 1 %", "random-k, 5 %", "DCT, 1 %"),
    "local steps": ("local SGD", "DiLoCo", "SelSync", "CO2"),
    "compressed or streamed differences": (
        "Streaming DiLoCo",
        "Streaming DiLoCo, float4",
        "MuLoCo",
        "SparseLoCo",
    ),
    "pairs and neighbours": ("SAPS, 10 %", "A2CiD2", "A2CiD2, overlapped", "backup workers"),
}


def main() -> None:
    """Draw every figure."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        draw().savefig(PICTURES / f"{name}.png", dpi=100)
        print(PICTURES / f"{name}.png")


def bus_efficiency() -> Figure:
    """Draw the predicted efficiency of gathers by the width of float32 rows, a panel per layout."""
    figure = Figure(figsize=(9, 6.3), layout="constrained")
    figure.suptitle("Efficiency of feature gathers on the PCIe bus, by layout (predicted)")
    *panels, legend = figure.subplots(2, 3, sharex=True, sharey=True).flatten()
    for axis, layout in zip(panels, LAYOUTS, strict=True):
        for unit, colour in ((16, "C0"), (8, "C2"), (4, "C1")):
            widths = [width for width in range(4, 8193, 4) if gcd(width, 16) == unit]
            shares = [float(traffic(width, layout=layout).efficiency) for width in widths]
            label = f"row a multiple of {unit} B"
            axis.plot(widths, shares, ".", color=colour, markersize=2.5, label=label)
        for size in (128, 32):
            share = size / (size + HEADER_BYTES)
            axis.axhline(share, color="grey", linewidth=1, linestyle="--")
            axis.text(4, share, f"requests of {size} B", fontsize="x-small", va="bottom")
        axis.set_title(layout, fontsize="medium")
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    figure.supxlabel("bytes per row", fontsize="medium")
    figure.supylabel("bytes of rows per byte on the bus", fontsize="medium")
    legend.set_axis_off()
    legend.legend(*panels[0].get_legend_handles_labels(), loc="center", markerscale=3)
    return figure


def new_figure(title: str, lines: Sequence[Line], width: float, height: float) -> Figure:
    """Return a figure with a title, and the machine and the date of its newest line."""
    figure = Figure(figsize=(width, height), layout="constrained")
    line = lines[-1]
    machine = f"{line.cpu}, {line.cores} cores, torch {line.torch}"
    figure.suptitle(f"{title}\n{machine}, {line.time[:10]}", fontsize="medium")
    return figure


def cases(name: str, *keys: str, has: str = "time") -> list[Line]:
    """Return the newest lines of a file of results by `keys`, of those that have a field."""
    return list(newest((line for line in read(name) if has in line), *keys).values())


def select(lines: Iterable[Line], **fields: Any) -> list[Line]:
    """Return the lines with these fields."""
    return [line for line in lines if all(line[name] == each for name, each in fields.items())]


def distinct(lines: Iterable[Line], name: str) -> list[Any]:
    """Return the sorted values of a field."""
    return sorted({line[name] for line in lines})


def curve(axis: Axes, lines: list[Line], x: str, y: Callable[[Line], float], **style: Any) -> None:
    """Draw a function of a field of lines."""
    lines = sorted(lines, key=lambda line: line[x])
    axis.plot([line[x] for line in lines], [y(line) for line in lines], marker=".", **style)


def legend(figure: Figure, columns: int, panel: Axes | None = None, **style: Any) -> None:
    """Draw the legend of a figure, or of one of its panels, below the panels."""
    handles = panel.get_legend_handles_labels() if panel else ()
    figure.legend(*handles, loc="outside lower center", ncols=columns, **style)


def loader() -> Figure:
    """Draw the seeds per second of each system and configuration, on one thread and two cores."""
    lines = cases("loader", "system", "way", "on", has="seeds_per_s")
    figure = new_figure("Loading: seeds per second, fanouts 15,10,5", lines, 8, 7)
    processors = distinct(lines, "on")[::-1]
    counts = [len(select(lines, on=each)) for each in processors]
    panels = figure.subplots(len(processors), 1, sharex=True, height_ratios=counts)
    for panel, on in zip(panels, processors, strict=True):
        selected = sorted(select(lines, on=on), key=lambda line: line.seeds_per_s)
        bars = panel.barh(
            [f"{SYSTEMS.get(line.system, line.system)}: {line.way}" for line in selected],
            [line.seeds_per_s for line in selected],
            color=["C0" if line.system == "ours" else "C7" for line in selected],
        )
        panel.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize="small")
        panel.set_title(on, fontsize="medium", loc="left")
        panel.margins(x=0.15)
    panels[-1].xaxis.set_major_formatter("{x:,.0f}")
    panels[-1].xaxis.set_major_locator(MaxNLocator(5))
    panels[-1].set_xlabel("seeds per second (blue: gcnzc)")
    return figure


def accuracy() -> Figure:
    """Draw the mean and standard deviation of test accuracies over runs, and the targets."""
    lines = cases("accuracy", "graph", "model", "sampler", has="test_percent")
    figure = new_figure("Test accuracy: mean, standard deviation, target", lines, 8, 6)
    axis = figure.subplots()
    names = sorted({(line.graph, line.model) for line in lines}, reverse=True)
    samplers = {"gcnzc": "sampled by gcnzc", "dgl": "sampled by DGL", "none": "full batch"}
    for number, (sampler, label) in enumerate(samplers.items()):
        selected = select(lines, sampler=sampler)
        heights = [names.index((x.graph, x.model)) + 0.25 * (1 - number) for x in selected]
        means, widths = ([x[f"{key}_percent"] for x in selected] for key in ("test", "spread"))
        axis.errorbar(means, heights, xerr=widths, fmt="o", label=label, markersize=4)
        targets = [x.target_percent for x in selected]
        axis.plot(targets, heights, "k|", label=None if number else "target")
    axis.set_yticks(range(len(names)), [f"{graph}, {model}" for graph, model in names])
    axis.set_xlabel("test accuracy in percent (tolokers: ROC AUC in percent)")
    axis.grid(alpha=0.3)
    legend(figure, 3, fontsize="small")
    return figure


def collectives() -> Figure:
    """Draw the speed-up of default collective algorithms over gloo's, a panel per collective."""
    times = select(default_lines(), workers=8)
    lines = list(newest(times, "link", "kind", "num_bytes").values())
    figure = new_figure("Default collectives of 8 workers, relative to gloo's", lines, 9, 4)
    kinds = distinct(lines, "kind")
    panels = figure.subplots(1, len(kinds), sharex=True, sharey=True)
    for panel, kind in zip(panels, kinds, strict=True):
        for number, (link, label) in enumerate(
            {"delay": "1 ms of delay", "slow": "100 Mbit/s"}.items()
        ):
            selected, style = select(lines, link=link, kind=kind), {"color": f"C{number}"}
            curve(panel, selected, "num_bytes", lambda x: x.of_builtin, label=label, **style)
        panel.axhline(1, color="black", linewidth=1)
        panel.set_title(kind, fontsize="medium")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        panel.grid(alpha=0.3)
        panel.set_xlabel("bytes of a request")
    figure.supylabel("time of gloo / time of the default")
    legend(figure, 2, panels[0])
    return figure


def strategies(case: str, shown_percent: float) -> Figure:
    """Draw the validation accuracy of each method on one graph by the bytes sent and by the time.

    The time of an epoch is computed from the throughput over links of the given rate.

    Args:
        case: name of the graph in the results.
        shown_percent: start of the vertical axis, in percentage points below the best accuracy.
    """
    lines = select(read("strategies"), case=case)
    accuracies = newest(select(lines, part="accuracy"), "method")
    speeds = newest(select(lines, part="speed"), "method", "mbit_per_s")
    title = f"Validation accuracy on {case}: by bytes sent, and by time over slow links"
    figure = new_figure(title, lines, 9, 2.7 * len(METHODS))
    grid = figure.subplots(len(METHODS), 1 + len(RATES), sharey=True)
    best = max(max(line.valid_percent) for line in accuracies.values())
    for row, (group, methods) in zip(grid, METHODS.items(), strict=True):
        for number, method in enumerate(["adamw", *methods]):
            if method not in accuracies:
                continue
            line = accuracies[method]
            style = {"color": f"C{number}" if number else "C7", "marker": "."}
            sent = [num_bytes / 1e6 for num_bytes in line.bytes_sent]
            row[0].plot(sent, line.valid_percent, label=method, **style)
            for panel, rate in zip(row[1:], RATES, strict=True):
                if (method, rate) in speeds:
                    epoch_s = line.seeds_in_an_epoch / speeds[method, rate].seeds_per_s
                    times = [epoch_s * epochs for epochs in line.evaluated_after]
                    panel.plot(times, line.valid_percent, **style)
        row[0].legend(fontsize="small")
        row[0].set_title(group, fontsize="medium", loc="left")
        row[0].set_xlabel("MB sent per worker")
        row[0].set_ylabel("accuracy in percent")
        for panel, rate in zip(row[1:], RATES, strict=True):
            panel.set_title(f"links of {rate:g} Mbit/s", fontsize="medium")
            panel.set_xlabel("seconds")
        for panel in row:
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.tick_params(axis="x", labelsize="small")
            panel.minorticks_off()
            panel.set_ylim(best - shown_percent, best + shown_percent / 12)
            panel.grid(alpha=0.3)
    return figure


def feature_cache() -> Figure:
    """Draw predicted and measured hit rates of feature caches, by cache size, a panel per graph."""
    lines = cases("hot", "graph", "fanouts", "batch_size", "counted", "ranking", "share")
    lines = select(lines, fanouts="15,10,5", counted=max(line.counted for line in lines))
    title = "Hit rate of the feature cache: fanouts 15,10,5, minibatches of 1,024 seeds"
    graphs = distinct(lines, "graph")
    rows = -(-len(graphs) // 3)
    figure = new_figure(title, lines, 9, 1.5 + 2.3 * rows)
    panels = figure.subplots(rows, 3, sharey=True, squeeze=False).flatten()
    for axis in panels[len(graphs) :]:
        axis.set_axis_off()
    for axis, graph in zip(panels, graphs, strict=False):
        selected = select(lines, graph=graph)
        shares = distinct(selected, "share")
        for number, ranking in enumerate(distinct(selected, "ranking")):
            points = newest(select(selected, ranking=ranking), "share")
            for name, mark in {"predicted": ("-", "--"), "measured": ("x", "+")}.items():
                rates = [points[share][name] for share in shares]
                axis.plot(shares, rates, f"C{number}{mark[number]}", label=f"{ranking}, {name}")
        axis.plot(shares, shares, color="grey", linestyle=":", label="random rows cached")
        axis.set_title(graph, fontsize="medium")
        axis.set_xscale("log")
        axis.set_xticks(shares, [f"{100 * share:g} %" for share in shares])
        axis.minorticks_off()
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    for axis in panels[-3:]:
        axis.set_xlabel("fraction of the rows cached")
    for axis in panels[::3]:
        axis.set_ylabel("hit rate")
    legend(figure, 3, panels[0], fontsize="small")
    return figure


def strategy_comparison() -> Figure:
    """Draw the training loss over virtual time, a panel for each family of methods."""
    even = select(read("strategy_comparison"), slow_rank_factor=1, slow_link_factor=1)
    lines = newest(select(even, seed=0), "method")
    figure = new_figure("Training loss by virtual time, 4 ranks at 50 Mbit/s", even, 9, 7.5)
    panels = figure.subplots(2, 3, sharey=True).flat
    for panel, (title, methods) in zip(panels, FAMILIES.items(), strict=False):
        for number, method in enumerate(("average", *methods)):
            if method in lines:
                line, color = lines[method], f"C{number - 1}" if number else "C7"
                style = {"label": method, "color": color, "marker": "."}
                panel.plot(line.epoch_ends_s, line.losses, **style)
        panel.set_title(title, fontsize="medium")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("virtual seconds")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small")
    for panel in (figure.axes[0], figure.axes[3]):
        panel.set_ylabel("mean training loss of an epoch")
    figure.axes[-1].set_axis_off()
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "pcie": bus_efficiency,
    "loader": loader,
    "feature_cache": feature_cache,
    "accuracy": accuracy,
    "collectives": collectives,
    "strategies-amazon_photo": lambda: strategies("amazon_photo", 6),
    "strategies-planted": lambda: strategies("planted", 3),
    "strategy_comparison": strategy_comparison,
}

if __name__ == "__main__":
    main()
