"""Several workers on shares of the minibatches compute the result of one worker."""

import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from limits import HANG_S, NEVER_S
from processes import results, talk, workers
from slow_cases import mark_slow
from torch import nn
from training import assert_same_weights, planted, saved, train_as_worker

import gcnzc
from gcnzc import FeatureTable, Graph, Loader, cli
from gcnzc.cli import builtin_graph
from gcnzc.exchange import Group, init_group, lockstep
from gcnzc.models import gnn
from gcnzc.optim import Averaged
from gcnzc.system.spans import Span
from gcnzc.train import checkpointing, run_folder
from gcnzc.train.config import TrainConfig
from gcnzc.train.epoch_stats import seeds_checksum
from gcnzc.train.run import train
from gcnzc.train.tasks import NodeTask
from gcnzc.train.tracing import gather_spans

STEPS, TOTAL = 12, 48
COUNT, COLUMNS, CLASSES = 300, 6, 4


class WithEverything(nn.Module):
    """A model with an embedding of the nodes, and a tied and an unused parameter."""

    def __init__(self, model: nn.Module, *, sparse: bool) -> None:
        super().__init__()
        self.model = model
        self.table = nn.Embedding(COUNT, COLUMNS, sparse=sparse)
        self.first = nn.Linear(COLUMNS, COLUMNS)
        self.second = nn.Linear(COLUMNS, COLUMNS)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, batch) -> torch.Tensor:
        x = batch.x.double() + self.table(batch.nodes.long())
        return self.model(batch.blocks, self.second(self.first(x)))


@pytest.fixture(scope="module")
def graph():
    generator = torch.Generator().manual_seed(5)
    ends = torch.randint(COUNT, (2, 2500), generator=generator)
    return Graph.from_edges(*ends, COUNT)


def build(kind, sparse):
    torch.manual_seed(7)
    return WithEverything(
        kind(COLUMNS, 8, CLASSES, num_layers=2, dropout=0.0), sparse=sparse
    ).double()


def steps(graph, model, inner, rank, world_size):
    """Train one worker for two epochs, whose last minibatches are not full."""
    generator = torch.Generator().manual_seed(6)
    table = FeatureTable(torch.randn(COUNT, COLUMNS, generator=generator))
    labels = torch.randint(CLASSES, (COUNT,), generator=generator)
    loader = Loader(
        graph,
        table,
        torch.arange(COUNT - 13),
        [4, 3],
        TOTAL // world_size,
        labels=labels,
        rank=rank,
        world_size=world_size,
        threads=1,
    )
    optimizer = Averaged(inner(model.parameters()), Group(rank, world_size))
    yield from optimizer.broadcast_model_algorithm()
    taken = 0
    while taken < STEPS:
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), batch.y).backward()
            optimizer.weight = loader.shares.loss_weight(step)
            yield from optimizer.algorithm()
            taken += 1


INNER = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


@pytest.mark.parametrize(
    ("kind", "inner"),
    # each model, and each optimizer with one of them
    mark_slow(
        itertools.product((gnn.SAGE, gnn.GCN, gnn.GAT, gnn.GATv2), INNER),
        lambda kind, inner: inner != "sgd" and kind is not gnn.SAGE,
    ),
)
def test_gradients_of_shares_equal_those_of_the_whole(kind, inner, graph):
    # the embedding is sparse where the optimizer takes that
    sparse = False
    expected = build(kind, sparse)
    lockstep([steps(graph, expected, INNER[inner], 0, 1)])
    moved = build(kind, sparse)
    assert not torch.equal(expected.first.weight, moved.first.weight)
    assert torch.equal(expected.unused, moved.unused)
    for world_size in (2, 3):
        replicas = [build(kind, sparse) for _ in range(world_size)]
        lockstep(
            [
                steps(graph, model, INNER[inner], rank, world_size)
                for rank, model in enumerate(replicas)
            ]
        )
        for model in replicas:
            for (name, found), right in zip(
                model.named_parameters(), expected.parameters(), strict=True
            ):
                torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-10, msg=name)


# runs of several processes


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    graph = planted(tmp_path_factory, 2000, 12000, 24, 4)
    return TrainConfig(
        data=graph,
        fanouts=(5, 5),
        hidden=16,
        batch_size=60,
        epochs=2,
        lr=0.01,
        dropout=0.0,
        optimizer="sgd",
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_with_buffers(config, folder):
    """The result of a run on this worker, and the buffers of its model at each evaluation."""
    seen, evaluate = [], NodeTask.evaluate

    def watched(task, of, *words):
        seen.append({name: buffer.clone() for name, buffer in of.model.named_buffers()})
        return evaluate(task, of, *words)

    NodeTask.evaluate = watched
    return train_as_worker(config, folder) | {"buffers": seen}


# options of the update, with which two workers compute the result of one as well
LEARNING = {"schedule": "cosine", "warmup_epochs": 0.5, "clip_gradients": 0.5}
LEARNING |= {"task": "node:label_smoothing=0.1,class_weights=balanced"}
LEARNING |= {"optimizer": "sgd:weight_decay=0.01", "decay": "weights"}


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_two_workers_compute_the_result_of_one(norm, config, tmp_path):
    if norm == "none":
        config = config.replace(**LEARNING)
    alone = train(config.replace(model=f"sage:norm={norm}"), tmp_path / "alone")
    halves = config.replace(model=f"sage:norm={norm}", batch_size=30)
    found = results(2, tmp_path, train_with_buffers, halves, tmp_path / "two")
    assert found[0]["workers"] == 2
    # both evaluate the same model: the statistics of their shares are combined
    for mine, theirs in zip(found[0]["buffers"], found[1]["buffers"], strict=True):
        assert mine.keys() == theirs.keys()
        assert any("running_mean" in name for name in mine) == (norm == "batch")
        for name, buffer in mine.items():
            assert torch.equal(buffer, theirs[name]), name
            assert buffer.count_nonzero() > 0, name
    assert len(found[0]["buffers"]) == config.training.epochs
    assert found[0]["bytes_sent"] > 0
    # both have chosen the same model by the same scores
    assert found[0]["best_epoch"] == found[1]["best_epoch"]
    assert found[0]["test_accuracy"] == found[1]["test_accuracy"]
    one, two = lines(tmp_path / "alone" / "record.jsonl"), lines(tmp_path / "two" / "record.jsonl")
    for a, b in zip(one, two, strict=True):
        assert (a["seeds"], a["steps"]) == (b["seeds"], b["steps"])
        if norm == "none":
            # normalized over its own share, a minibatch is another one
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    if norm == "none":
        before, after = saved(tmp_path / "alone"), saved(tmp_path / "two")
        for name, value in before["model"].items():
            torch.testing.assert_close(after["model"][name], value, rtol=1e-3, atol=1e-4)
        assert alone["test_accuracy"] == pytest.approx(found[0]["test_accuracy"], abs=0.01)
    # what each did in each epoch
    each = lines(tmp_path / "two" / "workers.jsonl")
    assert [(line["epoch"], line["worker"]) for line in each] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert sum(line["seeds"] for line in each[:2]) == one[0]["seeds"]
    assert all(line["exchange_s"] > 0 for line in each)


def test_the_timeline_shows_all_workers_on_one_clock(config, tmp_path):
    results(2, tmp_path, train_as_worker, config.replace(trace=5), tmp_path / "run")
    events = json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"worker 0, model", "worker 1, model"} <= lanes
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["name"] for span in spans} == {"sample", "gather", "compute", "wait", "exchange"}
    assert (tmp_path / "run" / "timeline.png").stat().st_size > 0


def test_clock_offsets_are_corrected():
    def spans(rank):
        own = [Span("compute", "model", 100.0 * rank, 100.0 * rank + 1)]
        return gather_spans(own, rank)

    found = lockstep([spans(rank) for rank in range(3)]).results
    assert found[0] == found[2]
    assert [span.lane for span in found[0]] == [f"worker {rank}, model" for rank in range(3)]
    # one process has one clock
    assert [span.begin_s for span in found[0]] == pytest.approx([0.0, 100.0, 200.0], abs=1.0)
    assert lockstep([spans(0)]).results == [[Span("compute", "model", 0.0, 1.0)]]


def sent(run):
    """The bytes that each worker of two sent, by epoch; the record has their sums."""
    record, each = lines(run / "record.jsonl"), lines(run / "workers.jsonl")
    found = [
        [line["bytes_sent"] for line in each if line["epoch"] == epoch]
        for epoch in range(len(record))
    ]
    assert [line["bytes_sent"] for line in record] == [sum(epoch) for epoch in found]
    return found


def test_a_run_resumes_bit_for_bit_and_with_another_number_of_workers(config, tmp_path):
    config = config.replace(batch_size=30, dropout=0.3)
    whole = tmp_path / "whole"
    (expected_result, _) = results(2, tmp_path, train_as_worker, config, whole)
    assert expected_result["bytes_sent"] == sum(map(sum, sent(whole)))
    stopped = results(2, tmp_path, train_as_worker, config, tmp_path / "cut", 7)
    assert stopped[0] == stopped[1] == "stopped in epoch 1"
    state = saved(tmp_path / "cut")
    assert state["in_epoch"]
    # the first of them asked in its seventh step, and both stopped after it
    assert state["loader"]["position"] == 7
    shutil.copytree(tmp_path / "cut", tmp_path / "other")
    for folder, after in ((tmp_path / "cut", 2), (tmp_path / "other", 3)):
        more = config.replace(resume=folder)
        found = results(after, tmp_path, train_as_worker, more, folder)
        assert found[0]["workers"] == after
        expected = seeds_checksum(gcnzc.load(config.graph.data).split["train"])
        for line, its in zip(
            lines(folder / "record.jsonl"), lines(whole / "record.jsonl"), strict=True
        ):
            assert line["seeds"] == its["seeds"]
            # each seed once, whoever took it
            assert line["seeds_checksum"] == its["seeds_checksum"] == f"{expected:016x}"
        # of all epochs and workers, and not only since the run went on
        assert found[0]["bytes_sent"] == sum(map(sum, sent(folder)))
    for epoch, (mine, its) in enumerate(zip(sent(tmp_path / "cut"), sent(whole), strict=True)):
        # an epoch's, and all of it, without the broadcast of the checkpoint by which it resumes
        for rank, (found_bytes, bytes_sent) in enumerate(zip(mine, its, strict=True)):
            assert 0.9 * bytes_sent < found_bytes < 1.1 * bytes_sent, (epoch, rank)
    first, second = sent(whole)
    assert second[1] < 1.1 * first[1]
    assert_same_weights(whole, tmp_path / "cut")


def wait_for_record(run, tmp_path):
    """Wait until workers have written an epoch's line into the record."""
    end = time.monotonic() + HANG_S
    while not (run / "record.jsonl").exists():
        assert time.monotonic() < end, talk(tmp_path, 0)
        time.sleep(0.1)


def choose_folder_with_errors(folder, words):
    """`gcnzc train` without --out, three times; something fails on rank 1, 0 and 1."""
    os.chdir(folder)
    rank, usual = int(os.environ["RANK"]), (run_folder.new_folder, builtin_graph.prepared)
    outcomes = []
    for name, data, culprit in (("folder", words[1:2], 1), ("folder", words[1:2], 0), ("", [], 1)):

        def fail(*_):
            raise OSError("the disk is broken")

        def find(reporter):
            return fail() if rank == 1 else Path(words[1])

        run_folder.new_folder, builtin_graph.prepared = usual
        if name and rank == culprit:
            run_folder.new_folder = fail
        if not name:
            builtin_graph.prepared = find
        outcomes.append(cli.main(["train", *map(str, [*data, *words[2:]])]))
    return outcomes


def test_worker_0_chooses_the_folder_and_an_error_of_any_worker_reaches_all(config, tmp_path):
    words = ["train", config.graph.data, "--fanouts", "5,5", "--hidden", 16]
    words += ["--batch-size", 30, "--epochs", 1, "--timeout-s", NEVER_S]
    found = results(2, tmp_path, choose_folder_with_errors, tmp_path, words)
    # worker 1 chooses nothing
    assert found == [[0, 1, 1]] * 2
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["graph-sage-1"]
    first, second = talk(tmp_path, 0), talk(tmp_path, 1)
    assert "error: rank 0: the disk is broken" in second
    assert "error: rank 1: the disk is broken" in first


def train_on_damaged_files(config, folder):
    """What a run ends with on each worker, if the files of one machine are damaged."""

    def describe(data):
        raise ValueError("meta.json is damaged")

    with init_group(timeout_s=NEVER_S) as group:
        if group.rank == 1:
            checkpointing.describe_files = describe
        with pytest.raises(ValueError, match=r"meta\.json is damaged") as caught:
            train(config, folder, group=group)
        return str(caught.value)


def test_damaged_files_of_one_machine_are_an_error_on_all(config, tmp_path):
    found = results(2, tmp_path, train_on_damaged_files, config, tmp_path / "run")
    assert found == ["rank 1: meta.json is damaged", "meta.json is damaged"]
    assert not (tmp_path / "run").exists()


def test_a_non_finite_gradient_is_skipped_on_all_ranks_and_reported(config, tmp_path):
    found = results(2, tmp_path, train_as_worker, config, tmp_path / "run", None, 5)
    assert found[0]["said"] == found[1]["said"]
    (line,) = found[0]["said"]
    assert "step 6 of epoch 1 was skipped on all workers" in line
    assert "rank 1 has" in line
    assert found[0]["test_accuracy"] > 0.3


def test_a_killed_worker_is_reported_and_the_checkpoint_is_whole(config, tmp_path):
    config = config.replace(epochs=10_000, checkpoint_every_s=0.2, timeout_s=NEVER_S)
    with workers(3, tmp_path, train_as_worker, config, tmp_path / "run") as processes:
        wait_for_record(tmp_path / "run", tmp_path)
        os.kill(processes[2].pid, signal.SIGKILL)
        for process in processes[:2]:
            process.join(HANG_S)
            assert process.exitcode == 1
    talks = [talk(tmp_path, rank) for rank in (0, 1)]
    assert any("rank 2 on" in each and "has stopped sending heartbeats" in each for each in talks)
    assert saved(tmp_path / "run")["epoch"] >= 0
