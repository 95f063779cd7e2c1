"""Tensors of a simulated device: their memory is the host's, and their device is "cuda".

Whatever reads their values on the host is a synchronization: on a GPU the host would wait there for
all that is queued. It also waits where it copies something to or from the device, unless
`non_blocking` is given. `Reads` counts both. There is no autograd on such a device, and
torch.distributed cannot send or receive its tensors.
"""

from typing import ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
# the shape of what they return depends on values, so that the host waits for these
DATA_DEPENDENT = {
    *(aten.nonzero.default, aten.masked_select.default, aten._local_scalar_dense.default),
    *(aten.is_nonzero.default, aten.equal.default, aten.repeat_interleave.Tensor),
    *(aten._unique2.default, aten.unique_consecutive.default, aten.bincount.default),
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


def waits_for_device(func, args, kwargs):
    """Whether the host must know values of a device's tensors for this operation."""
    if func in DATA_DEPENDENT:
        # the size of the output may be given
        return kwargs.get("output_size") is None
    if func in INDEXED:
        # a mask is turned into places, of which there are as many as it says
        return any(each is not None and each.dtype == torch.bool for each in args[1])
    return False


class OnDevice(torch.Tensor):
    """A tensor of the simulated device; `inner` has its values."""

    # called with `inner` of each new tensor, and of each whose values the host reads
    on_new = on_read = None

    @staticmethod
    def __new__(cls, inner):
        if cls.on_new is not None:
            cls.on_new(inner)
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func.namespace == "c10d":
            raise AssertionError(f"{func} with a tensor of the device: gloo needs host memory")
        to_host = kwargs.get("device") is not None and kwargs["device"].type == "cpu"
        if func is aten.copy_.default:
            to_host = not isinstance(args[0], cls)
        if to_host or waits_for_device(func, args, kwargs):
            Reads.seen.append(str(func))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        inner_args, inner_kwargs = pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs))
        out = func(*inner_args, **inner_kwargs)
        if to_host:
            return args[0] if func is aten.copy_.default else out
        if func is aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, cls, out)


class Factories(TorchFunctionMode):
    """Makes new tensors on the simulated device, where torch would look for a real one."""

    INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
    READERS = (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__float__)
    READERS += (torch.Tensor.__int__, torch.Tensor.__bool__)
    # in these, too, torch would look for the device
    GUARDED = (torch.Tensor.__invert__, torch.Tensor.where, torch.where)
    GUARDED += (torch.Tensor.contiguous, torch.Tensor.nonzero)
    NAMES = (torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor, torch.arange)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func in self.NAMES and device is not None and torch.device(device).type == "cuda":
            if func is torch.tensor:
                Reads.seen.append("tensor to the device")
            return OnDevice(func(*args, **{**kwargs, "device": "cpu"}))
        if func in self.INDEXING and isinstance(args[0], OnDevice):
            # torch would choose the device to work on, which is not there
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in places):
                Reads.seen.append("mask")
            if any(type(each) is torch.Tensor and each.dim() for each in args[2:]):
                Reads.seen.append("setitem to the device")
            inner = pytree.tree_map_only(OnDevice, lambda t: t.inner, args)
            found = func(*inner)
            return found if found is None else OnDevice(found)
        if func in self.READERS and isinstance(args[0], OnDevice):
            Reads.seen.append(func.__name__)
            value = func(args[0].inner)
            if OnDevice.on_read is not None:
                OnDevice.on_read(args[0].inner)
            return value
        if func in self.GUARDED and any(isinstance(each, OnDevice) for each in args):
            if func is torch.Tensor.nonzero:
                Reads.seen.append("nonzero")
            return OnDevice(func(*pytree.tree_map_only(OnDevice, lambda t: t.inner, args)))
        if func is torch.Tensor.to and isinstance(args[0], OnDevice) and args[1] == DEVICE:
            return args[0]
        if func is torch.Tensor.new_tensor and isinstance(args[0], OnDevice):
            Reads.seen.append("new_tensor to the device")
            return OnDevice(args[0].inner.new_tensor(*args[1:], **kwargs))
        if func is torch.Tensor.to and not isinstance(args[0], OnDevice) and args[1] == DEVICE:
            if not kwargs.get("non_blocking"):
                Reads.seen.append("to the device")
            return OnDevice(args[0].clone())
        if func is torch.Tensor.copy_ and any(isinstance(each, OnDevice) for each in args):
            into, source = pytree.tree_map_only(OnDevice, lambda t: t.inner, args[:2])
            if not isinstance(args[0], OnDevice) and not kwargs.get("non_blocking"):
                Reads.seen.append("copy_")
            if not isinstance(args[1], OnDevice) and not kwargs.get("non_blocking"):
                Reads.seen.append("copy_ to the device")
            into.copy_(source)
            return args[0]
        return func(*args, **kwargs)


class Reads(TorchDispatchMode):
    """Counts what waits for the device while it is entered, and makes tensors there.

    With `everywhere` all tensors count as the device's.
    """

    seen: ClassVar[list[str]] = []

    def __init__(self, everywhere=False):
        super().__init__()
        self.everywhere = everywhere

    def __enter__(self):
        Reads.seen.clear()
        self.factories = Factories()
        self.factories.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.factories.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.everywhere and waits_for_device(func, args, kwargs):
            Reads.seen.append(str(func))
        return func(*args, **kwargs)
