"""PyG, which a module of tests imports from here: it is skipped where PyG is not installed."""

from importlib.util import find_spec

import pytest

from gcnzc.interop.pyg.importing import import_pyg

if find_spec("torch_geometric") is None:
    pytest.skip("PyG is not installed", allow_module_level=True)

pyg = import_pyg()
