"""Emulate machines by Linux namespaces that exist only as long as their processes.

A hub and the machines are each the first process of a process namespace, the machines' within the
hub's, with a network of their own. The hub reads from a pipe that whoever made it holds. When that
one ends, however it ends, the kernel closes the pipe and the hub ends with it; the kernel then
kills all processes in the hub's namespace, and with its last process each network, its interfaces
and its mounts are gone. There are no names in /run/netns, no files, and nothing to clean up.
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
CLONE_NEWNET = 0x40000000  # of the kernel's sched.h
PR_SET_PDEATHSIG = 1  # of its prctl.h
_libc = ctypes.CDLL(None, use_errno=True)

# what a cluster needs of the kernel, tried where it leaves nothing
PROBE = """
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /dev/shm
ip link add name bridge0 type bridge
ip link add name port0 type veth peer name port1
tc qdisc add dev port0 root tbf rate 1mbit burst 4096 limit 65536
"""
# /proc still is the outer one when the shell reads there who it is. The shared memory of a machine
# is its own, as are its name and the file of names; all other files are everybody's. The last
# program does nothing, and the kernel buries the dead for it.
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
    """Running namespaces; process numbers are those that the maker sees."""

    process: subprocess.Popen[str]
    hub: int
    ranks: list[int]

    def close(self) -> None:
        """End all processes in them, and with these the namespaces."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def can_make() -> str | None:
    """Return the reason why no machines can be created here, or None if they can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"only root makes network namespaces, and this is user {os.geteuid()}"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no command {', '.join(missing)} (of iproute2, util-linux and coreutils)"
    probe = ["unshare", *NAMESPACES, "--fork", "sh", "-ec", PROBE]
    tried = subprocess.run(probe, capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"the kernel refuses what they need: {tried.stderr.strip()}"
    return None


def make_machines(addresses: Sequence[str]) -> Machines:
    """Start a hub and machines machine0, machine1, ..., which know these addresses of each other.

    Raises:
        RuntimeError: one did not start; what it said is on stderr.
    """
    count = len(addresses)
    # sockets of torch.distributed speak IPv6, and look for IPv4 addresses as parts of it
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
        # an interrupt from the keyboard is for the maker, who ends the hub in its own time
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        said = dict(line.split() for line in islice(process.stdout, 1 + count))
    wanted = ["hub", *map(str, range(count))]
    pids = [int(said[name]) for name in wanted if said.get(name, "failed") != "failed"]
    machines = Machines(process, pids[0] if pids else 0, pids[1:])
    if len(pids) != len(wanted):
        machines.close()
        raise RuntimeError(f"{len(pids)} of {len(wanted)} namespaces started; stderr says why")
    return machines


def inside(pid: int, command: Sequence[str], namespaces: Sequence[str] = NAMESPACES) -> list[str]:
    """Return the command that runs `command` in `namespaces` of process `pid`, in this folder.

    A shell waits for the command, outside of the process namespace. It does not stop when the
    command is stopped, as nsenter would, and only by its exit code tells of a signal.
    """
    script = 'cd "$1" && shift && exec 3>&2 2> /dev/null && (exec "$@" 2>&3 3>&-); exit $?'
    words = ["--no-fork", "--", "sh", "-c", script, "sh", os.getcwd(), *command]
    return ["nsenter", "--target", str(pid), *namespaces, *words]


def shell_in(pid: int, script: str) -> None:
    """Run lines of `sh` in the network of the process `pid`, until one fails.

    Raises:
        RuntimeError: a line failed, with what it said.
    """
    command = inside(pid, ["sh", "-ec", script], ("--net",))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"setting up a network failed: {done.stderr.strip()}\n\nin: {script}")


def call_in(pid: int, fn: Callable[[], T]) -> T:
    """Call `fn` in the network of the process `pid`: sockets that it opens stay there."""

    def joined() -> T:
        with open(f"/proc/{pid}/ns/net") as namespace:
            if _libc.setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return fn()

    # a thread joins for itself alone, and ends with the pool
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(joined).result()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def processes_in(pid: int) -> list[int]:
    """Return the other processes in the process namespace of `pid`, in ascending order."""
    namespace = os.readlink(f"/proc/{pid}/ns/pid")
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/pid") == namespace and int(name) != pid:
                found.append(int(name))
        except OSError:
            pass  # it has ended
    return sorted(found)
