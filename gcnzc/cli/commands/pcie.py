"""The command that measures the PCIe bus."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from gcnzc.cli.output import print_json
from gcnzc.kernels.gather.lanes import LINE_BYTES
from gcnzc.train.options import Fanouts, at_least, check_options
from gcnzc.train.progress import Reporter
from gcnzc.tune import pcie_bench

# architectures that Triton 3.6 and 3.7 compile for
ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)


@dataclass(frozen=True, kw_only=True)
class PcieConfig:
    """Predict and measure how efficiently feature gathers use the PCIe bus.

    Prints one JSON line: with a GPU, the measured rates of the bus; with DATA, the predicted
    traffic of its features, with a GPU also the measured rate, and with --compile-for also the
    requests of the compiled kernel.
    """

    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file;
    without it, only the bus is measured"""
    split_bytes: Literal[64, 128] = 128
    """alignment in bytes at which the host splits read completions into packets (the read
    completion boundary of its root complex)"""
    megabytes: int = 1024
    """size of the page-locked memory that the GPU reads"""
    compile_for: Fanouts = ()
    """architectures of GPUs, such as 80,90,100: compile the gather kernel for each, execute it on
    the CPU, and compare its requests with the prediction; needs DATA and Triton 3.6 or 3.7, and no
    GPU"""

    def __post_init__(self) -> None:
        check_options(self)
        at_least(16, "megabytes", self.megabytes)
        for arch in self.compile_for:
            if arch not in ARCHITECTURES:
                raise ValueError(
                    f"--compile-for: sm_{arch} is not an architecture that Triton compiles for\n\n"
                    f"hint: use some of {','.join(map(str, ARCHITECTURES))}, such as 90 for H100 "
                    "and H200"
                )
        if self.compile_for and self.data is None:
            raise ValueError(
                "--compile-for needs the features of a graph\n\n"
                "hint: `gcnzc pcie DATA --compile-for 90` counts the requests for its rows"
            )


def pcie_command(config: PcieConfig, reporter: Reporter) -> None:
    """`gcnzc pcie`."""
    gpu = pcie_bench.current_gpu()
    if config.data is None and gpu is None:
        raise ValueError(
            "there is no CUDA device whose bus could be measured\n\n"
            "hint: `gcnzc pcie DATA` predicts the traffic of the features of a graph"
        )
    shape = None if config.data is None else pcie_bench.shape_of(config.data)
    compiled = None
    if config.compile_for and shape is not None:
        # the executor of compiled kernels is loaded only if it is used
        from gcnzc.tune.compiled_traffic import compare

        with reporter.task("execute the compiled gather"):
            compiled = compare(shape, tuple(dict.fromkeys(config.compile_for)), config.split_bytes)
    with reporter.task("measure the bus"):
        found = pcie_bench.report(
            shape, gpu, num_bytes=config.megabytes << 20, split_bytes=config.split_bytes
        )
    if compiled is not None:
        found["table"]["compiled"] = compiled
    for line in format_report(found):
        reporter.say(line)
    print_json(found)


def format_report(found: Mapping[str, Any]) -> list[str]:
    """Format a `pcie_bench.report` as lines of text: rates of the bus, and traffic of the table."""
    bus, table = found["link"], found["table"]
    lines = ["no CUDA device: these figures are predicted, not measured"]
    if bus is not None:
        lines = [_describe_bus(bus)]
    if table is None:
        return lines
    base = table["base"]
    offset = f", from {base} B after a multiple of {LINE_BYTES} B" if base else ""
    lines += [
        f"{table['name']}: {table['rows']:,} rows of {table['columns']} {table['dtype']}, "
        f"{table['row_bytes']} B, with a pitch of {table['stride_bytes']} B{offset}",
        f"predicted: {_describe_traffic(table)}, an efficiency of {table['efficiency']:.1%}",
    ]
    if bus is not None:
        lines.append(
            f"measured: {table['payload_bytes_per_s'] / 1e9:.2f} GB/s of rows, "
            f"{table['share_of_dense']:.1%} of the dense read, {table['share_of_copy']:.1%} of the "
            "copy"
        )
    lines.append(
        f"`gcnzc prepare` stores these rows with a pitch of {table['pitch_bytes']} B: "
        f"{table['why']}"
    )
    if "compiled" in table:
        lines += _describe_compiled(table["compiled"])
    return lines


def _describe_bus(bus: Mapping[str, Any]) -> str:
    copy, dense = (bus[f"{name}_bytes_per_s"] / 1e9 for name in ("copy", "dense"))
    text = (
        f"the copy engine reaches {copy:.1f} GB/s; a dense read by {bus['dense_programs']} "
        f"programs {dense:.1f} GB/s; a load takes {bus['latency_s'] * 1e6:.2f} us, so "
        f"{bus['requests_in_flight']:.0f} requests of {LINE_BYTES} B are in flight"
    )
    if bus["pcie_bytes_per_s"] is not None:
        text += (
            f"; PCIe {bus['pcie_generation']} with {bus['pcie_lanes']} lanes carries "
            f"{bus['pcie_bytes_per_s'] / 1e9:.1f} GB/s with headers"
        )
    return text


def _describe_traffic(figures: Mapping[str, Any]) -> str:
    return (
        f"{figures['requests_per_row']:.2f} requests per row, "
        f"{figures['wire_bytes_per_row']:.1f} B on the bus"
    )


def _describe_compiled(compiled: Mapping[str, Any]) -> list[str]:
    """Describe the requests of the compiled kernel, with a warning if they are not as predicted."""
    lines = [
        f"the compiled gather kernel, executed on the CPU for {compiled['sampled_rows']} rows; "
        f"predicted for these rows: {_describe_traffic(compiled['model'])}"
    ]
    for arch, figures in compiled.items():
        if arch.startswith("sm_"):
            end = "as predicted" if figures["equals_model"] else "warning: not as predicted"
            lines.append(f"{arch}: {_describe_traffic(figures)}, {end}")
    return lines
