"""DGL, which a module of tests imports from here: it is skipped where DGL is not installed."""

from importlib.util import find_spec

import pytest

from gcnzc.interop.dgl import import_dgl

if find_spec("dgl") is None:
    pytest.skip("DGL is not installed", allow_module_level=True)

dgl = import_dgl()
