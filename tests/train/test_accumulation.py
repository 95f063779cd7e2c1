"""Gradient accumulation computes the steps of larger minibatches."""

import json
import shutil

import pytest
import torch
from processes import results
from training import Listener, assert_same_weights, lines, planted, saved, train_as_worker

from gcnzc.cli.commands.train import summary_lines
from gcnzc.loader.seeds import Shares
from gcnzc.optim import Averaged, DropCompute
from gcnzc.optim.compute_deadline import ComputeClock, SimulatedTime
from gcnzc.train import run as train_module
from gcnzc.train.accumulation import Accumulation
from gcnzc.train.config import TrainConfig
from gcnzc.train.ineffective import ineffective_options
from gcnzc.train.results import format_drop_warning
from gcnzc.train.run import train

# none of these depends on which seeds share a minibatch
LEARNING = {"schedule": "cosine", "warmup_epochs": 0.5}
LEARNING |= {"task": "node:label_smoothing=0.1,class_weights=balanced"}
LEARNING |= {"clip_gradients": 0.5, "optimizer": "sgd:weight_decay=0.01"}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    graph = planted(tmp_path_factory, 700, 3000, 12, 4)
    return TrainConfig(
        data=graph,
        fanouts=(-1, -1),
        hidden=8,
        batch_size=20,
        accumulate=4,
        epochs=2,
        lr=0.05,
        dropout=0.0,
        optimizer="sgd",
    )


def weights_of(run):
    return saved(run)["model"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("num_seeds", "batch_size", "size"), [(103, 5, 4), (60, 5, 2), (7, 2, 8)])
def test_steps_have_the_seeds_and_weights_of_larger_minibatches(
    world_size, num_seeds, batch_size, size
):
    found = [
        Accumulation(Shares(num_seeds, batch_size, rank, world_size), size)
        for rank in range(world_size)
    ]
    larger = Shares(num_seeds, batch_size * size, 0, world_size)
    assert len(found[0]) == len(larger)
    for step in range(len(larger)):
        seeds = sum(sum(each.num_seeds(step)) for each in found)
        assert seeds == larger.step_start(step + 1) - larger.step_start(step)
        weights = [each.weights(step, by_size=False) for each in found]
        assert sum(weight for _, weight in weights) == pytest.approx(world_size)
        for each, (factors, weight) in zip(found, weights, strict=True):
            counts = each.num_seeds(step)
            assert weight == pytest.approx(sum(counts) * world_size / seeds)
            assert sum(factors) == pytest.approx(1.0)
            # what the loss of a seed counts, on any worker and in any minibatch
            for factor, count in zip(factors, counts, strict=True):
                assert factor * weight / world_size == pytest.approx(count / seeds)
            sizes = [count / batch_size for count in counts]
            assert each.weights(step, by_size=True) == (sizes, 1.0)
    assert found[0].first_step(0) == 0
    assert found[0].first_step(size) == 1
    assert found[0].first_step(len(found[0].shares)) == len(larger)


def check_equal_runs(one, other):
    for a, b in zip(lines(one), lines(other), strict=True):
        for name in ("steps", "seeds", "seeds_checksum", "lr"):
            assert a.get(name) == b.get(name), name
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    weights = weights_of(other)
    for name, value in weights_of(one).items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-5)


def test_a_run_equals_one_with_larger_minibatches(config, tmp_path):
    config = config.replace(**LEARNING)
    whole = config.replace(batch_size=80, accumulate=1)
    train(whole, tmp_path / "whole")
    result = train(config, tmp_path / "parts")
    # the last step of an epoch has fewer minibatches
    seeds = lines(tmp_path / "whole")[0]["seeds"]
    assert 0 < seeds % 80 < 60
    check_equal_runs(tmp_path / "whole", tmp_path / "parts")
    assert result["options"]["accumulate"] == 4


def test_two_workers_equal_one_and_resume_as_two_or_as_one(config, tmp_path):
    config = config.replace(**LEARNING)
    train(config.replace(batch_size=80, accumulate=1), tmp_path / "alone")
    config = config.replace(batch_size=10)
    whole, cut, other = tmp_path / "whole", tmp_path / "cut", tmp_path / "other"
    results(2, tmp_path, train_as_worker, config, whole)
    check_equal_runs(tmp_path / "alone", whole)
    stopped = results(2, tmp_path, train_as_worker, config, cut, 2)
    assert stopped[0] == "stopped in epoch 1"
    assert saved(cut)["loader"]["position"] == 8
    shutil.copytree(cut, other)
    results(2, tmp_path, train_as_worker, config.replace(resume=cut), cut)
    assert lines(cut)[-1]["loss"] == lines(whole)[-1]["loss"]
    assert_same_weights(cut, whole)
    train(config.replace(resume=other), other)
    for mine, its in zip(lines(other), lines(whole), strict=True):
        # each seed is used once, also by another number of workers
        assert mine["seeds_checksum"] == its["seeds_checksum"]


def test_few_steps_of_an_epoch_are_a_warning(config):
    epochs = config.training.epochs
    assert not [*ineffective_options(config, None, 320, 1, 4 * epochs)]
    for num_seeds, words in ((79, "smaller --accumulate"), (19, "smaller --batch-size")):
        (text,) = ineffective_options(config, None, num_seeds, 1, epochs)
        assert "an epoch is a single step" in text
        assert words in text


# DropCompute


class Scripted(ComputeClock):
    """A clock on which each pass takes a second."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.time_s = 0.0

    def record(self):
        self.time_s += 1
        return SimulatedTime(self.time_s)


def use_drop_compute(threshold, patch=setattr):
    """Let runs in this process train with DropCompute."""

    def build(config, model, group, steps, signals):
        inner = torch.optim.SGD(model.parameters(), config.training.lr, momentum=0.9)
        own = {"micro_batches": config.training.accumulate, "threshold": threshold}
        return DropCompute(inner, group, signals=signals, clock=Scripted(), module=model, **own)

    patch(train_module, "build_optimizer", build)


def train_with_drops(config, folder, threshold):
    use_drop_compute(threshold)
    return train_as_worker(config, folder)


def test_the_dropped_share_is_recorded_and_shown_and_too_large_a_one_is_a_warning(
    config, tmp_path, monkeypatch
):
    train(config, tmp_path / "plain")
    assert all("dropped_share" not in line for line in lines(tmp_path / "plain"))
    # with a worker alone, and with two workers
    use_drop_compute(3.5, monkeypatch.setattr)
    reporter = Listener()
    found = train(config, tmp_path / "one", reporter)
    results(2, tmp_path, train_with_drops, config.replace(batch_size=10), tmp_path / "two", 3.5)
    for run in (tmp_path / "one", tmp_path / "two"):
        for line, whole in zip(lines(run), lines(tmp_path / "plain"), strict=True):
            # full minibatches are dropped, and the last one of an epoch may be smaller
            assert line["dropped_share"] == pytest.approx(
                1 - line["seeds"] / whole["seeds"], abs=0.1
            )
            assert 0.3 < line["dropped_share"] < 0.7
    workers = [
        json.loads(line) for line in (tmp_path / "two" / "workers.jsonl").read_text().splitlines()
    ]
    for line in lines(tmp_path / "two"):
        own = [each["dropped_share"] for each in workers if each["epoch"] == line["epoch"]]
        assert sum(own) / 2 == pytest.approx(line["dropped_share"])
    shares = [line["dropped_share"] for line in lines(tmp_path / "one")]
    assert found["dropped_share"] == pytest.approx(sum(shares) / len(shares))
    assert f"{found['dropped_share']:.1%} of the minibatches were dropped" in "\n".join(
        summary_lines(found, tmp_path / "one")
    )
    epochs = [text for text in reporter.said if text.startswith("epoch ")]
    assert all(f"dropped {share:.0%}" in text for share, text in zip(shares, epochs, strict=True))
    # once, and not in each epoch
    (warning,) = [text for text in reporter.said if "their seeds were not used" in text]
    assert "of the minibatches of epoch 1 were dropped, more than 10%; their seeds" in warning
    assert "were not used. Use a larger --strategy dropcompute:threshold=" in warning


def test_the_limit_of_dropped_minibatches_is_that_of_the_run():
    inner = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    line = {"epoch": 4, "dropped_share": 0.35}

    def warning(earlier=(), **options):
        optimizer = DropCompute(inner, micro_batches=4, **options)
        return format_drop_warning(line, optimizer, earlier)

    assert "35% of the minibatches of epoch 5" in warning(max_dropped=0.2)
    # a measured threshold is not measured again up to 1.5 times its limit
    assert not warning(max_dropped=0.25)
    assert not warning([{"dropped_share": 0.31}], max_dropped=0.2)
    assert warning([{"dropped_share": 0.29}], max_dropped=0.2)
    assert warning(threshold=1.0, max_dropped=0.25)
    assert not format_drop_warning(line, Averaged(inner), [])
