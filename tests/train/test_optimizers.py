"""Runs of several workers by each method of exchange."""

import shutil

import pytest
from processes import results
from slow_cases import mark_slow
from training import (
    assert_same_weights,
    lines,
    planted,
    saved,
    train_as_worker,
)

from gcnzc.train.build import warmup_steps
from gcnzc.train.config import ONE_BIT, TrainConfig
from gcnzc.train.run import train
from gcnzc.train.run_folder import last_checkpoint

METHODS = {
    **{name: {"optimizer": name} for name in ONE_BIT},
    **{name: {"strategy": name} for name in ("selsync", "saps", "a2cid2", "backup")},
    # that meet while a run is as short as here
    **{
        name: {"strategy": f"{name}:local_steps=4"}
        for name in ("local-sgd", "diloco", "sparseloco", "co2")
    },
    "streaming-diloco": {"strategy": "streaming-diloco:local_steps=4,fragments=2"},
    "dropcompute": {"strategy": "dropcompute", "accumulate": 4},
    "muloco": {"strategy": "muloco:local_steps=4", "optimizer": "muon"},
    "fedglomo": {"strategy": "fedglomo:local_steps=4", "optimizer": "sgd", "lr": 0.1},
    "muon in diloco": {"optimizer": "muon", "strategy": "diloco:local_steps=4"},
    "int8": {"strategy": "average:compress=int8"},
    "sign": {"strategy": "average:compress=sign"},
    "topk": {"strategy": "average:compress=topk:0.05"},
    "randomk": {"strategy": "average:compress=randomk:0.05"},
    "threshold": {"strategy": "average:compress=threshold:0.05"},
    "compress sparseloco": {
        "strategy": "diloco:compress=sparseloco:0.1,outer_lr=1,outer_momentum=0,local_steps=2"
    },
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    graph = planted(tmp_path_factory, 2000, 12000, 24, 4)
    return TrainConfig(
        data=graph,
        fanouts=(5, 5),
        hidden=16,
        batch_size=30,
        epochs=3,
        lr=0.01,
        dropout=0.2,
    )


# a compression, and a method of each family
QUICK = ("onebit-adam", "topk", "diloco", "muon in diloco", "a2cid2", "backup", "fedglomo")


@pytest.mark.parametrize("method", mark_slow(zip(METHODS), lambda method: method not in QUICK))
def test_one_worker_learns_by_each_method(method, config, tmp_path):
    found = train(config.replace(**METHODS[method], evaluate_every=3), tmp_path / "run")
    assert found["test_accuracy"] > 0.6
    assert found["bytes_sent"] == 0


# what each saves is tested step by step beside each optimizer
OFTEN = ("onebit-adam",)


def files_of(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "method",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
)
def test_a_run_resumes_bit_for_bit_and_with_another_number_of_workers(method, config, tmp_path):
    config = config.replace(**METHODS[method])
    whole = results(2, tmp_path, train_as_worker, config, tmp_path / "whole")
    assert whole[0]["test_accuracy"] == whole[1]["test_accuracy"] > 0.6
    # in the second epoch, which has about ten steps, when workers may be apart
    stopped = results(2, tmp_path, train_as_worker, config, tmp_path / "cut", 15)
    assert stopped[0] == stopped[1]
    assert stopped[0].startswith("stopped in epoch ")
    assert saved(tmp_path / "cut")["workers"] == 2
    number, _, _ = last_checkpoint(tmp_path / "cut").name.partition("-")
    assert files_of(tmp_path / "cut") == [f"{number}-0.pt", f"{number}-1.pt"]
    other = tmp_path / "other"
    (tmp_path / "cut").rename(other)
    shutil.copytree(other, tmp_path / "cut")
    again = results(
        2, tmp_path, train_as_worker, config.replace(resume=tmp_path / "cut"), tmp_path / "cut"
    )
    assert again[0]["test_accuracy"] == whole[0]["test_accuracy"]
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")
    more = results(3, tmp_path, train_as_worker, config.replace(resume=other), other)
    assert more[0]["workers"] == 3
    assert more[0]["test_accuracy"] > 0.6
    seeds = [line["seeds"] for line in lines(tmp_path / "whole")]
    assert [line["seeds"] for line in lines(other)] == seeds
    assert train(config.replace(resume=other, epochs=4), other)["workers"] == 1
    # those of workers that do not exist any more are removed
    assert files_of(other) == [last_checkpoint(other).name]
    again = results(2, tmp_path, train_as_worker, config.replace(resume=other, epochs=5), other)
    assert again[0]["test_accuracy"] > 0.6


@pytest.mark.parametrize(
    ("words", "steps"), [("0.15", 15), ("0.001", 1), ("40", 40), ("1", 1), ("auto", None)]
)
def test_a_warm_up_is_a_share_or_a_number_of_steps(words, steps):
    training = TrainConfig(optimizer=f"onebit-adam:warmup={words}").training
    assert warmup_steps(training, 100) == steps
