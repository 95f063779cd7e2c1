"""Compute the tables about loading heterogeneous graphs."""

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
