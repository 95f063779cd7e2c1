"""Start several launchers (torchrun) of one run on this machine, as on several machines.

They have one worker each, and their rendezvous is on the loopback interface. The first launcher
keeps it, unless this process does; every other launcher may be lost and replaced.
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

# a launcher that is lost is noticed after three intervals
SETTINGS = "join_timeout=120,read_timeout=10,keep_alive_interval=1,last_call_timeout=5"
# what workers take at most to start again, on busy cores
STILL_S = 180.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3",
}


class Launchers:
    """Launchers of one run, and what they print.

    Args:
        graph: prepared folder.
        run: folder of the run; what launchers print goes into files beside it.
        machines: how many launchers take part, as torchrun's `--nnodes`: "2", or "1:2".
        options: of `gcnzc train`.
        environment: added to this process's.
        run_id: torchrun's `--rdzv-id`; not given if None.
        keeps_rendezvous: whether this process keeps the rendezvous, so that the first launcher may
            be lost too.
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
        settings = f"{SETTINGS},is_host=false" if keeps_rendezvous else SETTINGS
        self.started: list[subprocess.Popen[bytes]] = []
        self.command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", machines]
        self.command += [] if run_id is None else ["--rdzv-id", run_id]
        self.command += ["--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
        self.command += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", settings]
        self.command += ["--log-dir", str(run.with_name(f"{run.name}.logs"))]
        self.command += ["--max-restarts", "3", "-m", "gcnzc", "train", str(graph)]
        self.command += ["--out", str(run), *options]

    def start(self) -> "subprocess.Popen[bytes]":
        """Start one more launcher."""
        with self._output(len(self.started)).open("w") as file:
            process = subprocess.Popen(
                self.command, env=self.environment, stdout=file, stderr=subprocess.STDOUT
            )
        self.started.append(process)
        # the one that listens first keeps the rendezvous
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

    def wait(self, launcher: "subprocess.Popen[bytes]", still_s: float = STILL_S) -> int | None:
        """Wait until a launcher ends, however long that takes while the run goes on.

        Returns:
            Its exit status; None if the record did not grow for `still_s`.
        """
        path, before, end = self.run / "record.jsonl", 0, time.monotonic() + still_s
        while launcher.poll() is None:
            size = path.stat().st_size if path.exists() else 0
            if size != before:
                before, end = size, time.monotonic() + still_s
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
    """Yield `Launchers`, all of which are ended at the end of the `with`."""
    found = Launchers(
        graph, run, machines, options, environment, run_id, keeps_rendezvous=keeps_rendezvous
    )
    try:
        yield found
    finally:
        found.close()


def workers_of(launcher: int) -> list[int]:
    """Return the processes that a launcher started."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"\nPPid:\t{launcher}\n" in (entry / "status").read_text():
                found.append(int(entry.name))
    return sorted(found)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until `condition` holds, for so long at most; whether it does."""
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
