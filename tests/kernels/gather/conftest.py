"""Both implementations of the gather, with the device on which their tensors are."""

import pytest
import torch

from gcnzc.kernels.gather import gather_numba, gather_triton


@pytest.fixture(params=[gather_numba, pytest.param(gather_triton, marks=pytest.mark.triton)])
def implementation(request: pytest.FixtureRequest):
    """An implementation that a test launches."""
    return request.param


@pytest.fixture
def place(implementation, device: torch.device) -> torch.device:
    """The device of the implementation's tensors."""
    return torch.device("cpu") if implementation is gather_numba else device
