"""Launch several workers on this machine, and restart them if one is lost.

It uses torch's elastic agent, as torchrun does. Worker 0 writes to stdout and stderr of this
process, which may be a terminal. Each line of the other workers is copied to the same stream, with
a rank prefix, and stored in the log folder. The output of worker 0 is not stored: torch would store
and copy it line by line with a prefix, which progress bars and the JSON line on stdout preclude.
"""

import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import gcnzc
from gcnzc.cli.errors import Terminated
from gcnzc.exchange import Algorithm
from gcnzc.exchange.rendezvous import find_children
from gcnzc.exchange.sync import all_gather_text
from gcnzc.system.files import create_memory_file, folder_identity, locked_folder
from gcnzc.train.record import Launch
from gcnzc.train.run_folder import LOGS

# environment variable: the file by which a worker reports that a restart would not help
FATAL = "GCNZC_FATAL"


# environment variable: the identity of the run folder that the launcher has locked
RUN_FOLDER = "GCNZC_RUN_FOLDER"


# the program of workers. It imports the package of the launcher; `python -m` would prefer another
# one in the current folder, such as a checkout.
WORKER = (
    f"import sys; sys.path[0] = {str(Path(gcnzc.__file__).parents[1])!r}; import gcnzc; "
    "del sys.path[0]; from gcnzc.cli import main; sys.exit(main())"
)


# the rendezvous of a launcher whose workers are all on this machine
LOOPBACK, LOOPBACK_ADDRESS = "gcnzc-loopback", "127.0.0.1"


# torchrun's run id if the user gave none
NO_RUN_ID = "none"


# environment of workers on one machine; variables that the user has set take precedence
LOCAL_ENVIRONMENT = {
    # connections of gloo and NCCL stay on this machine
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # gcnzc reports a lost store itself; hide torch's C++ stack trace
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


# seconds from one look at the workers to the next
INTERVAL_S = 1.0


# signals by which the launcher asks workers to end, as a mask in /proc/PID/status
END = 1 << (signal.SIGINT - 1) | 1 << (signal.SIGTERM - 1)


def launch(words: Sequence[str], workers: int, run: Path, restarts: int) -> int:
    """Run `gcnzc WORDS` in several worker processes, and return their exit status.

    Args:
        words: the arguments of the command line.
        workers: the number of workers on this machine; they share its cores.
        run: the run folder, which is locked until the end. Its folder `logs` has the
            output of workers 1 and above, with a subfolder for each start.
        restarts: how often all workers are restarted after one was lost.

    Returns:
        0, or 1 if a worker reported a failure that a restart cannot fix. If the run was stopped by
        a signal that this process received, 128 and its number.

    Raises:
        ValueError: another launcher has locked the run folder.
        RuntimeError: workers were lost more often than `restarts`.
        KeyboardInterrupt: this process received SIGINT or SIGTERM, and no worker has reported that
            the run was stopped.
    """
    logs = run / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    rendezvous_handler_registry.register(LOOPBACK, _Loopback)
    others = dict.fromkeys(range(1, workers), Std.ALL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        role="worker",
        rdzv_backend=LOOPBACK,
        rdzv_endpoint=LOOPBACK_ADDRESS,
        max_restarts=restarts,
        logs_specs=DefaultLogsSpecs(str(logs), tee={0: Std.NONE, **others}),
        log_line_prefix_template="[worker ${rank}] ",
    )
    # workers lock the run folder itself, but not while they are restarted: the launcher's lock on
    # the logs keeps another run from starting in between
    with locked_folder(logs, run), _environment(workers, run):
        try:
            with continue_stopped_workers():
                elastic_launch(config, sys.executable)("-c", WORKER, *words)
        except ChildFailedError as error:
            # the worker that failed first: the launcher then ends the others, which fail too
            rank, first = error.get_first_failure()
            raise RuntimeError(
                f"worker {rank} ended with {_describe_exit(first.exitcode)}, after {restarts} "
                f"restarts\n\nhint: the error of worker 0 is printed above, those of other workers "
                f"also in {logs}; `gcnzc train --resume` resumes from the last checkpoint"
            ) from None
        except SignalException as error:
            if has_reported_fatal_error():
                # a worker has reported how the run was stopped
                return 128 + error.sigval
            is_terminated = error.sigval == signal.SIGTERM
            raise (Terminated if is_terminated else KeyboardInterrupt) from None
        return 1 if has_reported_fatal_error() else 0


@contextmanager
def continue_stopped_workers() -> Iterator[None]:
    """Within the `with`, continue child processes that are stopped and have a signal to end.

    A process that was stopped, as by SIGSTOP, handles no signal but SIGKILL and SIGCONT. The
    launcher would wait 30 s for it, and then kill it; the other workers could not save the run,
    because they wait for its part of the next exchange. Child processes that are stopped, but have
    no such signal, remain stopped.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(INTERVAL_S):
            for child in find_children(os.getpid()):
                if child.state == "T" and _has_signal_to_end(child.pid):
                    # it may have ended
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGCONT)

    thread = threading.Thread(target=watch, name="stopped workers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _has_signal_to_end(process: int) -> bool:
    """Whether a process has a pending signal to end."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in lines)
    pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return bool(pending & END)


def report_fatal_error() -> bool:
    """Report to the launcher that this worker failed in a way that a restart cannot fix.

    Returns:
        Whether there is a launcher that reads it; the worker should then exit with status 0.
    """
    path = os.environ.get(FATAL)
    if path is None:
        return False
    try:
        Path(path).write_bytes(b"1")
    except OSError:
        # the launcher was killed
        return False
    return True


def has_reported_fatal_error() -> bool:
    """Whether a worker has called `report_fatal_error`."""
    path = os.environ.get(FATAL)
    return path is not None and Path(path).exists() and Path(path).stat().st_size > 0


def may_be_restarted() -> bool:
    """Whether torchrun may restart this worker after it was stopped, as when a machine joins.

    The launcher of `gcnzc train --workers` does not: it stops workers only to end the run.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return FATAL not in os.environ and restarts.isdecimal() and int(restarts) > 0


def own_launch() -> Launch | None:
    """Return the launch that this worker belongs to; None without a launcher.

    A launch is identified by its run id: the `--rdzv-id` of torchrun, or a random one for
    `gcnzc train --workers`. Without `--rdzv-id` it is identified by its launchers, one on each
    machine; `agree_on_launch` adds those of the other machines.
    """
    given = os.environ.get("TORCHELASTIC_RUN_ID")
    if given is None:
        return None
    if given != NO_RUN_ID:
        return Launch(given, folder=os.environ.get(RUN_FOLDER))
    return Launch(None, frozenset([_launcher()]))


def agree_on_launch(own: Launch | None) -> Algorithm[Launch | None]:
    """Return the launch of all workers of a group, the same on all.

    Args:
        own: the result of `own_launch` on each worker.
    """
    launchers = own.launchers if own is not None else frozenset()
    texts = yield from all_gather_text("\n".join(sorted(launchers)))
    if own is None or own.run_id is not None:
        return own
    return Launch(None, frozenset(line for text in texts for line in text.splitlines()))


def _launcher() -> str:
    """Return a unique name of this process's parent: host, boot id, process id and start time."""
    parent = os.getppid()
    stat = Path(f"/proc/{parent}/stat").read_text()
    # a process id may be reused, but not with the same start time, which is counted from boot
    started = stat[stat.rindex(")") + 1 :].split()[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{parent}/{started}"


def is_closed_to_new_machines() -> bool:
    """Whether a replacement for a lost machine could not join this run.

    With torch 2.13, launchers that share their store do not send its address to a new launcher: the
    new launcher and the old ones end with DistStoreError.
    """
    has_several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    return has_several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class _Loopback(RendezvousHandler):
    """The rendezvous of a single launcher: a new store on the loopback interface for each start.

    torch's own rendezvous listens on all interfaces, and unpickles the values that it reads.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.parameters = parameters
        self.store: TCPStore | None = None

    def get_backend(self) -> str:
        """See base class."""
        return LOOPBACK

    @property
    def use_agent_store(self) -> bool:
        """Return True: workers use the launcher's store, which outlives them."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Create a store for the next start of the workers."""
        with socket.socket() as listener:
            listener.bind((LOOPBACK_ADDRESS, 0))
            listener.listen(socket.SOMAXCONN)
            port = listener.getsockname()[1]
            self.store = TCPStore(
                LOOPBACK_ADDRESS,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(LOOPBACK_ADDRESS, port))

    def is_closed(self) -> bool:
        """Return False: there is no other launcher."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other launcher."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other machine may join."""
        return 0

    def get_run_id(self) -> str:
        """See base class."""
        return str(self.parameters.run_id)

    def shutdown(self) -> bool:
        """Close the store."""
        self.store = None
        return True


@contextmanager
def _environment(workers: int, run: Path) -> Iterator[None]:
    """Set the environment of workers: numbers of threads, LOCAL_ENVIRONMENT, FATAL and RUN_FOLDER.

    Args:
        workers: the number of workers.
        run: the run folder.
    """
    cores = str(max(len(os.sched_getaffinity(0)) // workers, 1))
    wanted = {"OMP_NUM_THREADS": cores, "NUMBA_NUM_THREADS": cores, **LOCAL_ENVIRONMENT}
    # the file that `report_fatal_error` writes is in memory: the run folder may be moved or on a
    # full disk, and a killed launcher would leave a temporary file
    with open(create_memory_file("gcnzc-fatal"), "rb") as memory:
        fatal = f"/proc/{os.getpid()}/fd/{memory.fileno()}"
        given = {FATAL: fatal, RUN_FOLDER: str(folder_identity(run))}
        given |= {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(given)
        try:
            yield
        finally:
            for name in given:
                del os.environ[name]


def _describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
