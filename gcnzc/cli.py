"""The `gcnzc` command: words in, data on stdout, talk on stderr.

Every subcommand is a class of `gcnzc.config`. A user's mistake is one `error:` and one `hint:`
line; the exit status is 0, 1 for what failed, or 2 for what was misused. `--debug`, anywhere among
the words, adds the traceback.
"""

import contextlib
import errno
import io
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from gcnzc import builtin, check, data, hot, launch, link, network_plan, shapes, train, tune
from gcnzc._version import VERSION
from gcnzc.config import (
    CheckConfig,
    EmbedConfig,
    EvaluateConfig,
    InfoConfig,
    LinkConfig,
    MakeConfig,
    PlanCacheConfig,
    PlanConfig,
    PlotConfig,
    PrepareConfig,
    TrainConfig,
    demand_picture,
    demand_writable,
    from_words,
)
from gcnzc.datasets import generate
from gcnzc.datasets.embed import embed
from gcnzc.edge_split import EdgeShares
from gcnzc.exchange import Group, is_worker, joined, run
from gcnzc.graph import Graph
from gcnzc.kernels.compilation import report_compilation
from gcnzc.loader import Loader
from gcnzc.picture import HitRates, curves, efficiencies, hit_rates, step_times
from gcnzc.progress import Quiet, Reporter
from gcnzc.record import Launch
from gcnzc.replicas import told
from gcnzc.stages import choose_device
from gcnzc.together import together

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAILED, MISUSED = 1, 2
DEBUG = "--debug"
UNKNOWN_REMEDY = f"{DEBUG} shows the traceback, which helps to report this"
# parts of the error messages of numpy's and torch's allocators
NO_MEMORY = ("can't allocate memory", "DefaultCPUAllocator", "not enough memory")
# what may be over when workers are started again
PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    words = [word for word in given if word != DEBUG]
    if words in (["--version"], ["-V"]):
        print(f"gcnzc {VERSION}")
        return 0
    try:
        return _run(words, len(words) < len(given))
    except _OutputClosed:
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if len(words) < len(given):
            traceback.print_exc()
        return _complain(_message_of(error), MISUSED if isinstance(error, _Misuse) else FAILED)


def _run(words: Sequence[str], is_debug: bool) -> int:
    """Run the command that `words` spell and return its exit status."""
    reporter = Reporter()
    config = _parse(words)
    if isinstance(config, TrainConfig) and is_worker():
        return work(config, reporter, is_debug)
    if isinstance(config, TrainConfig) and config.workers > 1:
        return start_workers(config, [*words, DEBUG] if is_debug else words, reporter)
    if config is not None:
        _demand_outputs(config)
        with _terminable(), report_compilation(reporter.say):
            COMMANDS[type(config)](config, reporter)
    return 0


def start_workers(config: TrainConfig, words: Sequence[str], reporter: Reporter) -> int:
    """`gcnzc train --workers N`, which is this command once for each worker."""
    # made once, and not by each
    data = config.data or builtin.prepared(reporter)
    folder = config.resume or config.out or train.new_folder(replace(config, data=data))
    own = list(words)
    if config.data is None:
        own.append(str(data))
    if config.resume is None and config.out is None:
        own += ["--out", str(folder)]
    return launch.launch(own, config.workers, folder / "logs", config.restarts)


def work(config: TrainConfig, reporter: Reporter, is_debug: bool = False) -> int:
    """`gcnzc train` as one of several workers."""
    if launch.word_was_left():
        return 0
    backend = "gloo" if choose_device(config.device).type == "cpu" else "auto"
    try:
        with joined(backend, timeout_s=config.timeout_s) as group:
            own = reporter if group.rank == 0 else Quiet()
            if launch.cannot_be_joined():
                own.say(
                    "a machine that is lost cannot be replaced in this run: torchrun allows it "
                    "where TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set on all machines"
                )
            train_command(config, own, group)
    except train.Followed:
        return 0 if launch.leave_word() else FAILED
    except (ValueError, OSError, OverflowError, train.Interrupted) as error:
        if is_debug:
            traceback.print_exc()
        status = _complain(_message_of(error), FAILED)
        if isinstance(error, OSError) and error.errno in PASSING:
            return status
        # all would fail in the same way again
        return 0 if launch.leave_word() else status
    return 0


def _find_data_and_launch(
    config: TrainConfig, reporter: Reporter, group: Group
) -> tuple[Path, Launch | None]:
    """Return the graph's folder, which may have to be made first, and the launch of all workers.

    An error on one worker ends all of them at once.
    """

    def find_data() -> Path:
        return builtin.prepared(reporter) if config.data is None else config.data

    with together(group) as work:
        # one process alone has nobody to inform, and must be able to clean up when it is ended
        path = work.meanwhile(find_data) if group.world_size > 1 else find_data()
        own = launch.own_launch()
    return path, run(launch.agree_on_launch(own), group)


def _choose_folder(config: TrainConfig, group: Group, started_by: Launch | None) -> Path:
    """Choose the folder of a run without --out on worker 0, and return it on all workers."""
    chosen = b""
    with together(group):
        if group.rank == 0:
            chosen = str(train.new_folder(config, started_by)).encode()
    return Path(run(told(chosen, group.rank), group).decode())


def train_command(config: TrainConfig, reporter: Reporter, group: Group | None = None) -> None:
    """`gcnzc train`."""
    everybody = group or Group()
    path, started_by = _find_data_and_launch(config, reporter, everybody)
    config = replace(config, data=path)
    folder = config.resume or config.out or _choose_folder(config, everybody, started_by)
    result = train.train(config, folder, reporter, group, started_by)
    if group is not None and group.rank:
        return
    metric, best = result["metric"], result.get("best_possible_accuracy")
    possible = f" of {best:.4f} possible" if best is not None else ""
    reporter.say(
        f"test {metric} {result[f'test_{metric}']:.4f}{possible}, at the best validation, in epoch "
        f"{result['best_epoch']}; curves in {folder / train.CURVES}"
    )
    gathered, roof = result["gather_bytes_per_s"], result["gather_roof_bytes_per_s"]
    share = "" if roof is None else f", {gathered / roof:.0%} of what this GPU reads from the host"
    reporter.say(f"rows of features arrived at {gathered / 1e9:.1f} GB/s{share}")
    if "hit_rate" in result:
        predicted = result["predicted_hit_rate"]
        told = "" if predicted is None else f", {predicted:.1%} predicted"
        peers = result["peer_hit_rate"]
        told += f", {peers:.1%} on the GPUs of other workers" if peers else ""
        reporter.say(
            f"{result['hit_rate']:.1%} of the rows were hot{told}: "
            f"{result['bytes_saved'] / 1e6:.1f} MB an epoch had no need to cross the bus"
        )
    _print_json(result)


def make_command(config: MakeConfig, reporter: Reporter) -> None:
    """`gcnzc make`."""
    shape = generate.Shape(config.nodes, config.edges, config.num_features, config.classes)
    if config.like is not None:
        shape = generate.like(config.like, config.scale)
    with reporter.stages(f"make {config.path}") as progress:
        generate.make(config.path, config.kind, shape, seed=config.seed, progress=progress)
    reporter.say(f"wrote {config.path}")
    _print_json(data.info(config.path))


def prepare_command(config: PrepareConfig, reporter: Reporter) -> None:
    """`gcnzc prepare`."""
    choices = {"yes": True, "no": False}
    shares = EdgeShares(config.valid_edges, config.test_edges, config.seed)
    with reporter.stages(f"prepare {config.dest}") as progress:
        data.prepare(
            config.source,
            config.dest,
            download=config.download,
            features=config.features,
            sparse_features=config.sparse_features,
            normalize_features=config.normalize_features,
            feature_dtype=None if config.feature_dtype == "as-is" else config.feature_dtype,
            scales=config.scales,
            pitch_bytes=config.pitch_bytes,
            bidirected=choices.get(config.bidirected),
            self_loops=config.self_loops,
            duplicates=None if config.duplicates == "as-usual" else config.duplicates,
            split=config.split,
            edge_split=shares if config.task == "link" else None,
            allow_nan=config.allow_nan,
            progress=progress,
        )
    reporter.say(f"wrote {config.dest}")
    loaded = data.load(config.dest, allow_nan=True)
    if config.bidirected == "as-usual" and _is_mostly_one_way(loaded.graph):
        reporter.say(
            "most edges lack their reverse: the graph is taken as directed; --bidirected yes adds "
            "the reverse of each edge"
        )
    _print_json(data.info(config.dest))


def _is_mostly_one_way(graph: Graph) -> bool:
    """Whether most of up to 1,000 edges, evenly apart, have no reverse."""
    places = torch.arange(0, graph.num_edges, max(1, graph.num_edges // 1000))
    sources = graph.indices[places].tolist()
    targets = (torch.searchsorted(graph.indptr, places, right=True) - 1).tolist()
    found = 0
    for source, target in zip(sources, targets, strict=True):
        begin, end = graph.indptr[source : source + 2].tolist()
        found += bool((graph.indices[begin:end] == target).any())
    return found < len(places) / 2


def embed_command(config: EmbedConfig, reporter: Reporter) -> None:
    """`gcnzc embed`."""
    graph = data.load(config.source).graph
    graph.check()
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    with reporter.stages(f"embed {config.source}") as progress:
        rows = embed(indptr, indices, config.dims, seed=config.seed, progress=progress)
        data.prepare(config.source, config.dest, features=rows, progress=progress)
    reporter.say(f"wrote {config.dest}")
    _print_json(data.info(config.dest))


def info_command(config: InfoConfig, reporter: Reporter) -> None:
    """`gcnzc info`."""
    if config.verify:
        with reporter.stages(f"verify {config.data}") as progress:
            data.verify(config.data, progress)
        reporter.say("every checksum is right")
    _print_json(data.info(config.data))


def evaluate_command(config: EvaluateConfig, reporter: Reporter) -> None:
    """`gcnzc evaluate`."""
    _print_json(train.evaluate(config, reporter))


def check_command(config: CheckConfig, reporter: Reporter) -> None:
    """`gcnzc check`."""
    with reporter.task("measure") as advance:
        found = check.machine(config.megabytes << 20, advance)
    for line in check.advice(found):
        reporter.say(line)
    loaded = None if config.data is None else data.load(config.data, allow_nan=True)
    if config.tune:
        with reporter.stages("tune") as progress:
            plans = [check.tuned(config, loaded, progress)]
        found["kept_in"] = check.kept(plans[0], reporter.say)
    else:
        plans = check.plans(loaded, reporter.say)
    for plan in plans:
        for line in tune.lines(plan):
            reporter.say(line)
    _print_json(found | {"plans": [asdict(plan) for plan in plans]})


def link_command(config: LinkConfig, reporter: Reporter) -> None:
    """`gcnzc link`."""
    if config.data is None:
        tables, widths = shapes.public_shapes(), shapes.WIDTHS
    else:
        tables, widths = [shapes.shape_of(config.data)], []
    with reporter.task("measure") as advance:
        found = link.report(
            tables,
            link.gpu(),
            num_bytes=config.megabytes << 20,
            split_bytes=config.split_bytes,
            widths=widths,
            advance=advance,
        )
    for line in link.lines(found):
        reporter.say(line)
    if config.out is not None:
        efficiencies(link.drawn(found), config.out)
        reporter.say(f"wrote {config.out}")
    _print_json(found)


def plan_cache_command(config: PlanCacheConfig, reporter: Reporter) -> None:
    """`gcnzc plan-cache`."""
    loaded = data.load(config.data, allow_nan=True)
    graph, seeds, fanouts = loaded.graph, loaded.split["train"], list(config.fanouts)
    if loaded.table is None:
        raise ValueError(
            f"{loaded.name} has no features to cache\n\n"
            f"hint: `gcnzc embed {config.data} DEST` makes some from its edges"
        )
    threads, fresh = config.threads or None, None
    with reporter.task("count") as advance:
        counted = hot.presample(
            graph,
            seeds,
            fanouts,
            config.batch_size,
            seed=config.seed,
            batches=config.batches,
            threads=threads,
            progress=advance,
        )
    if config.measure:
        loader = Loader(
            graph, None, seeds, fanouts, config.batch_size, seed=config.seed, threads=threads
        )
        with reporter.task("measure") as advance:
            fresh = hot.needed(loader, config.batches, advance)
    found = hot.plan(counted, loaded.table, graph.in_degrees(), fresh, gpus=config.gpus)
    for line in hot.lines(found):
        reporter.say(line)
    if config.out is not None:
        hit_rates(HitRates(loaded.name, *hot.drawn(found)), config.out)
        reporter.say(f"wrote {config.out}")
    told = {"data": loaded.name, "fanouts": fanouts, "batch_size": config.batch_size}
    _print_json(told | found)


def plan_command(config: PlanConfig, reporter: Reporter) -> None:
    """`gcnzc plan`."""
    if config.data is None:
        config = replace(config, data=builtin.prepared(reporter))
    assert config.data is not None, "just filled in"
    loaded = data.load(config.data)
    model, network = network_plan.model_of(config, loaded), network_plan.network_of(config)
    computed = network_plan.Computed(config.step_s or 0.0)
    if config.step_s is None:
        with reporter.task("measure steps") as advance:
            computed = network_plan.measured(config, loaded, advance)
    with reporter.task("run exchanges") as advance:
        costs = network_plan.costs_of(model, config.workers, network, advance)
    lines = [network_plan.line_of(cost, computed, network) for cost in costs]
    usual = network_plan.usual_method(model)
    chosen = network_plan.advice(lines, usual)
    reporter.say(f"{loaded.name}, {config.model}:")
    talk = network_plan.sums(model, computed, network) + network_plan.table_of(lines, usual)
    for text in [*talk, "* what `gcnzc train` takes", chosen["why"]]:
        reporter.say(text)
    if config.picture is not None:
        step_times(network_plan.drawn(costs, computed, network, loaded.name), config.picture)
        reporter.say(f"wrote {config.picture}")
    _print_json(network_plan.found_by(config, computed, model) | {"costs": lines, "choice": chosen})


def plot_command(config: PlotConfig, reporter: Reporter) -> None:
    """`gcnzc plot`."""
    if not config.runs:
        raise _Misuse("no run to plot\n\nhint: gcnzc plot runs/NAME")
    out = config.out or config.runs[0] / train.CURVES
    curves(config.runs, out)
    _print_json({"runs": [str(run) for run in config.runs], "picture": str(out)})


COMMANDS: dict[type, Callable[[Any, Reporter], None]] = {
    TrainConfig: train_command,
    MakeConfig: make_command,
    PrepareConfig: prepare_command,
    EmbedConfig: embed_command,
    InfoConfig: info_command,
    EvaluateConfig: evaluate_command,
    CheckConfig: check_command,
    LinkConfig: link_command,
    PlanCacheConfig: plan_cache_command,
    PlanConfig: plan_command,
    PlotConfig: plot_command,
}


class _Misuse(Exception):
    """The words of the command line make no command."""


class _OutputClosed(Exception):
    """The reader of this command's stdout has closed the pipe."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM was received; raised as an exception so that partial files are removed."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse(words: Sequence[str]) -> Any:
    """The config that `words` spell, or None when they asked for help and got it."""
    default = _defaults(words)
    choices: Any = None
    for kind in COMMANDS:
        name = _name(kind)
        own = {"default": default} if kind is TrainConfig and default is not None else {}
        choice = Annotated[kind, tyro.conf.subcommand(name, **own)]  # type: ignore[valid-type]
        choices = choice if choices is None else choices | choice
    talk = io.StringIO()
    try:
        with contextlib.redirect_stderr(talk):
            return tyro.cli(
                choices,
                prog="gcnzc",
                description="Train graph neural networks whose features are larger than the GPU. "
                "With --debug, errors come with a traceback.",
                args=list(words),
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
            )
    except SystemExit as left:
        if not left.code:
            return None
        raise _Misuse(_plain(talk.getvalue(), words)) from None
    except ValueError as error:
        # a config's own check
        raise _Misuse(str(error)) from None


def _demand_outputs(config: Any) -> None:
    """Raise before the work if its result could not be written.

    Not in the configs themselves: the parser breaks the lines of their messages, and so long paths.
    """
    try:
        if isinstance(config, EvaluateConfig):
            demand_writable("predictions", config.predictions)
        elif isinstance(config, PlanConfig):
            demand_picture("picture", config.picture)
        elif isinstance(config, LinkConfig | PlanCacheConfig | PlotConfig):
            demand_picture("out", config.out)
    except ValueError as error:
        raise _Misuse(str(error)) from None


def _name(kind: type) -> str:
    """The subcommand of a config: `plan-cache` of `PlanCacheConfig`."""
    return re.sub("(?<=.)([A-Z])", r"-\1", kind.__name__.removesuffix("Config")).lower()


def _defaults(words: Sequence[str]) -> TrainConfig | None:
    """What --config or --resume says before the other words are read."""
    if not words or words[0] != "train":
        return None
    for option, read in (("--resume", train.read_config), ("--config", _read_toml)):
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name == option and not equals and index + 1 < len(words):
                value = words[index + 1]
            if name == option and value:
                return replace(read(Path(value)), out=None, resume=None)
    return None


def _read_toml(path: Path) -> TrainConfig:
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except tomllib.TOMLDecodeError as error:
        raise _Misuse(f"{path} is not TOML: {error}\n\nhint: lines like `epochs = 20`") from error
    try:
        return from_words(TrainConfig, values, str(path))
    except ValueError as error:
        raise _Misuse(str(error)) from error


def _plain(framed: str, words: Sequence[str]) -> str:
    """The parser's message without its frames: what is wrong, then what to do."""
    # a title, what is wrong, a rule, what may have been meant, a rule, where help is
    sections: list[list[str]] = [[]]
    for line in framed.splitlines()[1:]:
        text = line.strip("│╭╮╰╯ ")
        if text and not text.strip("-─"):
            sections.append([])
        else:
            sections[-1].append(text)
    wrong, *others = [lines for lines in sections if any(lines)] or [["not understood"]]
    message = re.sub("^Error parsing [^:]*: ", "", "\n".join(wrong).strip())
    if "\n\nhint: " in message:
        return message
    message = message.split("\n\n")[0]
    names = {_name(kind) for kind in COMMANDS}
    command = f"gcnzc {words[0]}" if words and words[0] in names else "gcnzc"
    near = []
    for option, place in pairwise(
        text for text in chain(*others) if text.startswith(("--", "in "))
    ):
        if place == f"in {command} --help":
            near.append(option.split()[0])
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{message}\n\nhint: {meant}`{command} --help` lists what there is"


def _complain(text: str, status: int) -> int:
    wrong, _, remedy = text.partition("\n\n")
    remedy = remedy.removeprefix("hint:").strip() or UNKNOWN_REMEDY
    with contextlib.suppress(BrokenPipeError):
        print(f"error: {' '.join(wrong.split())}", file=sys.stderr)
        print(f"hint: {' '.join(remedy.split())}", file=sys.stderr, flush=True)
    return status


def _message_of(error: BaseException) -> str:
    """Return the message of an error, and after an empty line its hint."""
    text = str(error)
    if isinstance(error, KeyboardInterrupt):
        how = "terminated" if isinstance(error, _Terminated) else "interrupted"
        return f"{how}\n\nhint: nothing half written is left behind"
    if "\n\nhint:" in text:
        return text
    if isinstance(error, MemoryError) or any(sign in text for sign in NO_MEMORY):
        return _out_of_memory(text)
    if isinstance(error, OSError):
        return _of_the_system(error)
    if text.startswith("CUDA"):
        return _of_the_gpu(text)
    if isinstance(error, ValueError | RuntimeError | train.Interrupted | _Misuse) and text:
        return text
    return f"unexpected {type(error).__name__}: {text}"


def _out_of_memory(text: str) -> str:
    detail = text.splitlines()[0] if text else "an allocation failed"
    return (
        f"not enough memory: {detail}\n\n"
        "hint: a smaller --batch-size, --hidden or --threads needs less; the features of a folder "
        "that `gcnzc prepare` made need not fit into memory"
    )


def _of_the_gpu(text: str) -> str:
    wrong = text.splitlines()[0]
    if wrong.startswith("CUDA out of memory"):
        return f"{wrong}\n\nhint: a smaller --batch-size or --hidden, or --features host"
    return (
        f"the GPU failed, or was lost: {wrong}\n\nhint: `nvidia-smi` shows whether it is there; "
        "`gcnzc train --resume RUN` goes on from the last checkpoint"
    )


def _of_the_system(error: OSError) -> str:
    text = str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "the disk"
        return f"no space left on {where}\n\nhint: free some, or write to another disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{text}\n\nhint: choose a place that this user may write to"
    return f"{text}\n\nhint: check the path and the disk"


def _print_json(line: Mapping[str, Any]) -> None:
    try:
        print(json.dumps(line, default=str), flush=True)
    except BrokenPipeError:
        # the interpreter flushes stdout when it exits, and would report the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise _OutputClosed from None


if __name__ == "__main__":
    sys.exit(main())
