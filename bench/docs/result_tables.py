"""Compute the documentation's tables from the lines of `bench/results/`.

Each function returns one table in Markdown, with a caption that states the machine, the date, the
commits and the command. If a case was measured more than once, the table shows the newest line.
`bench/docs/pages.py` writes the tables into the pages.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"

Line = dict[str, Any]
TABLES: dict[str, Callable[[], str]] = {}


def table(function: Callable[[], str]) -> Callable[[], str]:
    """Register a table by the name of its function."""
    TABLES[function.__name__] = function
    return function


def read(name: str) -> list[Line]:
    """Return the lines of a file of results, oldest first."""
    return [json.loads(text) for text in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def newest(lines: Iterable[Line], *keys: str) -> dict[Any, Line]:
    """Return the newest line by the values of `keys`, among the lines that have all keys."""
    found: dict[Any, Line] = {}
    for line in lines:
        if all(key in line for key in keys):
            case = tuple(line[key] for key in keys)
            found[case if len(keys) > 1 else case[0]] = line
    return found


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a Markdown table; None is an empty cell."""
    cells = [heads, ["---"] * len(heads), *rows]
    shown = (["" if cell is None else str(cell) for cell in row] for row in cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in shown) + "\n"


def with_caption(text: str, lines: Iterable[Line], command: str) -> str:
    """Return a table with a caption that states where its figures were measured."""
    lines = list(lines)
    days = sorted({line["time"][:10] for line in lines})
    cpus = sorted({str(line["cpu"]).replace("(R)", "") for line in lines})
    cores = sorted({line["cores"] for line in lines})
    versions = sorted({str(line["torch"]).split("+")[0] for line in lines})
    commits = sorted({line["commit"] for line in lines})
    gpus = sorted({line["gpu"] for line in lines} - {"none"})
    parts = [" and ".join([*cpus, *gpus]), f"{' or '.join(map(str, cores))} cores"]
    parts += [
        f"torch {' and '.join(versions)}",
        days[0] if len(days) == 1 else " to ".join(days[:: len(days) - 1]),
    ]
    parts.append(f"commit{'s' * (len(commits) > 1)} {', '.join(f'`{each}`' for each in commits)}")
    return f"{text}\n{', '.join(parts)}. Measured by `{command}`.\n"


def with_source(text: str, lines: Iterable[Line], command: str) -> str:
    """Return a table with a caption that states by which command its figures were computed."""
    commits = ", ".join(sorted({f"`{line['commit']}`" for line in lines}))
    return f"{text}\nComputed by `{command}` at commit {commits}; nothing was measured.\n"


def spread(
    line: Mapping[str, Any], name: str = "test_percent", unit: str = "spread_percent"
) -> str:
    """Format a mean and its standard deviation."""
    return f"{line[name]:.2f} ± {line[unit]:.2f}" if line[unit] is not None else f"{line[name]:.2f}"


def significant(number: float, digits: int = 3) -> str:
    """Format a number with a number of significant digits, without an exponent."""
    shown = float(f"{number:.{digits}g}")
    return f"{shown:,.0f}" if abs(shown) >= 10 ** (digits - 1) else f"{shown:g}"


SYSTEMS = {
    "ours": "gcnzc {rival_gcnzc}",
    "dgl": "DGL {rival_dgl}",
    "graphbolt": "GraphBolt of DGL {rival_dgl}",
    "pyg": "PyG {rival_torch_geometric} with {sampler}",
}


def title_of(system: str, line: Line) -> str:
    """Return the name of a measured system with its versions."""
    # PyG samples with pyg-lib if it is installed; older lines have no `rival_pyg_lib`
    libraries = {"pyg-lib": "rival_pyg_lib", "torch-sparse": "rival_torch_sparse"}
    found = [
        f"{name} {line[key]}" for name, key in libraries.items() if line.get(key, "none") != "none"
    ]
    return SYSTEMS[system].format(**line, sampler=found[0] if found else "no sampler")


def best_loaders() -> dict[str, Line]:
    """Return the fastest configuration of each system's loader with features."""
    lines = newest(read("loader"), "system", "way", "on")
    best: dict[str, Line] = {}
    for (system, configuration, _), line in lines.items():
        if not configuration.startswith("loader,") or "without features" in configuration:
            continue
        if system not in best or line["seeds_per_s"] > best[system]["seeds_per_s"]:
            best[system] = line
    return best


@table
def loader() -> str:
    """Return the table of the throughput of the loaders."""
    best = best_loaders()
    ours = best["ours"]["seeds_per_s"]
    rows = []
    for system in SYSTEMS:
        line = best[system]
        title = title_of(system, line)
        title += f", torch {line['rival_torch'].split('+')[0]}"
        speedup = None if system == "ours" else f"{ours / line['seeds_per_s']:.1f}"
        rows.append([title, line["way"], f"{line['seeds_per_s']:,.0f}", speedup])
    text = markdown(["system", "configuration", "seed nodes/s", "speed-up of gcnzc"], rows)
    return with_caption(text, best.values(), "python -m bench.loading.loader --rivals FOLDER")


@table
def heterograph() -> str:
    """Return the table of the throughput of loaders of heterographs."""
    lines = newest(read("heterograph"), "system", "way")
    best: dict[str, Line] = {}
    for (system, _), line in lines.items():
        if system not in best or line["seeds_per_s"] > best[system]["seeds_per_s"]:
            best[system] = line
    ratio = newest(read("heterograph"), "ratio")["ours / dgl"]
    rows = [
        [
            title_of(system, line),
            line["way"],
            f"{line['seeds_per_s']:,.0f}",
            None if system == "ours" else f"{ratio['times']:.1f}",
        ]
        for system, line in sorted(best.items(), key=lambda item: -item[1]["seeds_per_s"])
    ]
    heads = ["system", "configuration", "seed nodes/s", "speed-up of gcnzc, median of rounds"]
    text = markdown(heads, rows)
    return with_caption(text, best.values(), "python -m bench.loading.heterograph")


@table
def sampling() -> str:
    """Return the table of the throughput of sampling without features, on one thread."""
    lines = newest(read("loader"), "system", "way", "on")
    found = {
        system: line
        for (system, configuration, _), line in lines.items()
        if configuration == "sampling"
    }
    ours = found["ours"]["seeds_per_s"]
    rows = [
        [
            title_of(system, line),
            f"{line['seeds_per_s']:,.0f}",
            None if system == "ours" else f"{ours / line['seeds_per_s']:.1f}",
        ]
        for system, line in sorted(found.items(), key=lambda item: -item[1]["seeds_per_s"])
    ]
    text = markdown(["sampler, one thread", "seed nodes/s", "speed-up of gcnzc"], rows)
    return with_caption(text, found.values(), "python -m bench.loading.loader --rivals FOLDER")


@table
def examples() -> str:
    """Return the table of DGL and PyG scripts before and after the loader is replaced."""
    lines = newest([line for line in read("examples") if "epoch_s" in line], "script", "way")
    rows = []
    for script in sorted({script for script, _ in lines}):
        before, after = lines[script, "unchanged"], lines[script, "changed"]
        measure = "" if after["measure"] == "accuracy" else " (ROC AUC)"
        rows.append(
            [
                f"`{script}`{measure}",
                *(spread(line, "mean_percent") for line in (before, after)),
                *(f"{line['waited_s'] * 1e3:,.0f} ms" for line in (before, after)),
                f"{before['waited_s'] / after['waited_s']:.1f}",
                f"{before['epoch_s'] / after['epoch_s']:.2f}",
            ]
        )
    heads = ["script", "test, %, before", "after", "waiting in an epoch, before", "after"]
    heads += ["waiting before / after", "speed-up of an epoch"]
    return with_caption(
        markdown(heads, rows), lines.values(), "python -m bench.training.examples --rivals FOLDER"
    )


@table
def gather() -> str:
    """Return the table of bandwidths of random gathers on the CPU, relative to a large copy."""
    lines = newest(read("gather_cpu"), "way", "row_bytes", "table_pages")
    methods = [
        "gather, one thread",
        "gather, two threads",
        "torch.index_select(out=)",
        "numpy.take(out=)",
    ]
    widths = sorted({row_bytes for _, row_bytes, _ in lines})
    rows = []
    for pages in ("4 KiB", "2 MiB"):
        for row_bytes in widths:
            cells = [lines.get((method, row_bytes, pages)) for method in methods]
            if all(cell is None for cell in cells):
                continue
            shown = [None if cell is None else f"{cell['share_of_copy']:.2f}" for cell in cells]
            rows.append([f"{row_bytes:,} B", pages, *shown])
    text = markdown(["row", "pages of the table", *methods], rows)
    return with_caption(text, lines.values(), "python -m bench.loading.gather")


@table
def aggregate() -> str:
    """Return the table of times of an aggregation, forward and backward."""
    lines = newest(
        [line for line in read("aggregate_cpu") if "median_s" in line], "what", "way", "columns"
    )
    methods = ["gcnzc, new blocks", "gcnzc", "dgl", "torch.sparse"]
    cases = sorted({(aggregation, columns) for aggregation, _, columns in lines}, reverse=True)
    rows = [
        [aggregation, columns]
        + [
            f"{lines[aggregation, method, columns]['median_s'] * 1e3:,.0f} ms"
            if (aggregation, method, columns) in lines
            else None
            for method in methods
        ]
        for aggregation, columns in cases
    ]
    heads = [
        "aggregation",
        "columns",
        "gcnzc, blocks of a new minibatch",
        "gcnzc, the same blocks again",
        "DGL",
        "torch.sparse",
    ]
    return with_caption(markdown(heads, rows), lines.values(), "python -m bench.training.aggregate")


@table
def full_batch_layers() -> str:
    """Return the table of times of full-batch layers, forward and backward."""
    lines = newest(read("layers_cpu"), "graph", "layer", "input_gradient", "way")
    ways = ["gcnzc", "PyG, edge list", "PyG, EdgeIndex", "PyG, sparse CSR", "DGL"]
    cases = list(dict.fromkeys(case[:3] for case in lines))
    rows = []
    for graph, layer, is_hidden in cases:
        found = [lines.get((graph, layer, is_hidden, way)) for way in ways]
        own, *others = [None if line is None else line["median_s"] for line in found]
        assert own is not None, "each case has a line of gcnzc"
        fastest = min(seconds for seconds in others if seconds is not None)
        cells = [None if s is None else f"{significant(s * 1e3)} ms" for s in (own, *others)]
        columns = lines[graph, layer, is_hidden, "gcnzc"]["columns"].replace("->", " to ")
        name = f"{layer.upper()}, {columns}"
        rows.append([graph, name, "yes" if is_hidden else "no", *cells, f"{fastest / own:.2f}"])
    heads = ["graph", "layer and columns", "gradient of the input", *ways, "fastest other / gcnzc"]
    command = "python -m bench.training.layers"
    return with_caption(markdown(heads, rows), lines.values(), command)


@table
def memory() -> str:
    """Return the table of the memory of preparing and training."""
    rows, lines = [], newest(read("memory"), "command")
    for command, line in lines.items():
        gigabytes = [line[key] / 1e9 for key in ("feature_bytes", "unshared_peak_bytes")]
        rows.append(
            [
                f"`gcnzc {command}`",
                *(f"{each:.2f} GB" for each in gigabytes),
                f"{line['median_s']:.0f} s",
            ]
        )
    text = markdown(["command", "features", "unshared memory at the peak", "time"], rows)
    return with_caption(text, lines.values(), "python -m bench.data.memory")


@table
def shared_memory() -> str:
    """Return the table of the memory of all workers of a machine."""
    lines = newest(read("shared_memory"), "layout", "workers")
    rows = [
        [
            layout,
            workers,
            *(
                f"{line[key] / 1e6:,.0f} MB"
                for key in ("feature_bytes", "loaded_bytes", "evaluated_bytes")
            ),
        ]
        for (layout, workers), line in sorted(lines.items())
    ]
    heads = ["folder", "workers", "features", "memory for the data, all workers", "with evaluation"]
    return with_caption(markdown(heads, rows), lines.values(), "python -m bench.data.shared_memory")


@table
def build() -> str:
    """Return the table of times of generating and building graphs."""
    lines = newest(read("build"), "way", "graph", "edges")
    rows = [
        [
            method,
            graph,
            f"{line['nodes']:,}",
            f"{edges:,}",
            f"{significant(line['median_s'])} s",
            f"{significant(line['edges_per_s'] / 1e6)} M",
        ]
        for (method, graph, edges), line in lines.items()
    ]
    text = markdown(["operation", "graph", "nodes", "edges", "time", "edges/s"], rows)
    return with_caption(text, lines.values(), "python -m bench.data.build")


@table
def accuracy() -> str:
    """Return the table of test accuracies with gcnzc's sampler, DGL's, and the whole graph."""
    lines = newest(
        [line for line in read("accuracy") if "test_percent" in line], "graph", "model", "sampler"
    )
    rows = []
    for graph, model in sorted({(graph, model) for graph, model, _ in lines}):
        found = [lines.get((graph, model, sampler)) for sampler in ("gcnzc", "dgl", "none")]
        metrics = {line["metric"] for line in found if line is not None}
        metric = " (ROC AUC)" if metrics == {"rocauc"} else ""
        scores = [None if line is None else spread(line) for line in found]
        sampled, whole = (
            None if line is None else f"{line['target_percent']:g}"
            for line in (found[0] or found[1], found[2])
        )
        rows.append([graph + metric, MODELS[model], *scores[:2], sampled, scores[2], whole])
    heads = ["graph", "model", "sampled, %", "with DGL's sampler, %", "target, %"]
    heads += ["full batch, %", "target, %"]
    return with_caption(markdown(heads, rows), lines.values(), "python -m bench.training.accuracy")


MODELS = {"sage": "GraphSAGE", "gcn": "GCN", "gin": "GIN", "gat": "GAT", "gatv2": "GATv2"}
MODELS["sage, label inputs"] = "GraphSAGE with `--label-inputs`"
FORMATS = ["float16", "bfloat16", "int8", "int8-columns", "float8_e4m3fn", "float8_e5m2"]


@table
def quantize() -> str:
    """Return the table of test accuracies with quantized features, as differences to float32."""
    lines = newest(read("quantize"), "graph", "model", "form")
    rows = []
    for graph, model in sorted({(graph, model) for graph, model, _ in lines}):
        base = lines.get((graph, model, "float32"))
        cells = []
        for name in FORMATS:
            line = lines.get((graph, model, name))
            found = line is not None and line["difference_percent"] is not None
            cells.append(
                f"{line['difference_percent']:+.2f} ± {line['difference_spread_percent']:.2f}"
                if line is not None and found
                else None
            )
        rows.append([graph, MODELS[model], None if base is None else spread(base), *cells])
    heads = ["graph", "model", "float32, %", *(f"`{name}`" for name in FORMATS)]
    return with_caption(
        markdown(heads, rows), lines.values(), "python -m bench.data.quantize GRAPH"
    )


@table
def link_prediction() -> str:
    """Return the table of test AUCs of link prediction."""
    lines = newest([line for line in read("linkpred") if "test_auc" in line], "way", "seed")
    rows = []
    titles = {
        "gcnzc": "`gcnzc train --task link`",
        "gcnzc, as PyG": "`gcnzc train --task link`, with PyG's negatives and exclusions",
        "pyg": "PyG's `LinkNeighborLoader` and layers",
        "pyg, drawn": "PyG, with batch normalization over fewer nodes",
        "gcnzc, chance": "`gcnzc train --task link`, on random edges",
    }
    for method, title in titles.items():
        values = [100 * line["test_auc"] for (each, _), line in lines.items() if each == method]
        mean = sum(values) / len(values)
        deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
        rows.append([title, f"{mean:.2f} ± {deviation:.2f}", len(values)])
    text = markdown(["method", "test AUC, %", "runs"], rows)
    return with_caption(
        text, lines.values(), "python -m bench.training.link_prediction --rivals FOLDER"
    )


@table
def cache_hit_rates() -> str:
    """Return the table of hit rates of the feature cache, predicted and measured."""
    lines = newest(
        [line for line in read("hot") if line.get("counted") == 100],
        "fanouts",
        "batch_size",
        "graph",
        "ranking",
        "share",
    )
    shares, rankings = sorted({key[4] for key in lines}), ["in-degree", "presampled"]
    shares = [share for share in shares if share in (0.01, 0.05, 0.2)]
    rows = []
    for fanouts, batch_size, graph in sorted({key[:3] for key in lines}):
        first = lines[fanouts, batch_size, graph, "presampled", shares[0]]
        cells = []
        for share in shares:
            for ranking in rankings:
                line = lines[fanouts, batch_size, graph, ranking, share]
                cells.append(f"{100 * line['predicted']:.1f} / {100 * line['measured']:.1f}")
        rows.append(
            [
                graph,
                f"{fanouts}; {batch_size}",
                f"{first['nodes_per_batch'] / first['nodes']:.0%}",
                *cells,
            ]
        )
    heads = ["graph", "fanouts; seeds", "rows needed by a minibatch"]
    heads += [f"{share:.0%} of the rows, {ranking}" for share in shares for ranking in rankings]
    return with_caption(
        markdown(heads, rows), lines.values(), "python -m bench.loading.feature_cache"
    )


@table
def cache_prediction_error() -> str:
    """Return the table of errors of predicted hit rates, by number of counted minibatches."""
    rows, used = [], []
    for counted in (20, 100, 400):
        lines = [line for line in read("hot") if line.get("counted") == counted]
        used += lines
        differences = [100 * line["difference"] for line in lines]
        rows.append(
            [
                counted,
                len(lines),
                f"{min(differences):+.2f}",
                f"{max(differences):+.2f}",
                f"{max(line['count_s'] for line in lines):.2f} s",
            ]
        )
    heads = [
        "counted minibatches",
        "predictions",
        "smallest predicted - measured, percentage points",
        "largest predicted - measured, percentage points",
        "longest time of counting",
    ]
    return with_caption(markdown(heads, rows), used, "python -m bench.loading.feature_cache")


@table
def cache_counting() -> str:
    """Return the table of the time that counting hits adds to a gather on the CPU."""
    lines = newest(
        [line for line in read("hot") if "of_plain" in line or line.get("way") == "cached"],
        "dtype",
        "columns",
    )
    rows = [
        [
            f"{columns} columns, {dtype.removeprefix('torch.')}",
            f"{100 * (line['of_plain'] - 1):+.1f} %",
        ]
        for (dtype, columns), line in lines.items()
        if "of_plain" in line
    ]
    text = markdown(["row", "time of a gather that counts hits"], rows)
    return with_caption(text, lines.values(), "python -m bench.loading.feature_cache")


@table
def bus_requests() -> str:
    """Return the table of requests for a row and efficiency on the bus, by layout."""
    lines = newest(
        [line for line in read("wire") if "requests_per_row" in line], "name", "dtype", "layout"
    )
    layouts = list(dict.fromkeys(layout for _, _, layout in lines))
    rows = []
    for name, dtype in dict.fromkeys((name, dtype) for name, dtype, _ in lines):
        selected = {layout: lines[name, dtype, layout] for layout in layouts}
        shown = (
            f"{line['requests_per_row']:.2f}, {line['efficiency']:.1%}"
            for line in selected.values()
        )
        chosen = next(layout for layout, line in selected.items() if line["chosen"])
        one = selected[chosen]
        rows.append(
            [
                name,
                dtype,
                one["row_bytes"],
                *shown,
                f"{selected['pitched']['memory']:+.1%}",
                f"{one['pitch_bytes']} B apart, {chosen}",
            ]
        )
    heads = [
        "dataset",
        "type",
        "bytes of a row",
        *layouts,
        "memory of padded rows",
        "stored, read as",
    ]
    return with_source(markdown(heads, rows), lines.values(), "python -m bench.loading.pcie")


@table
def bus_limits() -> str:
    """Return the table of the lower of the two limits of a PCIe bus."""
    lines = newest(
        [line for line in read("wire") if "tags" in line],
        "rows",
        "layout",
        "pcie_generation",
        "tags",
    )
    cases = sorted({key[2:] for key in lines})
    rows = []
    for name, layout in dict.fromkeys(key[:2] for key in lines):
        cells = []
        for case in cases:
            line = lines[(name, layout, *case)]
            least = min(line["by_wire_bytes_per_s"], line["by_tags_bytes_per_s"])
            cells.append(f"{least / 1e9:.1f}, {line['binds']}")
        rows.append([name, layout, *cells])
    heads = ["rows", "layout", *(f"PCIe {generation}, {tags} tags" for generation, tags in cases)]
    return with_source(markdown(heads, rows), lines.values(), "python -m bench.loading.pcie")
