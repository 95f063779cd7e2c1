"""Emulate a cluster with slow network links on one Linux machine, as root.

    python -m bench.network.cluster --workers 4 --mbit-per-s 100 --delay-ms 1 --measure
    python -m bench.network.cluster --workers 4 --mbit-per-s 100 -- python script.py
    python -m bench.network.cluster --workers 3 --link 0:2=10 -- sh -c 'echo "$RANK of $WORLD_SIZE"'

Each worker has an emulated machine with its own network interface at a switch, host name, processes
and shared memory. The command runs on every machine, with the environment variables of
torch.distributed. It may also be a torchrun with
`--nnodes 4 --rdzv-backend c10d --rdzv-endpoint machine0:29400`. Its output is shown on stderr,
prefixed with the worker's number. At the end, one JSON line on stdout has the configuration, the
measurements, exit codes, the wall time and the counters of each interface.

Everything is removed at exit, even after SIGKILL. See docs/howto/emulate_a_cluster.md.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from socket import create_connection, create_server
from typing import IO

from bench.network.links import Network, disable_offload
from bench.network.namespaces import (
    Machines,
    call_in,
    can_make,
    inside,
    make_machines,
    processes_in,
    shell_in,
)
from bench.network.tcp import Measured, measure
from bench.network.uneven import check_workers, moment, pair_rates, slow_link, slow_worker, slowed

# port of the rendezvous in the first run; each run takes the next one, since processes and
# connections of the previous run may still use its port
FIRST_PORT = 29500
OUTPUT_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Counters:
    """Bytes and packets of a machine's interface, headers included."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(*(a - b for a, b in zip(astuple(self), astuple(earlier), strict=True)))


@dataclass(frozen=True)
class Ran:
    """How a command ran on every machine; lists are by worker."""

    codes: list[int]  # exit codes; 128 plus the signal's number if a signal ended the command
    output: list[str]  # of stdout
    counters: list[Counters]  # of this run
    wall_s: float
    in_time: bool


class Cluster:
    """Machines at a switch, from the start of a `with` to its end.

    The links are full duplex: a rate limits sending and receiving independently. With a rate or a
    delay, and without `offload`, frames have at most 1514 B, as on a physical link, and are counted
    as such. `switch` says what implements the delay: "netem" where the kernel has it, else "user
    space" (bench/network/delay_switch.py); it is "bridge" without a delay.

    Args:
        workers: how many machines; they are machine0, machine1, ... at 10.0.0.1, 10.0.0.2, ...
        mbit_per_s: of every machine's link, or of each; None does not limit.
        delay_ms: from one machine to another, one way.
        links: (sender, receiver) to Mbit/s, for pairs that are slower than their machines' links.
        offload: allow frames of up to 64 KiB, as the kernel passes them to a network card with
            segmentation offload. Rates are still limited, but byte counts differ from those of a
            physical link. It takes less CPU time from workers that share the cores of one machine.

    Raises:
        ValueError: for a network that cannot be set up.
        RuntimeError: on entering, if no cluster can be created (`can_make` returns the reason).
    """

    def __init__(
        self,
        workers: int,
        mbit_per_s: float | Sequence[float | None] | None = None,
        delay_ms: float = 0.0,
        links: Mapping[tuple[int, int], float] | None = None,
        *,
        offload: bool = False,
    ) -> None:
        each = mbit_per_s if isinstance(mbit_per_s, Sequence) else [mbit_per_s] * workers
        if len(each) != workers:
            raise ValueError(
                f"{len(each)} rates for {workers} workers\n\nhint: give one for all or for each"
            )
        self.workers = workers
        self.network = Network(each, delay_ms, links or {}, offload)
        self.addresses = self.network.addresses
        self.switch = "bridge"
        self._machines: Machines | None = None
        self._started: list[subprocess.Popen[str]] = []
        self._num_runs = 0

    def __enter__(self) -> "Cluster":
        reason = can_make()
        if reason is not None:
            raise RuntimeError(
                f"no cluster can be made here: {reason}\n\n"
                "hint: run this as root on Linux, or use the virtual clock, which needs neither"
            )
        self._machines = make_machines(self.addresses)
        try:
            self._plug_in(self._machines)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs on the machines, and the machines."""
        self._running.close()
        self._machines = None
        for process in self._started:
            process.wait()

    @property
    def _running(self) -> Machines:
        if self._machines is None:
            raise RuntimeError("this cluster is not running\n\nhint: enter it by `with`")
        return self._machines

    def _plug_in(self, machines: Machines) -> None:
        if self.network.delay_ms:
            self.switch = "netem" if _has_netem(machines.hub) else "user space"
        ports = self.network.ports(machines.ranks, bridge=self.switch != "user space")
        shell_in(machines.hub, ports)
        for rank, machine in enumerate(machines.ranks):
            if self.network.limited and not self.network.offload:
                call_in(machine, disable_offload)
            shell_in(machine, self.network.interface(rank))
        if self.switch == "user space":
            self._start_switch(machines.hub)

    def _start_switch(self, hub: int) -> None:
        script = Path(__file__).with_name("delay_switch.py")
        ports = [f"port{rank}" for rank in range(self.workers)]
        # -I -S: isolated from the user's Python environment, which also starts faster
        words = ["-I", "-S", str(script), str(self.network.delay_ms), *ports]
        process = subprocess.Popen(
            inside(hub, [sys.executable, *words], ("--net", "--pid")),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        assert process.stdout is not None
        with process.stdout:
            if not process.stdout.readline():
                raise RuntimeError("the switch in user space did not start; stderr has its reason")

    def start(
        self,
        worker: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> "subprocess.Popen[str]":
        """Start a command on a worker's machine, in the working directory of this process.

        It inherits this process's environment, with the variables of torch.distributed and
        `environment` added. The returned process only waits for the command and ends with its exit
        code (see `Ran.codes`). To send a signal to the command itself, use `processes`.
        """
        process = subprocess.Popen(
            inside(self._running.ranks[worker], command),
            env={**os.environ, **self._environment(worker), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
        )
        self._started.append(process)
        return process

    def _environment(self, worker: int) -> dict[str, str]:
        return {
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(FIRST_PORT + self._num_runs),
            "RANK": str(worker),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def run(
        self,
        command_of: Callable[[int], Sequence[str]],
        *,
        limit_s: float = 600.0,
        environment: Mapping[str, str] | None = None,
        slow: Mapping[int, float] | None = None,
        leave: Mapping[int, float] | None = None,
        join: Mapping[int, float] | None = None,
    ) -> Ran:
        """Run a command on every machine, copy its output to stderr, and wait for all.

        Background processes that a command started continue to run; `processes` lists them.

        Args:
            command_of: a worker's number to its command.
            limit_s: after this time, everything on all machines is killed.
            environment: as for `start`.
            slow: by worker, how many times as slowly its machine runs.
            leave: by worker, the seconds after which everything on its machine is killed.
            join: by worker, the seconds after which its command starts, or starts again.
        """
        before, begin = self.counters(), time.monotonic()
        self._num_runs += 1
        processes: dict[int, subprocess.Popen[str]] = {}
        readers = []
        output: list[list[str]] = [[] for _ in range(self.workers)]
        leave, join = leave or {}, join or {}

        def start(worker: int) -> None:
            process = self.start(
                worker,
                command_of(worker),
                environment=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            processes[worker] = process
            readers.append(_show(worker, process.stdout, output[worker]))
            readers.append(_show(worker, process.stderr, []))

        events = [(at, worker, self.kill) for worker, at in leave.items()]
        events += [(at, worker, start) for worker, at in join.items()]
        in_time = False
        try:
            with slowed(self.processes, slow or {}):
                for worker in range(self.workers):
                    if worker in leave or worker not in join:
                        start(worker)
                for at, worker, change in sorted(events, key=lambda event: event[0]):
                    time.sleep(max(0.0, begin + at - time.monotonic()))
                    change(worker)
                in_time = _wait(list(processes.values()), begin + limit_s)
        finally:
            if not in_time:
                for worker in range(self.workers):
                    self.kill(worker)
        codes = [processes[worker].wait() for worker in range(self.workers)]
        wall_s = time.monotonic() - begin
        # a background process of a command may keep its stdout open
        deadline = time.monotonic() + OUTPUT_TIMEOUT_S
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        counted = [b - a for a, b in zip(before, self.counters(), strict=True)]
        return Ran(codes, ["".join(lines) for lines in output], counted, wall_s, in_time)

    def processes(self, worker: int) -> list[int]:
        """Return the processes on a worker's machine, by their ids in this namespace."""
        return processes_in(self._running.ranks[worker])

    def kill(self, worker: int) -> None:
        """Kill all processes on a worker's machine; the machine remains."""
        while running := self.processes(worker):
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.001)

    def counters(self) -> list[Counters]:
        """Return the counters of each machine's interface since the cluster was created."""
        return [_counters(machine) for machine in self._running.ranks]

    def link_down(self, worker: int) -> None:
        """Disconnect a worker's machine: all frames from and to it are dropped without an error."""
        shell_in(self._running.hub, f"ip link set dev port{worker} down")

    def link_up(self, worker: int) -> None:
        """Reconnect a worker's machine."""
        shell_in(self._running.hub, f"ip link set dev port{worker} up")

    def measure(self, sender: int = 0, receiver: int = 1, *, seconds: float = 1.0) -> Measured:
        """Send small messages between two machines and back, then a stream one way, over TCP.

        Args:
            sender: of the stream.
            receiver: another worker.
            seconds: duration of the stream; its first third is not counted. TCP needs tens of round
                trips to reach its full rate: with long delays, use a longer duration.
        """
        if sender == receiver or not {sender, receiver} <= set(range(self.workers)):
            raise ValueError(
                f"no link from worker {sender} to worker {receiver} of {self.workers}\n\n"
                "hint: measure between two different workers"
            )
        machines = self._running.ranks
        address = (self.addresses[receiver], 0)
        with call_in(machines[receiver], lambda: create_server(address)) as listening:
            found = listening.getsockname()
            with call_in(machines[sender], lambda: create_connection(found)) as client:
                measured = measure(client, listening.accept()[0], seconds)
        self._drain()
        return measured

    def _drain(self) -> None:
        """Wait until queued frames have arrived, so that they do not count for a later command."""
        before = None
        while (now := self.counters()) != before:
            before = now
            time.sleep(0.05 + 4e-3 * self.network.delay_ms)


def _has_netem(hub: int) -> bool:
    try:
        shell_in(hub, "tc qdisc add dev lo root netem delay 1ms")
    except RuntimeError:
        return False
    return True


def _show(worker: int, stream: IO[str] | None, lines: list[str]) -> threading.Thread:
    """Copy a stream to stderr and to `lines`, in a thread of its own."""
    assert stream is not None

    def copy() -> None:
        with stream:
            for line in stream:
                sys.stderr.write(f"[{worker}] {line.rstrip()}\n")
                lines.append(line)

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    return reader


def _wait(processes: Sequence[subprocess.Popen], deadline: float) -> bool:
    """Whether all end before the deadline, by the monotonic clock."""
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _counters(machine: int) -> Counters:
    lines = Path(f"/proc/{machine}/net/dev").read_text().splitlines()
    fields = next(line.split()[1:] for line in lines if line.split()[0] == "eth0:")
    return Counters(int(fields[8]), int(fields[0]), int(fields[9]), int(fields[1]))


def main() -> None:
    """Make a cluster, measure it or run a command on it, and print a JSON line."""
    options = _options()
    try:
        line, fine = _run(options)
    except (ValueError, RuntimeError) as error:
        # a line for the hint, as gcnzc's commands print it
        print("error:", str(error).replace("\n\nhint:", "\nhint:"), file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(line))
    sys.exit(not fine)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4, help="machines, one worker on each")
    parser.add_argument(
        "--mbit-per-s", type=parse_rates, help="of all links, or of each: 100 or 100,100,10"
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    for name, parse, metavar, text in REPEATED_OPTIONS:
        parser.add_argument(
            name, type=parse, action="append", default=[], metavar=metavar, help=text
        )
    parser.add_argument("--limit-s", type=float, default=600.0, help="time limit of the command")
    parser.add_argument(
        "--measure", action="store_true", help="measure worker 0's link to worker 1, and all --link"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="append the measurements to bench/results/cluster.jsonl",
    )
    parser.add_argument("command", nargs="*", help="run on each machine; after --")
    options = parser.parse_args()
    options.measure |= options.record
    if not options.measure and not options.command:
        parser.error("nothing to do: give --measure, or a command after --")
    return options


def parse_rates(text: str) -> float | list[float]:
    """Parse an option: a rate, or one for each worker."""
    found = [float(word) for word in text.split(",")]
    return found if len(found) > 1 else found[0]


def link(text: str) -> tuple[tuple[int, int], float]:
    """Parse an option: sender, receiver, and the rate between them."""
    pair, rate = text.split("=")
    sender, receiver = pair.split(":")
    return (int(sender), int(receiver)), float(rate)


# name, parser of a value, its form and help of the options that may be repeated
REPEATED_OPTIONS: Sequence[tuple[str, Callable[[str], object], str, str]] = (
    ("--link", link, "FROM:TO=MBIT_PER_S", "a slower link from one worker to another"),
    ("--slow-worker", slow_worker, "WORKER:FACTOR", "slow a machine, by pausing its processes"),
    ("--slow-link", slow_link, "A-B:FACTOR", "a slower link, in both directions"),
    ("--leave", moment, "WORKER:SECONDS", "kill everything on a machine after this time"),
    ("--join", moment, "WORKER:SECONDS", "start a machine's command at this time, or again"),
)


def _run(options: argparse.Namespace) -> tuple[dict[str, object], bool]:
    """Run the command, and return the line of JSON and whether it succeeded."""
    each = options.mbit_per_s
    rates = each if isinstance(each, list) else [each] * options.workers
    slow = pair_rates(rates, dict(options.slow_link)) | dict(options.link)
    uneven = {
        "slow": dict(options.slow_worker),
        "leave": dict(options.leave),
        "join": dict(options.join),
    }
    for named in uneven.values():
        check_workers(options.workers, list(named))
    with Cluster(options.workers, options.mbit_per_s, options.delay_ms, slow) as cluster:
        case: dict[str, object] = {
            "workers": options.workers,
            "mbit_per_s": options.mbit_per_s,
            "delay_ms": options.delay_ms,
            "links": {_arrow(pair): rate for pair, rate in slow.items()},
            "switch": cluster.switch,
        }
        line = dict(case)
        if options.measure:
            pairs = dict.fromkeys([(0, 1), *slow])
            measured = {_arrow(pair): asdict(cluster.measure(*pair)) for pair in pairs}
            line["measured"] = measured
            if options.record:
                _record(case, measured)
        if not options.command:
            return line, True
        ran = cluster.run(lambda _: options.command, limit_s=options.limit_s, **uneven)
        if not ran.in_time:
            print(f"killed after {options.limit_s:g} s, the limit", file=sys.stderr)
        line |= {key: value for key, value in uneven.items() if value}
        line |= {key: value for key, value in asdict(ran).items() if key != "output"}
        return line, not any(ran.codes)


def _arrow(pair: tuple[int, int]) -> str:
    return f"{pair[0]}:{pair[1]}"


def _record(case: Mapping[str, object], measured: Mapping[str, dict[str, float]]) -> None:
    from bench.harness import record  # imports torch, which takes seconds that only records need

    with contextlib.redirect_stdout(sys.stderr):
        for pair, values in measured.items():
            record(
                "cluster",
                {**case, "link": pair},
                measured_round_trip_ms=values["round_trip_ms"],
                measured_mbit_per_s=values["mbit_per_s"],
            )


if __name__ == "__main__":
    main()
