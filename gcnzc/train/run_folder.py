"""The run folder: names of its files, and which folder a run uses."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gcnzc.datasets.store import is_prepared
from gcnzc.system import files
from gcnzc.train import record
from gcnzc.train.config import TrainConfig
from gcnzc.train.options import check_names, rows

# the options of several runs with different seeds, and their scores
RUNS, SUMMARY = "runs.json", "summary.json"

# what the model reads and predicts
SCHEMA = "schema.json"

CONFIG, RECORD, WORKERS, CHECKPOINT, BEST, CURVES, RESULT, BOARD, TRACE, TIMELINE, LOGS = (
    "config.json",
    "record.jsonl",
    "workers.jsonl",
    "checkpoint.pt",
    "best.pt",
    "curves.png",
    "result.json",
    "tensorboard",
    "timeline.json",
    "timeline.png",
    "logs",
)


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
    if not (folder / RUNS).is_file():
        return [folder]
    found = [path for path in folder.glob("seed-*") if (path / CONFIG).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("seed-"))) or [folder]


def folder_of_seed(folder: Path, seed: int) -> Path:
    """Return the run folder of one seed in the folder of several runs."""
    return folder / f"seed-{seed}"


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
    if (run / RUNS).is_file() and not path.is_file():
        raise FileNotFoundError(
            f"{run} has several runs\n\nhint: give the folder of one, such as {run}/seed-0"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"no run in {run}: it has no {CONFIG}\n\n"
            "hint: give the folder that `gcnzc train` wrote, runs/DATA-MODEL-N or that of --out"
        )
    remedy = (
        f"restore it from a copy; torch.load('{run / CHECKPOINT}')['options'] has the same options"
    )
    values = files.read_json(path, remedy)
    if not isinstance(values, dict) or not isinstance(values.get("data"), str):
        raise ValueError(
            f"{path} names no data, so it does not hold the options of a run\n\n"
            f"hint: was it edited? `gcnzc train --out FOLDER` starts a new run"
        )
    given = check_names(TrainConfig, values, f"{path}: ")
    missing = [name for name in rows(TrainConfig) if name not in given]
    if missing:
        raise ValueError(f"{path} has no option {missing[0]}\n\nhint: {remedy}")
    try:
        return TrainConfig(**given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
