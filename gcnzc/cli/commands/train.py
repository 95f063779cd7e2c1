"""The command that trains."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gcnzc.cli import builtin_graph, launch
from gcnzc.cli.output import print_json
from gcnzc.exchange import Group, run
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import broadcast_bytes
from gcnzc.train import run as train_run
from gcnzc.train import run_folder
from gcnzc.train.config import TrainConfig
from gcnzc.train.epoch_stats import format_rate
from gcnzc.train.output_files import Unsaved, format_unsaved_error
from gcnzc.train.progress import Reporter
from gcnzc.train.record import Launch


def _find_data_and_launch(
    config: TrainConfig, reporter: Reporter, group: Group
) -> tuple[Path, Launch | None]:
    """Return the folder of the graph, and the launch of all workers.

    Without DATA, the built-in graph is generated on first use. An error on one worker is raised on
    all.
    """

    def find_data() -> Path:
        return builtin_graph.prepared(reporter) if config.graph.data is None else config.graph.data

    with joint_work(group) as work:
        path = work.run_in_thread(find_data)
        own = launch.own_launch()
    return path, run(launch.agree_on_launch(own), group)


@contextmanager
def _chosen_folder(config: TrainConfig, group: Group, started_by: Launch | None) -> Iterator[Path]:
    """Choose the run folder on worker 0, and yield it on all workers."""
    given = config.run.resume or config.run.out
    if given is not None:
        yield given
        return
    with ExitStack() as stack:
        chosen = b""
        with joint_work(group):
            if group.rank == 0:
                folder = stack.enter_context(run_folder.chosen_folder(config, started_by))
                chosen = str(folder).encode()
        yield Path(run(broadcast_bytes(chosen, group.rank), group).decode())


def train_command(config: TrainConfig, reporter: Reporter, group: Group | None = None) -> None:
    """`gcnzc train`."""
    workers = group or Group()
    path, started_by = _find_data_and_launch(config, reporter, workers)
    config = config.replace(data=path)
    with _chosen_folder(config, workers, started_by) as folder:
        result = train_run.train(config, folder, reporter, group, started_by)
    if group is not None and group.rank:
        return
    for line in summary_lines(result, folder):
        reporter.say(line)
    print_json(result)
    if result["unsaved"]:
        raise Unsaved(format_unsaved_error(folder, result["unsaved"]))


def summary_lines(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the lines that summarize the result of the run in `folder`."""
    metric, best = result["metric"], result.get("best_possible_accuracy")
    possible = f" of {best:.4f} possible" if best is not None else ""
    rate, peak = result["gather_bytes_per_s"], result["gather_roof_bytes_per_s"]
    share = "" if peak is None else f", {rate / peak:.0%} of this GPU's peak host read rate"
    lines = [
        f"test {metric} {result[f'test_{metric}']:.4f}{possible}, with the model of the best "
        f"validation {metric} (epoch {result['best_epoch']}); curves in "
        f"{folder / run_folder.CURVES}",
    ]
    if rate and result["options"]["batch_size"] != "all":
        # a full-batch run gathers at most once
        lines.append(f"features were gathered at {format_rate(rate)}{share}")
    if "dropped_share" in result:
        lines.append(
            f"{result['dropped_share']:.1%} of the minibatches were dropped by dropcompute"
        )
    if "hit_rate" in result:
        predicted, peers = result["predicted_hit_rate"], result["peer_hit_rate"]
        details = "" if predicted is None else f" ({predicted:.1%} predicted)"
        details += f", {peers:.1%} on the GPUs of other workers" if peers else ""
        lines.append(
            f"the feature cache had a hit rate of {result['hit_rate']:.1%}{details}: "
            f"{result['bytes_saved'] / 1e6:.1f} MB per epoch did not cross the bus"
        )
    return lines
