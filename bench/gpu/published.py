"""Published figures of GPUs that read host memory, with their sources.

`bench/gpu/comparison.py` lists those of the same kind and PCIe generation beside what it measures.
Rates are bytes of data per second, from the host to one GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["copy engine", "dense read", "gather"]
NVBANDWIDTH = "https://github.com/NVIDIA/nvbandwidth"


@dataclass(frozen=True)
class Published:
    """A figure that somebody else has measured."""

    kind: Kind  # a copy by a copy engine, a dense read by threads of the GPU, or random rows
    gpu: str
    pcie_generation: int | None  # of 16 lanes; None for NVLink-C2C
    bytes_per_s: float
    source: str
    condition: str = ""
    row_bytes: int | None = None  # of a gather
    num_ids: int | None = None  # of a gather


PUBLISHED = (
    Published("dense read", "V100", 3, 12e9, "https://github.com/ZaidQureshi/bam/issues/54"),
    Published("copy engine", "RTX 4090", 4, 26.3e9, f"{NVBANDWIDTH}/issues/15", "5 of 8 GPUs"),
    Published("dense read", "A100", 4, 25.13e9, f"{NVBANDWIDTH}/issues/42", "of 512 MiB"),
    Published("dense read", "A100", 4, 18.05e9, f"{NVBANDWIDTH}/issues/42", "of 10 GiB"),
    Published("dense read", "A100", 4, 16.50e9, f"{NVBANDWIDTH}/issues/42", "of 20 GiB"),
    Published("dense read", "H100", 5, 35.2e9, f"{NVBANDWIDTH}/issues/24", "mean of 8 GPUs"),
    Published("copy engine", "GH200", None, 346e9, f"{NVBANDWIDTH}/issues/23"),
    Published("dense read", "GH200", None, 342e9, f"{NVBANDWIDTH}/issues/23"),
    *(
        Published(
            "gather",
            "A100",
            4,
            # its MB are MiB, so the rate is computed from the time
            row_bytes * num_ids / (microseconds * 1e-6),
            "https://github.com/dmlc/dgl/pull/6635",
            "GraphBolt",
            row_bytes,
            num_ids,
        )
        for row_bytes, num_ids, microseconds in (
            (1412, 100_000, 5636),
            (1412, 1_000_000, 52_611),
            (353, 100_000, 1768),
            (353, 1_000_000, 15_807),
        )
    ),
)


def of_kind(kind: Kind, pcie_generation: int | None) -> Sequence[Published]:
    """Return the figures of a kind for a PCIe generation; all of them if it is not known."""
    return [
        figure
        for figure in PUBLISHED
        if figure.kind == kind and pcie_generation in (None, figure.pcie_generation)
    ]
