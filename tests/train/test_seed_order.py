"""Runs train on each seed once an epoch, whichever worker takes it."""

import json

import pytest
from processes import results
from training import Listener, assert_same_weights, saved, train_as_worker

from gcnzc import load, prepare
from gcnzc.datasets.generate import Shape, make
from gcnzc.exchange import init_group
from gcnzc.graph import EdgeShares
from gcnzc.train.config import TrainConfig
from gcnzc.train.epoch_stats import seeds_checksum
from gcnzc.train.run import train


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    make(folder / "raw", "planted", Shape(1500, 9000, 16, 4), seed=3)
    prepare(folder / "raw", folder / "graph")
    prepare(folder / "raw", folder / "links", edge_split=EdgeShares())
    sizes = {"fanouts": (4, 4), "hidden": 8, "batch_size": 30}
    return TrainConfig(data=folder / "graph", **sizes, epochs=2, lr=0.01, dropout=0.3)


def record(run):
    return [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]


def train_and_listen(config, folder):
    listener = Listener()
    with init_group(timeout_s=config.run.timeout_s) as group:
        train(config, folder, listener, group)
    return listener.said


def expected_checksums(config):
    return [
        f"{seeds_checksum(load(config.graph.data).split['train']):016x}"
    ] * config.training.epochs


@pytest.mark.processes
def test_a_run_of_rotating_chunks_resumes_bit_for_bit(config, tmp_path):
    config = config.replace(seed_order="rotating")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    results(2, tmp_path, train_as_worker, config, whole)
    stopped = results(2, tmp_path, train_as_worker, config, cut, 7)
    assert stopped[0] == stopped[1] == "stopped in epoch 1"
    results(2, tmp_path, train_as_worker, config.replace(resume=cut), cut)
    assert [line["seeds_checksum"] for line in record(cut)] == expected_checksums(config)
    assert_same_weights(whole, cut)


def test_the_local_seeds_of_one_worker_are_all_seeds(config, tmp_path):
    config = config.replace(seed_order="local", epochs=1)
    train(config, tmp_path / "run")
    assert [line["seeds_checksum"] for line in record(tmp_path / "run")] == expected_checksums(
        config
    )


@pytest.mark.processes
def test_a_run_of_local_seeds_resumes_with_another_number_of_workers(config, tmp_path):
    config = config.replace(seed_order="local")
    stopped = results(2, tmp_path, train_as_worker, config, tmp_path / "run", 7)
    assert stopped[0] == stopped[1] == "stopped in epoch 1"
    assert saved(tmp_path / "run")["loader"]["order_world_size"] == 2
    more = config.replace(resume=tmp_path / "run")
    said = results(3, tmp_path, train_and_listen, more, tmp_path / "run")
    assert any("of the edges connect parts of different workers" in line for line in said[0])
    # each seed once, by the workers before and after
    checksums = [line["seeds_checksum"] for line in record(tmp_path / "run")]
    assert checksums == expected_checksums(config)
