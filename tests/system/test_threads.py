"""Worker threads have a lower priority and one OpenMP thread."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gcnzc.system.threads import use_batch_scheduling

needs_classes = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"), reason="the system has no classes of threads"
)


def in_a_thread(*deeds):
    """What each returns, one after the other in one new thread."""
    with ThreadPoolExecutor(1) as executor:
        return [executor.submit(deed).result() for deed in deeds]


def of_this_thread():
    return os.sched_getscheduler(0), torch.get_num_threads()


@pytest.fixture
def three():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@needs_classes
def test_a_thread_lowers_only_its_own_priority(three):
    usual = (os.SCHED_OTHER, 3)
    assert in_a_thread(of_this_thread, use_batch_scheduling, of_this_thread) == [
        usual,
        None,
        (os.SCHED_BATCH, 1),
    ]
    assert of_this_thread() == usual
    assert in_a_thread(of_this_thread) == [usual]


def test_torch_computes_in_one_thread(three):
    # as a thread's first question to torch
    numbers = torch.randint(1000, (10**5,))
    _, found, threads = in_a_thread(use_batch_scheduling, numbers.unique, torch.get_num_threads)
    assert threads == 1
    assert torch.equal(found, numbers.unique())


@needs_classes
def test_another_scheduling_class_is_kept(three):
    def step_aside():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    assert in_a_thread(step_aside, use_batch_scheduling, of_this_thread)[-1] == (os.SCHED_IDLE, 1)


@needs_classes
def test_a_system_that_refuses_is_tolerated(three, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert in_a_thread(use_batch_scheduling, of_this_thread)[-1] == (os.SCHED_OTHER, 1)
