"""Start several torchrun launchers of one run on this machine, as on several machines.

Each launcher has one worker. The rendezvous store is hosted by the first launcher or by this
process, on the loopback interface. A launcher that does not host it may fail and be replaced.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed import TCPStore

# a launcher counts as failed after three keep-alive intervals
RENDEZVOUS_CONFIG = "join_timeout=120,read_timeout=10,keep_alive_interval=1,last_call_timeout=5"
# maximum time without a new record: workers may take this long to restart on busy cores
STALL_TIMEOUT_S = 180.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3",
}


class Launchers:
    """The launchers of one run, and their output.

    Args:
        graph: prepared folder of the graph.
        run: run folder; the output of launchers is written to files next to it.
        machines: number of launchers, as in torchrun's `--nnodes`: "2", or "1:2" for one or two.
        options: options of `gcnzc train`.
        environment: environment variables in addition to those of this process.
        run_id: torchrun's `--rdzv-id`; None: without this option.
        keeps_rendezvous: host the rendezvous store in this process, so that also the first launcher
            may fail.
    """

    def __init__(
        self,
        graph: Path,
        run: Path,
        machines: str,
        options: Sequence[str],
        environment: Mapping[str, str],
        run_id: str | None = "7",
        *,
        keeps_rendezvous: bool = False,
    ) -> None:
        self.run = run
        self.environment = {**os.environ, **ENVIRONMENT, **environment}
        self.rendezvous = None
        if keeps_rendezvous:
            self.rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self.rendezvous.port if self.rendezvous is not None else _free_port()
        config = RENDEZVOUS_CONFIG + (",is_host=false" if keeps_rendezvous else "")
        self.started: list[subprocess.Popen[bytes]] = []
        self.command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", machines]
        self.command += [] if run_id is None else ["--rdzv-id", run_id]
        self.command += ["--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
        self.command += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", config]
        self.command += ["--log-dir", str(run.with_name(f"{run.name}.logs"))]
        self.command += ["--max-restarts", "3", "-m", "gcnzc", "train", str(graph)]
        self.command += ["--out", str(run), *options]

    def start(self) -> "subprocess.Popen[bytes]":
        """Start another launcher."""
        with self._output(len(self.started)).open("w") as file:
            process = subprocess.Popen(
                self.command, env=self.environment, stdout=file, stderr=subprocess.STDOUT
            )
        self.started.append(process)
        # the launcher that listens first hosts the rendezvous store
        wait_for(lambda: process.poll() is not None or _listens(self.port), 60)
        return process

    def output(self) -> str:
        """Return the output of all launchers and workers."""
        return "\n".join(self._output(n).read_text() for n in range(len(self.started)))

    def epochs(self) -> list[dict[str, object]]:
        """Return the lines of the record."""
        path = self.run / "record.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]

    def wait(
        self, launcher: "subprocess.Popen[bytes]", stall_s: float = STALL_TIMEOUT_S
    ) -> int | None:
        """Wait until a launcher ends, or the run has stalled.

        Returns:
            The exit status; None if nothing was added to the record for `stall_s` seconds.
        """
        path, before, end = self.run / "record.jsonl", 0, time.monotonic() + stall_s
        while launcher.poll() is None:
            size = path.stat().st_size if path.exists() else 0
            if size != before:
                before, end = size, time.monotonic() + stall_s
            if time.monotonic() > end:
                return None
            time.sleep(0.1)
        return launcher.returncode

    def close(self) -> None:
        """End all launchers and workers."""
        for launcher in self.started:
            if launcher.poll() is None:
                for worker in workers_of(launcher.pid):
                    with suppress(ProcessLookupError):
                        os.kill(worker, signal.SIGKILL)
                launcher.kill()
                launcher.wait()

    def _output(self, number: int) -> Path:
        return self.run.with_name(f"{self.run.name}.launcher-{number}")


@contextmanager
def launchers(
    graph: Path,
    run: Path,
    machines: str,
    options: Sequence[str],
    environment: Mapping[str, str],
    run_id: str | None = "7",
    *,
    keeps_rendezvous: bool = False,
) -> Iterator[Launchers]:
    """Yield `Launchers`, and end them and their workers afterwards."""
    started = Launchers(
        graph, run, machines, options, environment, run_id, keeps_rendezvous=keeps_rendezvous
    )
    try:
        yield started
    finally:
        started.close()


def workers_of(launcher: int) -> list[int]:
    """Return the process ids of the children of a launcher, given its process id."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"\nPPid:\t{launcher}\n" in (entry / "status").read_text():
                found.append(int(entry.name))
    return sorted(found)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until `condition` holds, at most `seconds`; return whether it does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
