"""Compare what a GPU session measured with the model, the budgets and published figures.

    python -m bench.gpu.comparison FOLDER                      of bench/gpu/session.py
    python -m bench.gpu.comparison FOLDER --results RESULTS    measurements that are elsewhere

Reads the newest measurements of `bench/gpu/suite.py` and the resources of the compiled kernels, and
writes `comparison.jsonl` and `comparison.txt` to the folder:

- The bus: the copy engine and a dense read, beside published rates for the same PCIe generation.
- Gathers: each width and layout, beside the model of PCIe traffic. The rate of a gather is limited
  by the bytes on the bus, headers included, or by the number of requests in flight. Both limits are
  computed from the dense read, whose requests are all of 128 B. So the column that the measured
  rates follow shows which limit applies.
- Bytes in flight: what Little's law requires, bandwidth times latency, beside what the default
  number of programs has in flight.
- Kernels: registers and shared memory, beside the budgets in `bench/results/budgets.jsonl`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import harness
from bench.gpu.claims import Line, read
from bench.gpu.published import Kind, of_kind
from gcnzc.cli.output import align_columns
from gcnzc.features.pcie_traffic import traffic
from gcnzc.kernels.gather.lanes import LAYOUTS, LINE_BYTES
from gcnzc.kernels.gpu_launch import DEFAULT_PROGRAMS

BUDGETS = Path(harness.__file__).parent / "results" / "budgets.jsonl"
GIGA = 1e9
# A published figure is compared with rows whose width is at most this many times larger or smaller
# than that of its rows.
NEAR = 1.25


def main() -> None:
    """Compare the measurements of a session."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of a session")
    parser.add_argument("--results", type=Path, help="default: `results` in the folder")
    options = parser.parse_args()
    results = options.results or options.folder / "results"
    lines = compare(results, read(options.folder / "kernels.jsonl"), read(BUDGETS))
    text = "".join(f"{line}\n" for line in format_comparison(lines))
    (options.folder / "comparison.txt").write_text(text)
    with (options.folder / "comparison.jsonl").open("w") as file:
        for line in lines:
            file.write(json.dumps(line | harness.machine()) + "\n")
    print(text, end="")


def compare(results: Path, kernels: Sequence[Line], budgets: Sequence[Line]) -> list[Line]:
    """Return one line for each figure, with the figures that it is compared with.

    Args:
        results: folder of the measurements.
        kernels: resources of the kernels that were compiled for this GPU.
        budgets: lines of `bench/results/budgets.jsonl`.
    """
    lines: list[Line] = []
    links, gathers = (
        [line for line in read(results / f"gpu_{part}.jsonl") if "outcome" not in line]
        for part in ("link", "gather")
    )
    if links:
        link = links[-1]
        lines += compare_bus(link)
        lines += compare_gathers(link, gathers)
        lines += compare_bytes_in_flight(link, budgets)
    return lines + compare_kernels(kernels, budgets)


def compare_bus(link: Mapping[str, Any]) -> list[Line]:
    """Compare the copy engine and the dense read with published rates."""
    generation = _pcie_generation(link)
    lines: list[Line] = []
    kinds: tuple[tuple[Kind, str], ...] = (
        ("copy engine", "copy_bytes_per_s"),
        ("dense read", "dense_bytes_per_s"),
    )
    for kind, name in kinds:
        for figure in of_kind(kind, generation):
            lines.append(
                {
                    "compared": "bus",
                    "what": kind,
                    "pcie_generation": generation,
                    "measured_bytes_per_s": link[name],
                    "published_bytes_per_s": figure.bytes_per_s,
                    "ratio": link[name] / figure.bytes_per_s,
                    "published_on": f"{figure.gpu} {figure.condition}".strip(),
                    "source": figure.source,
                }
            )
    return lines


def _pcie_generation(link: Mapping[str, Any]) -> int | None:
    """Return the PCIe generation of a measured GPU: from NVML, or else from nvidia-smi."""
    generation = link.get("pcie_generation") or link.get("gpu_state", {}).get("pcie_generation")
    return None if generation is None else int(generation)


def compare_gathers(link: Mapping[str, Any], gathers: Sequence[Line]) -> list[Line]:
    """Compare the gathers of each width and layout with both limits of the model."""
    newest = {(line["row_bytes"], line["method"]): line for line in gathers}
    lines = []
    for (row_bytes, layout), line in newest.items():
        if layout not in LAYOUTS:
            continue
        item_bytes = 4 if row_bytes % 4 == 0 else 2
        model = traffic(row_bytes, layout=layout, item_bytes=item_bytes)
        dense = traffic(LINE_BYTES, layout="pitched")
        # of the same rounds
        dense_rate = line["payload_bytes_per_s"] / line["share_of_dense_read"]
        by_bytes = dense_rate * float(model.efficiency / dense.efficiency)
        by_requests = dense_rate * row_bytes / float(model.requests_per_row) / LINE_BYTES
        found: Line = {
            "compared": "gather",
            "row_bytes": row_bytes,
            "layout": layout,
            "num_ids": line["num_ids"],
            "model_requests_per_row": float(model.requests_per_row),
            "model_wire_bytes_per_row": float(model.wire_bytes),
            "limit_by_bytes": by_bytes,
            "limit_by_requests": by_requests,
            "measured_bytes_per_s": line["payload_bytes_per_s"],
            "share_of_limit_by_bytes": line["payload_bytes_per_s"] / by_bytes,
            "share_of_limit_by_requests": line["payload_bytes_per_s"] / by_requests,
        }
        found["published"] = [
            {
                "bytes_per_s": figure.bytes_per_s,
                "row_bytes": figure.row_bytes,
                "num_ids": figure.num_ids,
                "on": f"{figure.gpu} {figure.condition}".strip(),
                "source": figure.source,
            }
            for figure in of_kind("gather", _pcie_generation(link))
            if figure.row_bytes is not None and 1 / NEAR <= figure.row_bytes / row_bytes <= NEAR
        ]
        lines.append(found)
    return lines


def compare_bytes_in_flight(link: Mapping[str, Any], budgets: Sequence[Line]) -> list[Line]:
    """Compare the bytes that the bus needs in flight with those of the default programs."""
    needed = link["dense_bytes_per_s"] * link["latency_s"]
    newest = {
        (line["columns"], line["arch"]): line["program_bytes"]
        for line in budgets
        if "program_bytes" in line
    }
    return [
        {
            "compared": "bytes in flight",
            "columns": columns,
            "arch": arch,
            "latency_s": link["latency_s"],
            "needed_bytes": needed,
            "program_bytes": program_bytes,
            "default_programs": DEFAULT_PROGRAMS,
            "ratio": DEFAULT_PROGRAMS * program_bytes / needed,
        }
        for (columns, arch), program_bytes in newest.items()
    ]


def compare_kernels(kernels: Sequence[Line], budgets: Sequence[Line]) -> list[Line]:
    """Compare the resources of compiled kernels with the newest budget of the same launch."""
    keys = ("launch", "kernel", "arch")
    newest = {tuple(line[key] for key in keys): line for line in budgets if "launch" in line}
    lines = []
    for kernel in (line for line in kernels if "outcome" not in line):  # the others failed
        budget = newest.get(tuple(kernel[key] for key in keys))
        figures = {name: kernel[name] for name in ("registers", "shared_bytes")}
        lines.append(
            {"compared": "kernel", **{key: kernel[key] for key in keys}}
            | figures
            | {"stack_bytes": kernel["stack_bytes"]}
            | {f"budget_{name}": None if budget is None else budget[name] for name in figures}
        )
    return lines


def format_comparison(lines: Sequence[Line]) -> list[str]:
    """Format the lines of `compare` as tables."""
    tables = (
        ("bus", "The bus, and published rates", _bus_row, _BUS_HEADS),
        ("gather", "Gathers, and the model of PCIe traffic", _gather_row, _GATHER_HEADS),
        ("bytes in flight", "Bytes in flight", _in_flight_row, _IN_FLIGHT_HEADS),
        ("kernel", "Resources of kernels, and budgets", _kernel_row, _KERNEL_HEADS),
    )
    text = []
    for compared, title, row, heads in tables:
        rows = [row(line) for line in lines if line["compared"] == compared]
        if rows:
            text += ["", title, *align_columns([heads, *rows], left=(0,))]
    published = [
        f"  {line['row_bytes']} B {line['layout']}: {_rate(line['measured_bytes_per_s'])} GB/s of "
        f"{line['num_ids']:,} rows; {_rate(figure['bytes_per_s'])} GB/s of {figure['num_ids']:,} "
        f"rows of {figure['row_bytes']} B on {figure['on']}, {figure['source']}"
        for line in lines
        for figure in line.get("published", ())
    ]
    return [*text, *(["", "Gathers, and published rates"] if published else []), *published]


_BUS_HEADS = ["", "measured GB/s", "published GB/s", "ratio", "published for"]
_GATHER_HEADS = ["layout", "row B", "requests", "B on the bus", "limit by bytes"]
_GATHER_HEADS += ["limit by requests", "measured GB/s", "of bytes", "of requests"]
_IN_FLIGHT_HEADS = ["columns", "sm", "latency us", "needed kB", "a program's kB"]
_IN_FLIGHT_HEADS += ["programs", "ratio"]
_KERNEL_HEADS = ["launch", "sm", "registers", "budget", "shared B", "budget", "stack B"]


def _bus_row(line: Line) -> list[str]:
    return [
        line["what"],
        _rate(line["measured_bytes_per_s"]),
        _rate(line["published_bytes_per_s"]),
        f"{line['ratio']:.2f}",
        f"{line['published_on']}, {line['source']}",
    ]


def _gather_row(line: Line) -> list[str]:
    return [
        line["layout"],
        str(line["row_bytes"]),
        f"{line['model_requests_per_row']:.2f}",
        f"{line['model_wire_bytes_per_row']:.1f}",
        _rate(line["limit_by_bytes"]),
        _rate(line["limit_by_requests"]),
        _rate(line["measured_bytes_per_s"]),
        f"{line['share_of_limit_by_bytes']:.0%}",
        f"{line['share_of_limit_by_requests']:.0%}",
    ]


def _in_flight_row(line: Line) -> list[str]:
    return [
        str(line["columns"]),
        str(line["arch"]),
        f"{line['latency_s'] * 1e6:.2f}",
        f"{line['needed_bytes'] / 1e3:.1f}",
        f"{line['program_bytes'] / 1e3:.1f}",
        str(line["default_programs"]),
        f"{line['ratio']:.2f}",
    ]


def _kernel_row(line: Line) -> list[str]:
    names = ("registers", "budget_registers", "shared_bytes", "budget_shared_bytes", "stack_bytes")
    cells = ["-" if line[name] is None else str(line[name]) for name in names]
    return [line["launch"], str(line["arch"]), *cells]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GIGA:.3g}"


if __name__ == "__main__":
    main()
