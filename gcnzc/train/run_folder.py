"""The run folder: names of its files, and which folder a run uses."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gcnzc.datasets.store import is_prepared
from gcnzc.train import record
from gcnzc.train.config import TrainConfig
from gcnzc.train.options import read_options, rows

# the options of several runs with different seeds, and their scores
RUNS, SUMMARY = "runs.json", "summary.json"

# what the model reads and predicts
SCHEMA = "schema.json"

# a line for each epoch; and with several workers, one for each worker
CONFIG, RECORD, WORKERS = "config.json", "record.jsonl", "workers.jsonl"
# what a run resumes from, and the weights with the best validation metric
CHECKPOINTS, BEST = "checkpoints", "best.pt"
CURVES, RESULT, BOARD, LOGS = "curves.png", "result.json", "tensorboard", "logs"
TRACE, TIMELINE = "timeline.json", "timeline.png"


@contextmanager
def chosen_folder(config: TrainConfig, launch: record.Launch | None = None) -> Iterator[Path]:
    """Yield the run folder of --resume or --out; without them a new one, see `new_folder`.

    A new folder that is still empty at the end, because the run did not begin, is removed.
    """
    given = config.run.resume or config.run.out
    folder = given or new_folder(config, launch)
    try:
        yield folder
    finally:
        if given is None:
            for path in (folder, folder.parent):
                # not if it has files, or was removed
                with suppress(OSError):
                    path.rmdir()


def check_free_folder(folder: Path) -> None:
    """Check that the folder of a new run has neither runs nor a prepared graph.

    Raises:
        ValueError: it has.
    """
    for name, what in ((RUNS, "runs"), (CONFIG, "a run")):
        if (folder / name).exists():
            raise ValueError(
                f"{folder} already has {what}\n\n"
                f"hint: --resume {folder} resumes; another --out starts anew"
            )
    if is_prepared(folder):
        raise ValueError(f"{folder} has a prepared graph\n\nhint: give another folder with --out")


def new_folder(config: TrainConfig, launch: record.Launch | None = None) -> Path:
    """Create the first runs/DATA-MODEL-N that does not exist, so that no other process takes it.

    Returns:
        The new folder, or the one before it that has a run of this launch.
    """
    name = config.graph.data.name.removesuffix(".npz") if config.graph.data else "run"
    number = 1
    while True:
        folder = Path("runs") / f"{name}-{config.model.model.name}-{number}"
        try:
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir()
            return folder
        except FileExistsError:
            if is_of_launch(folder, launch):
                return folder
            number += 1
        except FileNotFoundError:
            # another process has just removed its empty folder, and `runs`
            continue


def expand_runs(folder: Path) -> list[Path]:
    """Return the run folders in the folder of several runs, by seed; for one run, its folder."""
    return (_seeds_of(folder) if (folder / RUNS).is_file() else []) or [folder]


def _seeds_of(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("seed-*") if (path / CONFIG).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("seed-")))


def folder_of_seed(folder: Path, seed: int) -> Path:
    """Return the run folder of one seed in the folder of several runs."""
    return folder / f"seed-{seed}"


def checkpoint_path(run: Path, number: int, owner: object = 0) -> Path:
    """Return the file of a checkpoint with the state of a worker, or the rows of embeddings."""
    suffix = "npz" if owner == "rows" else "pt"
    return run / CHECKPOINTS / f"{number:06}-{owner}.{suffix}"


def checkpoint_numbers(run: Path) -> list[int]:
    """Return the numbers of the checkpoints of a run, in their order."""
    names = [re.fullmatch(r"(\d+)-0\.pt", path.name) for path in (run / CHECKPOINTS).glob("*")]
    return sorted(int(name[1]) for name in names if name)


def last_checkpoint(run: Path) -> Path:
    """Return the file of worker 0 of the last checkpoint of a run, or that of the first one."""
    return checkpoint_path(run, max(checkpoint_numbers(run), default=1))


def best_rows(run: Path, epoch: int) -> Path:
    """Return the file with the embeddings of the best model, of an epoch counted from 0."""
    return run / f"best-{epoch:06}.npz"


def lost_best_remedy(run: Path) -> str:
    """Return the hint of the error for a file of the best model that is missing or damaged."""
    return (
        "restore the file from a copy; otherwise start the run again, since "
        f"`gcnzc train --resume {run} --epochs N` writes another only if a later epoch is better"
    )


def is_of_launch(folder: Path, launch: record.Launch | None) -> bool:
    """Whether `folder` has a run that this launch started last."""
    return launch is not None and (folder / CONFIG).is_file() and launch.has_started(folder)


def read_config(run: Path) -> TrainConfig:
    """Read the options with which the run in folder `run` was started.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: the file is damaged, or does not have the options of a run.
    """
    path = run / CONFIG
    if not path.is_file():
        if (run / RUNS).is_file():
            raise FileNotFoundError(
                f"{run} has several runs\n\nhint: give the folder of one, such as {run}/seed-0"
            )
        if seeds := _seeds_of(run):
            raise FileNotFoundError(f"{run} has no {RUNS}\n\nhint: {_lost_runs_remedy(seeds)}")
        raise FileNotFoundError(
            f"no run in {run}: it has no {CONFIG}\n\n"
            "hint: give the folder that `gcnzc train` wrote, runs/DATA-MODEL-N or that of --out"
        )
    return _read_all(
        path,
        f"restore {path} from a copy; torch.load('{last_checkpoint(run)}')['options'] has the same "
        "options",
    )


def _read_all(path: Path, remedy: str) -> TrainConfig:
    """Read a file that has all options.

    Raises:
        ValueError: the file is damaged; the hint is `remedy`.
    """
    try:
        given = read_options(path, TrainConfig)
        for name in rows(TrainConfig):
            if name not in given or (name == "data" and given[name] is None):
                raise ValueError(f"{path} has no option {name}")
        return TrainConfig(**given)
    except ValueError as error:
        cause = str(error).partition("\n\n")[0]
        raise ValueError(f"{cause}\n\nhint: {remedy}") from None


def _lost_runs_remedy(seeds: Sequence[Path]) -> str:
    return (
        f"restore {seeds[0].parent / RUNS} from a copy; or copy {seeds[0] / CONFIG} to it, and "
        "resume with --runs N"
    )


def read_runs(folder: Path) -> TrainConfig:
    """Read the options with which the runs in a folder were started.

    Raises:
        FileNotFoundError: the folder has no runs.
        ValueError: the file is damaged.
    """
    path = folder / RUNS
    if not path.is_file():
        raise FileNotFoundError(
            f"no runs in {folder}: it has no {RUNS}\n\n"
            "hint: --resume of a single run takes no --runs; start several with another --out"
        )
    return _read_all(path, _lost_runs_remedy(_seeds_of(folder) or [folder_of_seed(folder, 0)]))


def read_any(folder: Path) -> TrainConfig:
    """Read the options with which the run or the runs in a folder were started."""
    return read_runs(folder) if (folder / RUNS).is_file() else read_config(folder)
