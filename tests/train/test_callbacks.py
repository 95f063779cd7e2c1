"""Callbacks listen to a run, keep a state, and end it on all workers."""

import re
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_runs import failed
from processes import results
from torch import nn
from training import Listener, Stopped, Stopping, assert_same_run, lines, planted, saved

from gcnzc.cli import main
from gcnzc.exchange import init_group
from gcnzc.train import Callback, StopTraining, TrainConfig, train
from gcnzc.train.callbacks import EVENTS
from gcnzc.train.errors import PeerFailed
from gcnzc.train.state import Run

# 240 training nodes: 8 steps in an epoch, and 4 of two workers
SIZES = {"fanouts": (3, 3), "hidden": 8, "batch_size": 30, "epochs": 3, "lr": 0.01, "threads": 1}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return planted(tmp_path_factory, 400, 2400, 8, 3)


class Watch(Callback):
    """Counts the steps, and writes down the events; raises an error in one of them."""

    def __init__(self, event: str = "", at: int = 0, error: Exception | None = None) -> None:
        self.events, self.steps = [], 0
        self.event, self.at, self.error = event, at, error

    def happened(self, event, run):
        self.steps += event == "on_step"
        self.events.append((event, run.epoch, dict(run.line) if event == "on_record" else None))
        if event == self.event and self.steps >= self.at and self.error is not None:
            raise self.error

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


for _name in EVENTS:
    setattr(Watch, _name, lambda self, run, event=_name: self.happened(event, run))


@pytest.mark.parametrize("where", ["state", "line"])
def test_values_that_a_checkpoint_cannot_have_are_refused(where, graph, tmp_path):
    class Odd(Callback):
        def on_epoch(self, run):
            run.line["odd"] = Fraction(1, 2) if where == "line" else 1.0

        def state_dict(self):
            return {"odd": Fraction(1, 2)} if where == "state" else {}

    config = TrainConfig(data=graph, **SIZES, checkpoint_every_s=0)
    with pytest.raises(TypeError, match=f"{where}.*: a checkpoint can only have tensors"):
        train(config, tmp_path / "run", callbacks=[Odd()])


def test_numbers_of_numpy_are_recorded_as_numbers(graph, tmp_path):
    class Numbers(Callback):
        def on_epoch(self, run):
            run.line |= {"half": np.float32(0.5), "counts": [np.int64(3)]}

        def state_dict(self):
            return {"half": np.float16(0.5)}

    train(TrainConfig(data=graph, **SIZES), tmp_path / "run", callbacks=[Numbers()])
    for line in (lines(tmp_path / "run")[-1], saved(tmp_path / "run")["lines"][-1]):
        assert (line["half"], line["counts"]) == (0.5, [3])


def test_methods_that_are_set_on_a_callback_are_called(graph, tmp_path):
    calls, callback = [], Callback()
    callback.on_epoch = lambda run: calls.append(run.epoch)
    train(TrainConfig(data=graph, **SIZES), tmp_path / "run", callbacks=[callback])
    assert calls == [0, 1, 2]
    with pytest.raises(
        ValueError, match=r"is no callback, but <class .*\n\nhint: give an instance"
    ):
        train(TrainConfig(data=graph, **SIZES), tmp_path / "other", callbacks=[Callback])


def test_a_callback_receives_the_events_of_a_run(graph, tmp_path):
    watch = Watch()
    train(TrainConfig(data=graph, **SIZES, evaluate_every=2), tmp_path / "run", callbacks=[watch])
    steps = watch.steps // 3
    one = [("on_step", epoch) for epoch in range(3) for _ in range(steps)]
    expected = [("on_start", 0), *one[:steps], ("on_epoch", 0), ("on_record", 1)]
    for epoch in (1, 2):
        expected += one[epoch * steps : (epoch + 1) * steps]
        expected += [("on_epoch", epoch), ("on_evaluate", epoch), ("on_record", epoch + 1)]
    assert [each[:2] for each in watch.events] == [*expected, ("on_end", 3)]
    records = [line for event, _, line in watch.events if event == "on_record"]
    assert records == lines(tmp_path / "run")


def test_callbacks_do_not_change_a_run(graph, tmp_path):
    config = TrainConfig(data=graph, **SIZES)
    train(config, tmp_path / "one", callbacks=[Watch()])
    train(config, tmp_path / "other")
    assert_same_run(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize(("event", "epochs"), [("on_step", 1), ("on_evaluate", 1), ("on_start", 1)])
def test_a_stopped_run_ends_as_after_its_last_epoch(event, epochs, graph, tmp_path):
    watch, listener = Watch(event, 3 * (event == "on_step"), StopTraining("enough")), Listener()
    config = TrainConfig(data=graph, **SIZES)
    result = train(config, tmp_path / "run", listener, callbacks=[watch])
    assert result["epochs"] == epochs == len(lines(tmp_path / "run"))
    assert 0 <= result["test_accuracy"] <= 1
    assert "stopped after epoch 1: enough" in listener.said
    assert watch.events[-1][0] == "on_end"
    assert (tmp_path / "run" / "result.json").exists()


def test_an_error_of_a_callback_ends_the_run_which_can_be_resumed(graph, tmp_path):
    config = TrainConfig(data=graph, **SIZES, checkpoint_every_s=0)
    with pytest.raises(KeyError, match="mine") as caught:
        train(config, tmp_path / "cut", callbacks=[Watch("on_step", 11, KeyError("mine"))])
    assert "on_step" in caught.value.__notes__[-1]
    train(config.replace(resume=tmp_path / "cut"), tmp_path / "cut", callbacks=[Watch()])
    train(config, tmp_path / "whole")
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_the_state_of_a_callback_is_resumed(graph, tmp_path):
    config = TrainConfig(data=graph, **SIZES, checkpoint_every_s=0)
    whole = [Watch(), Watch()]
    train(config, tmp_path / "whole", callbacks=whole)
    with pytest.raises(Stopped):
        train(config, tmp_path / "cut", Stopping(2, 4), callbacks=[Watch(), Watch()])
    assert saved(tmp_path / "cut")["epoch"] == 1
    # a resumed run may have other callbacks, too
    resumed, other = [Watch(), Watch()], Callback()
    train(config.replace(resume=tmp_path / "cut"), tmp_path / "cut", callbacks=[other, *resumed])
    assert [each.steps for each in resumed] == [each.steps for each in whole]
    train(config.replace(resume=tmp_path / "cut"), tmp_path / "cut")


def train_with_callback(config, folder, rank, *words):
    """Train with a callback that raises an error on one of the workers."""
    with init_group(timeout_s=60) as group:
        watch = Watch(*words) if group.rank == rank else Watch()
        try:
            result = train(config, folder, group=group, callbacks=[watch])
        except (PeerFailed, KeyError) as error:
            return type(error).__name__, str(error)
        return result["epochs"], watch.steps


def work_on_the_first(folder):
    """Work longer on the first worker than the others wait for an exchange."""
    with init_group(timeout_s=2) as group:
        run = SimpleNamespace(group=group, is_first=group.rank == 0)
        Run.on_first(run, lambda: time.sleep(5))
        return group.rank


@pytest.mark.processes
def test_others_wait_for_long_work_of_the_first_worker(tmp_path):
    assert results(2, tmp_path, work_on_the_first, tmp_path) == [0, 1]


class Broken(Watch):
    def load_state_dict(self, state):
        raise KeyError("mine")


def test_a_callback_that_cannot_load_its_state_is_named(graph, tmp_path):
    config = TrainConfig(data=graph, **(SIZES | {"epochs": 1}))
    train(config, tmp_path / "run", callbacks=[Broken()])
    config = config.replace(resume=tmp_path / "run", epochs=2)
    with pytest.raises(RuntimeError, match=r"Broken.load_state_dict raised KeyError 'mine'"):
        train(config, tmp_path / "run", callbacks=[Broken()])


class Final(Callback):
    """Has the parameters at the end of a run that stops in an event of its first epoch."""

    def __init__(self, event):
        setattr(self, event, self.stop)

    def stop(self, run):
        raise StopTraining("enough")

    def on_end(self, run):
        self.weights = nn.utils.parameters_to_vector(run.model.parameters()).detach()


def train_to_the_end(config, folder, event):
    """The parameters of this worker after a run that a callback has ended."""
    with init_group(timeout_s=60) as group:
        final = Final(event)
        train(config, folder, group=group, callbacks=[final])
        return final.weights


@pytest.mark.processes
@pytest.mark.parametrize("event", ["on_evaluate", "on_record"])
def test_workers_have_equal_parameters_after_a_stop(event, graph, tmp_path):
    config = TrainConfig(data=graph, **SIZES, strategy="local-sgd:local_steps=100")
    one, other = results(2, tmp_path, train_to_the_end, config, tmp_path / "run", event)
    assert torch.equal(one, other)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # one exchange later
        (("on_step", 2, StopTraining("enough")), [(1, 3), (1, 3)]),
        (("on_record", 0, StopTraining("enough")), [(1, 4), (1, 4)]),
        (
            ("on_record", 0, KeyError("mine")),
            [("PeerFailed", "worker 1 has failed"), ("KeyError", "'mine'")],
        ),
    ],
    ids=["in a step", "after an epoch", "error"],
)
def test_a_callback_of_one_worker_ends_the_run_on_all(words, expected, graph, tmp_path):
    config = TrainConfig(data=graph, **SIZES)
    assert (
        results(2, tmp_path, train_with_callback, config, tmp_path / "run", 1, *words) == expected
    )


MODULE = """
from gcnzc.train import Callback


class Watch(Callback):
    def on_end(self, run):
        run.reporter.say(f"watched {run.epoch} epochs")


class Broken(Callback):
    def on_epoch(self, run):
        raise KeyError("mine")


class Unsaved(Callback):
    def state_dict(self):
        raise KeyError("mine")
"""


def test_the_command_imports_callbacks_by_name(graph, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "watching.py").write_text(MODULE)
    words = ["train", graph, "--epochs", "1", "--fanouts", "3", "--hidden", "4", "--callback"]
    assert main([*map(str, words), "watching:Watch"]) == 0
    assert "watched 1 epochs" in capsys.readouterr().err
    for name, message in (
        ("watching:Broken", "unexpected KeyError: 'mine' (raised by Broken.on_epoch)"),
        ("watching:Unsaved", "unexpected KeyError: 'mine' (raised by Unsaved.state_dict)"),
        ("watching:Wach", "has no attribute 'Wach'"),
        ("none:Watch", "No module named 'none'"),
        ("watching", "--callback watching names no class"),
        ("watching.Watch", "--callback watching.Watch names no class"),
        ("json:loads", "is no callback"),
    ):
        error, hint = failed(capsys, [*words, name], 1)
        assert message in error
        assert re.search("watch(ing)?:Watch|subclass|traceback", hint)


def test_runs_are_logged_to_weights_and_biases(graph, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from gcnzc.train.wandb import WandB

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run, logged = tmp_path / "run", []

    class Watched(WandB):
        def on_start(self, run):
            super().on_start(run)
            log = self.board.log
            self.board.log = lambda line, step: (
                logged.append((self.id, step, line)),
                log(line, step),
            )

    config = TrainConfig(data=graph, **SIZES)
    train(config, run, callbacks=[Watched()])
    train(config.replace(epochs=4, resume=run), run, callbacks=[Watched()])
    assert [step for _, step, _ in logged] == [1, 2, 3, 4]
    assert len({identity for identity, _, _ in logged}) == 1
    for (_, _, line), record in zip(logged, lines(run), strict=True):
        assert line == {key: value for key, value in record.items() if key in line}
        assert {"loss", "valid_accuracy", "epoch_s"} <= set(line)
    assert len([*(run / "wandb").glob("offline-run-*")]) == 2
