"""Draw what was measured: each file of `results/` as one picture in `docs/pictures/`.

    python bench/plot.py

Of a case that was measured more than once the newest line is drawn.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"

Line = dict[str, Any]


def main() -> None:
    """Draw every picture whose results are there."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES_OF.items():
        path = RESULTS / f"{name}.jsonl"
        if not path.exists():
            print(f"no {path}")
            continue
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        rows, panels = PANELS.get(name, (1, 1))
        width = 8 if panels == 1 else 4 * panels
        figure = Figure(figsize=(width, 4.2 * rows), layout="constrained")
        axes = figure.subplots(rows, panels)
        draw(axes, lines)
        where = lines[-1]
        figure.suptitle(
            f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}, {where['time'][:10]}",
            fontsize="small",
            color="grey",
        )
        figure.savefig(PICTURES / f"{name}.png", dpi=120)
        print(PICTURES / f"{name}.png")


def newest(lines: Sequence[Line], *keys: str) -> list[Line]:
    """The last line of each combination of `keys`, of the lines that have them all."""
    return list(
        {
            tuple(line[key] for key in keys): line for line in lines if all(k in line for k in keys)
        }.values()
    )


def loader(axes: Axes, lines: Sequence[Line]) -> None:
    """Seeds per second of each system's ways."""
    ways = newest([line for line in lines if "seeds_per_s" in line], "system", "way", "on")
    ways.sort(key=lambda line: line["seeds_per_s"])
    names = [f"{line['system']}: {line['way']}, {line['on']}" for line in ways]
    colours = ["C0" if line["system"] == "ours" else "C7" for line in ways]
    bars = axes.barh(names, [line["seeds_per_s"] for line in ways], color=colours)
    axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize="small")
    axes.set_xlabel("seeds per second, fan-outs 15,10,5")
    axes.tick_params(axis="y", labelsize="small")
    axes.margins(x=0.15)


def gather_cpu(axes: Axes, lines: Sequence[Line]) -> None:
    """Share of a large copy's bandwidth against the width of a row."""
    cases = newest(lines, "way", "row_bytes", "table_pages")
    for way, pages in sorted({(c["way"], c["table_pages"]) for c in cases}):
        if way.startswith("copy") or "numpy" in way or "fresh" in way:
            continue
        mine = [c for c in cases if (c["way"], c["table_pages"]) == (way, pages)]
        mine.sort(key=lambda line: line["row_bytes"])
        ours, large = way.startswith("gather"), pages != "4 KiB"
        axes.plot(
            [line["row_bytes"] for line in mine],
            [line["share_of_copy"] for line in mine],
            "-" if large else ":",
            color=("C0" if "two" in way else "C1") if ours else "C7",
            linewidth=2 if ours else 1,
            label=f"{way}, {pages} pages",
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes of a row, random ids")
    axes.set_ylabel("share of a large copy's bandwidth")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def aggregate_cpu(axes: Axes, lines: Sequence[Line]) -> None:
    """Seconds of forward and backward, by width."""
    cases = [c for c in newest(lines, "what", "way", "columns") if "median_s" in c]
    names = sorted({(c["what"], c["columns"]) for c in cases})
    ways = sorted({c["way"] for c in cases}, key=lambda way: ("gcnzc" not in way, way))
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        mine = [c for c in cases if c["way"] == way]
        places = [names.index((c["what"], c["columns"])) + number * width for c in mine]
        axes.bar(places, [c["median_s"] * 1e3 for c in mine], width, label=way)
    axes.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(names))],
        [f"{what}\n{columns} columns" for what, columns in names],
        fontsize="x-small",
    )
    axes.set_ylabel("milliseconds, forward and backward")
    axes.set_yscale("log")
    axes.legend(fontsize="small")


def accuracy(axes: Axes, lines: Sequence[Line]) -> None:
    """Mean and spread over the seeds beside the target."""
    cases = newest([c for c in lines if "test_percent" in c], "graph", "model", "sampler")
    names = sorted({(c["graph"], c["model"]) for c in cases}, reverse=True)
    for number, sampler in enumerate(sorted({c["sampler"] for c in cases}, reverse=True)):
        mine = [c for c in cases if c["sampler"] == sampler]
        axes.errorbar(
            [c["test_percent"] for c in mine],
            [names.index((c["graph"], c["model"])) - 0.15 * number for c in mine],
            xerr=[c["spread_percent"] for c in mine],
            fmt="o",
            label=f"sampled by {sampler}",
        )
    targets = {(c["graph"], c["model"]): c["target_percent"] for c in cases}
    for name, target in targets.items():
        axes.plot(target, names.index(name), "k|", markersize=14)
    axes.set_yticks(range(len(names)), [f"{graph}, {model}" for graph, model in names])
    axes.tick_params(axis="y", labelsize="small")
    axes.set_xlabel("test accuracy (tolokers: ROC AUC), percent; the black lines are the targets")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def collectives(axes: Axes, lines: Sequence[Line]) -> None:
    """How much faster than gloo's own the tuned algorithms are, of 8 workers."""
    cases = [c for c in lines if c["part"] == "times" and c["workers"] == 8]
    cases = newest(cases, "link", "kind", "num_bytes")
    links = {"delay": ("-", "1 ms of delay"), "slow": ("--", "100 Mbit/s")}
    kinds = sorted({c["kind"] for c in cases})
    for link, (style, words) in links.items():
        for number, kind in enumerate(kinds):
            mine = [c for c in cases if (c["link"], c["kind"]) == (link, kind)]
            mine.sort(key=lambda line: line["num_bytes"])
            axes.plot(
                [c["num_bytes"] for c in mine],
                [1 / c["tuned_of_builtin"] for c in mine],
                style,
                color=f"C{number}",
                label=f"{kind}, {words}",
            )
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    axes.set_xlabel("bytes of a request, 8 workers")
    axes.set_ylabel("gloo's own time / the tuned choice's")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)


def strategies(panels: Any, lines: Sequence[Line]) -> None:
    """For each graph a row: accuracy on validation nodes against bytes, and against time.

    Epochs of the accuracy runs take as long as the speed runs on links of each rate found them to.
    """
    methods = list(dict.fromkeys(line["method"] for line in lines if line["part"] == "accuracy"))
    for row, (case, shown_percent) in zip(panels, STRATEGIES_OF.items(), strict=True):
        of_case = [line for line in lines if line["case"] == case]
        learnt = newest([line for line in of_case if line["part"] == "accuracy"], "method")
        timed = newest(
            [line for line in of_case if line["part"] == "speed"], "method", "mbit_per_s"
        )
        rates = {(line["method"], line["mbit_per_s"]): line["seeds_per_s"] for line in timed}
        for line in learnt:
            method, percent = line["method"], line["valid_percent"]
            number = methods.index(method)
            dashed = ("-", "--")[number // 10]
            style = {"color": f"C{number % 10}", "linestyle": dashed, "marker": "."}
            sent = [num_bytes / 1e6 for num_bytes in line["bytes_sent"]]
            row[0].plot(sent, percent, label=method, **style)
            for panel, rate in zip(row[1:], RATES, strict=True):
                if (method, rate) in rates:
                    epoch_s = line["seeds_in_an_epoch"] / rates[method, rate]
                    times = [epoch_s * epochs for epochs in line["evaluated_after"]]
                    panel.plot(times, percent, **style)
        row[0].set_xlabel("MB that a worker has sent")
        row[0].set_ylabel(f"{case}, validation accuracy in percent")
        for panel, rate in zip(row[1:], RATES, strict=True):
            panel.set_xlabel(f"seconds, {rate:g} Mbit/s")
        best = max(max(line["valid_percent"]) for line in learnt)
        for panel in row:
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.minorticks_off()
            panel.set_ylim(best - shown_percent, best + shown_percent / 12)
            panel.grid(alpha=0.3)
    panels[0][0].figure.legend(
        *panels[0][0].get_legend_handles_labels(), loc="outside right center", fontsize="small"
    )


# graphs, and how far below the best accuracy methods differ there
STRATEGIES_OF, RATES = {"amazon_photo": 6, "planted": 3}, (10.0, 100.0, 1000.0)
# pictures of more than one panel: rows and columns
PANELS = {"strategies": (len(STRATEGIES_OF), 1 + len(RATES))}
PICTURES_OF: dict[str, Callable[[Any, Sequence[Line]], None]] = {
    "loader": loader,
    "gather_cpu": gather_cpu,
    "aggregate_cpu": aggregate_cpu,
    "accuracy": accuracy,
    "collectives": collectives,
    "strategies": strategies,
}

if __name__ == "__main__":
    main()
