"""CUDA streams and devices, as far as a machine without a GPU can test them."""

import pytest
import torch

from gcnzc.system.streams import CudaStreams
from gcnzc.train.setup import choose_device


class FakeStream:
    """What torch.cuda.Stream is to CudaStream; without a driver."""

    def __init__(self, *_args):
        self.recorded = []

    def record_event(self, event=None):
        # as torch does without one
        event = torch.cuda.Event() if event is None else event
        self.recorded.append(event)
        return event


class FakeEvent:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.enable_timing, self.blocking = enable_timing, blocking

    def synchronize(self):
        assert self.blocking, "the thread spins until the event is past"


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    return CudaStreams(torch.device("cuda", 0))


def test_waiting_for_an_event_leaves_the_core_to_other_threads(streams):
    streams.new().record().synchronize()


def test_waiting_for_a_moment_leaves_the_core_to_other_threads(streams):
    timed_event = streams.new().timed_event()
    assert timed_event.event.enable_timing
    timed_event.synchronize()


@pytest.mark.parametrize(
    ("place", "current", "index"), [(0, 0, 0), (0, 2, 2), (1, 0, 1), (5, 0, 1)]
)
def test_a_chosen_gpu_has_an_index_and_is_the_current_one(monkeypatch, place, current, index):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("auto", place) == torch.device("cuda", index)
    assert chosen == [index]


def test_the_cpu_has_no_index():
    assert choose_device("cpu", 3) == torch.device("cpu")
