"""A run on a heterogeneous graph with a GPU, on a fake one: see `fake_cuda`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gcnzc.exchange import Group
from gcnzc.features import pinning
from gcnzc.features.table import FeatureTable
from gcnzc.train.hetero import data as hetero_data
from gcnzc.train.hetero.data import TypedTables, open_tables

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_a_run_on_a_gpu_has_the_losses_of_one_on_the_cpu(tmp_path):
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "fake_cuda", "-m", "typed_gpu_runs", tmp_path]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    result = json.loads((tmp_path / "cuda" / "result.json").read_text())
    assert (result["device"], result["gpu"]) == ("cuda:0", "fake GPU")
    lines = [json.loads((tmp_path / name / "record.jsonl").read_text()) for name in ("cpu", "cuda")]
    for name in ("loss", "valid_mrr", "test_mrr", "seeds_checksum", "payload_bytes"):
        assert lines[0][name] == lines[1][name], name
    assert all(line["gather_s"] > 0 for line in lines)
    # on the GPU's streams, and not in a thread of the loader
    spans = json.loads((tmp_path / "cuda" / "timeline.json").read_text())["traceEvents"]
    names = {span["args"]["name"] for span in spans if span["ph"] == "M"}
    assert {"copy stream", "gather stream"} <= names


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_dense_tables_are_page_locked_for_a_gpu_only(monkeypatch):
    locked = []

    def pinned(table):
        locked.append(table)
        return pinning.pinned(table)

    monkeypatch.setattr(hetero_data, "pinned", pinned)
    dense, sparse = FeatureTable(torch.eye(3)), FeatureTable(torch.eye(3).to_sparse_csr())
    tables = TypedTables({"a": dense, "b": sparse})
    for device, expected in (("cpu", []), ("cuda", [dense])):
        with open_tables(tables, torch.device(device), Group()) as found:
            assert found.tables == tables.tables
        assert locked == expected
