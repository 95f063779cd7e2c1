#!/bin/sh
# Create the Python environments in which bench/loading/loader.py runs PyG and GraphBolt: FOLDER/pyg
# and FOLDER/graphbolt. torch-scatter and torch-sparse have no wheels for this torch and are compiled,
# which takes about half an hour on two cores; MAX_JOBS limits the number of compilers. Working
# environments that exist are kept. With a name, only that environment is created.
#
# usage: bench/rivals/make_environments.sh FOLDER [PYTHON3.11 [pyg|graphbolt]]
set -eu
folder=${1:?"usage: make_environments.sh FOLDER [PYTHON3.11 [pyg|graphbolt]]"}
python=${2:-python3.11}
only=${3:-}
mkdir -p "$folder"

# the newest versions of DGL, torch and torchdata with which GraphBolt's wheel works
if [ "$only" != pyg ] && ! "$folder/graphbolt/bin/python" -c "import dgl.graphbolt" 2>/dev/null; then
    rm -rf "$folder/graphbolt"
    "$python" -m venv "$folder/graphbolt"
    "$folder/graphbolt/bin/pip" install "dgl==2.1.0" "torch==2.2.1" "torchdata==0.7.1" \
        "numpy<2" "pandas<2.3" pydantic pyyaml "setuptools<70" scipy psutil
fi

if [ "$only" != graphbolt ] && ! "$folder/pyg/bin/python" -c "import torch_geometric, torch_sparse" 2>/dev/null; then
    rm -rf "$folder/pyg"
    "$python" -m venv "$folder/pyg"
    "$folder/pyg/bin/pip" install "torch==2.13.0" "torch_geometric==2.8.1" numpy scipy scikit-learn psutil \
        setuptools wheel
    # without build isolation, since their builds import the installed torch
    "$folder/pyg/bin/pip" install --no-build-isolation "torch-scatter==2.1.2" "torch-sparse==0.6.18"
fi
