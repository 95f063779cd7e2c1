"""Tables of loading, of data and memory, of the PCIe bus, and of compiled kernels."""

from bench.docs.table import (
    Cells,
    Line,
    Row,
    Table,
    by_key,
    compiled,
    computed,
    newest,
    read,
    significant,
    spread,
    uncaptioned,
)
from gcnzc.datasets.table_options import KEYS

SYSTEMS = {
    "ours": "gcnzc {rival_gcnzc}",
    "dgl": "DGL {rival_dgl}",
    "graphbolt": "GraphBolt of DGL {rival_dgl}",
    "pyg": "PyG {rival_torch_geometric} with {sampler}",
    "hetero_ours": "gcnzc {rival_gcnzc}",
    "hetero_pyg": "PyG {rival_torch_geometric} with pyg-lib {rival_pyg_lib}",
}
LOADER = "bench.loading.loader --rivals FOLDER"
LAYOUTS = ("scalar", "vector", "wrapped", "shifted", "pitched")
GATHERS = ("gather, one thread", "gather, two threads", "torch.index_select(out=)")
LAYERS = ("gcnzc", "PyG, edge list", "PyG, EdgeIndex", "PyG, sparse CSR", "DGL")
AGGREGATIONS = {
    "gcnzc, new blocks": "gcnzc, blocks of a new minibatch",
    "gcnzc": "gcnzc, the same blocks again",
    "dgl": "DGL",
    "torch.sparse": "torch.sparse",
}
EMBEDDINGS = {
    ("adagrad", "gcnzc"): "`gcnzc.optim.SparseAdagrad`",
    ("adagrad", "torch"): "`torch.optim.Adagrad`, `nn.Embedding(sparse=True)`",
    ("adam", "gcnzc"): "`gcnzc.optim.SparseAdam`",
    ("adam", "torch"): "`torch.optim.SparseAdam`, `nn.Embedding(sparse=True)`",
}
RESOURCES = {
    "registers": "registers",
    "spilled bytes": "spill_store_bytes",
    "shared memory, B": "shared_bytes",
    "barriers": "barriers",
    "widest load, B": "widest_load_bytes",
    "in flight per lane, B": "load_bytes_in_flight",
    "in flight per multiprocessor, B": "load_bytes_in_flight_per_multiprocessor",
}


def title_of(line: Line) -> str:
    """Return the name of a measured system with its versions."""
    # PyG samples with pyg-lib if it is installed; older lines have no `rival_pyg_lib`
    libraries = {"pyg-lib": "rival_pyg_lib", "torch-sparse": "rival_torch_sparse"}
    found = [f"{name} {line[k]}" for name, k in libraries.items() if line.get(k, "none") != "none"]
    return SYSTEMS[line.system].format(**line, sampler=found[0] if found else "no sampler")


def fastest(lines: list[Line]) -> Line:
    """Return the line with the most seed nodes per second."""
    return max(lines, key=lambda line: line.seeds_per_s)


def by_speed(row: Row) -> float:
    """Sort rows by their seed nodes per second, the fastest first."""
    return -row.seeds_per_s


def speedup(row: Row) -> str | None:
    """Return how many times gcnzc's seed nodes per second are another system's."""
    ours = next(line for line in row.all if line.system == "ours")
    return None if row.system == "ours" else f"{ours.seeds_per_s / row.seeds_per_s:.1f}"


@Table(
    "loader",
    "system",
    LOADER,
    among="way on",
    where=lambda x: x.get("way", "").startswith("loader,") and "without features" not in x.way,
    pick=fastest,
    rows=SYSTEMS,
)
def loader(x: Row) -> Cells:
    """Throughput of the loaders."""
    return {
        "system": f"{title_of(x.lines[0])}, torch {x.rival_torch.split('+')[0]}",
        "configuration": x.way,
        "seed nodes/s": f"{x.seeds_per_s:,.0f}",
        "speed-up of gcnzc": speedup(x),
    }


@Table("heterograph", "system", "bench.loading.heterograph", "way", pick=fastest, sort=by_speed)
def heterograph(x: Row) -> Cells:
    """Throughput of loaders of heterographs."""
    ratio = newest(read("heterograph"), "ratio")["ours / dgl"]
    return {
        "system": title_of(x.lines[0]),
        "configuration": x.way,
        "seed nodes/s": f"{x.seeds_per_s:,.0f}",
        "speed-up of gcnzc, median of rounds": (
            None if x.system == "ours" else f"{ratio.times:.1f}"
        ),
    }


def hetero_lines() -> list[Line]:
    """Return the lines of loaders of heterogeneous graphs; some older ones have CPU times."""
    return [line for line in read("hetero_loader") if line.get("clock") != "cpu"]


@Table(
    lambda: [Line(x, kind=x.way.split(",")[0]) for x in hetero_lines() if "way" in x],
    "kind system",
    "bench.loading.hetero --rivals FOLDER",
    among="way",
    pick=fastest,
    sort=lambda x: (x.kind != "uniform", x.system),
)
def hetero_loader(x: Row) -> Cells:
    """Throughput of loaders of a heterogeneous graph."""
    ratio = newest(hetero_lines(), "ratio").get(f"pyg / ours, {x.kind}")
    return {
        "system": title_of(x.lines[0]),
        "configuration": x.way,
        "seed nodes/s": f"{x.seeds_per_s:,.0f}",
        "speed-up of gcnzc": (f"{ratio.times:.1f}" if ratio and x.system == "hetero_pyg" else None),
    }


@Table("loader", "system", LOADER, "on", lambda x: x.get("way") == "sampling", sort=by_speed)
def sampling(x: Row) -> Cells:
    """Throughput of sampling without features, on one thread."""
    return {
        "sampler, one thread": title_of(x.lines[-1]),
        "seed nodes/s": f"{x.seeds_per_s:,.0f}",
        "speed-up of gcnzc": speedup(x),
    }


@Table(
    "examples",
    "script",
    "bench.training.examples --rivals FOLDER",
    among="way",
    where=lambda x: "epoch_s" in x,
    sort=by_key,
)
def examples(x: Row) -> Cells:
    """DGL and PyG scripts before and after the loader is replaced."""
    before, after = (x.at(way=way) or Line() for way in ("unchanged", "changed"))
    return {
        "script": f"`{x.script}`" + " (ROC AUC)" * (after.measure != "accuracy"),
        "test, %, before": spread(before, "mean_percent"),
        "after": spread(after, "mean_percent"),
        "waiting in an epoch, before": f"{before.waited_s * 1e3:,.0f} ms",
        "waiting, after": f"{after.waited_s * 1e3:,.0f} ms",
        "waiting before / after": f"{before.waited_s / after.waited_s:.1f}",
        "speed-up of an epoch": f"{before.epoch_s / after.epoch_s:.2f}",
    }


@Table(
    "gather_cpu",
    "row_bytes table_pages",
    "bench.loading.gather",
    among="way",
    where=lambda x: x.way in (*GATHERS, "numpy.take(out=)"),
    sort=lambda x: (x.table_pages != "4 KiB", x.row_bytes),
)
def gather(x: Row) -> Cells:
    """Bandwidths of random gathers on the CPU, relative to a large copy."""
    return {
        "row": f"{x.row_bytes:,} B",
        "pages of the table": x.table_pages,
        **x.across("way", "{}", lambda x: f"{x.share_of_copy:.2f}", (*GATHERS, "numpy.take(out=)")),
    }


@Table(
    "aggregate_cpu",
    "what columns",
    "bench.training.aggregate",
    among="way",
    where=lambda x: "median_s" in x,
    sort=lambda x: (x.what.startswith("attention"), -x.columns),
)
def aggregate(x: Row) -> Cells:
    """Times of an aggregation, forward and backward."""
    return {
        "aggregation": x.what,
        "columns": x.columns,
        **x.across("way", AGGREGATIONS, lambda x: f"{x.median_s * 1e3:,.0f} ms"),
    }


@Table("layers_cpu", "graph layer input_gradient", "bench.training.layers", among="way")
def full_batch_layers(x: Row) -> Cells:
    """Times of full-batch layers, forward and backward."""
    own, *others = [line.median_s for way in LAYERS if (line := x.at(way=way))]
    return {
        "graph": x.graph,
        "layer and columns": f"{x.layer.upper()}, {x.columns.replace('->', ' to ')}",
        "gradient of the input": "yes" if x.input_gradient else "no",
        **x.across("way", "{}", lambda x: f"{significant(x.median_s * 1e3)} ms", LAYERS),
        "fastest other / gcnzc": f"{min(others) / own:.2f}",
    }


@Table("memory", "command", "bench.data.memory")
def memory(x: Row) -> Cells:
    """Memory of preparing and training."""
    return {
        "command": f"`gcnzc {x.command}`",
        "features": f"{x.feature_bytes / 1e9:.2f} GB",
        "unshared memory at the peak": f"{x.unshared_peak_bytes / 1e9:.2f} GB",
        "time": f"{x.median_s:.0f} s",
    }


@Table("embeddings", "rule library", "bench.loading.embeddings", rows=EMBEDDINGS)
def embeddings(x: Row) -> Cells:
    """Memory of each optimizer of embeddings."""
    return {
        "optimizer": x.title,
        "rows": f"{x.rows / 1e6:g} M",
        "table and state": f"{x.table_and_state_bytes / 1e9:.2f} GB",
        "other memory at the peak": f"{x.beside_bytes / 1e9:.2f} GB",
    }


@Table("build", "way graph edges", "bench.data.build")
def build(x: Row) -> Cells:
    """Times of generating and building graphs."""
    return {
        "operation": x.way,
        "graph": x.graph,
        "nodes": f"{x.nodes:,}",
        "edges": f"{x.edges:,}",
        "time": f"{significant(x.median_s)} s",
        "edges/s": f"{significant(x.edges_per_s / 1e6)} M",
    }


@Table(
    "partition",
    "graph",
    "bench.loading.partition GRAPH.npz ...",
    among="workers",
    sort=by_key,
    caption=computed,
)
def partition(x: Row) -> Cells:
    """Edges between the parts of workers, and the nodes that a worker reads."""
    workers = " / ".join(str(line.workers) for line in x.lines)
    cuts, random_cuts = (
        " / ".join(f"{each:.0f} %" for each in x.of(name))
        for name in ("cut_percent", "random_cut_percent")
    )
    return {
        "graph": x.graph,
        f"edges between parts, {workers} workers": cuts,
        "with random parts": random_cuts,
        f"nodes that one of {x.workers} workers reads in an epoch, `local`": (
            f"{x.read_percent:.0f} %"
        ),
        "`shuffled`": f"{x.shuffled_read_percent:.0f} %",
    }


@Table(
    lambda: [
        Line(line, case=(line.share, line.ranking)) for line in read("hot") if "share" in line
    ],
    "fanouts batch_size graph",
    "bench.loading.feature_cache",
    among="case",
    where=lambda x: x.counted == 100 and x.share in (0.01, 0.05, 0.2),
    sort=by_key,
)
def cache_hit_rates(x: Row) -> Cells:
    """Hit rates of the feature cache, predicted and measured."""
    return {
        "graph": x.graph,
        "fanouts; seeds": f"{x.fanouts}; {x.batch_size}",
        "rows needed by a minibatch": f"{x.nodes_per_batch / x.nodes:.0%}",
        **x.across(
            "case",
            "{0[0]:.0%} of the rows, {0[1]}",
            lambda x: f"{100 * x.predicted:.1f} / {100 * x.measured:.1f}",
        ),
    }


@Table(
    lambda: [Line(line, number=number) for number, line in enumerate(read("hot"))],
    "counted",
    "bench.loading.feature_cache",
    among="number",
    where=lambda x: x.get("counted") in (20, 100, 400),
    sort=by_key,
)
def cache_prediction_error(x: Row) -> Cells:
    """Errors of predicted hit rates, by number of counted minibatches."""
    errors = x.of("difference", 100)
    return {
        "counted minibatches": x.counted,
        "predictions": len(errors),
        "smallest predicted - measured, percentage points": f"{min(errors):+.2f}",
        "largest predicted - measured, percentage points": f"{max(errors):+.2f}",
        "longest time of counting": f"{max(x.of('count_s')):.2f} s",
    }


@Table("hot", "dtype columns", "bench.loading.feature_cache", where=lambda x: "of_plain" in x)
def cache_counting(x: Row) -> Cells:
    """Time that counting hits adds to a gather on the CPU."""
    return {
        "row": f"{x.columns} columns, {x.dtype.removeprefix('torch.')}",
        "time of a gather that counts hits": f"{100 * (x.of_plain - 1):+.1f} %",
    }


@Table(
    "wire",
    "name dtype",
    "bench.loading.pcie",
    among="layout",
    where=lambda x: "requests_per_row" in x,
    caption=computed,
)
def bus_requests(x: Row) -> Cells:
    """Requests for a row and efficiency on the bus, by layout."""
    chosen = next(line for line in x.lines if line.chosen)
    return {
        "dataset": x.name,
        "type": x.dtype,
        "bytes of a row": chosen.row_bytes,
        **x.across(
            "layout", "{}", lambda x: f"{x.requests_per_row:.2f}, {x.efficiency:.1%}", LAYOUTS
        ),
        **x.across("layout", {"pitched": "memory of padded rows"}, lambda x: f"{x.memory:+.1%}"),
        "stored, read as": f"{chosen.pitch_bytes} B apart, {chosen.layout}",
    }


@Table(
    lambda: [Line(x, case=(x.pcie_generation, x.tags)) for x in read("wire") if "tags" in x],
    "rows layout",
    "bench.loading.pcie",
    among="case",
    caption=computed,
)
def bus_limits(x: Row) -> Cells:
    """The lower of the two limits of a PCIe bus, and which of them it is."""

    def lower(x: Line) -> str:
        return f"{min(x.by_wire_bytes_per_s, x.by_tags_bytes_per_s) / 1e9:.1f}, {x.binds}"

    return {
        "rows": x.rows,
        "layout": x.layout,
        **x.across("case", "PCIe {0[0]}, {0[1]} tags", lower),
    }


@Table(
    "compiled_wire",
    "name dtype",
    "bench.loading.compiled_pcie",
    among="layout arch",
    caption=computed,
)
def compiled_bus_requests(x: Row) -> Cells:
    """Requests and bytes on the bus of compiled gathers, relative to the shifted layout."""

    def of(layout: str, key: str) -> float:
        values = {line[key] for line in x.lines if line.layout == layout}
        if len(values) > 1:
            raise ValueError(f"the requests of {x.name}, {x.dtype} depend on the architecture")
        return float(values.pop())

    return {
        "dataset": x.name,
        "type": x.dtype,
        "bytes of a row": x.row_bytes,
        "requests, shifted": f"{of('shifted', 'requests_per_row'):.2f}",
        **{
            f"relative {what}, {layout}": f"{of(layout, key) / of('shifted', key):.2f}"
            for what, key in {
                "requests": "requests_per_row",
                "bus bytes": "wire_bytes_per_row",
            }.items()
            for layout in ("scalar", "vector")
        },
        "equal to the model": "yes" if all(line.equals_model for line in x.lines) else "no",
    }


def budget_lines() -> list[Line]:
    """Return the lines of the newest run by launch, kernel and compute capability."""
    lines = [line for line in read("budgets") if "launch" in line]
    lines = [line for line in lines if line.commit == lines[-1].commit]
    lines = list(newest(lines, "launch", "kernel", "arch").values())
    return sorted(lines, key=lambda line: int(line.arch))


def resources(row: Row) -> dict[str, str]:
    """Return columns with the resources of the launch with the most registers.

    A cell has the figure of each compute capability, or one if all are equal.
    """
    archs = dict.fromkeys(line.arch for line in row.lines)
    lines = [
        max((line for line in row.lines if line.arch == arch), key=lambda line: line.registers)
        for arch in archs
    ]
    values = {head: [f"{line[name]:,}" for line in lines] for head, name in RESOURCES.items()}
    return {
        head: each[0] if len(set(each)) == 1 else " / ".join(each) for head, each in values.items()
    }


@Table(
    budget_lines,
    "launch",
    "bench.gpu.budgets",
    among="arch",
    where=lambda x: (
        x.kernel == "_gather_rows" and " float32, " in x.launch and " warps of " not in x.launch
    ),
    caption=compiled,
)
def gather_budgets(x: Row) -> Cells:
    """Resources that gathers of contiguous float32 rows use."""
    return {"gather": x.launch.removeprefix("gather "), **resources(x)}


@Table(
    budget_lines,
    "kernel",
    "bench.gpu.budgets",
    among="launch arch",
    sort=by_key,
    caption=compiled,
)
def kernel_budgets(x: Row) -> Cells:
    """Resources of each kernel, in its launch with the most registers."""
    used = resources(x)
    most = max((line for line in x.lines if line.arch == x.arch), key=lambda x: x.registers)
    return {
        "kernel": f"`{x.kernel}`",
        "launches": len({line.launch for line in x.lines}),
        "most registers": used["registers"],
        "launches with spills": sum(map(bool, x.of("spill_store_bytes"))) or None,
        **{
            head: used[head]
            for head in ("shared memory, B", "barriers", "in flight per multiprocessor, B")
        },
        "launch with the most registers": most.launch,
    }


@Table("budgets", "link latency_s", "bench.gpu.budgets", among="columns arch", caption=compiled)
def bytes_in_flight(x: Row) -> Cells:
    """Bytes in flight that saturate a link, and the programs that reach them."""
    # the GPU that needs the most programs
    widths: dict[int, Line] = {}
    for line in sorted(x.lines, key=lambda line: (line.programs, line.multiprocessors)):
        widths[line.columns] = line
    return {
        "link": f"{x.link} ({x.source})",
        "GB/s": significant(x.link_bytes_per_s / 1e9),
        "latency, us": f"{x.latency_s * 1e6:g}",
        "needed in flight, kB": significant(x.needed_bytes / 1e3),
        **{
            f"{columns} columns: programs, multiprocessors": (
                f"{widths[columns].programs}, {widths[columns].multiprocessors}"
            )
            for columns in sorted(widths)
        },
    }


def lines_of_keys() -> list[Line]:
    """Return a line for each key of each table of the file that describes tables."""
    return [
        Line(table=f"`[{table}]`" if table else "", key=f"`{name}`", about=key)
        for table, keys in KEYS.items()
        for name, key in keys.items()
    ]


@Table(lines_of_keys, "key about", "", among="table", caption=uncaptioned)
def table_keys(x: Row) -> Cells:
    """The keys of the file that describes tables; those of a text file are in two tables."""
    return {
        "Table": ", ".join(line.table for line in x.lines),
        "Key": x.key[0],
        "Value": x.about.value,
        "Without it": x.about.without,
    }
