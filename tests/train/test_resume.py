"""A run that ends in the middle resumes bit for bit, whatever state its options have."""

import json
import math
import shutil

import pytest
import torch
import typed_papers
import typed_shop
from training import (
    Interrupting,
    Stopped,
    Stopping,
    assert_same_run,
    lines,
    planted,
    saved,
)

import gcnzc
from gcnzc import prepare
from gcnzc.graph.edge_split import EdgeShares
from gcnzc.train import checkpoint
from gcnzc.train.checkpoint import load_best
from gcnzc.train.config import TrainConfig
from gcnzc.train.errors import Interrupted
from gcnzc.train.run import train
from gcnzc.train.run_folder import last_checkpoint
from gcnzc.train.schema import read_schema

SIZES = {"fanouts": (3, 3), "hidden": 8, "batch_size": 30, "epochs": 3, "lr": 0.01, "threads": 1}
# by case: the graph, the options, and where the run ends: a stop request in a step of the run, or
# the end of the process at a step of an epoch
CASES = {
    "schedule and weights of classes": (
        "nodes",
        {"schedule": "cosine", "warmup_epochs": 1.5}
        | {"task": "node:label_smoothing=0.1,class_weights=balanced"},
        (2, 4),
    ),
    "steps of the schedule and an exchange": (
        "nodes",
        {"schedule": "step:epochs=0.5", "optimizer": "onebit-adam"},
        (2, 4),
    ),
    "moving average of the weights": (
        "nodes",
        {"average": "ema:decay=0.9", "model": "sage:norm=batch"}
        | {"optimizer": "adam:weight_decay=0.1", "decay": "weights", "clip_gradients": 0.1},
        (2, 4),
    ),
    "average of epochs and label inputs": (
        "nodes",
        {"average": "swa:start=0", "model": "sage:norm=batch", "task": "node:label_inputs=0.5"},
        (2, 4),
    ),
    "accumulation, after the first step": ("nodes", {"accumulate": 3}, 1),
    "accumulation, after the last step of an epoch": ("nodes", {"accumulate": 100}, 1),
    "links": ("links", {"task": "link:negatives=in-batch", "batch_size": 200}, (2, 6)),
    "typed nodes": ("papers", {"model": "rgcn", "batch_size": 64}, 3),
    "typed nodes, after an epoch": ("papers", {"model": "rgcn", "batch_size": 64}, 7),
    "typed links": (
        "shop",
        {"model": "hetero-sage", "task": "link:edge_type=buys,evaluate_negatives=10"}
        | {"batch_size": 256},
        8,
    ),
}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    nodes = planted(tmp_path_factory, 400, 2400, 8, 3)
    prepare(nodes, folder / "links", edge_split=EdgeShares())
    gcnzc.prepare(typed_papers.build(), folder / "papers")
    gcnzc.prepare(typed_shop.build(), folder / "shop")
    return {"nodes": nodes} | {name: folder / name for name in ("links", "papers", "shop")}


@pytest.mark.parametrize("case", CASES)
def test_a_run_resumes_bit_for_bit_also_with_other_threads(case, graphs, tmp_path):
    graph, options, end = CASES[case]
    config = TrainConfig(data=graphs[graph], **(SIZES | options), checkpoint_every_s=0)
    train(config, tmp_path / "whole")
    if isinstance(end, tuple):
        with pytest.raises(Stopped):
            train(config, tmp_path / "cut", Stopping(*end))
    else:
        with pytest.raises(Interrupted):
            train(config, tmp_path / "cut", callbacks=[Interrupting(end)])
    assert saved(tmp_path / "cut")["loader"]["position"] > 0
    train(config.replace(resume=tmp_path / "cut", threads=3), tmp_path / "cut")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.parametrize("strategy", ["average", "local-sgd:local_steps=3"])
def test_a_run_resumes_from_an_earlier_checkpoint(strategy, graphs, tmp_path):
    options = SIZES | {"strategy": strategy, "average": "ema", "checkpoint_every_s": 0, "keep": 3}
    config = TrainConfig(data=graphs["nodes"], **options)
    train(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    config = config.replace(resume=tmp_path / "run", keep=2)
    files = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert len(files) == 3
    # the end of the run, its last epoch, and a step of that epoch
    for damaged, earlier in ((files[2], files[1]), (files[1], files[0])):
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=f"{damaged} is damaged") as caught:
            train(config, tmp_path / "run")
        remedy = f"delete {damaged}, and the same command resumes from {earlier.name}"
        assert remedy in str(caught.value)
        damaged.unlink()
    assert saved(tmp_path / "run")["in_epoch"]
    train(config, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2


def test_the_best_model_is_that_of_the_checkpoint(graphs, tmp_path):
    """The file of the best model may be newer than the checkpoint, and may be lost."""
    run = tmp_path / "run"
    config = TrainConfig(data=graphs["nodes"], **SIZES, checkpoint_every_s=0, keep=99)
    result = train(config, run)
    best = load_best(run)
    assert best["epoch"] > 0
    config = config.replace(resume=run)
    # killed in the epoch after the first one, which a shorter run does not take
    while saved(run)["epoch"] > 1 or saved(run)["in_epoch"]:
        last_checkpoint(run).unlink()
    shutil.copytree(run, tmp_path / "short")
    short = train(config.replace(resume=tmp_path / "short", epochs=1), tmp_path / "short")
    assert short["best_epoch"] == 1 == load_best(tmp_path / "short")["epoch"] + 1
    assert json.loads((tmp_path / "short" / "config.json").read_text())["epochs"] == 1
    again = train(config, run)
    assert again["best_epoch"] == result["best_epoch"] == best["epoch"] + 1
    assert again["test_accuracy"] == result["test_accuracy"]
    for name, weights in load_best(run)["model"].items():
        assert torch.equal(weights, best["model"][name])
    assert [each["epoch"] for each in lines(run)] == list(range(SIZES["epochs"]))
    for name in ("best.pt", "schema.json"):
        (run / name).write_bytes(b"damaged")
    assert train(config, run)["best_epoch"] == load_best(run)["epoch"] + 1
    assert read_schema(run).num_classes == 3
    assert not (run / "workers.jsonl").exists()


@pytest.mark.parametrize("epoch", [0, 7, math.nan, "3"])
def test_a_checkpoint_of_another_epoch_than_its_record_is_damaged(epoch, graphs, tmp_path):
    run = tmp_path / "run"
    config = TrainConfig(data=graphs["nodes"], **(SIZES | {"epochs": 1}))
    train(config, run)
    checkpoint.save(last_checkpoint(run), saved(run) | {"epoch": epoch})
    with pytest.raises(ValueError, match=f"is damaged: epoch is {epoch!r}, and the record has 1 "):
        train(config.replace(resume=run), run)
