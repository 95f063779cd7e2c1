"""The command that measures the PCIe bus."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from gcnzc.cli.output import print_json
from gcnzc.cli.plots import efficiencies
from gcnzc.cli.reports import pcie as reports_pcie
from gcnzc.train.options import at_least, check_options
from gcnzc.train.progress import Reporter
from gcnzc.tune import pcie_bench, table_shapes


@dataclass(frozen=True, kw_only=True)
class PcieConfig:
    """Predict and measure how efficiently feature gathers use the PCIe bus.

    Prints one JSON line: for each layout of DATA's features, or of those of public graphs, the
    predicted efficiency; with a GPU, also the measured one.
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

    def __post_init__(self) -> None:
        check_options(self)
        at_least(16, "megabytes", self.megabytes)


def pcie_command(config: PcieConfig, reporter: Reporter) -> None:
    """`gcnzc pcie`."""
    if config.data is None:
        tables, widths = table_shapes.public_shapes(), table_shapes.WIDTHS
    else:
        tables, widths = [table_shapes.shape_of(config.data)], []
    with reporter.task("measure the bus") as advance:
        found = pcie_bench.report(
            tables,
            pcie_bench.current_gpu(),
            num_bytes=config.megabytes << 20,
            split_bytes=config.split_bytes,
            widths=widths,
            advance=advance,
        )
    for line in reports_pcie.format_report(found):
        reporter.say(line)
    if config.out is not None:
        efficiencies(reports_pcie.efficiency_points(found), config.out)
        reporter.say(f"wrote {config.out}")
    print_json(found)
