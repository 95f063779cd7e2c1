"""The description of this machine that records and results carry."""

import os
import platform
from pathlib import Path
from typing import Any

import numba
import numpy
import torch
import triton

from gcnzc._version import VERSION


def machine() -> dict[str, Any]:
    """Return the versions of gcnzc and its dependencies, the CPU, its cores and the GPU."""
    return {
        "gcnzc": VERSION,
        "python": platform.python_version(),
        # a plain string, which torch.load reads with weights_only
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        "numba": numba.__version__,
        "numpy": numpy.__version__,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def cpu_flags() -> frozenset[str]:
    """Return the flags of the CPU's instruction sets, as Linux names them, such as avx512_bf16."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def cpu_name() -> str:
    """Return the model name of the CPU, or its architecture if there is none."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()
