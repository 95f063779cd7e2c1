"""Clocks, temperature, power and the fastest possible PCIe link of a GPU, from nvidia-smi."""

import shutil
import subprocess

# Fields of `nvidia-smi --query-gpu`, and their names in results. The link is the fastest that the
# GPU and its slot support: an idle GPU lowers the generation of its current link.
FIELDS = {
    "clocks.sm": "sm_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks.max.mem": "max_memory_mhz",
    "temperature.gpu": "celsius",
    "power.draw": "watts",
    "pcie.link.gen.max": "pcie_generation",
    "pcie.link.width.max": "pcie_lanes",
}


def gpu_state(uuid: str, path: str | None = None) -> dict[str, float | None]:
    """Return the present state of a GPU.

    Args:
        uuid: of the GPU, as torch reports it: without "GPU-"; the first GPU if it is empty.
        path: folders in which nvidia-smi is found; those of the environment if None.

    Returns:
        A value for each name in `FIELDS`, None if the GPU does not report it; empty without
        nvidia-smi, or if it fails.
    """
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    if uuid:
        command.append(f"--id=GPU-{uuid}")
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = run.stdout.partition("\n")[0].split(",")
    if len(values) != len(FIELDS):
        return {}
    return {name: _number(text) for name, text in zip(FIELDS.values(), values, strict=True)}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        # such as [N/A]
        return None
