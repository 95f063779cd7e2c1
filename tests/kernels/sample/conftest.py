import pytest

from gcnzc.kernels import sample


@pytest.fixture(params=["direct", "hashed"])
def table(request, monkeypatch):
    """The kind of the table from nodes to their positions."""
    if request.param == "hashed":
        monkeypatch.setattr(sample, "DIRECT_NODES", 0)
    return request.param
