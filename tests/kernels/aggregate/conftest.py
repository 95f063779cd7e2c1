"""Memory that aggregation does not write shows in all tests of this folder."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty returns with NaN, so that a row that is not written is seen."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
