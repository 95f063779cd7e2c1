"""Train with several random seeds, and report the mean and standard deviation of the scores.

The folder of the runs has `runs.json` with their options, a run folder `seed-S` for each seed, and
at the end `summary.json`. A run that was stopped resumes from its checkpoint, so that all runs
together can be resumed.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from gcnzc.exchange import Group
from gcnzc.system import files
from gcnzc.train.checkpointing import check_epochs, check_resumed_options, load_last
from gcnzc.train.config import TrainConfig
from gcnzc.train.errors import SavedRun
from gcnzc.train.graph_files import check_files, describe_files
from gcnzc.train.hetero.data import load_data
from gcnzc.train.output_files import cause_of
from gcnzc.train.progress import NullReporter, Reporter
from gcnzc.train.run import train
from gcnzc.train.run_folder import (
    CONFIG,
    RESULT,
    RUNS,
    SUMMARY,
    check_free_folder,
    checkpoint_numbers,
    expand_runs,
    folder_of_seed,
    read_runs,
)

# trains one run in a folder, and returns its result
TrainOne: TypeAlias = Callable[[TrainConfig, Path], Mapping[str, Any]]

# what all runs have in common
COMMON = ("data", "task", "model", "parameters", "metric", "workers", "device")

# what each run's result must have
SUMMARIZED = {"best_epoch", "epoch_s", "epochs", "run", "seed"}


def train_runs(
    config: TrainConfig, folder: Path, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Train `--runs` times, with the seeds --seed, --seed + 1, and so on.

    Args:
        config: the options; `data` must be set. With `resume`, finished runs are skipped and
            the others are resumed or started; more `runs` or `epochs` extend what is there.
        folder: the folder of the runs, created if needed.
        reporter: shows the progress; None shows nothing.

    Returns:
        For each score, such as `test_accuracy`, the mean over the runs, each at its best validation
        epoch, and `test_accuracy_std`, the sample standard deviation; `seeds`;
        and `results`, the scores of each run. The mean is NaN if a score is not defined; the
        deviation is None then, and for one run. `unsaved` maps the names of files that could not be
        written to the cause.

    Raises:
        ValueError: the data or the options are invalid, or the folder has other runs.
        Interrupted: the process received SIGINT or SIGTERM; all files are saved.
    """
    reporter = reporter or NullReporter()
    return repeat(config, folder, lambda own, run: train(own, run, reporter), reporter)


def repeat(
    config: TrainConfig, folder: Path, train_one: TrainOne, reporter: Reporter
) -> dict[str, Any]:
    """Train with each seed by calling `train_one`; see `train_runs`."""
    if config.graph.data is None:
        raise ValueError("train: no data\n\nhint: give the folder of a graph")
    seeds = [config.loading.seed + number for number in range(config.training.runs)]
    # the largest seed is checked before the first run
    config.replace(runs=1, seed=seeds[-1], out=None, resume=None)
    if config.run.resume:
        _check_resumed(config, folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
    with files.locked_folder(folder):
        if not config.run.resume:
            for each in (folder, *(folder_of_seed(folder, seed) for seed in seeds)):
                check_free_folder(each)
        files.write_json(folder / RUNS, config.replace(out=None, resume=None).to_dict())
        results = []
        try:
            for number, seed in enumerate(seeds):
                reporter.say(f"run {number + 1} of {config.training.runs}, seed {seed}")
                results.append(_train_seed(config, folder, seed, train_one))
        finally:
            if not config.run.resume and expand_runs(folder) == [folder]:  # none has begun
                (folder / RUNS).unlink(missing_ok=True)
        line = summarize(folder, results)
        try:
            files.write_json(folder / SUMMARY, line)
        except OSError as error:
            # the results are returned all the same
            line["unsaved"][SUMMARY] = cause_of(error)
            reporter.say(f"warning: {folder / SUMMARY} could not be written: {cause_of(error)}")
    return line


def _train_seed(
    config: TrainConfig, folder: Path, seed: int, train_one: TrainOne
) -> Mapping[str, Any]:
    """Return the result of the run with a seed, which is trained unless it is finished."""
    run = folder_of_seed(folder, seed)
    if finished := _finished_result(config, run):
        return finished
    resume = run if (run / CONFIG).exists() else None
    try:
        return train_one(config.replace(runs=1, seed=seed, out=None, resume=resume), run)
    except SavedRun as error:
        # the same command resumes this run, and then trains the others
        raise SavedRun(f"{error.position} of seed {seed}", folder, error.signal) from None


def _finished_result(config: TrainConfig, run: Path) -> dict[str, Any] | None:
    """Return the result of a finished run of as many epochs; None if it has to be trained."""
    # a damaged file is written again from the checkpoint of the run
    with suppress(FileNotFoundError, ValueError, LookupError, TypeError):
        result = files.read_json(run / RESULT)
        is_whole = result.keys() >= {*SUMMARIZED, "options"} and not result.get("unsaved")
        if is_whole and result["options"]["epochs"] == config.training.epochs:
            return result
    return None


def _check_resumed(config: TrainConfig, folder: Path) -> None:
    """Check that the options and the graph are those of the runs in `folder`."""
    stored = read_runs(folder)
    check_resumed_options(config.replace(runs=stored.training.runs), stored.to_dict(), folder)
    if config.training.runs < stored.training.runs:
        raise ValueError(
            f"{folder} has {stored.training.runs} runs, more than --runs {config.training.runs}\n\n"
            "hint: omit --runs, or give a larger number to add runs"
        )
    if runs := [run for run in expand_runs(folder) if checkpoint_numbers(run)]:
        data = load_data(config, Group())
        here = describe_files(data)
        for run in runs:
            state = load_last(run)
            check_epochs(config, state, run)
            check_files(here, state["graph"], data.folder, run)


def summarize(folder: Path, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of runs: mean and sample standard deviation of each score."""
    first = results[0]
    scores = [key for key in first if key.startswith(("train_", "valid_", "test_"))]
    line: dict[str, Any] = {
        "run": str(folder),
        **{key: first[key] for key in COMMON if key in first},
        "runs": len(results),
        "seeds": [result["seed"] for result in results],
    }
    for key in scores:
        # a score that is not defined is null
        values = [math.nan if result[key] is None else float(result[key]) for result in results]
        line[key] = statistics.fmean(values)
        # `statistics.stdev` does not accept NaN
        is_defined = len(values) > 1 and not math.isnan(line[key])
        line[f"{key}_std"] = statistics.stdev(values) if is_defined else None
    keys = (*sorted(SUMMARIZED), *scores)
    line["epoch_s"] = statistics.fmean(result["epoch_s"] for result in results)
    line["results"] = [{key: result[key] for key in keys} for result in results]
    line["unsaved"] = {
        f"seed-{result['seed']}/{name}": cause
        for result in results
        for name, cause in result.get("unsaved", {}).items()
    }
    return line


def format_summary(line: Mapping[str, Any]) -> str:
    """Return the sentence that summarizes the test scores of several runs."""
    key = f"test_{line['metric']}"
    deviation = line[f"{key}_std"]
    return (
        f"test {line['metric']} {line[key]:.4f} ± "
        f"{math.nan if deviation is None else deviation:.4f}, mean and standard "
        f"deviation of {line['runs']} runs, each with the model of its best validation "
        f"{line['metric']}; all scores in {Path(line['run']) / SUMMARY}"
    )
