"""Two launchers (torchrun) of one run, as on two machines, one of which is lost."""

import json
import os
import signal
from pathlib import Path

import pytest
from limits import HANG_S
from training import planted

from bench.network.launchers import launchers, wait_for, workers_of
from gcnzc import load
from gcnzc.train.epoch_stats import seeds_checksum

OPTIONS = "--fanouts 5,5 --hidden 16 --batch-size 30 --evaluate-every 1000"
OPTIONS += " --checkpoint-every-s 0.3 --timeout-s 10"
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return planted(tmp_path_factory, 2000, 12000, 24, 4)


def start(graph, run, machines, epochs, *more, **keywords):
    options = [*OPTIONS.split(), "--epochs", str(epochs)]
    return launchers(graph, run, machines, options, ENVIRONMENT, *more, **keywords)


def wait_for_epochs(found, count):
    """Wait until the record has so many epochs more than it has."""
    count += len(found.epochs())
    assert wait_for(lambda: len(found.epochs()) >= count, HANG_S), found.output()


def check_whole(found, graph, epochs):
    """Every epoch is in the record once, and used each seed once."""
    seeds = load(graph).split["train"]
    expected = (len(seeds), f"{seeds_checksum(seeds):016x}")
    assert [line["epoch"] for line in found.epochs()] == list(range(epochs))
    assert {(line["seeds"], line["seeds_checksum"]) for line in found.epochs()} == {expected}
    assert "already has a run" not in found.output()
    assert json.loads((found.run / "result.json").read_text())["workers"] == 2


@pytest.mark.slow
def test_a_run_continues_when_a_worker_is_lost_and_when_a_launcher_is_replaced(graph, tmp_path):
    with start(graph, tmp_path / "run", "2", 120) as found:
        first, second = found.start(), found.start()
        wait_for_epochs(found, 2)
        # the first launcher's workers start for the second time, though none of them was lost
        (worker,) = workers_of(second.pid)
        os.kill(worker, signal.SIGKILL)
        wait_for_epochs(found, 5)
        second.kill()
        second.wait()
        found.start()
        assert found.wait(first) == 0, found.output()
        assert found.output().count("resuming ") >= 2
        check_whole(found, graph, 120)


@pytest.mark.slow
def test_a_run_continues_with_fewer_launchers_and_with_more(graph, tmp_path):
    with start(graph, tmp_path / "run", "1:2", 400) as found:
        first, second = found.start(), found.start()
        wait_for_epochs(found, 2)
        # at once, since a worker trains on for seconds until it notices that its launcher is lost
        (worker,) = workers_of(second.pid)
        second.kill()
        os.kill(worker, signal.SIGKILL)
        second.wait()
        wait_for_epochs(found, 5)
        found.start()
        assert found.wait(first) == 0, found.output()
        check_whole(found, graph, 400)
        # one worker alone has no lines of its own
        lines = (found.run / "workers.jsonl").read_text().splitlines()
        assert len(lines) < 2 * 400
