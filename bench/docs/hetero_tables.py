"""Compute the tables about heterogeneous graphs: speed of loading, and accuracy."""

import statistics

from bench.docs.result_tables import markdown, newest, read, table, with_caption

SYSTEMS = {
    "hetero_ours": "gcnzc {rival_gcnzc}",
    "hetero_pyg": "PyG {rival_torch_geometric} with pyg-lib {rival_pyg_lib}",
}

# what a rate is relative to
CLOCKS = {"wall": "time", "cpu": "CPU time"}


@table
def hetero_loader() -> str:
    """Return the table of the throughput of loaders of a heterogeneous graph."""
    lines = read("hetero_loader")
    # CPU times are only for machines on which other programs run
    clock = "wall" if any(line["clock"] == "wall" for line in lines) else "cpu"
    lines = [line for line in lines if line["clock"] == clock]
    found, ratios = newest(lines, "system", "way"), newest(lines, "ratio")
    rows = []
    for kind in ("uniform", "temporal"):
        for system, title in SYSTEMS.items():
            own = [
                line
                for (name, way), line in found.items()
                if name == system and way.startswith(kind)
            ]
            if own:
                best = max(own, key=lambda line: line["seeds_per_s"])
                ratio = ratios.get(f"pyg / ours, {kind}") if system == "hetero_pyg" else None
                speedup = None if ratio is None else f"{ratio['times']:.1f}"
                rows.append(
                    [
                        title.format(**best),
                        best["way"],
                        CLOCKS[clock],
                        f"{best['seeds_per_s']:,.0f}",
                        speedup,
                    ]
                )
    heads = ["system", "configuration", "per second of", "seed nodes", "speed-up of gcnzc"]
    command = "python -m bench.loading.hetero --rivals FOLDER"
    command += " --sequential" if clock == "cpu" else ""
    return with_caption(markdown(heads, rows), found.values(), command)


@table
def hetero_accuracy() -> str:
    """Return the table of accuracies on heterogeneous graphs with a known reference."""
    words = newest(read("hetero_words"), "graph", "model")
    rows = []
    for graph in dict.fromkeys(graph for graph, _ in words):
        ours, gcn = words[graph, "rgcn"], words[graph, "gcn"]
        cells = [
            f"{line['test_percent']:.2f} ± {line['spread_percent']:.2f}" for line in (ours, gcn)
        ]
        name = f"{graph}, words as nodes, {len(ours['tests_percent'])} seeds"
        rows.append([name, "`RGCN`", cells[0], f"`GCN` with the words as features: {cells[1]}"])
    typed = newest([line for line in read("typed") if line["times"]], "seed")
    accuracies = [100 * line["accuracy"] for line in typed.values()]
    best = statistics.mean(100 * line["best_accuracy"] for line in typed.values())
    rows.append(
        [
            f"`gcnzc make --kind typed`, {len(typed)} seeds",
            "PyG's `HeteroConv` of `SAGEConv`, gcnzc's `NeighborLoader`",
            f"{statistics.mean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f}",
            f"best possible: {best:.2f}",
        ]
    )
    heads = ["graph", "model", "test accuracy, %", "compared with, %"]
    lines = [*words.values(), *typed.values()]
    commands = "python -m bench.training.hetero` and `python -m bench.accuracy.typed"
    return with_caption(markdown(heads, rows), lines, commands)


@table
def shop_links() -> str:
    """Return the table of link prediction on ecomm_temporal."""
    lines = [line for line in read("ecomm") if line.get("epochs", 1) == 1]
    for line in lines:
        line["seed"] = line.get("seed")
    found = newest(lines, "method", "seed")
    names = {
        "popularity": "the most popular items",
        "own items": "the latest items of the user",
        "gcnzc": "PyG's `SAGEConv` with gcnzc's `LinkNeighborLoader`",
        "pyg": "the same with PyG's `LinkNeighborLoader`",
    }
    rows = []
    for method, name in names.items():
        runs = [line for (each, _), line in found.items() if each == method]
        cells = []
        for score in ("recall_at_20", "mrr"):
            values = [line[score] for line in runs]
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.4f}{spread}")
        rows.append([name, *cells])
    heads = ["method", "recall@20", "MRR"]
    return with_caption(markdown(heads, rows), found.values(), "python -m bench.accuracy.ecomm")
