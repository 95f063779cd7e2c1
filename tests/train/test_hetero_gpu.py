"""A run on a heterogeneous graph with a GPU, on a fake one: see `fake_cuda`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typed_shop

from gcnzc.exchange import Group
from gcnzc.features import pinning
from gcnzc.features.table import FeatureTable
from gcnzc.train import TrainConfig, train
from gcnzc.train.hetero import data as hetero_data
from gcnzc.train.hetero.data import TypedTables, open_tables

ROOT = Path(__file__).parents[2]
OPTIONS = {"task": "link", "edge_type": "buys", "model": "hetero-sage", "layers": 2, "hidden": 8}
OPTIONS |= {"embedding_dim": 4, "batch_size": 120, "epochs": 1, "evaluate_negatives": 20}


@pytest.mark.filterwarnings("ignore:the graph has times")
def test_a_run_on_a_gpu_has_the_losses_of_one_on_the_cpu(tmp_path):
    """Users have embeddings, and the features of items are page-locked."""
    typed_shop.without_features(typed_shop.build(), "user").save(tmp_path / "shop")
    mine = tmp_path / "mine"
    train(TrainConfig(data=tmp_path / "shop", fanouts=(3, 3), device="cpu", **OPTIONS), mine)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-m", "fake_cuda", "-m", "gcnzc", "train", tmp_path / "shop"]
    command += [*words, "--fanouts=3,3", "--device=cuda", "--trace=2", "--out", tmp_path / "gpu"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["device"], result["gpu"]) == ("cuda:0", "fake GPU")
    lines = [json.loads((run / "record.jsonl").read_text()) for run in (mine, tmp_path / "gpu")]
    for name in ("loss", "valid_mrr", "test_mrr", "seeds_checksum", "payload_bytes"):
        assert lines[0][name] == lines[1][name], name
    assert all(line["gather_s"] > 0 for line in lines)
    # on the GPU's streams, and not in a thread of the loader
    spans = json.loads((tmp_path / "gpu" / "timeline.json").read_text())["traceEvents"]
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
