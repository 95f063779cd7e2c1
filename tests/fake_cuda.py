"""A fake CUDA device on the host, which runs code for GPUs on a machine without one.

    python -m fake_cuda -m MODULE [ARGUMENT]...

runs a module in a process in which `torch.cuda` reports one GPU. Tensors "on" this GPU are in host
memory, work on streams runs at once, events have the host's time, Triton interprets kernels unless
TRITON_INTERPRET=0, and libcuda.so.1 is a library whose registrations and copies follow
`fake_driver.FakeDriver`. Results of measurements have no meaning. This finds errors in code that
no machine without a GPU executes otherwise, such as wrong names and arguments.
"""

import contextlib
import ctypes
import os
import runpy
import sys
import threading
import time
from types import SimpleNamespace

if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from fake_driver import FakeDriver, FakeGpu, is_cuda
from fast_interpreter import accept_new_numpy

NAME = "fake GPU"
ATTRIBUTES = {16: 1, 19: 1, 40: 2, 41: 1, 88: 0, 91: 1, 99: 1, 100: 0, 113: 0}
HOST_MEMORY = 1


class FakeLibrary:
    """The functions of libcuda that `gcnzc.system.cuda_driver.Driver` calls for one GPU."""

    def __init__(self, driver):
        self.driver = driver
        from gcnzc.system.cuda_driver import NOT_SUPPORTED, SIGNATURES

        for name in SIGNATURES:
            # an object of its own, which can have argument types
            call = getattr(self, name, lambda *arguments: NOT_SUPPORTED)
            setattr(self, name, _Function(call))

    def cuCtxGetCurrent(self, context):
        context._obj.value = 1
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = ATTRIBUTES.get(attribute, 0)
        return 0 if attribute in ATTRIBUTES else 1

    def cuDevicePrimaryCtxGetState(self, device, flags, active):
        active._obj.value = 1
        return 0

    def cuGetErrorName(self, code, name):
        name._obj.value = b"CUDA_ERROR_FAKE"
        return 0

    def cuMemHostGetDevicePointer_v2(self, seen, address, flags):
        found = self.driver.device_address(address)
        seen._obj.value = found or 0
        return 0 if found else 1

    def cuMemHostRegister_v2(self, address, num_bytes, flags):
        return self.driver.lock(address, num_bytes, bool(flags & 8))

    def cuMemHostUnregister(self, address):
        return self.driver.unlock(address)

    def cuPointerGetAttribute(self, value, attribute, address):
        found = self.driver.locked_range(address)
        if found is None:
            return 1
        value._obj.value = {2: HOST_MEMORY, 11: found[0], 12: found[1] - found[0]}[attribute]
        return 0


class _Function:
    def __init__(self, call):
        self.call = call

    def __call__(self, *arguments):
        return self.call(*arguments)


class FakeCuda(FakeGpu):
    """Creates tensors of the GPU in host memory, in every thread that enters it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        kwargs.pop("pin_memory", None)
        if name == "is_pinned":
            # True for registered memory, as in CUDA, and for tensors of the fake GPU, which are on
            # the host
            return (
                self.is_there(args[0]) or self.driver.locked_range(args[0].data_ptr()) is not None
            )
        if name in ("pin_memory", "record_stream"):
            return args[0]
        if name == "to" and any(map(is_cuda, (*args[1:], *kwargs.values()))):
            # of (device, dtype, non_blocking) only the dtype has an effect
            given = (*args[1:], *kwargs.values())
            dtypes = [value for value in given if isinstance(value, torch.dtype)]
            return self._put(func(args[0], *dtypes) if dtypes else args[0])
        return super().__torch_function__(func, types, args, kwargs)


class Stream:
    """A stream on which work is finished as soon as it is queued."""

    cuda_stream = 0

    def __init__(self, device=None, priority=0):
        self.device, self.priority = device, priority

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event):
        assert event.at_s is not None, "an event that was not recorded"

    def synchronize(self):
        pass


class Event:
    """An event with the host's time."""

    def __init__(self, enable_timing=False, blocking=False):
        self.enable_timing, self.at_s = enable_timing, None

    def record(self, stream=None):
        self.at_s = time.perf_counter()

    def query(self):
        return self.at_s is not None

    def synchronize(self):
        assert self.at_s is not None, "an event that was not recorded"

    def elapsed_time(self, end):
        assert self.enable_timing, "an event without a time"
        assert end.enable_timing, "an event without a time"
        # not 0, by which rates are divided
        return max(1e3 * (end.at_s - self.at_s), 1e-6)


@contextlib.contextmanager
def installed():
    """Replace torch.cuda and libcuda in this process, also after the context.

    Within the context, this thread creates tensors on the fake GPU.
    """
    driver = FakeDriver()
    device = FakeCuda(driver)
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, multi_processor_count=1, total_memory=1 << 34, uuid="fake"
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": NAME,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "mem_get_info": (1 << 33, 1 << 34),
        "max_memory_allocated": 1 << 20,
        "memory_allocated": 1 << 20,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "can_device_access_peer": False,
        "is_current_stream_capturing": False,
    }
    answers |= dict.fromkeys(("init", "synchronize", "set_device", "set_rng_state", "empty_cache"))
    answers |= dict.fromkeys(("manual_seed", "manual_seed_all", "reset_peak_memory_stats"))
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *given, answer=answer, **options: answer)
    own = Stream()
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.current_stream = lambda device=None: own
    torch.cuda.stream = torch.cuda.device = contextlib.nullcontext
    load, library = torch.load, ctypes.CDLL

    def load_on_host(*given, map_location=None, **options):
        return load(*given, map_location="cpu", **options)

    torch.load = load_on_host
    fake_library = FakeLibrary(driver)
    ctypes.CDLL = lambda name, *given, **options: (
        fake_library if name == "libcuda.so.1" else library(name, *given, **options)
    )
    run = threading.Thread.run

    def run_with_device(thread):
        # modes of torch belong to a thread
        with device:
            run(thread)

    threading.Thread.run = run_with_device
    with device:
        yield


def main():
    """Run the module of the command line with the fake device."""
    _, option, module, *arguments = sys.argv
    assert option == "-m", __doc__
    sys.argv = [module, *arguments]
    with installed():
        from gcnzc.tune import pcie_bench

        accept_new_numpy()
        # interpreted kernels are slow
        pcie_bench.ROOF_BYTES, pcie_bench.ROOF_ROUNDS = 1 << 16, 1
        pcie_bench.PROGRAMS, pcie_bench.ROUNDS, pcie_bench.CHASE_STEPS = (2, 3), 2, 16
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
