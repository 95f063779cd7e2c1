"""Check that the result of a gather does not overlap the tensors that the gather reads."""

from torch import Tensor


def check_no_overlap(function: str, out: Tensor, **inputs: Tensor | None) -> None:
    """Check that `out` overlaps none of the tensors that a gather reads.

    Otherwise rows might be overwritten before they are read.

    Args:
        function: name of the gather, for the message.
        out: (B, D), the result. It may be columns of a tensor whose other columns are read.
        inputs: tensors that are read, by their name in the message.

    Raises:
        ValueError: `out` shares a byte with one of `inputs`.
    """
    for name, tensor in inputs.items():
        if tensor is not None and _overlap(out, tensor):
            raise ValueError(
                f"{function}: out, {tuple(out.shape)} {out.dtype}, shares memory with the {name}, "
                f"{tuple(tensor.shape)} {tensor.dtype}, which the gather reads\n\n"
                "hint: omit it, or create it with torch.empty"
            )


def _overlap(first: Tensor, second: Tensor) -> bool:
    if "meta" in (first.device.type, second.device.type) or not (first.numel() and second.numel()):
        return False
    first_begin, second_begin = first.data_ptr(), second.data_ptr()
    if first_begin >= second_begin + _extent(second) or second_begin >= first_begin + _extent(
        first
    ):
        return False
    if first.ndim != 2 or second.ndim != 2:
        return True
    stride = first.stride(0) * first.element_size()
    if stride <= 0 or stride != second.stride(0) * second.element_size():
        return True
    # both may be columns of one tensor, so that their rows alternate in memory
    offset = (first_begin - second_begin) % stride
    return offset < _extent(second[:1]) or offset + _extent(first[:1]) > stride


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first to the last byte of a tensor."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in dimensions)) * tensor.element_size()
