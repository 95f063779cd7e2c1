"""Marks of tests that need a library which is not installed everywhere."""

from importlib.util import find_spec

import pytest

needs_pyg = pytest.mark.skipif(find_spec("torch_geometric") is None, reason="PyG is not installed")
# it has no wheel for Python 3.13
needs_dgl = pytest.mark.skipif(find_spec("dgl") is None, reason="DGL is not installed")
