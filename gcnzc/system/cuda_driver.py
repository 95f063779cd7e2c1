"""The CUDA driver: host registration, peer access and shared GPU memory.

Host memory is page-locked for them, and one GPU's memory opened to another, within a process and
between processes.

The runtime's calls would do the same, but one that fails leaves its error behind, and torch raises
it at its next call, whatever that is. The driver's calls return their error and keep nothing.

Source: the comments of cuda.h, CUDA 13.0, where the numbers below stand too.
"""

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LIBRARY = "libcuda.so.1"


# error codes that locking knows how to go on from
INVALID_VALUE = 1


OUT_OF_MEMORY = 2


OPERATING_SYSTEM = 304


ALREADY_LOCKED = 712


NOT_PERMITTED = 800


NOT_SUPPORTED = 801


# of cuMemHostRegister: for the contexts of all GPUs; into their addresses; not written by them
PORTABLE, DEVICE_MAP, READ_ONLY = 0x01, 0x02, 0x08


# of cuDeviceGetAttribute
CAN_MAP_HOST_MEMORY, HOST_REGISTER_SUPPORTED, READ_ONLY_HOST_REGISTER_SUPPORTED = 19, 99, 113


# of cuPointerGetAttribute
MEMORY_TYPE, RANGE_START, RANGE_SIZE = 2, 11, 12


HOST = 1


# of cuIpcOpenMemHandle: what cuCtxEnablePeerAccess does, if it is needed
ENABLE_PEER_ACCESS = 0x01


# two GPUs of a process that read each other's memory already
PEER_ACCESS_ALREADY_ENABLED = 704


HANDLE_BYTES = 64


# what is opened to another process is opened in whole blocks of these
BLOCK_BYTES = 1 << 21


_POINTER, _UINT, _INT, _ADDRESS = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_uint64


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which goes by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


# what the functions take; each returns an error code
SIGNATURES: dict[str, list[Any]] = {
    "cuCtxEnablePeerAccess": [_POINTER, _UINT],
    "cuCtxGetCurrent": [_POINTER],
    "cuDeviceGet": [_POINTER, _INT],
    "cuDeviceGetAttribute": [_POINTER, _INT, _INT],
    "cuDevicePrimaryCtxGetState": [_INT, _POINTER, _POINTER],
    "cuGetErrorName": [_INT, _POINTER],
    "cuIpcCloseMemHandle": [_ADDRESS],
    "cuIpcGetMemHandle": [_POINTER, _ADDRESS],
    "cuIpcOpenMemHandle_v2": [_POINTER, _Handle, _UINT],
    "cuMemAlloc_v2": [_POINTER, ctypes.c_size_t],
    "cuMemFree_v2": [_ADDRESS],
    "cuMemHostGetDevicePointer_v2": [_POINTER, _POINTER, _UINT],
    "cuMemHostRegister_v2": [_POINTER, ctypes.c_size_t, _UINT],
    "cuMemHostUnregister": [_POINTER],
    "cuPointerGetAttribute": [_POINTER, _INT, _ADDRESS],
}


@dataclass(frozen=True)
class _Bytes:
    """Memory as torch takes it over without a copy."""

    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # the driver's calls are done when they return, so that no stream need be waited for
        return {
            "shape": (self.num_bytes,),
            "typestr": "|i1",
            "data": (self.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }


class Driver:
    """The calls of the CUDA driver that are needed, in the contexts that torch uses.

    Args:
        library: what `ctypes.CDLL` makes of the driver; the machine's own if None.

    Raises:
        OSError: there is no such library.
        RuntimeError: torch cannot use CUDA, for example in a process that was forked after CUDA was
            first used.
    """

    def __init__(self, library: Any = None) -> None:
        torch.cuda.init()
        self._library = ctypes.CDLL(LIBRARY) if library is None else library
        for name, types in SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, _INT

    def lock(self, address: int, num_bytes: int, read_only: bool = False) -> int:
        """Page-lock a range of host memory for all GPUs; the driver's error code, 0 if it did.

        Args:
            address: of the first byte; it need not be on a page's border.
            num_bytes: 1 or more.
            read_only: the range is mapped read-only, which the driver is told if it wants to know.
        """
        flags = PORTABLE | DEVICE_MAP
        if read_only and self.locks_read_only(torch.cuda.current_device()):
            flags |= READ_ONLY
        return self._call("cuMemHostRegister_v2", address, num_bytes, flags)

    def unlock(self, address: int) -> int:
        """Let go of the range that was locked from `address` on; the error code, 0 if it did."""
        return self._call("cuMemHostUnregister", address)

    def is_locked(self, address: int) -> bool:
        """Whether the host memory at `address` is page-locked, by whomever."""
        kind = _UINT()
        code = self._call("cuPointerGetAttribute", ctypes.byref(kind), MEMORY_TYPE, address)
        return code == 0 and kind.value == HOST

    def locked_range(self, address: int) -> tuple[int, int] | None:
        """Where the locked range begins and ends that holds `address`; None if none does.

        It is one byte long if the driver does not tell.
        """
        if not self.is_locked(address):
            return None
        begin, size = _ADDRESS(), ctypes.c_size_t()
        for value, attribute in ((begin, RANGE_START), (size, RANGE_SIZE)):
            self._call("cuPointerGetAttribute", ctypes.byref(value), attribute, address)
        end = begin.value + size.value
        return (begin.value, end) if begin.value <= address < end else (address, address + 1)

    def device_address(self, address: int) -> int | None:
        """Where GPUs see the locked host memory at `address`; None if they do not."""
        seen = _ADDRESS()
        code = self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), address, 0)
        return seen.value if code == 0 else None

    def can_map_host_memory(self, device: int) -> bool:
        """Whether GPU number `device` says that it reads host memory that is locked in place."""
        wanted = (CAN_MAP_HOST_MEMORY, HOST_REGISTER_SUPPORTED)
        return all(self.attribute(attribute, device) for attribute in wanted)

    def locks_read_only(self, device: int) -> bool:
        """Whether GPU number `device` says that memory that is mapped read-only can be locked."""
        return self.attribute(READ_ONLY_HOST_REGISTER_SUPPORTED, device) != 0

    def attribute(self, attribute: int, device: int) -> int:
        """What cuDeviceGetAttribute says of GPU number `device`; 0 where the driver knows none."""
        handle, value = _INT(), _INT()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        code = self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        return value.value if code == 0 else 0

    def allocate(self, device: int, num_bytes: int) -> tuple[int, Tensor | None]:
        """Memory of a GPU that others can open, which not all memory of torch's allocator is.

        Args:
            device: the GPU's number.
            num_bytes: above 0; what is taken is rounded up to whole blocks of 2 MiB.

        Returns:
            The error code, 0 if there is memory; and (num_bytes,) int8 on the GPU, of any values,
            given back when nothing refers to it, or None.
        """
        address = _ADDRESS()
        whole = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        code = self._call_on(device, "cuMemAlloc_v2", ctypes.byref(address), whole)
        if code != 0:
            return code, None
        # torch keeps it as long as a tensor uses the memory
        memory = _Bytes(address.value, num_bytes)
        weakref.finalize(memory, self._free, device, address.value).atexit = False
        return 0, torch.as_tensor(memory, device=torch.device("cuda", device))

    def enable_peer(self, device: int, peer: int) -> int:
        """Let GPU number `device` read the memory of GPU `peer`; the error code, 0 if it does."""
        context = ctypes.c_void_p()
        self._call_on(peer, "cuCtxGetCurrent", ctypes.byref(context))
        code = self._call_on(device, "cuCtxEnablePeerAccess", context, 0)
        return 0 if code == PEER_ACCESS_ALREADY_ENABLED else code

    def export(self, device: int, address: int) -> tuple[int, bytes]:
        """What another process opens the memory by that `allocate` gave.

        Args:
            device: the number of its GPU.
            address: where it begins.

        Returns:
            The error code, 0 if there is a handle, and the handle.
        """
        handle = _Handle()
        code = self._call_on(device, "cuIpcGetMemHandle", ctypes.byref(handle), address)
        return code, bytes(handle)

    def open(self, device: int, handle: bytes) -> tuple[int, int]:
        """Let a GPU read the memory that another process has exported, which must still be there.

        Args:
            device: the number of the GPU that reads.
            handle: what `export` gave there.

        Returns:
            The error code, 0 if the memory is open, and where the GPU sees it.
        """
        address = _ADDRESS()
        code = self._call_on(
            device,
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ENABLE_PEER_ACCESS,
        )
        return code, address.value

    def close(self, device: int, address: int) -> int:
        """Let go of what GPU `device` has opened; the error code, 0 if it did."""
        return self._call_on(device, "cuIpcCloseMemHandle", address)

    def error_name(self, code: int) -> str:
        """CUDA's name of an error code, with its number."""
        name = ctypes.c_char_p()
        # it stays empty if the driver does not know the code
        self._library.cuGetErrorName(code, ctypes.byref(name))
        return f"{(name.value or b'error').decode()} ({code})"

    def synchronize(self) -> None:
        """Wait for all work of this process, on every GPU that it uses.

        Raises:
            RuntimeError: a GPU reports an error; the others were waited for.
        """
        errors = []
        for device in range(torch.cuda.device_count()):
            # waiting for a GPU that is not used would begin to use it, and take memory there
            if self._is_used(device):
                try:
                    torch.cuda.synchronize(device)
                except RuntimeError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _free(self, device: int, address: int) -> None:
        # other GPUs read it too
        self.synchronize()
        self._call_on(device, "cuMemFree_v2", address)

    def _call(self, name: str, *arguments: Any) -> int:
        context = ctypes.c_void_p()
        if self._library.cuCtxGetCurrent(ctypes.byref(context)) != 0 or not context.value:
            # a thread that has not used CUDA; any call of the runtime gives it torch's context
            torch.cuda.synchronize()
        return int(getattr(self._library, name)(*arguments))

    def _call_on(self, device: int, name: str, *arguments: Any) -> int:
        """A call in the context of a GPU, whose work is waited for."""
        with torch.cuda.device(device):
            # a call of the runtime, which is what makes the device's context this thread's
            torch.cuda.synchronize(device)
            return int(getattr(self._library, name)(*arguments))

    def _is_used(self, device: int) -> bool:
        handle, flags, active = _INT(), _UINT(), _INT()
        self._library.cuDeviceGet(ctypes.byref(handle), device)
        code = self._library.cuDevicePrimaryCtxGetState(
            handle, ctypes.byref(flags), ctypes.byref(active)
        )
        return code == 0 and active.value != 0
