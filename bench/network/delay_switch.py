"""A network switch in user space that delays every frame by a fixed time.

    python -m bench.network.delay_switch DELAY_MS PORT ...

For Linux machines without the queueing discipline `netem`; bench/network/cluster.py starts it, as
root, in the network namespace of the ports. A frame for the address 02:00:00:00:00:NN leaves by the
NN-th port, counted from 1. Frames for other addresses are dropped: the cluster's machines know one
another's addresses and never ask. Prints a line when it listens, and ends when it is killed.
"""

import os
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

ADDRESS = "02:00:00:00:00:{:02x}"
# a switch that cannot keep up loses frames, as a real one does; these are bytes of the kernel's
QUEUE_BYTES = 64 << 20
FRAME_BYTES = 2048  # more than any frame has
AT_ONCE = 64  # frames taken in before those that are due go out
# of the kernel's headers, and not in Python's socket module
ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33


def serve(delay_s: float, ports: list[str]) -> None:
    """Deliver frames among the interfaces `ports`, each `delay_s` seconds after it was taken in."""
    taker = _packet_socket()
    taker.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    senders = {}
    for number, port in enumerate(ports, 1):
        sender = _packet_socket(protocol=0)
        sender.bind((port, 0))
        senders[bytes.fromhex(ADDRESS.format(number).replace(":", ""))] = sender
    print("listening", flush=True)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if select.select([taker], [], [], patience)[0]:
            for frame in _take(taker):
                waiting.append((time.monotonic() + delay_s, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            frame = waiting.popleft()[1]
            if frame[:6] in senders:
                _send(senders[frame[:6]], frame)


def _packet_socket(protocol: int = ETH_P_ALL) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(protocol))
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, QUEUE_BYTES)
    opened.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, QUEUE_BYTES)
    opened.setblocking(False)
    return opened


def _take(taker: socket.socket) -> list[bytes]:
    frames: list[bytes] = []
    with suppress(BlockingIOError):
        while len(frames) < AT_ONCE:
            frames.append(taker.recv(FRAME_BYTES))
    return frames


def _send(sender: socket.socket, frame: bytes) -> None:
    with suppress(OSError):  # the port is down, or its queue is full
        sender.send(frame)


def _hurry() -> None:
    """Run before the workers, which share the cores: a frame that waits for one is late."""
    with suppress(OSError):
        os.nice(-20)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


if __name__ == "__main__":
    _hurry()
    serve(float(sys.argv[1]) / 1e3, sys.argv[2:])
