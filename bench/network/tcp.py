"""Measure the latency and the bandwidth of a TCP connection."""

import socket
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

ROUND_TRIPS = 30
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Measured:
    """The measured latency and bandwidth of a connection."""

    round_trip_ms: float  # median over ROUND_TRIPS messages of 1 B
    mbit_per_s: float  # of the payload, without headers


def measure(client: socket.socket, server: socket.socket, seconds: float) -> Measured:
    """Measure a connection; bandwidth is measured from `client` to `server`, which is closed.

    Both sockets belong to this process. One thread measures the round trips, so that they do not
    include context switches.
    """
    for end in (client, server):
        end.settimeout(TIMEOUT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    round_trip_s = statistics.median(_round_trip_s(client, server) for _ in range(ROUND_TRIPS))
    return Measured(round_trip_s * 1e3, _stream_bytes_per_s(client, server, seconds) * 8e-6)


def _round_trip_s(client: socket.socket, server: socket.socket) -> float:
    begin = time.perf_counter()
    client.send(b"?")
    server.recv(1)
    server.send(b"!")
    client.recv(1)
    return time.perf_counter() - begin


def _stream_bytes_per_s(client: socket.socket, server: socket.socket, seconds: float) -> float:
    """Measure the bandwidth without the first third of the time, in which TCP's window grows."""

    def send() -> None:
        with suppress(OSError):  # the receiver closes the connection at the end
            while True:
                client.send(bytes(1 << 16))

    sender = threading.Thread(target=send)
    sender.start()
    begin = time.perf_counter()
    arrivals = [(0.0, 0)]
    with server:
        while arrivals[-1][0] < seconds:
            size = len(server.recv(1 << 18))
            arrivals.append((time.perf_counter() - begin, arrivals[-1][1] + size))
    sender.join()
    first_s, first_bytes = next(arrival for arrival in arrivals if arrival[0] >= seconds / 3)
    last_s, last_bytes = arrivals[-1]
    return (last_bytes - first_bytes) / (last_s - first_s)
