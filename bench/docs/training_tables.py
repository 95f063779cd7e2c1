"""Tables of accuracy and of training."""

from collections.abc import Iterator

from bench.docs.loading_tables import title_of
from bench.docs.table import Cells, Line, Row, Table, by_key, newest, read, spread
from bench.rivals.steps import KEPT

MODELS = {"sage": "GraphSAGE", "gcn": "GCN", "gin": "GIN", "gat": "GAT", "gatv2": "GATv2"}
MODELS["sage, label inputs"] = "GraphSAGE with `label_inputs`"
LAYER_KINDS = {
    "plain": "without residuals",
    "linear": "`residual`",
    "pre-activation": "`pre_activation,residual`",
}
FORMATS = ("float16", "bfloat16", "int8", "int8-columns", "float8_e4m3fn", "float8_e5m2")
LINK_METHODS = {
    "gcnzc": "`gcnzc train --task link`",
    "gcnzc, as PyG": "`gcnzc train --task link`, with PyG's negatives and exclusions",
    "pyg": "PyG's `LinkNeighborLoader` and layers",
    "pyg, drawn": "PyG, with batch normalization over fewer nodes",
    "gcnzc, chance": "`gcnzc train --task link`, on random edges",
}
SHOP_METHODS = {
    "popularity": "the most popular items",
    "own items": "the latest items of the user",
    "gcnzc": "PyG's `SAGEConv` with gcnzc's `LinkNeighborLoader`",
    "pyg": "the same with PyG's `LinkNeighborLoader`",
}


def roc_auc(row: Row) -> str:
    """Return a note on scores that are not accuracies."""
    return " (ROC AUC)" if {line["metric"] for line in row.lines} == {"rocauc"} else ""


@Table(
    "accuracy",
    "graph model",
    "bench.training.accuracy",
    among="sampler",
    where=lambda x: "test_percent" in x,
    sort=by_key,
)
def accuracy(x: Row) -> Cells:
    """Test accuracies with gcnzc's sampler, DGL's, and the whole graph."""
    sampled, whole = x.at(sampler="gcnzc") or x.at(sampler="dgl"), x.at(sampler="none")
    return {
        "graph": x.graph + roc_auc(x),
        "model": MODELS[x.model],
        **x.across("sampler", {"gcnzc": "sampled, %", "dgl": "with DGL's sampler, %"}, spread),
        "target, %": sampled and f"{sampled.target_percent:g}",
        "full batch, %": whole and spread(whole),
        "target of full batch, %": whole and f"{whole.target_percent:g}",
    }


@Table("presets", "preset", "bench.training.presets PRESET", sort=by_key)
def presets(x: Row) -> Cells:
    """Scores of presets, beside the published ones."""
    return {
        "preset": f"`{x.preset}`{roc_auc(x)}",
        "split": x.split,
        "test, %": spread(x.lines[0]),
        "published, %": f"{x.published_percent:.2f}",
        "difference": f"{x.test_percent - x.published_percent:+.2f}",
        "runs": len(x.tests_percent),
        "epochs": max(x.epochs),
        "seconds per epoch": f"{x.epoch_s:.3g}",
    }


@Table("precision", "case precision", "bench.training.precision PRESET")
def precision(x: Row) -> Cells:
    """Scores and epochs in mixed precision, compared with float32."""
    low, high = x.interval_points
    return {
        "preset": f"`{x.case}`",
        "precision": f"`{x.precision}`",
        "float32, %": f"{x.float32_percent:.2f}",
        "mixed, %": f"{x.test_percent:.2f}",
        "difference, points (95 % interval)": (
            f"{x.difference_points:+.2f} ({low:+.2f} to {high:+.2f})"
        ),
        "runs": x.seeds,
        "epochs": max(x.epochs),
        "speed-up of an epoch": f"{x.speedup:.2f}",
    }


@Table("depth", "layers", "bench.training.depth", among="kind", sort=by_key)
def depth(x: Row) -> Cells:
    """Scores, memory and time of models by their number of layers."""
    deep = x.at(kind="pre-activation") or Line()
    return {
        "layers": x.layers,
        **x.across("kind", {kind: f"{name}, %" for kind, name in LAYER_KINDS.items()}, spread),
        "peak memory, MiB": f"{deep.peak_memory_bytes / 2**20:,.0f}",
        "seconds per epoch": f"{deep.epoch_s:.2g}",
    }


@Table("quantize", "graph model", "bench.data.quantize GRAPH", among="form", sort=by_key)
def quantize(x: Row) -> Cells:
    """Test accuracies with quantized features, as differences to float32."""

    def difference(line: Line) -> str | None:
        if line.difference_percent is None:
            return None
        return f"{line.difference_percent:+.2f} ± {line.difference_spread_percent:.2f}"

    return {
        "graph": x.graph,
        "model": MODELS[x.model],
        **x.across("form", {"float32": "float32, %"}, spread),
        **x.across("form", "`{}`", difference, FORMATS),
    }


@Table(
    "linkpred",
    "way",
    "bench.training.link_prediction --rivals FOLDER",
    among="seed",
    where=lambda x: "test_auc" in x,
    rows=LINK_METHODS,
)
def link_prediction(x: Row) -> Cells:
    """Test AUCs of link prediction."""
    return {"method": x.title, "test AUC, %": x.spread("test_auc", 100), "runs": len(x.lines)}


def hetero_scores() -> Iterator[Line]:
    """Yield the accuracy on each graph with types, and what it is compared with."""
    words = newest(read("hetero_words"), "graph", "model")
    for graph in dict.fromkeys(graph for graph, _ in words):
        ours, gcn = words[graph, "rgcn"], words[graph, "gcn"]
        name = f"{graph}, words as nodes, {len(ours.tests_percent)} seeds"
        other = f"`GCN` with the words as features: {spread(gcn)}"
        yield Line(ours, name=name, model="`RGCN`", score=spread(ours), other=other)
    lines = list(newest([line for line in read("typed") if line.times], "seed").values())
    row = Row((), lines, lines)
    yield Line(
        lines[-1],
        name=f"`gcnzc make --kind typed`, {len(lines)} seeds",
        model="PyG's `HeteroConv` of `SAGEConv`, gcnzc's `NeighborLoader`",
        score=row.spread("accuracy", 100),
        other=f"best possible: {row.mean('best_accuracy', 100):.2f}",
    )


@Table(
    hetero_scores,
    "name",
    "bench.training.hetero` and `python -m bench.accuracy.typed",
)
def hetero_accuracy(x: Row) -> Cells:
    """Accuracies on heterogeneous graphs with a known reference."""
    return {
        "graph": x.name,
        "model": x.model,
        "test accuracy, %": x.score,
        "compared with, %": x.other,
    }


@Table(
    lambda: [Line(line, seed=line.get("seed")) for line in read("ecomm")],
    "method",
    "bench.accuracy.ecomm",
    among="seed",
    where=lambda x: x.get("epochs", 1) == 1,
    rows=SHOP_METHODS,
)
def shop_links(x: Row) -> Cells:
    """Link prediction on ecomm_temporal."""
    recall, mrr = x.spread("recall_at_20", digits=4), x.spread("mrr", digits=4)
    return {"method": x.title, "recall@20": recall, "MRR": mrr}


def step_lines() -> list[Line]:
    """Return the lines of training steps.

    Configurations of DGL in which freed memory is kept are those of the system "dgl, kept".
    """
    return [
        Line(line, measured=line.system + ", kept" * line.way.endswith(KEPT))
        for line in read("steps")
        if "way" in line
    ]


@Table(
    step_lines,
    "kind measured",
    "bench.training.steps --rivals FOLDER",
    among="way",
    pick=lambda lines: min(lines, key=lambda line: line.median_s),
    sort=lambda x: list(MODELS).index(x.kind),
)
def steps(x: Row) -> Cells:
    """Times of training steps, compared with DGL and PyG."""
    ours = next(line for line in x.all if (line.kind, line.system) == (x.kind, "ours"))
    way = x.way.partition(", ")[2].replace("1 workers", "1 worker")
    return {
        "model": MODELS[x.kind],
        "system": title_of(x.lines[0]) + (f", {way}" if way else ""),
        "step, ms": f"{1e3 * x.median_s:.0f}",
        "gcnzc is faster by a factor of": f"{x.median_s / ours.median_s:.2f}",
    }


@Table("steps", "floor_of", "bench.training.steps --rivals FOLDER")
def steps_floor(x: Row) -> Cells:
    """Floors of training steps."""
    return {
        "model": MODELS[x.floor_of],
        "matrix products, ms": f"{x.gemm_ms:.0f}",
        "moving rows, ms": f"{x.rows_ms:.0f}",
        "step, ms": f"{x.step_ms:.0f}",
        "floor / step": f"{100 * x.share_of_floor:.0f} %",
    }


@Table("large_graph", "graph scale feature_dtype limit_gib", "bench.training.large_graph FOLDER")
def large_graph(x: Row) -> Cells:
    """Runs on a large graph within a limit of memory."""
    best = x.best_possible_accuracy
    return {
        "graph": f"{x.graph}, scale {x.scale:g}",
        "nodes": f"{x.num_nodes:,}",
        "edges": f"{x.num_edges:,}",
        "features": x.feature_dtype,
        "files, GiB": f"{x.graph_bytes / 2**30:.1f}",
        "limit, GiB": f"{x.limit_gib:g}",
        "epoch, s": f"{x.epoch_s:.0f}",
        "evaluation, s": f"{x.evaluate_s:.0f} ({x.evaluation})",
        "test accuracy, %": f"{100 * x.test_accuracy:.2f} of {100 * best:.2f}",
    }
