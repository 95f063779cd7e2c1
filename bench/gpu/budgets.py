"""Record what every compiled kernel uses: registers, spills, shared memory and loads in flight.

    python -m bench.gpu.budgets

Kernels are compiled for each of `ARCHS`, without a GPU, by the launches of
`bench/gpu/kernel_launches.py`. The lines are the budgets that `tests/ptx/test_budgets.py` compares
kernels with. Run this again if a kernel is added, or if it uses more on purpose.

Another kind of line has what Little's law requires: bytes in flight = bandwidth x latency, and how
many programs of the gather have so many bytes in flight.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import triton

from bench import harness
from bench.gpu.kernel_launches import COLUMNS, launches
from gcnzc.kernels.gather.lanes import LINE_BYTES, assign_lanes, default_layout
from gcnzc.testing import KernelResources
from gcnzc.testing.resources import resources_of
from gcnzc.testing.triton_driver import compile_launches

ARCHS = (80, 90, 100)
# a kernel exceeds its budget if one of the first is larger, or one of the second is smaller
MOST = ("registers", "spill_store_bytes", "spill_load_bytes", "shared_bytes", "barriers")
LEAST = ("widest_load_bytes", "load_bytes_in_flight", "load_bytes_in_flight_per_multiprocessor")
# the rule for the gather of unaligned float32 rows, on every GPU
GATHER_REGISTERS = 96
GATHER_COLUMNS = (602, 1433)


class Link(NamedTuple):
    """A link between a GPU and host memory, and where its figures are from."""

    name: str
    bytes_per_s: float
    source: str


# in one direction
LINKS = (
    Link("PCIe 4 x16", 16e9 * 16 * 128 / 130 / 8, "16 GT/s x 16 lanes x 128/130"),
    Link("PCIe 5 x16", 32e9 * 16 * 128 / 130 / 8, "32 GT/s x 16 lanes x 128/130"),
    Link("NVLink-C2C", 450e9, "NVIDIA, GH200: 900 GB/s in both directions"),
)
# assumed: no latency was measured; `gcnzc pcie` measures that of a machine
LATENCIES_S = (1e-6, 2e-6)


def main() -> None:
    """Record all kernels for all architectures."""
    found: dict[tuple[str, str, int], KernelResources] = {}
    for arch in ARCHS:
        for launch, resources in compiled(arch):
            case = {"launch": launch, "kernel": resources.name, "arch": arch}
            if (key := tuple(case.values())) in found:
                raise RuntimeError(f"{key} compiles two kernels\n\nhint: launch them by two names")
            found[launch, resources.name, arch] = resources
            harness.record("budgets", case, **figures_of(resources), ptxas=ptxas_version(arch))
    for arch in ARCHS:
        for columns in COLUMNS:
            layout = default_layout(4 * columns)
            gather = found[f"gather {columns} float32, {layout}", "_gather_rows", arch]
            in_flight = gather.threads * gather.load_bytes_in_flight * lane_share(columns)
            for link in LINKS:
                for latency_s in LATENCIES_S:
                    needed = link.bytes_per_s * latency_s
                    programs = math.ceil(needed / in_flight)
                    harness.record(
                        "budgets",
                        {"link": link.name, "latency_s": latency_s, "columns": columns}
                        | {"arch": arch},
                        source=link.source,
                        link_bytes_per_s=link.bytes_per_s,
                        needed_bytes=needed,
                        program_bytes=in_flight,
                        programs=programs,
                        multiprocessors=math.ceil(programs / gather.blocks_per_multiprocessor),
                    )


def compiled(arch: int) -> list[tuple[str, KernelResources]]:
    """Compile all launches; return the resources of each kernel with its first launch."""
    first: dict[str, tuple[str, Any]] = {}
    for name, launch in launches():

        def note(
            _function: Any, kernel: Any, _grid: Any, _arguments: Any, name: str = name
        ) -> None:
            first.setdefault(kernel.hash, (name, kernel))

        with compile_launches(arch, note):
            launch()
    found = resources_of([kernel for _, kernel in first.values()])
    return [(name, resources) for (name, _), resources in zip(first.values(), found, strict=True)]


def figures_of(resources: KernelResources) -> dict[str, Any]:
    """Return the figures of a kernel, by name."""
    figures = asdict(resources)
    del figures["name"], figures["arch"]
    # `threads` of a line are those of the machine
    figures["block_threads"] = figures.pop("threads")
    for name in ("blocks_per_multiprocessor", "load_bytes_in_flight_per_multiprocessor"):
        figures[name] = getattr(resources, name)
    return figures


def excesses(resources: KernelResources, budget: Mapping[str, Any]) -> list[str]:
    """Return which figures of a kernel exceed its budget, with both values."""
    figures = figures_of(resources)
    worse = [name for name in MOST if figures[name] > budget[name]]
    worse += [name for name in LEAST if figures[name] < budget[name]]
    return [f"{name} {figures[name]} instead of {budget[name]}" for name in worse]


def ptxas_version(arch: int) -> str:
    """Return the version of the assembler that Triton uses for an architecture."""
    tools = triton.knobs.nvidia
    return str((tools.ptxas_blackwell if arch >= 100 else tools.ptxas).version)


def lane_share(columns: int) -> float:
    """Return the share of lanes that load a vector of a float32 row, the mean over rows."""
    row_bytes = 4 * columns
    lanes = assign_lanes("shifted", row_bytes, row_bytes, 0, 4)
    vectors = [lanes.num_vectors(row * row_bytes) for row in range(LINE_BYTES)]
    return sum(vectors) / len(vectors) / (lanes.lanes * lanes.passes)


if __name__ == "__main__":
    main()
