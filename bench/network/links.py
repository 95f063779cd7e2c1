"""Generate the `ip` and `tc` commands that set up the network links of an emulated cluster.

A link is a pair of virtual Ethernet (veth) interfaces: `eth0` of a machine and `portN` of the hub.
The end of the hub has a token bucket filter (`tbf`) that limits the rate in its direction. The end
of the machine has a hierarchical token bucket (`htb`), with a queue for each receiver. They take
turns, and acknowledgements precede data, as with `fq_codel`, the default of most Linux systems.
With a single queue, acknowledgements would wait for hundreds of kilobytes of data in the opposite
direction, and the senders for them. The queues are token bucket filters with a high rate, which
divide the packets of up to 64 KiB that TCP creates even without segmentation offload: htb would
send such a packet at once, and wait afterwards. Rates are those of Ethernet frames, including
headers.
"""

import ctypes
import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.network.delay_switch import ADDRESS

MAX_WORKERS = 250
FRAME_BYTES = 1514  # of an Ethernet frame with an MTU of 1500 B
# The burst (bucket size) of a link is the bytes that it sends in this time, and at least a few
# frames: large enough to keep the rate if a kernel timer is late, small compared with the messages
# that are timed.
BURST_S = 5e-4
MIN_BURST_BYTES = 3 * FRAME_BYTES
# size of the largest packet with segmentation offload, 64 KiB and headers
OFFLOADED_BYTES = 70_000
# The queue of a link has room for the bytes that it sends in this time, and at least for as many
# frames as Linux's default; further frames are dropped.
QUEUE_S = 0.2
QUEUE_FRAMES = 1000
MIN_QUEUE_BYTES = QUEUE_FRAMES * FRAME_BYTES
# the number of the htb class of receiver 0; class 1 is the link, and 2 has the acknowledgements
FIRST_CLASS = 3
# u32 matches of TCP segments without data: less than 64 B, and no flag except ACK
PURE_ACKNOWLEDGEMENT = (
    "match ip protocol 6 0xff match u8 0x05 0x0f at 0"
    " match u16 0x0000 0xffc0 at 2 match u8 0x10 0xff at 33"
)
# Namespaces inherit the congestion control of the machine, which may be BBR: it limits the rate of
# short messages by its estimates of the bandwidth. Linux always has Reno, which other namespaces
# than the first may use without a setting of the machine.
CONGESTION_CONTROL = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
MIN_MBIT_PER_S, MAX_MBIT_PER_S = 0.01, 100_000.0
MAX_DELAY_MS = 10_000.0
# constants of linux/sockios.h and linux/ethtool.h
SIOCETHTOOL = 0x8946
SET_CHECKSUM, SET_SCATTER, SET_TSO, SET_GSO = 0x17, 0x19, 0x1F, 0x24


@dataclass(frozen=True)
class Network:
    """Machines that are connected to a switch; machine N has the address 10.0.0.(N+1).

    Args:
        rates: rate of each machine's link in either direction, in Mbit/s; None: unlimited.
        delay_ms: one-way delay between two machines.
        slow: Mbit/s by (sender, receiver), for pairs that are slower than their machines' links.
        offload: emulate segmentation offload (TSO): a link accepts packets of up to 64 KiB.

    Raises:
        ValueError: a number is out of range, or a pair is not of two different machines.
    """

    rates: Sequence[float | None]
    delay_ms: float
    slow: Mapping[tuple[int, int], float]
    offload: bool = False

    def __post_init__(self) -> None:
        workers = len(self.rates)
        if not 1 <= workers <= MAX_WORKERS:
            raise ValueError(f"a cluster of {workers} workers\n\nhint: 1 to {MAX_WORKERS} fit")
        for rate in [*self.rates, *self.slow.values()]:
            if rate is not None and not MIN_MBIT_PER_S <= rate <= MAX_MBIT_PER_S:
                raise ValueError(
                    f"a link of {rate} Mbit/s is invalid\n\n"
                    f"hint: {MIN_MBIT_PER_S} to {MAX_MBIT_PER_S:.0f} can be made"
                )
        if not 0 <= self.delay_ms <= MAX_DELAY_MS:
            raise ValueError(
                f"a delay of {self.delay_ms} ms\n\nhint: 0 to {MAX_DELAY_MS:.0f} can be made"
            )
        for sender, receiver in self.slow:
            if sender == receiver or not {sender, receiver} <= set(range(workers)):
                raise ValueError(
                    f"a link from worker {sender} to worker {receiver} of {workers}\n\n"
                    "hint: a link joins two different workers, counted from 0"
                )

    @property
    def addresses(self) -> list[str]:
        """The IPv4 addresses of the machines."""
        return [f"10.0.0.{rank + 1}" for rank in range(len(self.rates))]

    @property
    def limited(self) -> bool:
        """Whether there is any delay or limit of a rate."""
        return bool(self.delay_ms or self.slow or any(self.rates))

    def ports(self, machines: Sequence[int], *, bridge: bool) -> str:
        """Return the commands for the hub, which create the links and the bridge.

        Args:
            machines: the id of a process on each machine.
            bridge: create a bridge, with which the kernel forwards and delays frames. Without it, a
                program in user space has to do so.
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
        """Return the commands for a machine: its interface and a static ARP table."""
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
        if not self.limited:
            return "\n".join([*lines, CONGESTION_CONTROL])
        return "\n".join([*lines, CONGESTION_CONTROL, *self._htb(rank, slow)])

    def _htb(self, rank: int, slow: Mapping[int, float]) -> list[str]:
        """Return the commands for one htb class for acknowledgements, and one per receiver."""
        link_rate = self.rates[rank]
        if link_rate is None and not slow:
            return []
        link_rate = link_rate or MAX_MBIT_PER_S
        lines = [
            "tc qdisc add dev eth0 root handle 1: htb default 2",
            f"tc class add dev eth0 parent 1: classid 1:1 htb {self._rate(link_rate, link_rate)}",
            f"tc class add dev eth0 parent 1:1 classid 1:2 htb {self._rate(0, link_rate)} prio 0",
            f"tc filter add dev eth0 parent 1: protocol ip prio 1 u32 {PURE_ACKNOWLEDGEMENT}"
            " flowid 1:2",
        ]
        for receiver, address in enumerate(self.addresses):
            if receiver == rank:
                continue
            number = f"{receiver + FIRST_CLASS:x}"
            rate = self._rate(0, min(slow.get(receiver, link_rate), link_rate))
            lines += [
                f"tc class add dev eth0 parent 1:1 classid 1:{number} htb {rate} prio 1",
                f"tc qdisc add dev eth0 parent 1:{number} {self._queue(link_rate)}",
                "tc filter add dev eth0 parent 1: protocol ip prio 2 u32"
                f" match ip dst {address}/32 flowid 1:{number}",
            ]
        return lines

    def _queue(self, link_rate: float) -> str:
        """Return the queue of a receiver. Without offload, it splits packets into frames."""
        burst = OFFLOADED_BYTES if self.offload else MIN_BURST_BYTES
        return f"tbf rate {_bit(MAX_MBIT_PER_S)} burst {burst} limit {_queue_bytes(link_rate)}"

    def _rate(self, guaranteed: float, ceiling: float) -> str:
        """Return the parameters of an htb class, given its guaranteed and maximum Mbit/s."""
        rate = _bit(max(guaranteed, MIN_MBIT_PER_S))
        burst = max(_burst(ceiling), OFFLOADED_BYTES if self.offload else 0)
        bursts = f"burst {burst} cburst {burst}"
        return f"rate {rate} ceil {_bit(ceiling)} {bursts} quantum {FRAME_BYTES}"


def tbf(device: str, parent: str, mbit_per_s: float | None, *, offload: bool = False) -> list[str]:
    """Return the commands that limit the rate at which an interface sends.

    Args:
        device: name of the interface.
        parent: parent of the queueing discipline.
        mbit_per_s: the limit; None: unlimited, without any command.
        offload: see `Network`.
    """
    if mbit_per_s is None:
        return []
    burst = max(_burst(mbit_per_s), OFFLOADED_BYTES if offload else 0)
    limits = f"rate {_bit(mbit_per_s)} burst {burst} limit {_queue_bytes(mbit_per_s)}"
    return [f"tc qdisc add dev {device} {parent} tbf {limits}"]


def disable_offload() -> None:
    """Disable segmentation and checksum offload of eth0, so that it sends frames as on a wire."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for setting in (SET_CHECKSUM, SET_SCATTER, SET_TSO, SET_GSO):
            value = ctypes.create_string_buffer(struct.pack("II", setting, 0))
            request = struct.pack("16sP16x", b"eth0", ctypes.addressof(value))
            fcntl.ioctl(control, SIOCETHTOOL, request)


def _without_ipv6(device: str) -> str:
    """Return the command that disables IPv6: its router solicitations would be counted too."""
    setting = f"/proc/sys/net/ipv6/conf/{device}/disable_ipv6"
    return f"[ ! -e {setting} ] || echo 1 > {setting}"


def _bytes_sent_in(seconds: float, mbit_per_s: float) -> int:
    return round(seconds * mbit_per_s * 1e6 / 8)


def _queue_bytes(mbit_per_s: float) -> int:
    return max(MIN_QUEUE_BYTES, _bytes_sent_in(QUEUE_S, mbit_per_s))


def _bit(mbit_per_s: float) -> str:
    return f"{round(mbit_per_s * 1e6)}bit"


def _burst(mbit_per_s: float) -> int:
    return max(MIN_BURST_BYTES, _bytes_sent_in(BURST_S, mbit_per_s))
