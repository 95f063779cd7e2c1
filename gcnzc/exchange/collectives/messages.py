"""Messages that the algorithms of several collectives have in common, and tensors as bytes."""

from typing import Any

import torch
from torch import Tensor

from gcnzc.exchange.requests import Algorithm, Receive, Send, Start, Wait


class PendingReceive:
    """A receive that has started, and the tensor that it writes."""

    def __init__(self, values: Tensor, pending: Any) -> None:
        self.values, self.pending = values, pending

    def wait(self) -> Algorithm[None]:
        """Wait until the message is received."""
        if self.pending is not None:
            yield Wait(self.pending)


def start_receive(values: Tensor, source: int) -> Algorithm[PendingReceive]:
    """Start to receive `values`; empty messages are not sent, since both ranks know their size."""
    pending = (yield Start(Receive(values, source))) if values.numel() else None
    return PendingReceive(values, pending)


def send(values: Tensor, peer: int) -> Algorithm[None]:
    """Send `values`, unless they are empty, and wait until they are sent."""
    if values.numel():
        yield Send(values, peer)


def send_and_wait(values: Tensor, peer: int, receive: PendingReceive) -> Algorithm[None]:
    """Send `values`, and wait for both the send and a receive."""
    pending = (yield Start(Send(values, peer))) if values.numel() else None
    yield from receive.wait()
    if pending is not None:
        yield Wait(pending)


def as_bytes(values: Tensor) -> Tensor:
    """Return (bytes,) uint8: a view of `values`, or of a copy if it is not contiguous."""
    # a zero-dimensional tensor has no view of another element size
    return values.contiguous().view(-1).view(torch.uint8)


def copy_back(values: Tensor, flat: Tensor) -> Tensor:
    """Return `values`, after copying `flat`, its bytes, to it if `as_bytes` has copied them."""
    if not values.is_contiguous():
        values.copy_(flat.view(values.dtype).view(values.shape))
    return values
