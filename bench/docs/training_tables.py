"""Compute the tables of published recipes, and of training steps."""

from collections.abc import Iterable

from bench.docs.result_tables import (
    Line,
    markdown,
    newest,
    read,
    spread,
    table,
    title_of,
    with_caption,
    with_source,
)
from bench.rivals.steps import KEPT

KINDS = {"sage": "GraphSAGE", "gcn": "GCN", "gat": "GAT"}
LAYER_KINDS = {
    "plain": "without residuals",
    "linear": "`--residual`",
    "pre-activation": "`--pre-activation --residual`",
}


@table
def presets() -> str:
    """Return the table of the scores of presets, beside the published ones."""
    lines = newest(read("presets"), "preset")
    rows = []
    for name, line in sorted(lines.items()):
        metric = " (ROC AUC)" if line["metric"] == "rocauc" else ""
        epochs = f"{max(line['epochs'])}"
        gap = line["test_percent"] - line["published_percent"]
        published = f"{line['published_percent']:.2f}"
        rows.append(
            [
                f"`{name}`{metric}",
                line["split"],
                spread(line),
                published,
                f"{gap:+.2f}",
                len(line["tests_percent"]),
                epochs,
                f"{line['epoch_s']:.3g}",
            ]
        )
    heads = ["preset", "split", "test, %", "published, %", "difference", "runs", "epochs"]
    heads.append("seconds per epoch")
    command = "python -m bench.training.presets PRESET"
    return with_caption(markdown(heads, rows), lines.values(), command)


@table
def precision() -> str:
    """Return the table of scores and epochs in mixed precision, compared with float32."""
    lines = newest(read("precision"), "case", "precision")
    rows = []
    for (case, name), line in lines.items():
        low, high = line["interval_points"]
        rows.append(
            [
                f"`{case}`",
                f"`{name}`",
                f"{line['float32_percent']:.2f}",
                f"{line['test_percent']:.2f}",
                f"{line['difference_points']:+.2f} ({low:+.2f} to {high:+.2f})",
                line["seeds"],
                max(line["epochs"]),
                f"{line['speedup']:.2f}",
            ]
        )
    heads = ["preset", "precision", "float32, %", "mixed, %", "difference, points (95 % interval)"]
    heads += ["runs", "epochs", "speed-up of an epoch"]
    command = "python -m bench.training.precision PRESET"
    return with_caption(markdown(heads, rows), lines.values(), command)


@table
def depth() -> str:
    """Return the table of scores, memory and time of models by their number of layers."""
    lines = newest(read("depth"), "kind", "layers")
    rows = []
    for layers in sorted({layers for _, layers in lines}):
        scores = [spread(lines[kind, layers]) for kind in LAYER_KINDS]
        deep = lines["pre-activation", layers]
        memory = f"{deep['peak_memory_bytes'] / 2**20:,.0f}"
        rows.append([layers, *scores, memory, f"{deep['epoch_s']:.2g}"])
    heads = ["layers", *(f"{name}, %" for name in LAYER_KINDS.values())]
    heads += ["peak memory, MiB", "seconds per epoch"]
    return with_caption(markdown(heads, rows), lines.values(), "python -m bench.training.depth")


def best_steps(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """Return the fastest configuration of each kind of model and system.

    Configurations of DGL in which freed memory is kept are those of the system "dgl, kept".
    """
    best: dict[tuple[str, str], Line] = {}
    for line in newest(lines, "kind", "system", "way").values():
        kept = ", kept" if line["way"].endswith(KEPT) else ""
        key = line["kind"], line["system"] + kept
        if key not in best or line["median_s"] < best[key]["median_s"]:
            best[key] = line
    return best


@table
def steps() -> str:
    """Return the table of the times of training steps, compared with DGL and PyG."""
    best = best_steps(read("steps"))
    rows = []
    for (kind, _), line in sorted(best.items(), key=lambda case: list(KINDS).index(case[0][0])):
        way = line["way"].partition(", ")[2].replace("1 workers", "1 worker")
        rows.append(
            [
                KINDS[kind],
                title_of(line["system"], line) + (f", {way}" if way else ""),
                f"{1e3 * line['median_s']:.0f}",
                f"{line['median_s'] / best[kind, 'ours']['median_s']:.2f}",
            ]
        )
    heads = ["model", "system", "step, ms", "gcnzc is faster by a factor of"]
    command = "python -m bench.training.steps --rivals FOLDER"
    return with_caption(markdown(heads, rows), best.values(), command)


@table
def steps_floor() -> str:
    """Return the table of the floors of training steps."""
    lines = newest(read("steps"), "floor_of")
    rows = [
        [
            KINDS[kind],
            f"{line['gemm_ms']:.0f}",
            f"{line['rows_ms']:.0f}",
            f"{line['step_ms']:.0f}",
            f"{100 * line['share_of_floor']:.0f} %",
        ]
        for kind, line in lines.items()
    ]
    heads = ["model", "matrix products, ms", "moving rows, ms", "step, ms", "floor / step"]
    command = "python -m bench.training.steps --rivals FOLDER"
    return with_caption(markdown(heads, rows), lines.values(), command)


@table
def large_graph() -> str:
    """Return the table of runs on a large graph within a limit of memory."""
    lines = newest(read("large_graph"), "graph", "scale", "feature_dtype", "limit_gib")
    rows = [
        [
            f"{line['graph']}, scale {line['scale']:g}",
            f"{line['num_nodes']:,}",
            f"{line['num_edges']:,}",
            f"{line['feature_dtype']}",
            f"{line['graph_bytes'] / 2**30:.1f}",
            f"{line['limit_gib']:g}",
            f"{line['epoch_s']:.0f}",
            f"{line['evaluate_s']:.0f} ({line['evaluation']})",
            f"{100 * line['test_accuracy']:.2f} of {100 * line['best_possible_accuracy']:.2f}",
        ]
        for line in lines.values()
    ]
    heads = ["graph", "nodes", "edges", "features", "files, GiB", "limit, GiB", "epoch, s"]
    heads += ["evaluation, s", "test accuracy, %"]
    command = "python -m bench.training.large_graph FOLDER"
    return with_caption(markdown(heads, rows), lines.values(), command)


@table
def partition() -> str:
    """Return the edges between the parts of workers, and the nodes that a worker reads."""
    lines = newest(read("partition"), "graph", "workers")
    workers = sorted({key[1] for key in lines})
    most, rows = workers[-1], []
    for graph in sorted({key[0] for key in lines}):
        cuts = [
            " / ".join(f"{lines[graph, number][name]:.0f} %" for number in workers)
            for name in ("cut_percent", "random_cut_percent")
        ]
        last = lines[graph, most]
        read_percents = (last["read_percent"], last["shuffled_read_percent"])
        rows.append([graph, *cuts, *(f"{percent:.0f} %" for percent in read_percents)])
    shown = " / ".join(map(str, workers))
    heads = [
        "graph",
        f"edges between parts, {shown} workers",
        "with random parts",
        f"nodes that one of {most} workers reads in an epoch, `local`",
        "`shuffled`",
    ]
    return with_source(
        markdown(heads, rows), lines.values(), "python -m bench.loading.partition GRAPH.npz ..."
    )
