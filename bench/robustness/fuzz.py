"""Fuzz commands with damaged files and invalid options: each must be rejected with a hint.

    python -m bench.robustness.fuzz [--seed S] [--cases N] [--kinds KIND ...] [--report FILE]

Each case damages a copy of an input file, or generates an option. Cases are reproducible: they
depend only on the seed, the kind and the number of the case. Kinds:

    folder       a file of a prepared folder: bits or bytes are changed, the file is cut, extended,
                 deleted or replaced by another one
    meta         another value in meta.json
    checkpoint   a file of a run that `evaluate` or `train --resume` reads
    npz          an archive with inconsistent arrays, or with damaged bytes
    layout       a folder in OGB's layout, text or binary: a cell of a table, or damaged bytes
    option       an invalid value of an option of `train`
    config       an invalid TOML file of options

Outcomes:

    rejected     the command fails with one `error:` line and one `hint:` line that has a remedy
    accepted     the command succeeds correctly: the damage did not change the arrays that it reads,
                 or the changed value is valid
    failed       anything else: a traceback, a signal, a timeout, an unexpected error, damage that
                 neither `train` nor `info --verify` detects, or a partially written file

A forked process runs many cases. One line with the outcomes of all kinds is recorded.
"""

import argparse
import contextlib
import dataclasses
import gzip
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import harness
from gcnzc import cli
from gcnzc.cli.errors import UNKNOWN_REMEDY
from gcnzc.datasets import ogb, ogb_write
from gcnzc.graph import load
from gcnzc.train import checkpoint
from gcnzc.train.config import TrainConfig
from gcnzc.train.options import Row, rows
from gcnzc.train.run_folder import last_checkpoint

ROOT = Path(__file__).parents[2]

SIZES = "--nodes 300 --edges 1200 --num-features 8 --classes 3"
# options of `train` for one short epoch
TRAIN_OPTIONS: dict[str, Any] = {
    "epochs": 1,
    "fanouts": [3, 3],
    "hidden": 8,
    "batch_size": 64,
    "threads": 1,
    "tuning_profile": False,
}
TIMEOUT_S = 600.0  # only ends a command that hangs, also on a busy machine
# cases of each kind among 220 cases
CASES_PER_KIND = {
    "folder": 60,
    "meta": 50,
    "checkpoint": 30,
    "npz": 30,
    "layout": 20,
    "option": 20,
    "config": 10,
}
# default hints, which have no remedy
NO_REMEDIES = (UNKNOWN_REMEDY, "`gcnzc --help` lists the commands")
OUTCOMES = REJECTED, ACCEPTED, FAILED = "rejected", "accepted", "failed"
HEADER_BYTES = 4096  # of an array file in a prepared folder
BASES = {"dense": "", "codes": "--feature-dtype int8", "links": "--task link"}


class Failure(Exception):
    """A case has failed; the message says why."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One input and its outcome."""

    kind: str
    number: int
    change: str  # what was damaged, and how
    outcome: str
    reason: str


class Bench:
    """Runs cases in this process.

    Args:
        base: folder with the undamaged files, see `make_base`.
        work: working folder, which is emptied before each case.
    """

    def __init__(self, base: Path, work: Path) -> None:
        self.base, self.work = base, work
        self.change = ""

    def run(self, kind: str, number: int, seed: int) -> Case:
        """Run one case."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        os.chdir(self.work)
        self.change = ""
        try:
            outcome, reason = KINDS[kind](self, random.Random(f"{seed} {kind} {number}"))
            self.check_files_are_complete()
        except Failure as failure:
            outcome, reason = FAILED, str(failure)
        return Case(kind, number, self.change, outcome, reason)

    def command(self, words: str | Sequence[str]) -> str:
        """Run a command; return its error message, or an empty string if it succeeds.

        Raises:
            Failure: the command fails without exactly one error and one hint with a remedy.
        """
        words = words.split() if isinstance(words, str) else list(words)
        with capture_output() as outputs:
            try:
                status: object = cli.main(words)
            except SystemExit as exit_:
                status = exit_.code
            except BaseException as error:
                raise Failure(f"{words[0]}: {type(error).__name__}: {error}") from error
        (text,) = outputs
        errors = [line for line in text.splitlines() if line.startswith("error: ")]
        hints = [line for line in text.splitlines() if line.startswith("hint: ")]
        if status not in (0, 1, 2) or "Traceback" in text:
            raise Failure(f"{words[0]} ended with {status!r}: {text[-2000:]}")
        if status == 0:
            return ""
        if len(errors) != 1 or len(hints) != 1:
            raise Failure(f"{words[0]} printed {len(errors)} errors, {len(hints)} hints: {text}")
        if errors[0].startswith("error: unexpected "):
            raise Failure(errors[0])
        if any(remedy in hints[0] for remedy in NO_REMEDIES):
            raise Failure(f"{words[0]}: the hint has no remedy: {errors[0]}; {hints[0]}")
        return errors[0]

    def train(self, folder: Path, **options: Any) -> str:
        """Run a short training of a prepared folder, with the options in a TOML file."""
        path = self.work / "options.toml"
        path.write_text(to_toml(TRAIN_OPTIONS | options))
        return self.command(f"train {folder} --config {path}")

    def check_files_are_complete(self) -> None:
        """Check that commands left no partial or unreadable files.

        Raises:
            Failure: they did.
        """
        if partial := [str(path) for path in self.work.rglob("*.partial*")]:
            raise Failure(f"partially written files: {partial}")
        for path in (self.work / "runs").rglob("*"):
            try:
                if path.suffix == ".json":
                    json.loads(path.read_text())
                elif path.suffix == ".jsonl":
                    [json.loads(line) for line in path.read_text().splitlines()]
                elif path.suffix == ".pt":
                    checkpoint.load(path)
            except ValueError as error:
                raise Failure(f"partially written file: {path}: {error}") from error

    def copy(self, name: str) -> Path:
        """Copy a folder of the base to the working folder, and return the copy."""
        shutil.copytree(self.base / name, self.work / name)
        return self.work / name

    def prepare(self, source: Path, reference: str) -> tuple[str, str]:
        """Prepare a damaged source.

        Args:
            source: the damaged file or folder.
            reference: name of the folder that was prepared from the undamaged source.

        Returns:
            The outcome and its reason, which is empty if the arrays are not the reference's.
        """
        dest = self.work / "dest"
        before = set(self.work.iterdir())
        if error := self.command(["prepare", str(source), str(dest)]):
            if leftovers := set(self.work.iterdir()) - before:
                raise Failure(f"a failed prepare left {leftovers}")
            return REJECTED, error
        if load.info(dest)["num_nodes"] and crcs(dest) == crcs(self.base / reference):
            return ACCEPTED, "the same arrays are read"
        return ACCEPTED, ""


@contextlib.contextmanager
def capture_output() -> Iterator[list[str]]:
    """Capture the output of this process to file descriptors 1 and 2.

    Yields:
        A list to which the output is appended at the end.
    """
    outputs: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield outputs
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(saved, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            file.seek(0)
            outputs.append(file.read().decode(errors="replace"))


def to_toml(options: Mapping[str, Any]) -> str:
    """Format options as TOML, in which numbers, strings and lists are written as in JSON."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())


def crcs(folder: Path) -> dict[str, str]:
    """Return the checksums of the arrays of a prepared folder."""
    files = json.loads((folder / "meta.json").read_text())["files"]
    return {name: entry["crc32"] for name, entry in files.items()}


def damage(random: random.Random, path: Path, begin: int = 0) -> str:
    """Damage a file in a random way.

    Args:
        random: the random number generator.
        path: path of the file.
        begin: bits or bytes are changed from this offset on.

    Returns:
        A description of the damage.
    """
    before = path.read_bytes()
    after = bytearray(before)
    begin = min(begin, len(after) - 1)
    kind = random.choice(["bits", "bits", "bits", "zeros", "cut", "longer", "garbage", "empty"])
    if kind == "bits":
        for _ in range(random.choice([1, 1, 2, 50])):
            after[random.randrange(begin, len(after))] ^= 1 << random.randrange(8)
    elif kind == "zeros":
        offset = random.randrange(begin, len(after))
        after[offset : offset + 64] = bytes(len(after[offset : offset + 64]))
    elif kind == "cut":
        del after[random.randrange(len(after)) :]
    elif kind == "longer":
        after += random.randbytes(random.randrange(1, 100))
    elif kind == "garbage":
        after[begin:] = random.randbytes(len(after) - begin)
    else:
        after.clear()
    path.write_bytes(after)
    return f"{path.name}: {kind}{' (the same bytes)' if after == before else ''}"


def fuzz_folder(bench: Bench, random: random.Random) -> tuple[str, str]:
    """Test a prepared folder with damaged files."""
    base = random.choice(list(BASES))
    folder = bench.copy(base)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    # a random file, not a random byte: most bytes are features
    path = random.choice(paths)
    if random.random() < 0.1:
        bench.change = f"{base}: no {path.name}"
        path.unlink()
    elif random.random() < 0.1:
        other = random.choice([each for each in paths if each != path])
        bench.change = f"{base}: {other.name} as {path.name}"
        shutil.copyfile(other, path)
    else:
        # damage in a header is easily detected, so damage numbers in most cases
        begin = random.choice([0, HEADER_BYTES, HEADER_BYTES]) if path.suffix == ".npy" else 0
        bench.change = f"{base}: {damage(random, path, begin)}"
    trained = bench.train(folder, task=task_of(base))
    verified = bench.command(f"info {folder} --verify")
    if verified:
        return REJECTED, trained or verified
    if not has_changed(folder, bench.base / base):
        return ACCEPTED, "all bytes are equal"
    raise Failure(f"info --verify found nothing; train: {trained or 'done'}")


def task_of(base: str) -> str:
    """Return the task of a prepared folder."""
    return "link" if base == "links" else "node"


def has_changed(folder: Path, base: Path) -> bool:
    """Return whether a file of `base` differs from that of `folder`."""
    names = [path.relative_to(base) for path in base.rglob("*") if path.is_file()]
    return any((folder / name).read_bytes() != (base / name).read_bytes() for name in names)


NUMBERS = (-1, 0, 1, 2, 7, 301, 2**31, 2**40, 2**63, 10**40, 0.5, float("nan"), float("inf"))
TEXTS = ("", "0", "400", "no", "int8", "<f8", "x" * 1000, "../..")
VALUES: list[Any] = [None, True, False, *NUMBERS, *TEXTS, [], [1], {}, {"a": 1}]
DELETE = "nothing"


def fuzz_meta(bench: Bench, random: random.Random) -> tuple[str, str]:
    """Test a prepared folder with a changed value in meta.json."""
    base = random.choice(list(BASES))
    folder = bench.copy(base)
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    table, keys = meta, []
    while True:
        key = random.choice(list(table))
        keys.append(str(key))
        if not isinstance(table[key], dict) or not table[key] or random.random() < 0.15:
            break
        table = table[key]
    before = table[key]
    if random.random() < 0.2:
        del table[key]
        bench.change = f"{base}: no {'.'.join(keys)}"
    else:
        table[key] = random.choice(VALUES)
        bench.change = f"{base}: {'.'.join(keys)} {before!r:.40} -> {table[key]!r:.40}"
    path.write_text(json.dumps(meta))
    error = bench.train(folder, task=task_of(base))
    error = error or bench.command(f"info {folder} --verify")
    if error:
        return REJECTED, error
    if key in table and repr(table[key]) == repr(before):
        return ACCEPTED, "all values are equal"
    raise Failure("accepted")


def fuzz_checkpoint(bench: Bench, random: random.Random) -> tuple[str, str]:
    """Test a run with damaged files."""
    run = bench.copy("run")
    name = random.choice(["best.pt", "checkpoint", "best.pt", "checkpoint", "config.json"])
    path = last_checkpoint(run) if name == "checkpoint" else run / name
    is_value = random.random() < 0.4
    if is_value:
        bench.change = f"{name}: {change_value(random, path)}"
    elif random.random() < 0.1:
        path.unlink()
        bench.change = f"no {name}"
    else:
        bench.change = damage(random, path)
    command = f"evaluate {run}" if name == "best.pt" else f"train --resume {run} --epochs 2"
    error = bench.command(command)
    if error:
        return REJECTED, error
    if not has_changed(run, bench.base / "run"):
        return ACCEPTED, "all bytes are equal"
    if name == "config.json" and is_json(path):
        return ACCEPTED, "the options are those of the checkpoint, or may change on resume"
    if is_value and bench.change.startswith(UNUSED_VALUES):
        return ACCEPTED, "no result depends on the value"
    raise Failure("accepted")


# Values that `evaluate` does not use; and those of a checkpoint that are only in the record, or not
# used: best.pt has the best model, the checkpoint is of the end of an epoch, callbacks may be
# others, weights are not averaged, and the precision is float32.
UNUSED_VALUES = (
    "best.pt: scores",
    "best.pt: valid",
    "best.pt: epoch",
    *(f"checkpoint: {name}" for name in ("own.tally", "own.scaler", "average", "best", "loader")),
    "checkpoint: callbacks",
)


def change_value(random: random.Random, path: Path) -> str:
    """Change a value in a file of a run, and save it in the same format.

    Returns:
        A description of the change.
    """
    is_config = path.suffix == ".json"
    state = json.loads(path.read_text()) if is_config else torch.load(path, weights_only=True)
    table, keys = state, []
    while isinstance(table, dict) and table:
        key = random.choice(list(table))
        keys.append(key)
        if random.random() < 0.5 or not isinstance(table[key], dict) or not table[key]:
            break
        table = table[key]
    value = random.choice([*VALUES, torch.zeros(3), DELETE])
    if is_config and isinstance(value, torch.Tensor):
        value = DELETE
    if random.random() < 0.2 and not is_config:
        state = value if value is not DELETE else {}
        keys = ["all"]
    elif value is DELETE:
        del table[key]
    else:
        table[key] = value
    if is_config:
        path.write_text(json.dumps(state))
    elif isinstance(state, dict):
        # with a valid checksum
        checkpoint.save(path, state)
    else:
        torch.save(state, path)
    return f"{'.'.join(map(str, keys))} -> {value!r:.40}"


def is_json(path: Path) -> bool:
    """Return whether a file is valid JSON."""
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def fuzz_npz(bench: Bench, random: random.Random) -> tuple[str, str]:
    """Test an archive with damaged bytes or inconsistent arrays."""
    path = bench.work / "graph.npz"
    shutil.copyfile(bench.base / "graph.npz", path)
    if random.random() < 0.5:
        bench.change = damage(random, path)
        outcome, reason = bench.prepare(path, "from_npz")
        if outcome == ACCEPTED and not reason:
            raise Failure("another graph was read")
        return outcome, reason
    with np.load(path) as archive:
        arrays = dict(archive)
    key = random.choice([key for key, array in arrays.items() if array.ndim])
    array = arrays[key]
    changes: list[Callable[[], Any]] = [
        lambda: array[..., :-1],
        lambda: array.reshape(-1),
        lambda: array[..., None],
        lambda: array.astype(str),
        lambda: array[:0],
        lambda: np.where(np.arange(array.size).reshape(array.shape) == 3, 2**40, array),
        lambda: np.where(np.arange(array.size).reshape(array.shape) == 3, -7, array),
        lambda: np.full(array.shape, np.nan),
        lambda: np.array(5),
    ]
    number = random.randrange(len(changes) + 1)
    bench.change = f"{key}: change {number}"
    if number == len(changes):
        del arrays[key]
    else:
        arrays[key] = changes[number]()
    np.savez(path, **arrays)
    outcome, reason = bench.prepare(path, "from_npz")
    if outcome == ACCEPTED and not reason and number not in VALID_NPZ[key.split("_")[-1]]:
        raise Failure("accepted")
    return outcome, reason or "another graph, which is valid"


# by suffix of an array's name: numbers of the changes whose result is also a valid graph
VALID_NPZ: dict[str, set[int]] = {
    # fewer columns, other finite values, no array
    "feat": {0, 5, 6, 9},
    # fewer edges
    "index": {0},
    "label": set(),
    # fewer seeds, a single seed
    "idx": {0, 8},
}


def fuzz_layout(bench: Bench, random: random.Random) -> tuple[str, str]:
    """Test a folder in OGB's layout with damaged files."""
    folder = bench.copy(random.choice(["raw", "text"]))
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".gz", ".npz", ".json"))
    tables = [path for path in paths if path.suffix == ".gz"]
    is_cell = random.random() < 0.5
    path = random.choice(tables if is_cell else paths)
    if not is_cell:
        bench.change = f"{folder.name}: {damage(random, path)}"
        outcome, reason = bench.prepare(folder, "dense")
        # the values of task.json have no checksum, and are not stored elsewhere
        if outcome == ACCEPTED and not reason and path.name != "task.json":
            raise Failure("another graph was read")
        return outcome, reason or "another valid task.json"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    row = random.randrange(len(lines))
    cells = lines[row].split(",")
    cell = random.choice(["", "x", "-5", "1e400", "9" * 20, "0.5", "1,2,3", "\0", '"'])
    bench.change = f"{folder.name}: {path.name}: a cell of line {row} is {cell!r}"
    cells[random.randrange(len(cells))] = cell
    lines[row] = ",".join(cells)
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    outcome, reason = bench.prepare(folder, "dense")
    is_valid = (path.name == "node-feat.csv.gz" and cell in ("-5", "0.5", "9" * 20)) or (
        # a node without a label; an empty line in a split, which OGB skips, too
        cell == "" and (path.name == "node-label.csv.gz" or "split" in path.parts)
    )
    if outcome == ACCEPTED and not reason and not is_valid:
        raise Failure("accepted")
    return outcome, reason or "another graph, which is valid"


# options of `train`, except paths, and the numbers of workers and of epochs
OPTIONS = [
    row
    for name, row in rows(TrainConfig).items()
    if name not in {"data", "out", "resume", "config", "workers", "trace", "epochs"}
]
LARGE = "9" * 30
# within the bounds of most numbers
ZERO = "-0.0"
WORDS = ["nan", "-1", "", "x", "inf", "1e400", "0x10", ZERO, "1,2", LARGE, "\xe4", "[]", "None"]
VALID_OPTIONS = {
    *("fanouts -1", "fanouts 1,2", "strategy dropcompute:calibration=1,2"),
    *(f"evaluate {name}:fanouts={word}" for name in ("sampled", "auto") for word in ("", "1,2")),
    *(f"optimizer onebit-lamb:{name}_range=1,2" for name in ("factor", "trust")),
    "optimizer sgd:dampening=-1",
}
TOML_VALUES = ['"x"', "-1", "true", "nan", "[]", "[1, 2]", "{a = 1}", "1979-05-27", LARGE, ""]
VALID_LINES = {"fanouts = [1, 2]"}
VALID_LINES |= {f"{row.name} = true" for row in OPTIONS if row.kind is bool}


def starts_of(row: Row) -> Iterator[str]:
    """Yield what precedes the value of an option, or of an option of one of its values.

    Regular expressions, for which most texts are valid, are left out.
    """
    yield ""
    if row.of is not None:
        for name in row.of.targets:
            for own in row.of.arguments(name).keys() - {"fragments"}:
                yield f"{name}:{own}="


def fuzz_option(bench: Bench, random: random.Random) -> tuple[str, str]:
    """Test an invalid value of one option of train."""
    row = random.choice(OPTIONS)
    word = random.choice(sorted(starts_of(row))) + random.choice(WORDS)
    is_valid = f"{row.name} {word}" in VALID_OPTIONS or word.endswith(ZERO)
    bench.change = f"{row.flag} {word!r}"
    path = bench.work / "options.toml"
    path.write_text(to_toml(TRAIN_OPTIONS))
    words = ["train", str(bench.base / "dense"), "--config", str(path), row.flag, word]
    if error := bench.command(words):
        return REJECTED, error
    if is_valid:
        return ACCEPTED, "the value is valid"
    raise Failure("accepted")


def fuzz_config(bench: Bench, random: random.Random) -> tuple[str, str]:
    """Test a TOML file of options with wrong values."""
    path = bench.work / "options.toml"
    name = random.choice(OPTIONS).name
    if random.random() < 0.2:
        line = random.choice(["[", "nothing = 1", "lr = 1\nlr = 2", "a.b.c = 1", "\0", "= 3"])
        options = TRAIN_OPTIONS
    else:
        line = f"{name} = {random.choice(TOML_VALUES)}"
        options = {key: value for key, value in TRAIN_OPTIONS.items() if key != name}
    bench.change = repr(line)
    path.write_text(to_toml(options) + line + "\n")
    error = bench.command(f"train {bench.base / 'dense'} --config {path}")
    if error:
        return REJECTED, error
    if line in VALID_LINES:
        return ACCEPTED, "the value is valid"
    raise Failure("accepted")


KINDS: dict[str, Callable[[Bench, random.Random], tuple[str, str]]] = {
    "folder": fuzz_folder,
    "meta": fuzz_meta,
    "checkpoint": fuzz_checkpoint,
    "npz": fuzz_npz,
    "layout": fuzz_layout,
    "option": fuzz_option,
    "config": fuzz_config,
}


def make_base(base: Path) -> None:
    """Create the undamaged files: a graph in every format, and a complete run.

    Raises:
        Failure: a command failed.
    """
    commands = [f"make {base / 'raw'} {SIZES}"]
    commands += [
        f"prepare {base / 'raw'} {base / name} {options}" for name, options in BASES.items()
    ]
    toml = base / "options.toml"
    toml.write_text(to_toml(TRAIN_OPTIONS))
    commands += [f"train {base / 'dense'} --config {toml} --out {base / 'run'}"]
    bench = Bench(base, base)
    for command in commands:
        if error := bench.command(command):
            raise Failure(f"{command}: {error}")
    loaded = load.load(base / "dense")
    assert loaded.features is not None
    np.savez(
        base / "graph.npz",
        edge_index=torch.stack(loaded.graph.coo()).numpy().astype(np.int64),
        node_label=loaded.labels.numpy(),
        node_feat=loaded.features.numpy(),
        add_inverse_edge=np.array(False),
        **{f"{part}_idx": ids.numpy() for part, ids in loaded.split.items()},
    )
    ogb_write.write_source(base / "text", ogb.OgbGraph(base / "raw"), binary=False)
    for source, dest in (("graph.npz", "from_npz"), ("text", "from_text")):
        if error := bench.command(f"prepare {base / source} {base / dest}"):
            raise Failure(error)
    assert crcs(base / "from_text") == crcs(base / "dense")


def _work(base: Path, work: Path, seed: int, pipe: Connection) -> None:
    """Run the cases that are received from a pipe, and send their outcomes."""
    torch.set_num_threads(1)
    bench = Bench(base, work)
    while True:
        kind, number = pipe.recv()
        pipe.send(bench.run(kind, number, seed))


class Worker:
    """A forked process that runs cases. It is replaced if a case ends it."""

    def __init__(self, base: Path, work: Path, seed: int) -> None:
        self.args = base, work, seed
        self.start()

    def start(self) -> None:
        """Fork the process."""
        context = multiprocessing.get_context("fork")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_work, args=(*self.args, other), daemon=True)
        self.process.start()
        other.close()

    def stop(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()

    def run(self, kind: str, number: int) -> Case:
        """Run one case. It fails if it ends the process or takes too long."""
        self.pipe.send((kind, number))
        reason = f"took more than {TIMEOUT_S:g} s"
        try:
            if self.pipe.poll(TIMEOUT_S):
                case: Case = self.pipe.recv()
                return case
        except EOFError:
            self.process.join()
            reason = f"the process ended with exit code {self.process.exitcode}"
        self.stop()
        self.start()
        return Case(kind, number, "", FAILED, reason)


def run_cases(kinds: Sequence[str], num_cases: int, seed: int) -> dict[str, Counter[str]]:
    """Run cases of some kinds, and count their outcomes by kind.

    Raises:
        Failure: a command failed on undamaged files.
    """
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="gcnzc-fuzz-") as folder:
        os.environ["GCNZC_CACHE"] = f"{folder}/cache"
        base = Path(folder, "base")
        base.mkdir()
        maker = multiprocessing.get_context("fork").Process(target=make_base, args=(base,))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise Failure("the undamaged files could not be created")
        worker = Worker(base, Path(folder, "work"), seed)
        for kind in kinds:
            counts[kind] = Counter()
            total = sum(CASES_PER_KIND.values())
            for number in range(max(1, CASES_PER_KIND[kind] * num_cases // total)):
                case = worker.run(kind, number)
                counts[kind][case.outcome] += 1
                if case.outcome == FAILED:
                    line = f"{kind} {number}: {case.change}: {case.outcome}: {case.reason}"
                    print(line.encode(errors="backslashreplace").decode(), flush=True)
        worker.stop()
    return counts


def main() -> int:
    """Run the cases and record their outcomes; return 1 if one failed, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=sum(CASES_PER_KIND.values()))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--report", type=Path, help="write the outcomes to this file instead")
    arguments = parser.parse_args()
    if arguments.report is None:
        harness.check_code_is_committed()
    begin = time.monotonic()
    counts = run_cases(arguments.kinds, arguments.cases, arguments.seed)
    kinds = {
        kind: {outcome: found[outcome] for outcome in OUTCOMES} for kind, found in counts.items()
    }
    for kind, found in kinds.items():
        print(f"{kind:12}" + ", ".join(f"{count} {name}" for name, count in found.items()))
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(kinds))
    else:
        seconds = round(time.monotonic() - begin, 1)
        case = {
            "seed": arguments.seed,
            "cases": sum(sum(found.values()) for found in counts.values()),
        }
        harness.record("fuzz", case, seconds=seconds, kinds=kinds)
    return int(any(found[FAILED] for found in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
