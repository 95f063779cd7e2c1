"""Draw the figures of the benchmark pages from `results/` into `docs/pictures/`.

    python -m bench.docs.plot

If a case was measured more than once, its newest line is drawn.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from bench.docs.training_tables import KINDS, LAYER_KINDS, best_steps
from gcnzc.cli.plots import Efficiencies, efficiencies
from gcnzc.tune.table_shapes import roofs, sweep

RESULTS = Path(__file__).parents[1] / "results"
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"

Line = dict[str, Any]


def main() -> None:
    """Draw every figure whose results exist."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    efficiencies(Efficiencies("float32", sweep("float32"), {}, roofs()), PICTURES / "pcie.png")
    for name, (results, draw) in PICTURES_OF.items():
        path = RESULTS / f"{results}.jsonl"
        if not path.exists():
            print(f"no {path}")
            continue
        figure = draw([json.loads(text) for text in path.read_text().splitlines()])
        figure.savefig(PICTURES / f"{name}.png", dpi=100)
        print(PICTURES / f"{name}.png")


def new_figure(title: str, lines: Sequence[Line], width: float, height: float) -> Figure:
    """Return a figure with a title, and the machine and the date of its newest line."""
    figure = Figure(figsize=(width, height), layout="constrained")
    line = lines[-1]
    machine = f"{line['cpu']}, {line['cores']} cores, torch {line['torch']}"
    figure.suptitle(f"{title}\n{machine}, {line['time'][:10]}", fontsize="medium")
    return figure


def newest(lines: Sequence[Line], *keys: str) -> list[Line]:
    """Return the newest line for each combination of `keys`, of the lines that have all keys."""
    return list(
        {
            tuple(line[key] for key in keys): line for line in lines if all(k in line for k in keys)
        }.values()
    )


def loader(lines: Sequence[Line]) -> Figure:
    """Draw the seeds per second of each system and configuration, on one thread and two cores."""
    cases = newest([line for line in lines if "seeds_per_s" in line], "system", "way", "on")
    figure = new_figure("Loading: seeds per second, fanouts 15,10,5", cases, 8, 7)
    processors = sorted({line["on"] for line in cases}, reverse=True)
    counts = [sum(line["on"] == each for line in cases) for each in processors]
    panels = figure.subplots(len(processors), 1, sharex=True, height_ratios=counts)
    for panel, on in zip(panels, processors, strict=True):
        selected = sorted(
            (line for line in cases if line["on"] == on), key=lambda line: line["seeds_per_s"]
        )
        names = {"ours": "gcnzc", "dgl": "DGL", "pyg": "PyG", "graphbolt": "GraphBolt"}
        bars = panel.barh(
            [f"{names.get(line['system'], line['system'])}: {line['way']}" for line in selected],
            [line["seeds_per_s"] for line in selected],
            color=["C0" if line["system"] == "ours" else "C7" for line in selected],
        )
        panel.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize="small")
        panel.set_title(on, fontsize="medium", loc="left")
        panel.margins(x=0.15)
    panels[-1].xaxis.set_major_formatter("{x:,.0f}")
    panels[-1].xaxis.set_major_locator(MaxNLocator(5))
    panels[-1].set_xlabel("seeds per second (blue: gcnzc)")
    return figure


def gather_cpu(lines: Sequence[Line]) -> Figure:
    """Draw the bandwidth of gathers relative to a large copy, by row size."""
    cases = newest(lines, "way", "row_bytes", "table_pages")
    drawn = [
        line
        for line in cases
        if not line["way"].startswith("copy")
        and "numpy" not in line["way"]
        and "fresh" not in line["way"]
    ]
    figure = new_figure("Gathers on the CPU: random rows", drawn, 8, 4.2)
    pages = sorted({line["table_pages"] for line in drawn})
    for panel, size in zip(figure.subplots(1, len(pages), sharey=True), pages, strict=True):
        for method in sorted({line["way"] for line in drawn}):
            selected = sorted(
                (line for line in drawn if (line["way"], line["table_pages"]) == (method, size)),
                key=lambda line: line["row_bytes"],
            )
            panel.plot(
                [line["row_bytes"] for line in selected],
                [line["share_of_copy"] for line in selected],
                label=method.replace("gather,", "gcnzc,"),
                marker=".",
                color="C7" if "torch" in method else "C0" if "two" in method else "C1",
            )
        panel.set_title(f"pages of {size}", fontsize="medium")
        panel.set_xscale("log", base=2)
        panel.set_xlabel("bytes per row")
        panel.grid(alpha=0.3)
    # after all lines are drawn, since the panels share the axis
    figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].set_ylabel("bandwidth / bandwidth of a large copy")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def aggregate_cpu(lines: Sequence[Line]) -> Figure:
    """Draw the time of forward and backward of each aggregation, by the number of columns."""
    cases = [c for c in newest(lines, "what", "way", "columns") if "median_s" in c]
    figure = new_figure("Aggregation on the CPU: forward and backward", cases, 8, 5)
    kinds = sorted({c["what"] for c in cases})
    methods = sorted({c["way"] for c in cases}, key=lambda name: ("gcnzc" not in name, name))
    width = 0.8 / len(methods)
    counts = [len({c["columns"] for c in cases if c["what"] == kind}) for kind in kinds]
    panels = figure.subplots(1, len(kinds), sharey=True, width_ratios=counts, squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        columns = sorted({c["columns"] for c in cases if c["what"] == kind})
        for number, method in enumerate(methods):
            selected = [c for c in cases if (c["way"], c["what"]) == (method, kind)]
            positions = [columns.index(c["columns"]) + number * width for c in selected]
            panel.bar(positions, [c["median_s"] * 1e3 for c in selected], width, color=f"C{number}")
        panel.set_xticks([index + 0.4 - width / 2 for index in range(len(columns))], columns)
        panel.set_title(kind, fontsize="medium")
        panel.set_xlabel("columns")
        panel.set_yscale("log")
    panels[0].set_ylabel("milliseconds")
    colors = [panels[0].bar(0, 0, color=f"C{number}") for number in range(len(methods))]
    figure.legend(colors, methods, loc="outside lower center", ncols=3, fontsize="small")
    return figure


def accuracy(lines: Sequence[Line]) -> Figure:
    """Draw the mean and standard deviation of test accuracies over runs, and the targets."""
    cases = newest([c for c in lines if "test_percent" in c], "graph", "model", "sampler")
    figure = new_figure("Test accuracy: mean, standard deviation, target", cases, 8, 6)
    axes: Axes = figure.subplots()
    names = sorted({(c["graph"], c["model"]) for c in cases}, reverse=True)
    samplers = {"gcnzc": "sampled by gcnzc", "dgl": "sampled by DGL", "none": "full batch"}
    for number, (sampler, label) in enumerate(samplers.items()):
        selected = [c for c in cases if c["sampler"] == sampler]
        heights = [names.index((c["graph"], c["model"])) + 0.25 * (1 - number) for c in selected]
        axes.errorbar(
            [c["test_percent"] for c in selected],
            heights,
            xerr=[c["spread_percent"] for c in selected],
            fmt="o",
            markersize=4,
            label=label,
        )
        targets = [c["target_percent"] for c in selected]
        axes.plot(targets, heights, "k|", label=None if number else "target")
    axes.set_yticks(range(len(names)), [f"{graph}, {model}" for graph, model in names])
    axes.set_xlabel("test accuracy in percent (tolokers: ROC AUC in percent)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return figure


def presets(lines: Sequence[Line]) -> Figure:
    """Draw the scores of presets, mean and standard deviation over runs, beside published ones."""
    cases = sorted(newest(lines, "preset"), key=lambda case: case["preset"], reverse=True)
    figure = new_figure(
        "Test scores of presets, and the published ones", cases, 8, 1.5 + len(cases) / 3
    )
    axes: Axes = figure.subplots()
    places = range(len(cases))
    axes.errorbar(
        [case["test_percent"] for case in cases],
        places,
        xerr=[case["spread_percent"] for case in cases],
        fmt="o",
        label="gcnzc, mean and standard deviation",
    )
    published = [case["published_percent"] for case in cases]
    axes.plot(published, places, "k|", markersize=14, label="published")
    axes.set_yticks(places, [case["preset"] for case in cases])
    axes.set_xlabel("test accuracy in percent (minesweeper, tolokers: ROC AUC in percent)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


def precision(lines: Sequence[Line]) -> Figure:
    """Draw the difference of each precision and float32, and its 95 % interval."""
    cases = newest(lines, "case", "precision")[::-1]
    figure = new_figure(
        "Test scores in mixed precision, minus those in float32", cases, 7, 1.6 + len(cases) / 3
    )
    axes: Axes = figure.subplots()
    means = [case["difference_points"] for case in cases]
    widths = [case["interval_points"][1] - mean for case, mean in zip(cases, means, strict=True)]
    axes.errorbar(means, range(len(cases)), xerr=widths, fmt="o")
    axes.axvline(0, color="black", linewidth=1)
    axes.axvspan(-0.2, 0.2, color="lightgray", alpha=0.5)
    names = [f"{case['case']}, {case['precision']}" for case in cases]
    axes.set_yticks(range(len(cases)), names)
    axes.margins(y=0.3)
    axes.set_xlabel("points: mean, 95 % interval (gray: ±0.2)")
    axes.grid(alpha=0.3)
    return figure


def depth(lines: Sequence[Line]) -> Figure:
    """Draw accuracy and peak memory of each kind of layers, by the number of layers."""
    cases = newest(lines, "kind", "layers")
    title = "GCN on cora in full batch: mean and standard deviation, and peak memory"
    figure = new_figure(title, cases, 8, 4)
    scores, memory = figure.subplots(1, 2)
    for kind, label in LAYER_KINDS.items():
        selected = sorted((c for c in cases if c["kind"] == kind), key=lambda line: line["layers"])
        layers = [line["layers"] for line in selected]
        scores.errorbar(
            layers,
            [line["test_percent"] for line in selected],
            yerr=[line["spread_percent"] for line in selected],
            marker=".",
            label=label.replace("`", ""),
        )
        memory.plot(layers, [line["peak_memory_bytes"] / 2**20 for line in selected], marker=".")
    scores.axhline(75, color="black", linewidth=1, linestyle=":", label="target of 100 layers")
    scores.set_ylabel("test accuracy in percent")
    memory.set_ylabel("peak memory of the process in MiB")
    memory.set_ylim(bottom=0)
    for panel in (scores, memory):
        panel.set_xscale("log", base=2)
        panel.set_xticks(layers, [str(number) for number in layers])
        panel.set_xlabel("layers")
        panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    return figure


def steps(lines: Sequence[Line]) -> Figure:
    """Draw the times of training steps of the systems, and the floor."""
    best = best_steps(lines)
    floors = newest(lines, "floor_of")
    kinds = [line["floor_of"] for line in floors]
    figure = new_figure("A training step on the CPU", list(best.values()), 7, 4)
    axes: Axes = figure.subplots()
    systems = {"ours": "gcnzc", "dgl": "DGL", "pyg": "PyG"}
    height = 0.8 / (len(systems) + 1)
    for place, (system, name) in enumerate(systems.items()):
        times = [1e3 * best[kind, system]["median_s"] for kind in kinds]
        at = [number + place * height for number in range(len(kinds))]
        axes.barh(at, times, height, label=name)
    at = [number - height for number in range(len(kinds))]
    floor_ms = [line["gemm_ms"] + line["rows_ms"] for line in floors]
    axes.barh(at, floor_ms, height, label="floor", color="lightgray")
    axes.set_yticks(range(len(kinds)), [KINDS[kind] for kind in kinds])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    return figure


def collectives(lines: Sequence[Line]) -> Figure:
    """Draw the speed-up of tuned collective algorithms over gloo's, a panel per collective."""
    cases = [c for c in lines if c["part"] == "times" and c["workers"] == 8]
    cases = newest(cases, "link", "kind", "num_bytes")
    figure = new_figure("Tuned collectives of 8 workers, relative to gloo's", cases, 8, 6)
    links = {"delay": "1 ms of delay", "slow": "100 Mbit/s"}
    kinds = sorted({c["kind"] for c in cases})
    rows = -(-len(kinds) // 2)
    panels = list(figure.subplots(rows, 2, sharex=True, sharey=True).flat)
    for panel, kind in zip(panels, kinds, strict=False):
        for number, (link, label) in enumerate(links.items()):
            selected = [c for c in cases if (c["link"], c["kind"]) == (link, kind)]
            selected.sort(key=lambda line: line["num_bytes"])
            panel.plot(
                [c["num_bytes"] for c in selected],
                [1 / c["tuned_of_builtin"] for c in selected],
                color=f"C{number}",
                marker=".",
                label=label,
            )
        panel.axhline(1, color="black", linewidth=1)
        panel.set_title(kind, fontsize="medium")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        panel.grid(alpha=0.3)
    for panel in panels[-2:]:
        panel.set_xlabel("bytes of a request")
    figure.supylabel("time of gloo / time of the tuned choice")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def strategies(case: str, shown_percent: float) -> Callable[[Sequence[Line]], Figure]:
    """Return a function that draws the validation accuracy of each method on one graph.

    It is drawn by the bytes sent and by the time. The time of an epoch is computed from the
    throughput that was measured over links of the given rate.

    Args:
        case: name of the graph in the results.
        shown_percent: start of the vertical axis, in percentage points below the best accuracy.
    """

    def draw(lines: Sequence[Line]) -> Figure:
        of_case = [line for line in lines if line["case"] == case]
        accuracies = {
            line["method"]: line
            for line in newest([line for line in of_case if line["part"] == "accuracy"], "method")
        }
        speeds = [line for line in of_case if line["part"] == "speed"]
        rates = {
            (line["method"], line["mbit_per_s"]): line["seeds_per_s"]
            for line in newest(speeds, "method", "mbit_per_s")
        }
        title = f"Validation accuracy on {case}: by bytes sent, and by time over slow links"
        figure = new_figure(title, of_case, 9, 2.7 * len(METHODS))
        grid = figure.subplots(len(METHODS), 1 + len(RATES), sharey=True)
        best = max(max(line["valid_percent"]) for line in accuracies.values())
        for row, (group, methods) in zip(grid, METHODS.items(), strict=True):
            for number, method in enumerate(["adamw", *methods]):
                if method not in accuracies:
                    continue
                line = accuracies[method]
                style = {"color": f"C{number}" if number else "C7", "marker": "."}
                sent = [num_bytes / 1e6 for num_bytes in line["bytes_sent"]]
                row[0].plot(sent, line["valid_percent"], label=method, **style)
                for panel, rate in zip(row[1:], RATES, strict=True):
                    if (method, rate) in rates:
                        epoch_s = line["seeds_in_an_epoch"] / rates[method, rate]
                        times = [epoch_s * epochs for epochs in line["evaluated_after"]]
                        panel.plot(times, line["valid_percent"], **style)
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

    return draw


# each group has its own row of panels, which also shows adamw, which exchanges float32 gradients
METHODS = {
    "averaged gradients": ("adamw bfloat16", "adamw int8"),
    "compressed momenta": ("onebit-adam", "onebit-lamb", "zero-one-adam"),
    "local steps": ("local-sgd", "diloco", "co2", "co2 48"),
    "streamed fragments": ("streaming-diloco", "streaming-diloco fp4"),
}
RATES = (10.0, 1000.0)


def feature_cache(lines: Sequence[Line]) -> Figure:
    """Draw predicted and measured hit rates of feature caches, by cache size, a panel per graph."""
    cases = newest(lines, "graph", "fanouts", "batch_size", "counted", "ranking", "share")
    most = max(case["counted"] for case in cases)
    cases = [case for case in cases if (case["fanouts"], case["counted"]) == ("15,10,5", most)]
    title = "Hit rate of the feature cache: fanouts 15,10,5, minibatches of 1,024 seeds"
    graphs = sorted({case["graph"] for case in cases})
    rows = -(-len(graphs) // 3)
    figure = new_figure(title, cases, 9, 1.5 + 2.3 * rows)
    panels = figure.subplots(rows, 3, sharey=True, squeeze=False).flatten()
    for axis in panels[len(graphs) :]:
        axis.set_axis_off()
    for axis, graph in zip(panels, graphs, strict=False):
        selected = [case for case in cases if case["graph"] == graph]
        shares = sorted({case["share"] for case in selected})
        for number, ranking in enumerate(sorted({case["ranking"] for case in selected})):
            points = {case["share"]: case for case in selected if case["ranking"] == ranking}
            predicted = [points[share]["predicted"] for share in shares]
            measured = [points[share]["measured"] for share in shares]
            line, mark = ("-", "x") if number == 0 else ("--", "+")
            axis.plot(shares, predicted, f"C{number}{line}", label=f"{ranking}, predicted")
            axis.plot(shares, measured, f"C{number}{mark}", label=f"{ranking}, measured")
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
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        fontsize="small",
    )
    return figure


# name of a picture to the file of results and the function that draws it
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


def strategy_comparison(lines: Sequence[Line]) -> Figure:
    """Draw the training loss over virtual time, a panel for each family of methods."""
    even = [line for line in lines if line["slow_rank_factor"] == line["slow_link_factor"] == 1]
    cases = {line["method"]: line for line in newest(even, "method", "seed") if not line["seed"]}
    figure = new_figure("Training loss by virtual time, 4 ranks at 50 Mbit/s", even, 9, 7.5)
    panels = figure.subplots(2, 3, sharey=True).flat
    for panel, (title, methods) in zip(panels, FAMILIES.items(), strict=False):
        for number, method in enumerate(("average", *methods)):
            if method in cases:
                panel.plot(
                    cases[method]["epoch_ends_s"],
                    cases[method]["losses"],
                    label=method,
                    color="C7" if method == "average" else f"C{number - 1}",
                    marker=".",
                )
        panel.set_title(title, fontsize="medium")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("virtual seconds")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small")
    figure.axes[0].set_ylabel("mean training loss of an epoch")
    figure.axes[3].set_ylabel("mean training loss of an epoch")
    figure.axes[-1].set_axis_off()
    return figure


PICTURES_OF: dict[str, tuple[str, Callable[[Sequence[Line]], Figure]]] = {
    "loader": ("loader", loader),
    "gather_cpu": ("gather_cpu", gather_cpu),
    "aggregate_cpu": ("aggregate_cpu", aggregate_cpu),
    "feature_cache": ("hot", feature_cache),
    "accuracy": ("accuracy", accuracy),
    "presets": ("presets", presets),
    "precision": ("precision", precision),
    "depth": ("depth", depth),
    "steps": ("steps", steps),
    "collectives": ("collectives", collectives),
    "strategies-amazon_photo": ("strategies", strategies("amazon_photo", 6)),
    "strategies-planted": ("strategies", strategies("planted", 3)),
    "strategy_comparison": ("strategy_comparison", strategy_comparison),
}

if __name__ == "__main__":
    main()
