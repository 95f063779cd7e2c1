"""The driver's functions are called as cuda.h declares them; on a GPU, the driver itself."""

import contextlib
import ctypes
import itertools
import mmap
import threading

import numpy as np
import pytest
import torch

from gcnzc.features.table import FeatureTable
from gcnzc.system import cuda_driver as cuda
from gcnzc.system.cuda_driver import Driver
from gcnzc.system.host_memory import PAGE_BYTES as PAGE

# an address and a size that do not fit into 32 bits
ADDRESS, BYTES = 0x7F12_3456_7000, 48 << 30
# zeros are part of it
HANDLE = bytes([7, 0, 0, 255]) * 16

C = ctypes
INVALID_CONTEXT = 201
# these calls need no context
FREE = ("cuCtxGetCurrent", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxGetState")
FREE += ("cuGetErrorName",)


# calls that return a code alone
SAID = {"cuCtxEnablePeerAccess": "enable", "cuIpcCloseMemHandle": "close", "cuMemFree_v2": "free"}


class IpcHandle(C.Structure):
    """As cuda.h has it."""

    _fields_ = (("reserved", C.c_char * 64),)


class Library:
    """Machine code behind each name, as in a library: it knows no argument types of its own."""

    def __init__(self):
        self.calls = []
        # a thread that has called nothing has none
        self.of_threads = threading.local()
        self.context, self.in_contexts = 1, []
        self.attributes = {}
        self.pointers = {}
        self.used = {0}
        self.codes = {}
        self._kept = []
        int_at, uint_at = C.POINTER(C.c_int), C.POINTER(C.c_uint)
        word_at, name_at = C.POINTER(C.c_uint64), C.POINTER(C.c_char_p)
        # as cuda.h has them
        self._define("cuCtxEnablePeerAccess", C.c_void_p, C.c_uint)
        self._define("cuCtxGetCurrent", C.POINTER(C.c_void_p))
        self._define("cuDeviceGet", int_at, C.c_int)
        self._define("cuDeviceGetAttribute", int_at, C.c_int, C.c_int)
        self._define("cuDevicePrimaryCtxGetState", C.c_int, uint_at, int_at)
        self._define("cuGetErrorName", C.c_int, name_at)
        self._define("cuIpcCloseMemHandle", C.c_uint64)
        self._define("cuIpcGetMemHandle", C.POINTER(C.c_char * 64), C.c_uint64)
        self._define("cuIpcOpenMemHandle_v2", word_at, IpcHandle, C.c_uint)
        self._define("cuMemAlloc_v2", word_at, C.c_size_t)
        self._define("cuMemFree_v2", C.c_uint64)
        self._define("cuMemHostGetDevicePointer_v2", word_at, C.c_uint64, C.c_uint)
        self._define("cuMemHostRegister_v2", C.c_uint64, C.c_uint64, C.c_uint)
        self._define("cuMemHostUnregister", C.c_uint64)
        self._define("cuPointerGetAttribute", word_at, C.c_int, C.c_uint64)

    def _define(self, name, *types):
        said = SAID.get(name)
        function = getattr(self, f"_{name}", lambda *words: self._say(said, self.context, *words))

        def call(*arguments):
            if name not in FREE:
                self.in_contexts.append(self.context)
            return (
                INVALID_CONTEXT if name not in FREE and not self.context else function(*arguments)
            )

        code = C.CFUNCTYPE(C.c_int, *types)(call)
        self._kept.append(code)
        foreign = type("Foreign", (C._CFuncPtr,), {"_flags_": 1, "_restype_": C.c_int})
        setattr(self, name, foreign(C.cast(code, C.c_void_p).value))

    @property
    def context(self):
        """The context of this thread."""
        return getattr(self.of_threads, "context", None)

    @context.setter
    def context(self, context):
        self.of_threads.context = context

    def _cuCtxGetCurrent(self, context):
        context[0] = self.context
        return 0

    def _cuDeviceGet(self, device, ordinal):
        # handles need not be what torch counts
        device[0] = ordinal + 100
        return 0

    def _cuDeviceGetAttribute(self, value, attribute, device):
        if (attribute, device - 100) not in self.attributes:
            return cuda.INVALID_VALUE
        value[0] = self.attributes[attribute, device - 100]
        return 0

    def _cuDevicePrimaryCtxGetState(self, device, flags, active):
        flags[0], active[0] = 8, device - 100 in self.used
        return 0

    def _cuGetErrorName(self, code, name):
        if code != cuda.OUT_OF_MEMORY:
            return cuda.INVALID_VALUE
        name[0] = b"CUDA_ERROR_OUT_OF_MEMORY"
        return 0

    def _say(self, *call):
        self.calls.append(call)
        return self.codes.get(call[0], 0)

    def _cuIpcGetMemHandle(self, handle, address):
        C.memmove(handle, HANDLE, 64)
        return self._say("export", self.context, address)

    def _cuIpcOpenMemHandle_v2(self, address, handle, flags):
        address[0] = ADDRESS + (1 << 41)
        return self._say("open", self.context, bytes(handle), flags)

    def _cuMemAlloc_v2(self, address, num_bytes):
        address[0] = ADDRESS
        return self._say("allocate", self.context, num_bytes)

    def _cuMemHostGetDevicePointer_v2(self, seen, address, flags):
        self.calls.append(("seen", address, flags))
        if address != ADDRESS:
            return cuda.INVALID_VALUE
        seen[0] = address + (1 << 40)
        return 0

    def _cuMemHostRegister_v2(self, address, num_bytes, flags):
        self.calls.append(("lock", address, num_bytes, flags))
        return cuda.OUT_OF_MEMORY

    def _cuMemHostUnregister(self, address):
        self.calls.append(("unlock", address))
        return 713

    def _cuPointerGetAttribute(self, value, attribute, address):
        found = self.pointers.get(address, {})
        if attribute not in found:
            return cuda.INVALID_VALUE
        if attribute == cuda.MEMORY_TYPE:
            # 4 bytes wide, unlike the others
            C.cast(value, C.POINTER(C.c_uint))[0] = found[attribute]
        else:
            value[0] = found[attribute]
        return 0


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def waits(monkeypatch):
    """What torch was asked to wait for."""
    calls = []
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: calls.append(device))
    return calls


@pytest.fixture
def driver(library, waits):
    return Driver(library)


def test_torch_initializes_cuda_first(library, monkeypatch):
    def refuse():
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(RuntimeError, match="forked"):
        Driver(library)


def test_a_missing_driver_library_is_reported(waits, monkeypatch):
    monkeypatch.setattr(cuda, "LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(OSError, match="no-such-driver"):
        Driver()


def test_memory_is_locked_and_unlocked(driver, library):
    assert driver.lock(ADDRESS, BYTES) == cuda.OUT_OF_MEMORY
    assert driver.unlock(ADDRESS) == 713
    assert library.calls == [("lock", ADDRESS, BYTES, 0x01 | 0x02), ("unlock", ADDRESS)]


@pytest.mark.parametrize(("attributes", "flag"), [({(113, 0): 1}, 8), ({(113, 0): 0}, 0), ({}, 0)])
def test_read_only_locks_are_used_if_the_driver_supports_them(driver, library, attributes, flag):
    library.attributes = attributes
    driver.lock(ADDRESS, BYTES, read_only=True)
    driver.lock(ADDRESS, BYTES)
    assert [call[3] for call in library.calls] == [3 | flag, 3]


@pytest.mark.parametrize(
    ("attributes", "can"),
    [({19: 1, 99: 1}, True), ({19: 1, 99: 0}, False), ({19: 0, 99: 1}, False), ({19: 1}, False)],
)
def test_attributes_of_a_gpu_are_read(driver, library, attributes, can):
    library.attributes = {(number, 2): value for number, value in attributes.items()}
    assert driver.can_map_host_memory(2) == can
    assert not driver.can_map_host_memory(1)


def test_locked_ranges_are_found(driver, library):
    begin, size = ADDRESS - 4096, BYTES
    locked = {cuda.MEMORY_TYPE: 1, cuda.RANGE_START: begin, cuda.RANGE_SIZE: size}
    library.pointers[ADDRESS] = locked
    assert driver.is_locked(ADDRESS)
    assert driver.locked_range(ADDRESS) == (begin, begin + size)
    # memory of a GPU, and memory that CUDA does not know
    library.pointers[ADDRESS + 1] = locked | {cuda.MEMORY_TYPE: 2}
    for address in (ADDRESS + 1, ADDRESS + 2):
        assert not driver.is_locked(address)
        assert driver.locked_range(address) is None


@pytest.mark.parametrize("told", [{}, {cuda.RANGE_START: ADDRESS + 1, cuda.RANGE_SIZE: BYTES}])
def test_an_unreported_locked_range_is_found_by_pages(driver, library, told):
    library.pointers[ADDRESS] = {cuda.MEMORY_TYPE: 1} | told
    assert driver.locked_range(ADDRESS) == (ADDRESS, ADDRESS + 1)


def test_device_addresses_are_read(driver, library):
    assert driver.device_address(ADDRESS) == ADDRESS + (1 << 40)
    assert driver.device_address(ADDRESS + 1) is None
    assert library.calls[0] == ("seen", ADDRESS, 0)


def test_errors_have_their_cuda_names(driver):
    assert driver.error_name(2) == "CUDA_ERROR_OUT_OF_MEMORY (2)"
    assert driver.error_name(4711) == "error (4711)"


def test_only_gpus_in_use_are_synchronized(driver, library, waits):
    library.used = {0, 2}
    driver.synchronize()
    assert waits == ["init", 0, 2]


def test_a_lost_gpu_does_not_prevent_synchronizing_the_others(driver, library, monkeypatch):
    library.used = {0, 1, 2}
    waited = []

    def wait(device):
        waited.append(device)
        if device == 0:
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        driver.synchronize()
    assert waited == [0, 1, 2]


@pytest.fixture
def contexts(driver, library, monkeypatch):
    """Each GPU has a context.

    A call of the runtime, and so of torch, binds that of the thread's current device, and creates
    it if there is none. "CUDA_ERROR_INVALID_CONTEXT = 201: This most frequently indicates that
    there is no context bound to the current thread." (cuda.h, CUDA 13.0.)
    """
    own = library.of_threads

    def current():
        # that of a new thread is the first
        return getattr(own, "device", 0)

    @contextlib.contextmanager
    def on(device):
        before = current(), library.context
        own.device = device
        yield
        own.device, library.context = before

    def wait(device=None):
        device = current() if device is None else device
        library.context = 50 + device
        library.used.add(device)

    monkeypatch.setattr(torch.cuda, "current_device", current)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: memory)


CALLS = {
    "lock": lambda driver: driver.lock(ADDRESS, 10),
    "unlock": lambda driver: driver.unlock(ADDRESS),
    "is_locked": lambda driver: driver.is_locked(ADDRESS),
    "locked_range": lambda driver: driver.locked_range(ADDRESS),
    "device_address": lambda driver: driver.device_address(ADDRESS),
    # it is freed at once
    "allocate": lambda driver: driver.allocate(2, 100)[0],
    "enable_peer": lambda driver: driver.enable_peer(2, 2),
    "export": lambda driver: driver.export(2, ADDRESS)[0],
    "open": lambda driver: driver.open(2, HANDLE)[0],
    "close": lambda driver: driver.close(2, ADDRESS),
    "synchronize": lambda driver: driver.synchronize(),
}


@pytest.mark.usefixtures("contexts")
@pytest.mark.parametrize("name", CALLS)
def test_any_thread_may_call_and_no_other_gpu_gets_a_context(name, driver, library):
    # this process uses one GPU, which is not the first
    library.used = {2}
    with torch.cuda.device(2):
        torch.cuda.synchronize()
        answers = [CALLS[name](driver)]
        thread = threading.Thread(target=lambda: answers.append(CALLS[name](driver)))
        thread.start()
        thread.join()
    assert answers[0] == answers[1] != INVALID_CONTEXT
    assert set(library.in_contexts) <= {52}
    # it would take several hundred megabytes of memory there
    assert library.used == {2}


@pytest.mark.usefixtures("contexts")
def test_the_current_gpu_is_used_if_the_process_uses_none(driver, library):
    library.used, library.context = set(), None
    with torch.cuda.device(1):
        assert driver.unlock(ADDRESS) != INVALID_CONTEXT
    assert library.used == {1}


@pytest.mark.usefixtures("contexts")
def test_peer_access_is_enabled(driver, library):
    assert driver.enable_peer(0, 2) == 0
    # from the context of one into that of the other
    assert library.calls == [("enable", 50, 52, 0)]
    library.codes = {"enable": cuda.PEER_ACCESS_ALREADY_ENABLED}
    assert driver.enable_peer(2, 0) == 0
    assert library.calls[1:] == [("enable", 52, 50, 0)]
    library.codes = {"enable": 217}
    assert driver.enable_peer(0, 1) == 217


@pytest.mark.usefixtures("contexts")
def test_memory_is_shared_between_processes(driver, library):
    assert driver.export(1, ADDRESS) == (0, HANDLE)
    assert driver.open(2, HANDLE) == (0, ADDRESS + (1 << 41))
    assert driver.close(2, ADDRESS) == 0
    expected = [("export", 51, ADDRESS), ("open", 52, HANDLE, 1), ("close", 52, ADDRESS)]
    assert library.calls == expected
    library.codes = {"export": 801, "open": 205, "close": 1}
    assert driver.export(1, ADDRESS)[0] == 801
    assert driver.open(2, HANDLE)[0] == 205
    assert driver.close(2, ADDRESS) == 1


@pytest.mark.usefixtures("contexts")
def test_unreferenced_memory_is_freed(driver, library, monkeypatch):
    def taken_over(memory, device):
        assert device == torch.device("cuda", 1)
        return memory

    monkeypatch.setattr(torch, "as_tensor", taken_over)
    code, memory = driver.allocate(1, 5 << 20)
    described = memory.__cuda_array_interface__
    assert (code, described["data"], described["shape"]) == (0, (ADDRESS, False), (5 << 20,))
    assert described["typestr"] == "|i1"
    # whole blocks
    assert library.calls == [("allocate", 51, 6 << 20)]
    waited = []
    monkeypatch.setattr(Driver, "synchronize", lambda self: waited.append(len(library.calls)))
    del memory
    # after all GPUs were waited for
    assert waited == [1]
    assert library.calls[1:] == [("free", 51, ADDRESS)]
    library.codes = {"allocate": cuda.OUT_OF_MEMORY}
    assert driver.allocate(1, 5) == (cuda.OUT_OF_MEMORY, None)


@pytest.mark.gpu
def test_lock_and_unlock_on_a_gpu(device):
    driver = Driver()
    assert driver.can_map_host_memory(torch.cuda.current_device())
    memory = np.frombuffer(mmap.mmap(-1, 8 * PAGE), np.uint8)
    address = memory.ctypes.data
    assert not driver.is_locked(address)
    assert driver.locked_range(address) is None
    assert driver.device_address(address) is None
    assert driver.lock(address, 4 * PAGE) == 0
    try:
        assert driver.is_locked(address + 5)
        assert not driver.is_locked(address + 4 * PAGE)
        begin, end = driver.locked_range(address + 5)
        assert address <= begin <= address + 5 < end <= address + 4 * PAGE
        assert driver.device_address(address + PAGE) == address + PAGE
        assert driver.lock(address + PAGE, PAGE) == cuda.ALREADY_LOCKED
        assert torch.from_numpy(memory).is_pinned()
    finally:
        assert driver.unlock(address) == 0
    assert driver.unlock(address) != 0
    # nothing is left behind that torch would raise
    assert torch.ones(3, device=device).sum().item() == 3


@pytest.mark.gpu
def test_registrations_on_a_gpu_have_byte_granularity(device):
    driver = Driver()
    memory = torch.frombuffer(mmap.mmap(-1, 8 * PAGE), dtype=torch.uint8).random_()
    at = memory.data_ptr()
    cuts = [64, 2 * PAGE + 160, 4 * PAGE + 32]
    parts = list(itertools.pairwise(cuts))
    try:
        for begin, end in parts:
            assert driver.lock(at + begin, end - begin) == 0
            assert driver.locked_range(at + begin) == (at + begin, at + end)
            assert driver.device_address(at + end - 1) == at + end - 1
        # each registration, and what shares a page with one
        for begin, end in [*parts, (0, 64), (cuts[-1], 8 * PAGE)]:
            assert torch.equal(memory[begin:end].to(device).cpu(), memory[begin:end])
        # the page that both were on stays with the second
        assert driver.unlock(at + cuts[0]) == 0
        assert driver.device_address(at + cuts[1]) == at + cuts[1]
        rows = memory[cuts[1] : cuts[2]].view(-1, 16)
        ids = torch.arange(len(rows), device=device)
        assert torch.equal(FeatureTable(rows).gather(ids).cpu(), rows)
    finally:
        for begin in cuts[:-1]:
            driver.unlock(at + begin)


@pytest.mark.gpu
def test_errors_of_a_gpu_have_their_cuda_names(device):
    assert Driver().error_name(712) == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (712)"
