"""Programs with the ogb package, which tests start in processes of their own."""

IMPORT_OGB = """
import json, os, shutil, sys, types
# else the import asks the network for a newer version
sys.modules["outdated"] = types.ModuleType("outdated")
sys.modules["outdated"].check_outdated = lambda *_: (False, None)
import numpy as np
import torch
# the package loads graphs and arrays from its own files, without naming them as safe
plain = torch.load
torch.load = lambda *args, **how: plain(*args, **(how | {"weights_only": False}))
from pathlib import Path
from ogb.io import DatasetSaver
from ogb.linkproppred import LinkPropPredDataset
from ogb.nodeproppred import NodePropPredDataset

here = Path(sys.argv[1])
os.chdir(here)
"""
