"""Kernels run on the GPU if there is one, else on the CPU under Triton's interpreter."""

import os
import tempfile
from pathlib import Path

import torch

# Triton reads this when a kernel is decorated, so it must be set before gcnzc is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# every gather looks at its ids
os.environ["GCNZC_CHECK_IDS"] = "1"
# no plan of this user changes how a test runs
os.environ["GCNZC_CACHE"] = tempfile.mkdtemp(prefix="gcnzc-cache-")
# pictures are written, never shown
os.environ["MPLBACKEND"] = "Agg"

import pytest

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        needs_gpu = pytest.mark.skip(reason="no CUDA device here")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(needs_gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs; without it a test skips, but not in CI."""
    if not SHARED_DATA.is_dir():
        if os.environ.get("CI"):
            pytest.fail(f"no folder {SHARED_DATA}, which CI must have")
        pytest.skip(f"no real graphs at {SHARED_DATA}")
    return SHARED_DATA
