"""Start several workers on this machine, and start them again when one is lost.

torch's elastic agent does it, as torchrun does on many machines: this file is the door to it. The
first worker speaks on this process's own stdout and stderr; the lines of the others come on stderr,
with their ranks before them, and all are kept in the log folder.
"""

import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# where a worker leaves word that starting again would not help
FATAL = "GCNZC_FATAL"


def launch(words: Sequence[str], workers: int, logs: Path, restarts: int = 3) -> int:
    """Run `python -m gcnzc WORDS` as so many workers, and return the exit status of all.

    Args:
        words: of the command line.
        workers: on this machine; they share its cores.
        logs: folder for what the workers say, one inside it for each start.
        restarts: how often all are started again, after one was lost.

    Raises:
        RuntimeError: a worker was lost more often than that.
        KeyboardInterrupt: this process was asked to end, as the workers then were.
    """
    logs.mkdir(parents=True, exist_ok=True)
    fatal = logs / f"fatal-{os.getpid()}"
    others = dict.fromkeys(range(1, workers), Std.ALL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        role="worker",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        logs_specs=DefaultLogsSpecs(str(logs), tee={0: Std.NONE, **others}),
        log_line_prefix_template="[worker ${rank}] ",
    )
    with _environment(workers, fatal):
        try:
            elastic_launch(config, sys.executable)("-m", "gcnzc", *words)
        except ChildFailedError as error:
            rank, first = min(error.failures.items())
            raise RuntimeError(
                f"worker {rank} ended with {_ending(first.exitcode)}, after {restarts} new "
                f"starts\n\nhint: what the workers said is in {logs}; `gcnzc train --resume` goes "
                "on from the last checkpoint"
            ) from None
        except SignalException:
            raise KeyboardInterrupt from None
        finally:
            failed = fatal.exists()
            fatal.unlink(missing_ok=True)
    return 1 if failed else 0


def leave_word() -> bool:
    """Say that this worker failed in a way that starting again does not mend.

    Returns:
        Whether somebody reads it; the worker should then end as if all were well.
    """
    path = os.environ.get(FATAL)
    if path is None:
        return False
    Path(path).touch()
    return True


def word_was_left() -> bool:
    """Whether a worker has said so."""
    path = os.environ.get(FATAL)
    return path is not None and Path(path).exists()


def restarts_so_far() -> int:
    """How often this worker was started again; 0 without a launcher."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def _environment(workers: int, fatal: Path) -> Iterator[None]:
    """What workers find in their environment: their share of the cores, unless it is given."""
    cores = max(len(os.sched_getaffinity(0)) // workers, 1)
    given = {FATAL: str(fatal.absolute())}
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        if name not in os.environ:
            given[name] = str(cores)
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
