"""The CUDA driver: host registration, peer access and shared GPU memory.

These calls page-lock host memory for GPUs, and give one GPU access to the memory of another, in the
same process or in another one.

The CUDA runtime has equivalent calls, but it also stores an error as the last error of the thread
until `cudaGetLastError` is called: torch would raise it at its next, unrelated call. Calls of the
driver only return their error.

Source: the comments of cuda.h, CUDA 13.0, which also defines the constants below.
"""

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LIBRARY = "libcuda.so.1"


# error codes that page-locking handles
INVALID_VALUE = 1


OUT_OF_MEMORY = 2


OPERATING_SYSTEM = 304


ALREADY_LOCKED = 712


NOT_PERMITTED = 800


NOT_SUPPORTED = 801


# flags of cuMemHostRegister: for all contexts, mapped into device addresses, read-only for devices
PORTABLE, DEVICE_MAP, READ_ONLY = 0x01, 0x02, 0x08


# attributes of cuDeviceGetAttribute
CAN_MAP_HOST_MEMORY, HOST_REGISTER_SUPPORTED, READ_ONLY_HOST_REGISTER_SUPPORTED = 19, 99, 113


# attributes of cuPointerGetAttribute
MEMORY_TYPE, RANGE_START, RANGE_SIZE = 2, 11, 12


HOST = 1


# flag of cuIpcOpenMemHandle: enable peer access if the memory is on another GPU
ENABLE_PEER_ACCESS = 0x01


# error code of cuCtxEnablePeerAccess that is not a failure
PEER_ACCESS_ALREADY_ENABLED = 704


HANDLE_BYTES = 64


# memory is shared with other processes in whole blocks of this size
BLOCK_BYTES = 1 << 21


_POINTER, _UINT, _INT, _ADDRESS = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_uint64


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


# argument types of the functions; all return an error code
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
    """GPU memory that torch wraps without a copy, by `__cuda_array_interface__`."""

    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # the driver's calls are synchronous, so that no stream has to be synchronized
        return {
            "shape": (self.num_bytes,),
            "typestr": "|i1",
            "data": (self.address, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }


class Driver:
    """Calls of the CUDA driver, in the contexts that torch uses.

    Args:
        library: a `ctypes.CDLL` of the driver; None loads the installed one.

    Raises:
        OSError: the driver is not installed.
        RuntimeError: torch cannot use CUDA, for example in a process that was forked after CUDA was
            initialized.
    """

    def __init__(self, library: Any = None) -> None:
        torch.cuda.init()
        self._library = ctypes.CDLL(LIBRARY) if library is None else library
        for name, types in SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, _INT

    def lock(self, address: int, num_bytes: int, read_only: bool = False) -> int:
        """Page-lock a range of host memory for all GPUs; return 0 or an error code.

        Args:
            address: of the first byte; need not be at a page boundary.
            num_bytes: size of the range, at least 1.
            read_only: the range is mapped read-only; sets READ_ONLY if the GPU supports it.
        """
        flags = PORTABLE | DEVICE_MAP
        if read_only and self.locks_read_only(torch.cuda.current_device()):
            flags |= READ_ONLY
        return self._call("cuMemHostRegister_v2", address, num_bytes, flags)

    def unlock(self, address: int) -> int:
        """Unlock the range that was locked at `address`; return 0 or an error code."""
        return self._call("cuMemHostUnregister", address)

    def is_locked(self, address: int) -> bool:
        """Whether the host memory at `address` is page-locked, by this or another library."""
        kind = _UINT()
        code = self._call("cuPointerGetAttribute", ctypes.byref(kind), MEMORY_TYPE, address)
        return code == 0 and kind.value == HOST

    def locked_range(self, address: int) -> tuple[int, int] | None:
        """Return start and end of the locked range that contains `address`; None if not locked.

        If the driver does not report the range, return only the byte at `address`.
        """
        if not self.is_locked(address):
            return None
        begin, size = _ADDRESS(), ctypes.c_size_t()
        for value, attribute in ((begin, RANGE_START), (size, RANGE_SIZE)):
            self._call("cuPointerGetAttribute", ctypes.byref(value), attribute, address)
        end = begin.value + size.value
        return (begin.value, end) if begin.value <= address < end else (address, address + 1)

    def device_address(self, address: int) -> int | None:
        """Return the address on GPUs of locked host memory; None if it is not mapped."""
        seen = _ADDRESS()
        code = self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), address, 0)
        return seen.value if code == 0 else None

    def can_map_host_memory(self, device: int) -> bool:
        """Whether a GPU supports reading host memory that is locked in place."""
        required = (CAN_MAP_HOST_MEMORY, HOST_REGISTER_SUPPORTED)
        return all(self.attribute(attribute, device) for attribute in required)

    def locks_read_only(self, device: int) -> bool:
        """Whether a GPU supports locking of memory that is mapped read-only."""
        return self.attribute(READ_ONLY_HOST_REGISTER_SUPPORTED, device) != 0

    def attribute(self, attribute: int, device: int) -> int:
        """Return an attribute of a GPU, of cuDeviceGetAttribute; 0 if the driver lacks it."""
        handle, value = _INT(), _INT()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        code = self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        return value.value if code == 0 else 0

    def allocate(self, device: int, num_bytes: int) -> tuple[int, Tensor | None]:
        """Allocate GPU memory that can be shared with other processes.

        Memory of torch's caching allocator cannot always be shared.

        Args:
            device: index of the GPU.
            num_bytes: above 0; the allocation is rounded up to a multiple of 2 MiB.

        Returns:
            0 and an uninitialized tensor, (num_bytes,) int8 on the GPU, whose memory is freed when
            nothing refers to it; or an error code and None.
        """
        address = _ADDRESS()
        whole = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        code = self._call_on(device, "cuMemAlloc_v2", ctypes.byref(address), whole)
        if code != 0:
            return code, None
        # torch refers to `memory` as long as a tensor uses it
        memory = _Bytes(address.value, num_bytes)
        weakref.finalize(memory, self._free, device, address.value).atexit = False
        return 0, torch.as_tensor(memory, device=torch.device("cuda", device))

    def enable_peer(self, device: int, peer: int) -> int:
        """Let the GPU `device` read the memory of the GPU `peer`; return 0 or an error code."""
        context = ctypes.c_void_p()
        self._call_on(peer, "cuCtxGetCurrent", ctypes.byref(context))
        code = self._call_on(device, "cuCtxEnablePeerAccess", context, 0)
        return 0 if code == PEER_ACCESS_ALREADY_ENABLED else code

    def export(self, device: int, address: int) -> tuple[int, bytes]:
        """Return a handle with which another process can open memory of `allocate`.

        Args:
            device: index of the GPU of the memory.
            address: start of the memory.

        Returns:
            0 or an error code, and the handle.
        """
        handle = _Handle()
        code = self._call_on(device, "cuIpcGetMemHandle", ctypes.byref(handle), address)
        return code, bytes(handle)

    def open(self, device: int, handle: bytes) -> tuple[int, int]:
        """Open memory that another process exported, which must not be freed meanwhile.

        Args:
            device: index of the GPU that reads the memory.
            handle: the handle that `export` returned in the other process.

        Returns:
            0 or an error code, and the address of the memory on the GPU.
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
        """Close memory that the GPU `device` has opened; return 0 or an error code."""
        return self._call_on(device, "cuIpcCloseMemHandle", address)

    def error_name(self, code: int) -> str:
        """Return CUDA's name of an error code, with its number."""
        name = ctypes.c_char_p()
        # the name stays empty for an unknown code
        self._library.cuGetErrorName(code, ctypes.byref(name))
        return f"{(name.value or b'error').decode()} ({code})"

    def synchronize(self) -> None:
        """Synchronize with every GPU that this process uses.

        Raises:
            RuntimeError: a GPU reports an error; all others were synchronized with.
        """
        errors = []
        for device in range(torch.cuda.device_count()):
            # synchronizing with an unused GPU would create a context, which takes memory there
            if self._is_used(device):
                try:
                    torch.cuda.synchronize(device)
                except RuntimeError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _free(self, device: int, address: int) -> None:
        # other GPUs may be reading the memory
        self.synchronize()
        self._call_on(device, "cuMemFree_v2", address)

    def _call(self, name: str, *arguments: Any) -> int:
        context = ctypes.c_void_p()
        if self._library.cuCtxGetCurrent(ctypes.byref(context)) != 0 or not context.value:
            # this thread has not used CUDA; any context will do
            return self._call_on(self._used_device(), name, *arguments)
        return int(getattr(self._library, name)(*arguments))

    def _call_on(self, device: int, name: str, *arguments: Any) -> int:
        """Call a function in the context of a GPU, after synchronizing with the GPU."""
        with torch.cuda.device(device):
            # a runtime call sets the device's context in this thread
            torch.cuda.synchronize(device)
            return int(getattr(self._library, name)(*arguments))

    def _used_device(self) -> int:
        """Return a GPU that this process uses; the current one if it uses none."""
        # The current GPU of a new thread is the first one, whatever this process uses. A context
        # there would take several hundred megabytes of its memory.
        current = torch.cuda.current_device()
        devices = (current, *range(torch.cuda.device_count()))
        return next((device for device in devices if self._is_used(device)), current)

    def _is_used(self, device: int) -> bool:
        handle, flags, active = _INT(), _UINT(), _INT()
        self._library.cuDeviceGet(ctypes.byref(handle), device)
        code = self._library.cuDevicePrimaryCtxGetState(
            handle, ctypes.byref(flags), ctypes.byref(active)
        )
        return code == 0 and active.value != 0
