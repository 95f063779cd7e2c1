"""Each thread has a CUDA context of its own: no call fails for want of one, or creates others.

"CUDA_ERROR_INVALID_CONTEXT = 201: This most frequently indicates that there is no context bound to
the current thread." (cuda.h, CUDA 13.0.) A call of the runtime, and so of torch, binds the primary
context of the thread's current device, and creates it if there is none.
"""

import contextlib
import threading

import pytest
import torch

from gcnzc.system.cuda_driver import HANDLE_BYTES, SIGNATURES, Driver

INVALID_CONTEXT = 201
NUM_DEVICES = 4
# these calls need no context
FREE = ("cuCtxGetCurrent", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxGetState")
FREE += ("cuGetErrorName",)


class Contexts:
    """A driver library with the contexts of threads, and torch's functions that bind them."""

    def __init__(self):
        self.created = set()  # devices with a primary context
        self.of_threads = threading.local()
        self.used = []  # the devices in whose contexts calls were executed
        for name in SIGNATURES:
            setattr(self, name, self._function(name))

    def _function(self, name):
        def call(*arguments):
            bound = self.bound
            if name == "cuCtxGetCurrent":
                arguments[0]._obj.value = None if bound is None else 50 + bound
            elif name == "cuDeviceGet":
                arguments[0]._obj.value = arguments[1]
            elif name == "cuDevicePrimaryCtxGetState":
                arguments[2]._obj.value = arguments[0].value in self.created
            elif name not in FREE:
                self.used.append(bound)
                return INVALID_CONTEXT if bound is None else 0
            return 0

        return call

    @property
    def bound(self):
        return getattr(self.of_threads, "bound", None)

    @property
    def current(self):
        # that of a new thread is the first
        return getattr(self.of_threads, "current", 0)

    @contextlib.contextmanager
    def device(self, device):
        before, bound = self.current, self.bound
        self.of_threads.current = device
        yield
        self.of_threads.current, self.of_threads.bound = before, bound

    def synchronize(self, device=None):
        self.of_threads.bound = self.current if device is None else device
        self.created.add(self.of_threads.bound)


@pytest.fixture
def contexts(monkeypatch):
    contexts = Contexts()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: NUM_DEVICES)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: contexts.current)
    monkeypatch.setattr(torch.cuda, "device", contexts.device)
    monkeypatch.setattr(torch.cuda, "synchronize", contexts.synchronize)
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: memory)
    return contexts


def allocate(driver):
    code, memory = driver.allocate(2, 100)
    del memory
    return code


CALLS = {
    "lock": lambda driver: driver.lock(4096, 10),
    "unlock": lambda driver: driver.unlock(4096),
    "is_locked": lambda driver: driver.is_locked(4096),
    "locked_range": lambda driver: driver.locked_range(4096),
    "device_address": lambda driver: driver.device_address(4096),
    "allocate and free": allocate,
    "enable_peer": lambda driver: driver.enable_peer(2, 2),
    "export": lambda driver: driver.export(2, 4096)[0],
    "open": lambda driver: driver.open(2, bytes(HANDLE_BYTES))[0],
    "close": lambda driver: driver.close(2, 4096),
    "synchronize": lambda driver: driver.synchronize(),
}


def in_new_thread(work):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]


@pytest.mark.parametrize("name", CALLS)
def test_any_thread_may_call_and_no_other_gpu_gets_a_context(name, contexts):
    driver = Driver(contexts)
    # this process uses one GPU, which is not the first
    with contexts.device(2):
        contexts.synchronize()
        assert CALLS[name](driver) in (0, False, None)
        answer = in_new_thread(lambda: CALLS[name](driver))
    assert answer in (0, False, None)
    assert set(contexts.used) <= {2}
    # it would take several hundred megabytes of memory there
    assert contexts.created == {2}


def test_the_current_gpu_is_used_if_the_process_uses_none(contexts):
    driver = Driver(contexts)
    with contexts.device(1):
        assert driver.unlock(4096) == 0
    assert contexts.created == {1}
