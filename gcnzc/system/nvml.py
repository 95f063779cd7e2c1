"""PCIe generation, lanes and traffic of a GPU, from NVIDIA's management library (NVML).

The optional dependency is installed by the extra `nvml`. Values are None without it, and if NVML
does not provide them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# bytes per second of one PCI Express lane including packet headers, by generation: 2.5 and 5 GT/s
# with 8b/10b encoding, then 8, 16 and 32 GT/s with 128b/130b. Generation 6 is encoded differently.
LANE_BYTES_PER_S = {
    1: 0.25e9,
    2: 0.5e9,
    3: 1e9 * 128 / 130,
    4: 2e9 * 128 / 130,
    5: 4e9 * 128 / 130,
}


def pcie(device: torch.device, busy: Callable[[], object]) -> dict[str, float | None]:
    """Measure the PCIe link of a CUDA device while work is running.

    Args:
        device: a CUDA device, which NVML finds by its UUID.
        busy: a function that queues some tenths of a second of work, because an idle link reduces
            its speed, and the counters average over 20 ms.

    Returns:
        Current `pcie_generation` and `pcie_lanes`, their bandwidth `pcie_bytes_per_s` including
        packet headers, `pcie_received_bytes_per_s` and `pcie_sent_bytes_per_s` of the GPU, and
        `pcie_replays`, the packets that were retransmitted since the driver was loaded.
    """
    names = ("generation", "lanes", "bytes_per_s", "received_bytes_per_s", "sent_bytes_per_s")
    found: dict[str, float | None] = {f"pcie_{name}": None for name in (*names, "replays")}
    with _query_nvml(device) as (query, handle):
        if handle is None:
            return found
        busy()
        generation = query("nvmlDeviceGetCurrPcieLinkGeneration", handle)
        lanes = query("nvmlDeviceGetCurrPcieLinkWidth", handle)
        found |= {"pcie_generation": generation, "pcie_lanes": lanes}
        if generation in LANE_BYTES_PER_S and lanes is not None:
            found["pcie_bytes_per_s"] = lanes * LANE_BYTES_PER_S[generation]
        for name, counter in (("received", "RX"), ("sent", "TX")):
            number = query(f"NVML_PCIE_UTIL_{counter}_BYTES")
            kilobytes_per_s = query("nvmlDeviceGetPcieThroughput", handle, number)
            if kilobytes_per_s is not None:
                found[f"pcie_{name}_bytes_per_s"] = kilobytes_per_s * 1e3
        found["pcie_replays"] = query("nvmlDeviceGetPcieReplayCounter", handle)
    return found


def slot(device: torch.device) -> dict[str, Any]:
    """Return the properties of a CUDA device's PCIe slot that do not depend on load.

    Returns:
        `pcie_generation`, the highest that both the device and its slot support, `pcie_lanes`, and
        `driver`, the version of NVIDIA's driver.
    """
    with _query_nvml(device) as (query, handle):
        if handle is None:
            return {"pcie_generation": None, "pcie_lanes": None, "driver": None}
        return {
            "pcie_generation": query("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "pcie_lanes": query("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "driver": query("nvmlSystemGetDriverVersion"),
        }


@contextmanager
def _query_nvml(device: torch.device) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Yield a function that calls NVML by name, and the handle of the device; None if not found."""
    try:
        import pynvml
    except ImportError:
        yield (lambda *what: None), None
        return

    def query(name: str, *arguments: Any) -> Any:
        known = getattr(pynvml, name)
        try:
            return known(*arguments) if callable(known) else known
        except pynvml.NVMLError:
            return None

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield query, None
        return
    try:
        yield query, query("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
    finally:
        query("nvmlShutdown")
