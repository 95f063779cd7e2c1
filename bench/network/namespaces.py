"""Emulate machines by Linux namespaces, which the kernel removes when this process ends.

The hub and each machine have a network namespace and a PID namespace; the PID namespaces of the
machines are children of the hub's. The hub is a process that reads from a pipe. The process that
started it holds the other end. When that process ends for any reason, the kernel closes the pipe,
and the hub ends. The kernel then kills all processes in the hub's PID namespace. When the last
process of a namespace has ended, the kernel removes its interfaces and mounts. There are no names
in /run/netns and no files, so nothing has to be cleaned up.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "rm", "env", "sh", "sleep", "cat")
NAMESPACES = ("--net", "--pid", "--uts", "--ipc", "--mount")
CLONE_NEWNET = 0x40000000  # of linux/sched.h
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)

# checks that the kernel has the features that a cluster needs; runs in temporary namespaces
PROBE = """
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
ip link add name bridge0 type bridge
ip link add name port0 type veth peer name port1
tc qdisc add dev port0 root tbf rate 1mbit burst 4096 limit 65536
"""
# The shell reads its process id before it mounts /proc, so that the id is that of the outer PID
# namespace. A machine has its own /dev/shm, hostname and /etc/hosts, and shares all other files.
# `sleep` is the init process of the PID namespace; it ignores SIGCHLD, so that the kernel reaps
# orphaned processes.
MACHINE = """
read -r pid rest < /proc/self/stat
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
printf '%s' "$HOSTS" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
echo "machine$1" > /proc/sys/kernel/hostname
echo "$1 $pid"
exec env --ignore-signal=CHLD sleep infinity > /dev/null
"""
HUB = """
read -r pid rest < /proc/self/stat
echo "hub $pid"
rank=0
while [ $rank -lt $COUNT ]; do
    { unshare --net --pid --uts --ipc --mount --fork sh -ec "$MACHINE" sh $rank < /dev/null ||
        echo "$rank failed"; } &
    rank=$((rank + 1))
done
exec env --ignore-signal=CHLD cat > /dev/null
"""


@dataclass(frozen=True)
class Machines:
    """Running machines; process ids are those in the PID namespace of this process."""

    process: subprocess.Popen[str]
    hub: int  # the hub's process id
    ranks: list[int]  # the process id of each machine's init process

    def close(self) -> None:
        """End all processes on the machines and remove the namespaces."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def can_make() -> str | None:
    """Return the reason why no machines can be created here, or None if they can."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"network namespaces need root, and this is user {os.geteuid()}"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no command {', '.join(missing)} (of iproute2, util-linux and coreutils)"
    probe = ["unshare", *NAMESPACES, "--fork", "sh", "-ec", PROBE]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"the kernel lacks a feature or denies it: {tried.stderr.strip()}"
    return None


def make_machines(addresses: Sequence[str]) -> Machines:
    """Start a hub and machines named machine0, machine1, ..., whose /etc/hosts has the addresses.

    Raises:
        RuntimeError: a namespace was not created; the messages are on stderr.
    """
    count = len(addresses)
    # torch.distributed opens IPv6 sockets, and looks up the names of IPv4-mapped addresses
    names = [(address, f"machine{rank}") for rank, address in enumerate(addresses)]
    hosts = [("127.0.0.1", "localhost"), *names, *((f"::ffff:{a}", name) for a, name in names)]
    process = subprocess.Popen(
        ["unshare", "--net", "--pid", "--fork", "sh", "-ec", HUB],
        env={
            **os.environ,
            "COUNT": str(count),
            "HOSTS": "".join(f"{address} {name}\n" for address, name in hosts),
            "MACHINE": MACHINE,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Ctrl-C must interrupt this process only, which then closes the hub
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        pid_of = dict(line.split() for line in islice(process.stdout, 1 + count))
    names_to_start = ["hub", *map(str, range(count))]
    pids = [int(pid_of[n]) for n in names_to_start if pid_of.get(n, "failed") != "failed"]
    machines = Machines(process, pids[0] if pids else 0, pids[1:])
    if len(pids) != len(names_to_start):
        machines.close()
        raise RuntimeError(
            f"{len(pids)} of {len(names_to_start)} namespaces started; stderr says why"
        )
    return machines


def inside(pid: int, command: Sequence[str], namespaces: Sequence[str] = NAMESPACES) -> list[str]:
    """Return the command that runs `command` in `namespaces` of process `pid`, in this folder.

    A shell outside of the PID namespace waits for the command. Unlike nsenter, it does not stop
    when a signal stops the command, and it reports a fatal signal only by its exit status.
    """
    script = 'cd "$1" && shift && exec 3>&2 2> /dev/null && (exec "$@" 2>&3 3>&-); exit $?'
    words = ["--no-fork", "--", "sh", "-c", script, "sh", os.getcwd(), *command]
    return ["nsenter", "--target", str(pid), *namespaces, *words]


def shell_in(pid: int, script: str) -> None:
    """Run a shell script in the network namespace of process `pid`; it ends at the first failure.

    Raises:
        RuntimeError: a command failed; the message has its stderr.
    """
    command = inside(pid, ["sh", "-ec", script], ("--net",))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"setting up a network failed: {done.stderr.strip()}\n\nin: {script}")


def call_in(pid: int, fn: Callable[[], T]) -> T:
    """Call `fn` in the network namespace of process `pid`; sockets that it opens belong to it."""

    def call_in_namespace() -> T:
        with open(f"/proc/{pid}/ns/net") as namespace:
            if _libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return fn()

    # setns changes the namespace of the calling thread only, and this thread ends with the pool
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call_in_namespace).result()


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends for any reason."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def processes_in(pid: int) -> list[int]:
    """Return the other processes in the PID namespace of process `pid`, in ascending order."""
    namespace = os.readlink(f"/proc/{pid}/ns/pid")
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/pid") == namespace and int(name) != pid:
                found.append(int(name))
        except OSError:
            pass  # the process has ended
    return sorted(found)
