"""Check that the result of a gather does not overlap the tensors that the gather reads."""

from torch import Tensor


def check_no_overlap(gather: str, out: Tensor, **read: Tensor | None) -> None:
    """Check that `out` overlaps none of the tensors that a gather reads.

    Rows would be overwritten before they are read, in an order that depends on the threads.

    Args:
        gather: the name of the function, for the message.
        out: the result, of two dimensions; columns of a wide tensor, of which the gather may read
            other columns.
        read: tensors by their name in the message.

    Raises:
        ValueError: a byte of `out` is one of them.
    """
    for name, tensor in read.items():
        if tensor is not None and _overlap(out, tensor):
            raise ValueError(
                f"{gather}: out, {tuple(out.shape)} {out.dtype}, shares memory with the {name}, "
                f"{tuple(tensor.shape)} {tensor.dtype}, which the gather reads\n\n"
                "hint: omit it, or create it with torch.empty"
            )


def _overlap(first: Tensor, second: Tensor) -> bool:
    if "meta" in (first.device.type, second.device.type) or not (first.numel() and second.numel()):
        return False
    begin, other = first.data_ptr(), second.data_ptr()
    if begin >= other + _extent(second) or other >= begin + _extent(first):
        return False
    if first.ndim != 2 or second.ndim != 2:
        return True
    stride = first.stride(0) * first.element_size()
    if stride <= 0 or stride != second.stride(0) * second.element_size():
        return True
    # columns of one wide tensor: between the rows of one lie those of the other
    offset = (begin - other) % stride
    return offset < _extent(second[:1]) or offset + _extent(first[:1]) > stride


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first to the last byte of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
