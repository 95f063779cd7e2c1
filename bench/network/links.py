"""Generate the `ip` and `tc` commands that set up the links of a cluster.

A link is a pair of virtual interfaces: `eth0` in a machine and `portN` in the hub. Rates are
limited by `tbf` on both, as links are full duplex; pairs of machines by `htb` where the sender's
link begins. Queueing disciplines count Ethernet frames, headers included.
"""

import ctypes
import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.network.delay_switch import ADDRESS

MOST_WORKERS = 250
FRAME_BYTES = 1514
# what a link lets pass at once: as much as it carries in this time, and no less than a few frames.
# Enough for a timer that is late, little for a message that is timed
BURST_S = 1e-3
LEAST_BURST_BYTES = 4 * FRAME_BYTES
# as much as the kernel gives to a card that cuts it into frames by itself, and headers
OFFLOADED_BYTES = 70_000
# frames are lost where more wait than a link carries in this time
QUEUE_S = 0.2
LEAST_QUEUE_BYTES = 256 << 10
LEAST_MBIT_PER_S, MOST_MBIT_PER_S = 0.01, 100_000.0
MOST_DELAY_MS = 10_000.0
# of the kernel's sockios.h and ethtool.h
SIOCETHTOOL = 0x8946
SET_CHECKSUM, SET_SCATTER, SET_TSO, SET_GSO = 0x17, 0x19, 0x1F, 0x24


@dataclass(frozen=True)
class Network:
    """Machines at a switch; machine N has the address 10.0.0.(N+1).

    Args:
        rates: of each machine's link, both ways, in Mbit/s; None does not limit it.
        delay_ms: from one machine to another, one way.
        slow: (sender, receiver) to Mbit/s, for pairs that are slower than their machines' links.
        offload: whether what limits a machine's link takes up to 64 KiB at once.

    Raises:
        ValueError: for what cannot be set up.
    """

    rates: Sequence[float | None]
    delay_ms: float
    slow: Mapping[tuple[int, int], float]
    offload: bool = False

    def __post_init__(self) -> None:
        workers = len(self.rates)
        if not 1 <= workers <= MOST_WORKERS:
            raise ValueError(f"a cluster of {workers} workers\n\nhint: 1 to {MOST_WORKERS} fit")
        for rate in [*self.rates, *self.slow.values()]:
            if rate is not None and not LEAST_MBIT_PER_S <= rate <= MOST_MBIT_PER_S:
                raise ValueError(
                    f"a link of {rate} Mbit/s\n\n"
                    f"hint: {LEAST_MBIT_PER_S} to {MOST_MBIT_PER_S:.0f} can be made"
                )
        if not 0 <= self.delay_ms <= MOST_DELAY_MS:
            raise ValueError(
                f"a delay of {self.delay_ms} ms\n\nhint: 0 to {MOST_DELAY_MS:.0f} can be made"
            )
        for sender, receiver in self.slow:
            if sender == receiver or not {sender, receiver} <= set(range(workers)):
                raise ValueError(
                    f"a link from worker {sender} to worker {receiver} of {workers}\n\n"
                    "hint: a link joins two different workers, counted from 0"
                )

    @property
    def addresses(self) -> list[str]:
        """Of the machines, in order."""
        return [f"10.0.0.{rank + 1}" for rank in range(len(self.rates))]

    @property
    def limited(self) -> bool:
        """Whether anything holds up frames."""
        return bool(self.delay_ms or self.slow or any(self.rates))

    def ports(self, machines: Sequence[int], *, bridge: bool) -> str:
        """Return the commands for the hub: its end of each link, and the bridge if there is one.

        Args:
            machines: a process on each machine.
            bridge: the kernel forwards, and delays; else a program is to do both.
        """
        lines = [_without_ipv6("all"), _without_ipv6("default")]
        if bridge:
            lines += [
                "ip link add name switch type bridge mcast_snooping 0",
                "ip link set dev switch up",
            ]
        for rank, machine in enumerate(machines):
            port, parent = f"port{rank}", "root"
            lines.append(
                f"ip link add name {port} type veth"
                f" peer name eth0 address {ADDRESS.format(rank + 1)} netns {machine}"
            )
            if bridge:
                lines.append(f"ip link set dev {port} master switch")
            if bridge and self.delay_ms:
                delay = f"netem delay {self.delay_ms}ms limit 1000000"
                lines.append(f"tc qdisc add dev {port} root handle 1: {delay}")
                parent = "parent 1:1"
            lines += tbf(port, parent, self.rates[rank], offload=self.offload)
            lines.append(f"ip link set dev {port} up")
        return "\n".join(lines)

    def interface(self, rank: int) -> str:
        """Return the commands for a machine: its end of its link, and static neighbours."""
        lines = [
            "ip link set dev lo up",
            _without_ipv6("eth0"),
            "ip link set dev eth0 up",
            f"ip address add {self.addresses[rank]}/24 dev eth0",
        ]
        lines += [
            f"ip neighbour add {address} lladdr {ADDRESS.format(other + 1)} dev eth0 nud permanent"
            for other, address in enumerate(self.addresses)
            if other != rank
        ]
        slow = {receiver: rate for (sender, receiver), rate in self.slow.items() if sender == rank}
        if slow:
            return "\n".join(lines + self._htb(self.rates[rank] or MOST_MBIT_PER_S, slow))
        return "\n".join(lines + tbf("eth0", "root", self.rates[rank], offload=self.offload))

    def _htb(self, whole: float, slow: Mapping[int, float]) -> list[str]:
        """Return an htb class for each slow link and one for the rest."""
        lines = [
            "tc qdisc add dev eth0 root handle 1: htb default 2",
            f"tc class add dev eth0 parent 1: classid 1:1 htb {_htb_rate(whole, whole)}",
            f"tc class add dev eth0 parent 1:1 classid 1:2 htb {_htb_rate(0, whole)}",
        ]
        for number, (receiver, rate) in enumerate(slow.items(), 3):
            lines += [
                f"tc class add dev eth0 parent 1:1 classid 1:{number:x} htb"
                f" {_htb_rate(0, min(rate, whole))}",
                "tc filter add dev eth0 parent 1: protocol ip u32"
                f" match ip dst {self.addresses[receiver]}/32 flowid 1:{number:x}",
            ]
        return lines


def tbf(device: str, parent: str, mbit_per_s: float | None, *, offload: bool = False) -> list[str]:
    """Return the commands that limit the sending rate of an interface; none without a rate.

    Args:
        device: the interface.
        parent: of the queueing discipline.
        mbit_per_s: at most.
        offload: see `Network`.
    """
    if mbit_per_s is None:
        return []
    queue = max(LEAST_QUEUE_BYTES, _bytes_in(QUEUE_S, mbit_per_s))
    burst = max(_burst(mbit_per_s), OFFLOADED_BYTES if offload else 0)
    limits = f"rate {_bit(mbit_per_s)} burst {burst} limit {queue}"
    return [f"tc qdisc add dev {device} {parent} tbf {limits}"]


def send_whole_frames() -> None:
    """Make eth0 send frames as on a wire: cut by TCP, with their checksums."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for setting in (SET_CHECKSUM, SET_SCATTER, SET_TSO, SET_GSO):
            value = ctypes.create_string_buffer(struct.pack("II", setting, 0))
            request = struct.pack("16sP16x", b"eth0", ctypes.addressof(value))
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def _without_ipv6(device: str) -> str:
    """Disable IPv6, whose announcements would be counted by the interfaces."""
    setting = f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6"
    return f"[ ! -e {setting} ] || echo 1 > {setting}"


def _bytes_in(seconds: float, mbit_per_s: float) -> int:
    return round(seconds * mbit_per_s * 1e6 / 8)


def _bit(mbit_per_s: float) -> str:
    return f"{round(mbit_per_s * 1e6)}bit"


def _burst(mbit_per_s: float) -> int:
    return max(LEAST_BURST_BYTES, _bytes_in(BURST_S, mbit_per_s))


def _htb_rate(sure: float, most: float) -> str:
    """Return an htb class with a guaranteed rate `sure` and a ceiling `most`."""
    rate = _bit(max(sure, LEAST_MBIT_PER_S))
    bursts = f"burst {LEAST_BURST_BYTES} cburst {_burst(most)}"
    return f"rate {rate} ceil {_bit(most)} {bursts} quantum {FRAME_BYTES}"
