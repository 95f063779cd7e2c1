#!/bin/sh
# Make the environments of the rivals that bench/loading/loader.py compares with: FOLDER/pyg and
# FOLDER/graphbolt. torch-scatter and torch-sparse have no wheel for this torch and are compiled,
# which takes two cores about half an hour. What is there already is left as it is.
#
# usage: bench/rivals/make_environments.sh FOLDER [PYTHON3.11]
set -eu
folder=${1:?"usage: make_environments.sh FOLDER [PYTHON3.11]"}
python=${2:-python3.11}
mkdir -p "$folder"

# the last versions of DGL, torch and torchdata that GraphBolt's wheel works with
if ! "$folder/graphbolt/bin/python" -c "import dgl.graphbolt" 2>/dev/null; then
    rm -rf "$folder/graphbolt"
    "$python" -m venv "$folder/graphbolt"
    "$folder/graphbolt/bin/pip" install "dgl==2.1.0" "torch==2.2.1" "torchdata==0.7.1" \
        "numpy<2" "pandas<2.3" pydantic pyyaml "setuptools<70" scipy psutil
fi

if ! "$folder/pyg/bin/python" -c "import torch_geometric, torch_sparse" 2>/dev/null; then
    rm -rf "$folder/pyg"
    "$python" -m venv "$folder/pyg"
    "$folder/pyg/bin/pip" install "torch==2.13.0" "torch_geometric==2.8.1" numpy scipy scikit-learn psutil \
        setuptools wheel
    # they look for the installed torch while they are compiled
    "$folder/pyg/bin/pip" install --no-build-isolation "torch-scatter==2.1.2" "torch-sparse==0.6.18"
fi
