"""Page-lock host memory for GPUs: the one door to the CUDA driver library.

The runtime's calls would do the same, but one that fails leaves its error behind, and torch raises
it at its next call, whatever that is. The driver's calls return their error and keep nothing.

Source: the comments of cuda.h, CUDA 13.0, where the numbers below stand too.
"""

import ctypes
from typing import Any

import torch

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

_POINTER, _UINT, _INT, _ADDRESS = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_uint64
# what the functions take; each returns an error code
SIGNATURES: dict[str, list[Any]] = {
    "cuCtxGetCurrent": [_POINTER],
    "cuDeviceGet": [_POINTER, _INT],
    "cuDeviceGetAttribute": [_POINTER, _INT, _INT],
    "cuDevicePrimaryCtxGetState": [_INT, _POINTER, _POINTER],
    "cuGetErrorName": [_INT, _POINTER],
    "cuMemHostGetDevicePointer_v2": [_POINTER, _POINTER, _UINT],
    "cuMemHostRegister_v2": [_POINTER, ctypes.c_size_t, _UINT],
    "cuMemHostUnregister": [_POINTER],
    "cuPointerGetAttribute": [_POINTER, _INT, _ADDRESS],
}


class Driver:
    """The calls of the CUDA driver that locking needs, in the contexts that torch uses.

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
            address: of the first byte, on a page's border.
            num_bytes: a multiple of the page size.
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
        return all(self._attribute(attribute, device) for attribute in wanted)

    def locks_read_only(self, device: int) -> bool:
        """Whether GPU number `device` says that memory that is mapped read-only can be locked."""
        return self._attribute(READ_ONLY_HOST_REGISTER_SUPPORTED, device) != 0

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

    def _call(self, name: str, *arguments: Any) -> int:
        context = ctypes.c_void_p()
        if self._library.cuCtxGetCurrent(ctypes.byref(context)) != 0 or not context.value:
            # a thread that has not used CUDA; any call of the runtime gives it torch's context
            torch.cuda.synchronize()
        return int(getattr(self._library, name)(*arguments))

    def _attribute(self, attribute: int, device: int) -> int:
        handle, value = _INT(), _INT()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        code = self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, handle)
        return value.value if code == 0 else 0

    def _is_used(self, device: int) -> bool:
        handle, flags, active = _INT(), _UINT(), _INT()
        self._library.cuDeviceGet(ctypes.byref(handle), device)
        code = self._library.cuDevicePrimaryCtxGetState(
            handle, ctypes.byref(flags), ctypes.byref(active)
        )
        return code == 0 and active.value != 0
