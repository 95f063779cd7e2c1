"""Runs with --batch-size all: the whole graph in each step."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from training import Interrupting, Listener, assert_same_weights, planted, saved

from gcnzc import load
from gcnzc.models import gnn
from gcnzc.train import full_batch, memory
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.errors import Interrupted
from gcnzc.train.evaluation import evaluate
from gcnzc.train.memory import footprint_of
from gcnzc.train.record import read
from gcnzc.train.run import train


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Path:
    return planted(tmp_path_factory, 1000, 6000, 16, 4)


@pytest.fixture(scope="module")
def config(graph) -> TrainConfig:
    sizes = {"hidden": 16, "batch_size": "all", "fanouts": (-1, -1)}
    return TrainConfig(data=graph, **sizes, epochs=30, lr=0.02, dropout=0.2)


@pytest.mark.parametrize("model", ["sage", "gcn", "gin:norm=batch", "gat:heads=2", "gatv2:heads=2"])
def test_every_model_learns_in_one_step_per_epoch(model, config, tmp_path):
    line = train(config.replace(model=model), tmp_path / "run")
    # there are four classes
    assert line["valid_accuracy"] > 0.55
    assert line["options"]["fanouts"] == [-1, -1]
    records = read(tmp_path / "run" / "record.jsonl")
    seeds = len(load(config.graph.data).split["train"])
    assert [(record["steps"], record["seeds"]) for record in records] == [(1, seeds)] * 30
    # rows are gathered in the first epoch only
    assert records[0]["payload_bytes"] > 0
    assert not any(record["payload_bytes"] or record["gather_s"] for record in records[1:])
    again = evaluate(EvaluateConfig(run=tmp_path / "run"))
    # layer by layer, sums are rounded differently
    assert again["valid_accuracy"] == pytest.approx(line["valid_accuracy"], abs=0.01)


def test_a_run_resumes_bit_for_bit(config, tmp_path):
    config = config.replace(epochs=12, schedule="cosine", warmup_epochs=3.0)
    config = config.replace(checkpoint_every_s=0, optimizer="adamw", model="sage:norm=batch")
    train(config, tmp_path / "whole")
    train(config, tmp_path / "again")
    assert_same_weights(tmp_path / "whole", tmp_path / "again")
    # after the step of an epoch, whose batch is then not used again
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", callbacks=[Interrupting(9)])
    assert saved(tmp_path / "cut")["in_epoch"]
    assert saved(tmp_path / "cut")["loader"]["position"] == 1
    train(config.replace(resume=tmp_path / "cut"), tmp_path / "cut")
    assert_same_weights(tmp_path / "cut", tmp_path / "whole")
    one, other = saved(tmp_path / "cut")["lines"], saved(tmp_path / "whole")["lines"]
    for name in ("loss", "lr", "seeds", "seeds_checksum", "valid_accuracy"):
        assert [line[name] for line in one] == [line[name] for line in other], name


def test_a_large_graph_is_evaluated_layer_by_layer(config, tmp_path, monkeypatch):
    """A pass over all nodes would need much more memory than a step on a few of them."""
    config = config.replace(epochs=2)
    used = []
    compute_logits = full_batch.compute_logits
    monkeypatch.setattr(
        "gcnzc.train.tasks.node.compute_logits",
        lambda *args: [used.append(1), compute_logits(*args)][1],
    )
    one = train(config.replace(evaluate="auto"), tmp_path / "one", listener := Listener())
    assert "evaluation: needed, in one pass over the whole graph" in "".join(listener.said)
    assert len(used) == 2
    monkeypatch.setattr(full_batch, "MAX_NODES_FACTOR", 0)
    monkeypatch.setattr(full_batch, "MAX_PASS_BYTES", 0)
    other = train(config, tmp_path / "other")
    assert len(used) == 2
    assert one["valid_accuracy"] == pytest.approx(other["valid_accuracy"], abs=0.01)
    assert_same_weights(tmp_path / "one", tmp_path / "other")


def test_a_group_of_several_workers_is_an_error(config, tmp_path):
    with pytest.raises(ValueError, match=r"a group of 2 workers with --batch-size all.*\n\nhint: "):
        train(config, tmp_path / "run", group=SimpleNamespace(world_size=2))


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
