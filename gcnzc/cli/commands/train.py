"""The command that trains."""

from dataclasses import replace
from pathlib import Path

from gcnzc.cli import builtin_graph, launch
from gcnzc.cli.output import print_json
from gcnzc.exchange import Group, run
from gcnzc.exchange.long_work import joint_work
from gcnzc.exchange.sync import broadcast_bytes
from gcnzc.train import run as train_run
from gcnzc.train import run_folder
from gcnzc.train.config import TrainConfig
from gcnzc.train.output_files import Unsaved, unsaved
from gcnzc.train.progress import Reporter
from gcnzc.train.record import Launch


def _find_data_and_launch(
    config: TrainConfig, reporter: Reporter, group: Group
) -> tuple[Path, Launch | None]:
    """Return the graph's folder, which may have to be made first, and the launch of all workers.

    An error on one worker ends all of them at once.
    """

    def find_data() -> Path:
        return builtin_graph.prepared(reporter) if config.data is None else config.data

    with joint_work(group) as work:
        # one process alone has nobody to inform, and must be able to clean up when it is ended
        path = work.run_in_thread(find_data) if group.world_size > 1 else find_data()
        own = launch.own_launch()
    return path, run(launch.agree_on_launch(own), group)


def _choose_folder(config: TrainConfig, group: Group, started_by: Launch | None) -> Path:
    """Choose the folder of a run without --out on worker 0, and return it on all workers."""
    chosen = b""
    with joint_work(group):
        if group.rank == 0:
            chosen = str(run_folder.new_folder(config, started_by)).encode()
    return Path(run(broadcast_bytes(chosen, group.rank), group).decode())


def train_command(config: TrainConfig, reporter: Reporter, group: Group | None = None) -> None:
    """`gcnzc train`."""
    everybody = group or Group()
    path, started_by = _find_data_and_launch(config, reporter, everybody)
    config = replace(config, data=path)
    folder = config.resume or config.out or _choose_folder(config, everybody, started_by)
    result = train_run.train(config, folder, reporter, group, started_by)
    if group is not None and group.rank:
        return
    metric, best = result["metric"], result.get("best_possible_accuracy")
    possible = f" of {best:.4f} possible" if best is not None else ""
    reporter.say(
        f"test {metric} {result[f'test_{metric}']:.4f}{possible}, at the best validation, in epoch "
        f"{result['best_epoch']}; curves in {folder / run_folder.CURVES}"
    )
    gathered, roof = result["gather_bytes_per_s"], result["gather_roof_bytes_per_s"]
    share = "" if roof is None else f", {gathered / roof:.0%} of what this GPU reads from the host"
    reporter.say(f"rows of features arrived at {gathered / 1e9:.1f} GB/s{share}")
    if "hit_rate" in result:
        predicted = result["predicted_hit_rate"]
        details = "" if predicted is None else f", {predicted:.1%} predicted"
        peers = result["peer_hit_rate"]
        details += f", {peers:.1%} on the GPUs of other workers" if peers else ""
        reporter.say(
            f"{result['hit_rate']:.1%} of the rows were read from the feature cache{details}: "
            f"{result['bytes_saved'] / 1e6:.1f} MB per epoch did not cross the bus"
        )
    print_json(result)
    if result["unsaved"]:
        raise Unsaved(unsaved(folder, result["unsaved"]))
