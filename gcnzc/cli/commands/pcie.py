"""The command that measures the PCIe bus."""

from collections.abc import Mapping
from typing import Any

from gcnzc.cli.options import PcieConfig
from gcnzc.cli.output import print_json
from gcnzc.kernels.gather.lanes import LINE_BYTES
from gcnzc.train.progress import Reporter
from gcnzc.tune import pcie_bench


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
