"""What a worker does whose machine is cut off from the store."""

import os
import subprocess
import threading
import time

import pytest

from gcnzc.exchange import watch
from gcnzc.exchange.watch import Watch


class Deaf:
    """A store that answers until the network swallows all requests."""

    def __init__(self):
        self.is_cut_off, self.never = False, threading.Event()

    def set(self, key, value):
        self.wait()

    def get(self, key):
        self.wait()
        return b'[1, 0, "start", "here", ""]'

    def check(self, keys):
        self.wait()
        return True

    def wait(self):
        if self.is_cut_off:
            self.never.wait()


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in (("STORE_S", 0.2), ("LAST_WORDS_S", 0.2), ("BEAT_S", 0.1)):
        monkeypatch.setattr(watch, name, seconds)


@pytest.fixture
def launcher(monkeypatch):
    """A process in the place of this one's parent."""
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(os, "getppid", lambda: process.pid)
    yield process
    process.kill()
    process.wait()


@pytest.mark.usefixtures("quick")
def test_a_store_that_does_not_answer_is_told_in_time_and_ends_the_launcher(launcher, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    store = Deaf()
    alive = Watch(store, 0, 2, "here")
    store.is_cut_off = True
    began = time.monotonic()
    why = alive.culprits()
    assert "this machine is cut off" in why
    alive.leave(why)
    assert time.monotonic() - began < 5
    # by SIGTERM, when the worker has said why
    assert launcher.wait(10) == -15


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("elastic", [False, True])
def test_a_launcher_that_answers_or_is_not_torch_s_stays(elastic, launcher, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if elastic:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    store = Deaf()
    alive = Watch(store, 0, 2, "here")
    store.is_cut_off = not elastic
    why = alive.culprits()
    assert ("cut off" in why) != elastic
    alive.leave()
    time.sleep(1)
    assert launcher.poll() is None
