import pytest

from gcnzc.kernels import sample


@pytest.fixture(params=["direct", "hashed", "wide"])
def table(request, monkeypatch):
    """The kind of the table from nodes to their positions."""
    if request.param != "direct":
        monkeypatch.setattr(sample, "DIRECT_NODES", 0)
    if request.param == "wide":
        monkeypatch.setattr(sample, "HASHED_NODES", 0)
    return request.param
