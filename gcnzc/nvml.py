"""What NVIDIA's management library says of a GPU's link. The one door to pynvml.

It is asked for by the extra `nvml`. What it cannot tell, or is not there to tell, is None.
"""

from collections.abc import Callable
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
    try:
        import pynvml
    except ImportError:
        return found

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, name)(*arguments)
        except pynvml.NVMLError:
            return None

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return found
    try:
        handle = ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
        if handle is None:
            return found
        busy()
        generation = ask("nvmlDeviceGetCurrPcieLinkGeneration", handle)
        lanes = ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
        found |= {"pcie_generation": generation, "pcie_lanes": lanes}
        if generation in LANE_BYTES_PER_S and lanes is not None:
            found["pcie_bytes_per_s"] = lanes * LANE_BYTES_PER_S[generation]
        for name, counter in (
            ("received", pynvml.NVML_PCIE_UTIL_RX_BYTES),
            ("sent", pynvml.NVML_PCIE_UTIL_TX_BYTES),
        ):
            kilobytes_per_s = ask("nvmlDeviceGetPcieThroughput", handle, counter)
            if kilobytes_per_s is not None:
                found[f"pcie_{name}_bytes_per_s"] = kilobytes_per_s * 1e3
        found["pcie_replays"] = ask("nvmlDeviceGetPcieReplayCounter", handle)
    finally:
        ask("nvmlShutdown")
    return found
