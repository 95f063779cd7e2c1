"""A network switch in user space that delays every frame by a fixed time.

    python -m bench.network.delay_switch DELAY_MS PORT ...

It replaces the queueing discipline `netem` where the kernel does not have it.
bench/network/cluster.py starts it as root in the network namespace of the ports. A frame for the
address 02:00:00:00:00:NN is sent to the NN-th port, counted from 1. Frames for other addresses are
dropped; the machines have static ARP tables, so no broadcasts are needed. The program prints a line
when it is ready, and runs until it is killed.
"""

import os
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

ADDRESS = "02:00:00:00:00:{:02x}"
# size of the kernel's socket buffers; if they are full, frames are dropped, as by a real switch
QUEUE_BYTES = 64 << 20
MAX_FRAME_BYTES = 2048
RECEIVE_BATCH = 64  # maximum frames to receive before frames that are due are sent
# constants of the kernel's headers that Python's socket module lacks
ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33


def serve(delay_s: float, ports: list[str]) -> None:
    """Forward frames among the interfaces `ports`, each `delay_s` seconds after it was received."""
    receiver = _packet_socket()
    receiver.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    senders = {}
    for number, port in enumerate(ports, 1):
        sender = _packet_socket(protocol=0)
        sender.bind((port, 0))
        senders[bytes.fromhex(ADDRESS.format(number).replace(":", ""))] = sender
    print("listening", flush=True)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        if select.select([receiver], [], [], timeout_s)[0]:
            for frame in _receive(receiver):
                waiting.append((time.monotonic() + delay_s, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            frame = waiting.popleft()[1]
            if frame[:6] in senders:
                _send(senders[frame[:6]], frame)


def _packet_socket(protocol: int = ETH_P_ALL) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(protocol))
    sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, QUEUE_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, QUEUE_BYTES)
    sock.setblocking(False)
    return sock


def _receive(receiver: socket.socket) -> list[bytes]:
    frames: list[bytes] = []
    with suppress(BlockingIOError):
        while len(frames) < RECEIVE_BATCH:
            frames.append(receiver.recv(MAX_FRAME_BYTES))
    return frames


def _send(sender: socket.socket, frame: bytes) -> None:
    with suppress(OSError):  # the port is down, or its queue is full
        sender.send(frame)


def _raise_priority() -> None:
    """Raise the scheduling priority above that of the workers: they would delay the frames."""
    with suppress(OSError):
        os.nice(-20)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


if __name__ == "__main__":
    _raise_priority()
    serve(float(sys.argv[1]) / 1e3, sys.argv[2:])
