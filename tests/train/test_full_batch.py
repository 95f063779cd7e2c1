"""Runs with --batch-size all: the whole graph in each step."""

import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from training import assert_same_weights, planted, saved

from gcnzc import load
from gcnzc.cli import main
from gcnzc.models import gnn
from gcnzc.train import full_batch, memory
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.evaluation import evaluate
from gcnzc.train.memory import footprint_of
from gcnzc.train.progress import NullReporter
from gcnzc.train.record import read
from gcnzc.train.run import train
from gcnzc.train.errors import Interrupted


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Path:
    return planted(tmp_path_factory, 1000, 6000, 16, 4)


@pytest.fixture(scope="module")
def config(graph) -> TrainConfig:
    sizes = {"layers": 2, "hidden": 16, "batch_size": "all"}
    return TrainConfig(data=graph, **sizes, epochs=30, lr=0.02, dropout=0.2)


@pytest.mark.parametrize("model", ["sage", "gcn", "gin", "gat", "gatv2"])
def test_every_model_learns_in_one_step_per_epoch(model, config, tmp_path):
    norm = "batch" if model == "gin" else "none"
    line = train(replace(config, model=model, heads=2, norm=norm), tmp_path / "run")
    # there are four classes
    assert line["valid_accuracy"] > 0.55
    assert line["options"]["fanouts"] == [-1, -1]
    records = read(tmp_path / "run" / "record.jsonl")
    seeds = len(load(config.data).split["train"])
    assert [(record["steps"], record["seeds"]) for record in records] == [(1, seeds)] * 30
    # rows are gathered in the first epoch only
    assert records[0]["payload_bytes"] > 0
    assert not any(record["payload_bytes"] or record["gather_s"] for record in records[1:])
    again = evaluate(EvaluateConfig(run=tmp_path / "run"))
    # layer by layer, sums are rounded differently
    assert again["valid_accuracy"] == pytest.approx(line["valid_accuracy"], abs=0.01)


class Stopping(NullReporter):
    """Sends a stop request before the step of an epoch."""

    @contextmanager
    def task(self, what):
        if what.startswith("epoch 9/"):
            signal.raise_signal(signal.SIGINT)
        yield lambda done, total, figures="": None


def test_a_run_resumes_bit_for_bit(config, tmp_path):
    config = replace(config, epochs=12, schedule="cosine", warmup_epochs=3.0, norm="batch")
    config = replace(config, checkpoint_every_s=0, optimizer="adamw")
    train(config, tmp_path / "whole")
    train(config, tmp_path / "again")
    assert_same_weights(tmp_path / "whole", tmp_path / "again")
    # after the step of an epoch, whose batch is then not used again
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", Stopping())
    assert saved(tmp_path / "cut")["in_epoch"]
    assert saved(tmp_path / "cut")["loader"]["position"] == 1
    train(replace(config, resume=tmp_path / "cut"), tmp_path / "cut")
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")
    one, other = saved(tmp_path / "cut")["lines"], saved(tmp_path / "whole")["lines"]
    for name in ("loss", "lr", "seeds", "seeds_checksum", "valid_accuracy"):
        assert [line[name] for line in one] == [line[name] for line in other], name


def test_a_large_graph_is_evaluated_layer_by_layer(config, tmp_path, monkeypatch):
    """A pass over all nodes would need much more memory than a step on a few of them."""
    config = replace(config, epochs=2)
    used = []
    compute_logits = full_batch.compute_logits
    monkeypatch.setattr(
        "gcnzc.train.tasks.node.compute_logits",
        lambda *args: [used.append(1), compute_logits(*args)][1],
    )
    one = train(config, tmp_path / "one")
    assert len(used) == 2
    monkeypatch.setattr(full_batch, "MAX_NODES_FACTOR", 0)
    monkeypatch.setattr(full_batch, "MAX_PASS_BYTES", 0)
    other = train(config, tmp_path / "other")
    assert len(used) == 2
    assert one["valid_accuracy"] == pytest.approx(other["valid_accuracy"], abs=0.01)
    assert_same_weights(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("--fanouts 5,5", "--fanouts 5,5 with --batch-size all", "omit --fanouts"),
        # the default, if it is given
        ("--layers 3 --fanouts 15,10,5", "--fanouts 15,10,5 with --batch-size all", "give -1"),
        ("--task link", "--task link with --batch-size all", "give --batch-size a number"),
        ("--features cached", "--features cached with --batch-size all", "--features host"),
        ("--workers 2", "--workers 2 with --batch-size all", "use one worker"),
    ],
)
def test_options_that_do_not_fit_are_errors_with_remedies(words, message, hint, graph, capsys):
    options = ["--batch-size", "all", "--layers", "2", *words.split()]
    assert main(["train", str(graph), *options]) == 2
    error = capsys.readouterr().err
    assert f"error: {message}" in error or message in error
    assert f"{hint}" in error.partition("hint: ")[2]


def test_the_memory_of_all_layers_is_estimated(config, monkeypatch, tmp_path):
    def model():
        return gnn.SAGE(10, 7, 3, 2)

    found = footprint_of(config, model, 1000, 10, 200, (900, 500, 200))
    assert found.minibatch == (900 * 10 + 500 * 7 + 200 * 3) * 4
    # the features of all nodes are used in place
    whole = footprint_of(config, model, 1000, 10, 1000, (1000, 1000, 1000))
    assert whole.minibatch == 1000 * (7 + 3) * 4
    monkeypatch.setattr(memory, "total_bytes", lambda: 1000)
    with pytest.raises(RuntimeError, match=r"for a full-batch step\n\nhint: use minibatches with"):
        train(config, tmp_path / "run")
