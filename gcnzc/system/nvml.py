"""PCIe generation and lanes of a GPU, from NVIDIA's management library.

It is asked for by the extra `nvml`. What it cannot tell, or is not there to tell, is None.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# bytes a second of one lane of PCI Express, headers included, by generation: 2.5 and 5 GT/s of 10
# bits for 8, then 8, 16 and 32 GT/s of 130 bits for 128. The sixth counts in another way.
LANE_BYTES_PER_S = {
    1: 0.25e9,
    2: 0.5e9,
    3: 1e9 * 128 / 130,
    4: 2e9 * 128 / 130,
    5: 4e9 * 128 / 130,
}


def pcie(device: torch.device, busy: Callable[[], object]) -> dict[str, float | None]:
    """The link of a CUDA device, and what crosses it while `busy`'s work is done.

    Args:
        device: which; its UUID is how the library finds it.
        busy: queues work for some tenths of a second: an idle link slows down, and the counters are
            of 20 ms.

    Returns:
        `pcie_generation` and `pcie_lanes` at present, `pcie_bytes_per_s` of them with headers,
        `pcie_received_bytes_per_s` and `pcie_sent_bytes_per_s` by the GPU, and `pcie_replays`, the
        packets that were sent again since the driver was loaded.
    """
    names = ("generation", "lanes", "bytes_per_s", "received_bytes_per_s", "sent_bytes_per_s")
    found: dict[str, float | None] = {f"pcie_{name}": None for name in (*names, "replays")}
    with _asked(device) as (ask, handle):
        if handle is None:
            return found
        busy()
        generation = ask("nvmlDeviceGetCurrPcieLinkGeneration", handle)
        lanes = ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
        found |= {"pcie_generation": generation, "pcie_lanes": lanes}
        if generation in LANE_BYTES_PER_S and lanes is not None:
            found["pcie_bytes_per_s"] = lanes * LANE_BYTES_PER_S[generation]
        for name, counter in (("received", "RX"), ("sent", "TX")):
            number = ask(f"NVML_PCIE_UTIL_{counter}_BYTES")
            kilobytes_per_s = ask("nvmlDeviceGetPcieThroughput", handle, number)
            if kilobytes_per_s is not None:
                found[f"pcie_{name}_bytes_per_s"] = kilobytes_per_s * 1e3
        found["pcie_replays"] = ask("nvmlDeviceGetPcieReplayCounter", handle)
    return found


def slot(device: torch.device) -> dict[str, Any]:
    """What stays of a CUDA device's link whether it is busy or not, and the driver.

    Returns:
        `pcie_generation`, the highest that the device and its slot have together, `pcie_lanes`, and
        `driver`, as NVIDIA names its versions.
    """
    with _asked(device) as (ask, handle):
        if handle is None:
            return {"pcie_generation": None, "pcie_lanes": None, "driver": None}
        return {
            "pcie_generation": ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "pcie_lanes": ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "driver": ask("nvmlSystemGetDriverVersion"),
        }


@contextmanager
def _asked(device: torch.device) -> Iterator[tuple[Callable[..., Any], Any]]:
    """What asks the library by name, and its handle of the device; None if there is none."""
    try:
        import pynvml
    except ImportError:
        yield (lambda *what: None), None
        return

    def ask(name: str, *arguments: Any) -> Any:
        known = getattr(pynvml, name)
        try:
            return known(*arguments) if callable(known) else known
        except pynvml.NVMLError:
            return None

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield ask, None
        return
    try:
        yield ask, ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
    finally:
        ask("nvmlShutdown")
