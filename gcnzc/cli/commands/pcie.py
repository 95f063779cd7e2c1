"""The command that measures the PCIe bus."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from gcnzc.cli.output import print_json
from gcnzc.cli.plots import efficiencies
from gcnzc.cli.reports import pcie as reports_pcie
from gcnzc.kernels.gather.lanes import Layout
from gcnzc.train.options import Fanouts, at_least, check_options
from gcnzc.train.progress import Reporter
from gcnzc.tune import pcie_bench, table_shapes

# architectures that Triton 3.6 and 3.7 compile for
ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)


@dataclass(frozen=True, kw_only=True)
class PcieConfig:
    """Predict and measure how efficiently feature gathers use the PCIe bus.

    Prints one JSON line: for each layout of DATA's features, or of those of public graphs, the
    predicted efficiency; with a GPU, also the measured one; with --compile-for, also the requests
    of the compiled kernel.
    """

    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file;
    without it, the sizes of public graphs"""
    out: Path | None = None
    """image to write: efficiency by bytes per row; none if not given"""
    split_bytes: Literal[64, 128] = 128
    """alignment in bytes at which the host splits read completions into packets (the read
    completion boundary of its root complex)"""
    megabytes: int = 1024
    """size of the page-locked memory that the GPU reads"""
    compile_for: Fanouts = ()
    """architectures of GPUs, such as 80,90,100: compile the gather kernel for each, execute it on
    the CPU, and compare its requests with the prediction; needs Triton 3.6 or 3.7 and no GPU"""

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


def pcie_command(config: PcieConfig, reporter: Reporter) -> None:
    """`gcnzc pcie`."""
    if config.data is None:
        tables, widths = table_shapes.public_shapes(), table_shapes.WIDTHS
    else:
        tables, widths = [table_shapes.shape_of(config.data)], []
    compiled = _compiled_traffic(config, tables, reporter)
    with reporter.task("measure the bus") as advance:
        found = pcie_bench.report(
            tables,
            pcie_bench.current_gpu(),
            num_bytes=config.megabytes << 20,
            split_bytes=config.split_bytes,
            widths=widths,
            advance=advance,
        )
    for table, layouts in zip(found["tables"], compiled, strict=False):
        for layout, figures in layouts.items():
            table["layouts"][layout]["compiled"] = figures
    for line in reports_pcie.format_report(found):
        reporter.say(line)
    if config.out is not None:
        efficiencies(reports_pcie.efficiency_points(found), config.out)
        reporter.say(f"wrote {config.out}")
    print_json(found)


def _compiled_traffic(
    config: PcieConfig, tables: Sequence[table_shapes.Shape], reporter: Reporter
) -> list[dict[Layout, Any]]:
    """Return the traffic of the compiled kernel for each table and layout; [] if not requested."""
    if not config.compile_for:
        return []
    # the executor of compiled kernels is loaded only if it is used
    from gcnzc.tune.compiled_traffic import compare_layouts

    with reporter.task("execute the compiled gather") as advance:
        return compare_layouts(
            tables, tuple(dict.fromkeys(config.compile_for)), config.split_bytes, advance=advance
        )
