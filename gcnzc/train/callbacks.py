"""Callbacks: what a run does besides training and evaluation, in `gcnzc.train.loop`."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from gcnzc.exchange import WorkerLost
from gcnzc.exchange import run as run_algorithm
from gcnzc.exchange.sync import all_gather_scalar
from gcnzc.train.errors import PeerFailed, StopTraining
from gcnzc.train.state import Run


class Callback:
    """Listens to a run; override the events that you need.

    Each worker calls the callbacks, in the same order, so that they may exchange data. Write files
    on the worker with `run.is_first`. Raise `StopTraining` in any event of any worker to end the
    run as if its last epoch were over: all workers stop after the same step.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step, when all parts are built, and a resumed run is restored."""

    def on_step(self, run: Run) -> None:
        """After an optimizer step; `run.outputs` has its minibatches.

        On a GPU, do not read values of tensors in each step: it would wait for the device.
        """

    def on_epoch(self, run: Run) -> None:
        """After the last step of an epoch, before its evaluation; fill `run.line`.

        Its values are numbers, texts, and lists and dicts of these.
        """

    def on_evaluate(self, run: Run) -> None:
        """After an evaluation; `run.scores` are those of `run.evaluated`."""

    def on_record(self, run: Run) -> None:
        """After an epoch, when `run.line` is complete; again if the last epoch is scored later."""

    def on_end(self, run: Run) -> None:
        """After the last epoch, or when the run has stopped (`run.stopped`); not after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run restores, of the first worker.

        The values are tensors, numbers, texts, and lists and dicts of these.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, on all workers, before `on_start`."""


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Import and build the callbacks of --callback; modules may be in the current folder.

    Raises:
        ValueError: there is no such module or class, or it is no callback.
    """
    found: list[Callback] = []
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        module, _, attribute = name.partition(":")
        if not attribute:
            spelt = ":".join(name.rsplit(".", 1)) if "." in name else "watch:Watch"
            raise ValueError(
                f"--callback {name} names no class\n\nhint: write module:class, as in {spelt}"
            )
        try:
            kind = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            remedy = "a module of the current folder or an installed one, as in watch:Watch"
            raise ValueError(f"--callback {name}: {error}\n\nhint: name {remedy}") from error
        found.append(kind() if isinstance(kind, type) else kind)
        check_callback(found[-1], f"--callback {name}")
    return found


def check_callback(given: object, name: str) -> None:
    """Raise a ValueError if `given` is not an instance of `Callback`."""
    if not isinstance(given, Callback):
        raise ValueError(
            f"{name} is no callback, but {given!r:.100}\n\n"
            "hint: give an instance of a subclass of gcnzc.train.Callback, such as Watch(); "
            "--callback names the class or an instance"
        )


@contextmanager
def named_errors(method: str) -> Iterator[None]:
    """Within the `with`, name a method in the notes of errors, which keep their type.

    Tracebacks of Python 3.11, and `gcnzc train`, show the notes.
    """
    try:
        yield
    except Exception as error:
        vars(error).setdefault("__notes__", []).append(f"raised by {method}")
        raise


EVENTS = [name for name in vars(Callback) if name.startswith("on_")]


class Hooks:
    """Calls the callbacks that override an event."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.methods = {
            event: [
                (f"{type(each).__qualname__}.{event}", getattr(each, event))
                for each in callbacks
                if getattr(getattr(each, event), "__func__", None) is not vars(Callback)[event]
            ]
            for event in EVENTS
        }

    def __call__(self, event: str, run: Run) -> None:
        """Call the callbacks of an event, all of them also if one stops the run.

        Raises:
            PeerFailed: a callback failed on another worker; not in `on_step`, where nothing is
                exchanged.
        """
        for name, method in self.methods[event]:
            failure: Exception | None = None
            try:
                with named_errors(name):
                    method(run)
            except StopTraining as reason:
                run.ending = run.ending or reason
            except WorkerLost:
                raise  # the others see it, too
            except Exception as error:
                failure = error
            if event == "on_step" or run.group.world_size == 1:
                if failure is not None:
                    raise failure
                continue
            state = 2 if failure is not None else int(run.ending is not None)
            states = run_algorithm(all_gather_scalar(state), run.group)
            if 2 in states:
                raise failure or PeerFailed(f"worker {states.index(2)} has failed")
            if 1 in states and run.ending is None:
                run.ending = StopTraining(f"worker {states.index(1)} has ended the run")
