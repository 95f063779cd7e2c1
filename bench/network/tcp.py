"""Measure a network link over TCP: round trips of small messages, then a stream."""

import socket
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

TRIPS = 30
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Measured:
    """A link's delay and rate."""

    round_trip_ms: float  # the median of TRIPS
    mbit_per_s: float  # of payload: headers are not counted


def measure(client: socket.socket, server: socket.socket, seconds: float) -> Measured:
    """Measure a connection from `client`, which sends the stream, to `server`; closes `server`.

    Both ends are in this process and the small messages in one thread, so that no other process
    has to be woken for them.
    """
    for end in (client, server):
        end.settimeout(PATIENCE_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trip_s = statistics.median(_round_trip_s(client, server) for _ in range(TRIPS))
    return Measured(trip_s * 1e3, _stream_bytes_per_s(client, server, seconds) * 8e-6)


def _round_trip_s(client: socket.socket, server: socket.socket) -> float:
    begin = time.perf_counter()
    client.send(b"?")
    server.recv(1)
    server.send(b"!")
    client.recv(1)
    return time.perf_counter() - begin


def _stream_bytes_per_s(client: socket.socket, server: socket.socket, seconds: float) -> float:
    """Measure the rate of a stream, without its first third, in which TCP's window grows."""

    def send() -> None:
        with suppress(OSError):  # the receiver hangs up when it has seen enough
            while True:
                client.send(bytes(1 << 16))

    sending = threading.Thread(target=send)
    sending.start()
    begin = time.perf_counter()
    arrivals = [(0.0, 0)]
    with server:
        while arrivals[-1][0] < seconds:
            size = len(server.recv(1 << 18))
            arrivals.append((time.perf_counter() - begin, arrivals[-1][1] + size))
    sending.join()
    first_s, first_bytes = next(arrival for arrival in arrivals if arrival[0] >= seconds / 3)
    last_s, last_bytes = arrivals[-1]
    return (last_bytes - first_bytes) / (last_s - first_s)
