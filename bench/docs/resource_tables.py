"""Compute the documentation's tables about the registers and loads of compiled kernels."""

from collections.abc import Iterable

from bench.docs.result_tables import Line, markdown, newest, read, significant, table


def budget_lines() -> dict[tuple[str, str, int], Line]:
    """Return the lines of the newest run by launch, kernel and compute capability."""
    lines = [line for line in read("budgets") if "launch" in line]
    lines = [line for line in lines if line["commit"] == lines[-1]["commit"]]
    return newest(lines, "launch", "kernel", "arch")


def with_compilers(text: str, lines: Iterable[Line]) -> str:
    """Return a table with a caption that states the versions of the compilers."""
    lines = list(lines)
    tritons = ", ".join(sorted({line["triton"] for line in lines}))
    assemblers = {line["ptxas"]: set() for line in lines if "ptxas" in line}
    for line in lines:
        if "ptxas" in line:
            assemblers[line["ptxas"]].add(line["arch"])
    used = [
        f"ptxas {version} (for {', '.join(f'sm_{arch}' for arch in sorted(archs))})"
        for version, archs in sorted(assemblers.items())
    ]
    days = ", ".join(sorted({line["time"][:10] for line in lines}))
    commits = ", ".join(sorted({f"`{line['commit']}`" for line in lines}))
    compilers = ", ".join([f"Triton {tritons}", *used])
    return (
        f"{text}\n{compilers}, {days}, commit {commits}. Computed by "
        "`python -m bench.gpu.budgets`; nothing was measured on a GPU.\n"
    )


@table
def gather_budgets() -> str:
    """Return the table of resources that gathers of contiguous float32 rows use."""
    lines = [
        line
        for (launch, kernel, _), line in budget_lines().items()
        if kernel == "_gather_rows" and " float32, " in launch and " warps of " not in launch
    ]
    rows = []
    for launch in dict.fromkeys(line["launch"] for line in lines):
        selected = sorted((line for line in lines if line["launch"] == launch), key=_arch)
        rows.append(
            [
                launch.removeprefix("gather "),
                per_arch(selected, "registers"),
                per_arch(selected, "spill_store_bytes"),
                per_arch(selected, "shared_bytes"),
                per_arch(selected, "barriers"),
                per_arch(selected, "widest_load_bytes"),
                per_arch(selected, "load_bytes_in_flight"),
                per_arch(selected, "load_bytes_in_flight_per_multiprocessor"),
            ]
        )
    heads = [
        "gather",
        "registers",
        "spilled bytes",
        "shared memory, B",
        "barriers",
        "widest load, B",
        "in flight per lane, B",
        "in flight per multiprocessor, B",
    ]
    return with_compilers(markdown(heads, rows), lines)


@table
def kernel_budgets() -> str:
    """Return the table of resources of each kernel, in its launch with the most registers."""
    lines = budget_lines()
    rows = []
    for kernel in sorted({kernel for _, kernel, _ in lines}):
        selected = [line for (_, name, _), line in lines.items() if name == kernel]
        archs = sorted({line["arch"] for line in selected})
        largest = [
            max(
                (line for line in selected if line["arch"] == arch),
                key=lambda line: line["registers"],
            )
            for arch in archs
        ]
        spills = [line["launch"] for line in selected if line["spill_store_bytes"]]
        rows.append(
            [
                f"`{kernel}`",
                len({line["launch"] for line in selected}),
                per_arch(largest, "registers"),
                len(spills) or None,
                per_arch(largest, "shared_bytes"),
                per_arch(largest, "barriers"),
                per_arch(largest, "load_bytes_in_flight_per_multiprocessor"),
                largest[-1]["launch"],
            ]
        )
    heads = [
        "kernel",
        "launches",
        "most registers",
        "launches with spills",
        "shared memory, B",
        "barriers",
        "in flight per multiprocessor, B",
        "launch with the most registers",
    ]
    return with_compilers(markdown(heads, rows), lines.values())


@table
def bytes_in_flight() -> str:
    """Return the table of bytes in flight that saturate a link, and programs that reach them."""
    lines = newest(read("budgets"), "link", "latency_s", "columns", "arch")
    # the table shows the GPU that needs the most programs
    columns = sorted({key[2] for key in lines})
    rows = []
    for link, latency_s in dict.fromkeys(key[:2] for key in lines):
        selected = [line for key, line in lines.items() if key[:2] == (link, latency_s)]
        cells = []
        for each in columns:
            of_width = [line for line in selected if line["columns"] == each]
            worst = max(of_width, key=lambda x: (x["programs"], x["multiprocessors"]))
            cells.append(f"{worst['programs']}, {worst['multiprocessors']}")
        rows.append(
            [
                f"{link} ({selected[0]['source']})",
                significant(selected[0]["link_bytes_per_s"] / 1e9),
                f"{latency_s * 1e6:g}",
                significant(selected[0]["needed_bytes"] / 1e3),
                *cells,
            ]
        )
    heads = ["link", "GB/s", "latency, us", "needed in flight, kB"]
    heads += [f"{each} columns: programs, multiprocessors" for each in columns]
    return with_compilers(markdown(heads, rows), lines.values())


def per_arch(lines: Iterable[Line], name: str) -> str:
    """Format a figure for each compute capability, or once if all are equal."""
    values = [f"{line[name]:,}" for line in lines]
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def _arch(line: Line) -> int:
    return int(line["arch"])
