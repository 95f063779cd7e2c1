"""The command that measures the PCIe bus."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from gcnzc.cli.output import print_json
from gcnzc.cli.plots import efficiencies
from gcnzc.cli.reports import link
from gcnzc.train.options import at_least, check_numbers
from gcnzc.train.progress import Reporter
from gcnzc.tune import pcie_bench, table_shapes


@dataclass(frozen=True, kw_only=True)
class PcieConfig:
    """Say how well gathers use the link between the host's memory and a GPU.

    Prints one JSON line: the model's figures for the features of DATA, or for those of public
    graphs, by layout; with a GPU what it measures as well.
    """

    data: tyro.conf.Positional[Path | None] = None
    """folder of a graph, prepared or in OGB's layout; without it public ones"""
    out: Path | None = None
    """picture to write: efficiency by the width of a row; none if not given"""
    split_bytes: Literal[64, 128] = 128
    """where the host cuts its answers into packets: 64 for root complexes that do so there"""
    megabytes: int = 1024
    """size of the page-locked memory that a GPU reads from"""

    def __post_init__(self) -> None:
        check_numbers(self)
        at_least(16, "megabytes", self.megabytes)


def pcie_command(config: PcieConfig, reporter: Reporter) -> None:
    """`gcnzc pcie`."""
    if config.data is None:
        tables, widths = table_shapes.public_shapes(), table_shapes.WIDTHS
    else:
        tables, widths = [table_shapes.shape_of(config.data)], []
    with reporter.task("measure") as advance:
        found = pcie_bench.report(
            tables,
            pcie_bench.gpu(),
            num_bytes=config.megabytes << 20,
            split_bytes=config.split_bytes,
            widths=widths,
            advance=advance,
        )
    for line in link.lines(found):
        reporter.say(line)
    if config.out is not None:
        efficiencies(link.drawn(found), config.out)
        reporter.say(f"wrote {config.out}")
    print_json(found)
