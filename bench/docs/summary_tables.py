"""Compute the short table of results in the README and on the first page of the benchmarks."""

from bench.docs.network_tables import timed_collectives
from bench.docs.result_tables import (
    Line,
    best_loaders,
    markdown,
    newest,
    read,
    significant,
    spread,
    table,
)


@table
def summary() -> str:
    """Return a table of the main results, each with its machine and commit."""
    loaders = best_loaders()
    ours = loaders["ours"]["seeds_per_s"]
    gains = {name: ours / loaders[name]["seeds_per_s"] for name in ("dgl", "graphbolt", "pyg")}
    has_pyg_lib = loaders["pyg"].get("rival_pyg_lib", "none") != "none"
    pyg = f"PyG with {'pyg-lib' if has_pyg_lib else 'torch-sparse'}"
    faster = ", ".join(
        f"{gains[name]:.1f} times {library}"
        for name, library in (("dgl", "DGL"), ("graphbolt", "GraphBolt"), ("pyg", pyg))
    )
    rows = [
        row(
            "loading: seed nodes per second, compared with other libraries", faster, loaders["ours"]
        ),
        row(
            "memory of a training run, not counting its 4 GB of memory-mapped features",
            *memory_of_training(),
        ),
        row(
            "test accuracy of GraphSAGE on ogbn-arxiv, with labels of training nodes and features "
            "computed from the edges instead of the dataset's",
            *accuracy_of("ogbn_arxiv_structure", "sage, label inputs"),
        ),
        row(
            "4 workers at 10 Mbit/s: 1-bit Adam, compared with AdamW on averaged gradients",
            *gain_of("onebit-adam", 10.0),
        ),
        row(
            "4 workers at 10 Mbit/s: Streaming DiLoCo with 4 bits, compared with AdamW on averaged "
            "gradients",
            *gain_of("streaming-diloco fp4", 10.0),
        ),
        row(
            "all-reduce of 64 bytes, 8 workers, 1 ms of delay, compared with gloo",
            *gain_of_all_reduce(),
        ),
    ]
    return markdown(["measurement", "result", "machine, commit"], rows)


def row(measurement: str, result: str, line: Line) -> list[str]:
    """Return a row of the table."""
    cpu = str(line["cpu"]).replace("(R)", "").replace(" Processor", "")
    return [measurement, result, f"{line['cores']} cores, {cpu}, `{line['commit']}`"]


def memory_of_training() -> tuple[str, Line]:
    """Return the private memory of a training run."""
    line = newest(read("memory"), "command")["train"]
    return f"{line['unshared_peak_bytes'] / 1e9:.2f} GB", line


def accuracy_of(graph: str, model: str) -> tuple[str, Line]:
    """Return the test accuracy of a model on a graph."""
    lines = [line for line in read("accuracy") if "test_percent" in line]
    line = newest(lines, "graph", "model", "sampler")[graph, model, "gcnzc"]
    return f"{spread(line)} %", line


def gain_of(method: str, mbit_per_s: float) -> tuple[str, Line]:
    """Return the throughput of a method relative to AdamW."""
    # runs that also measured AdamW
    lines = [line for line in read("strategies") if "of_adamw" in line]
    line = newest(lines, "case", "method", "mbit_per_s")["amazon_photo", method, mbit_per_s]
    return f"{significant(line['of_adamw'], 2)} times the seed nodes/s", line


def gain_of_all_reduce() -> tuple[str, Line]:
    """Return the speed-up of the tuned all-reduce over gloo's."""
    line = timed_collectives()["delay", 8, "Sum", 64]
    return f"{1 / line['tuned_of_builtin']:.1f} times faster", line
