"""A damaged graph of a prepared folder is an error that names the file, wherever it is read."""

import contextlib
import io
import json
import traceback

import numpy as np
import pytest
import torch
from processes import FORKS

from gcnzc import Loader, load, presample
from gcnzc.cli import main

SIZES = ["--nodes", "300", "--edges", "1200", "--num-features", "8"]
SIZES += ["--classes", "3", "--seed", "1"]
TRAINING = ["--hidden", "8", "--epochs", "1"]
TRAINING += ["--batch-size", "64", "--threads", "1"]
# all neighbours, so that every value that is damaged is read
FANOUTS = "--fanouts=-1,-1"
HEADER_BYTES = 4096

# the value that replaces another, by file; N and E are those of the graph
DAMAGES = {
    "indices.npy": {
        "N": lambda n, e: n,
        # as one bit
        "2**30": lambda n, e: 2**30,
    },
    "indptr.npy": {
        "E + 1": lambda n, e: e + 1,
        "-1": lambda n, e: -1,
        # not out of range, but less than before
        "0": lambda n, e: 0,
    },
}


def load_batches(data, run, out):
    loader = Loader(data.graph, data.table, data.split["train"], [-1, -1], 64, threads=1)
    return list(loader)


def count_accesses(data, run, out):
    return presample(data.graph, data.split["train"], [-1, -1], 64, batches=8, threads=1)


PYTHON = {
    "Loader": load_batches,
    "presample": count_accesses,
}
COMMANDS = {
    "train": lambda data, run, out: ["train", data, *TRAINING, FANOUTS, "--out", out],
    "train with few neighbours": lambda data, run, out: [
        *("train", data, *TRAINING, "--fanouts", "1,1", "--out", out)
    ],
    "evaluate": lambda data, run, out: ["evaluate", run, data],
    "embed": lambda data, run, out: ["prepare", data, out, "--embed", "4"],
    "predict": lambda data, run, out: ["predict", run, data, "--out", f"{out}.csv"],
    "predict test": lambda data, run, out: [
        *("predict", run, data, "--nodes", "test", "--out", f"{out}.csv")
    ],
    "prepare": lambda data, run, out: ["prepare", data, out],
}
# every value where the sampler reads it, and the first value of each file wherever it is read
CASES = [
    (file, damage, entry)
    for file, damages in DAMAGES.items()
    for number, damage in enumerate(damages)
    for entry in (*PYTHON, *COMMANDS)
    if number == 0 or entry in ("Loader", "train", "evaluate")
]


def damaged(folder, file, damage):
    """Change one value in the middle of a file; undo that at the end."""
    path = folder / file
    before = path.read_bytes()
    dtype = np.dtype(np.int32 if file == "indices.npy" else np.int64)
    meta = json.loads((folder / "meta.json").read_text())
    value = DAMAGES[file][damage](meta["num_nodes"], meta["num_edges"])
    after = bytearray(before)
    place = HEADER_BYTES + (len(before) - HEADER_BYTES) // dtype.itemsize // 2 * dtype.itemsize
    after[place : place + dtype.itemsize] = dtype.type(value).tobytes()

    @contextlib.contextmanager
    def undone():
        path.write_bytes(after)
        try:
            yield
        finally:
            path.write_bytes(before)

    return undone()


def outcome_of(entry, data, run, out):
    """The exit status and the messages of a command, or of a function's error."""
    written = io.StringIO()
    if entry in COMMANDS:
        words = [str(word) for word in COMMANDS[entry](data, run, out)]
        with contextlib.redirect_stderr(written), contextlib.redirect_stdout(io.StringIO()):
            status = main(words)
        return status, written.getvalue()
    try:
        PYTHON[entry](load(data), run, out)
    except ValueError as error:
        return 1, f"error: {error}".replace("\n\n", "\n")
    except Exception:
        return 2, traceback.format_exc()
    return 0, ""


def write_outcomes(folder):
    """Run all cases in this process, and write a line for each."""
    torch.set_num_threads(1)
    for number, (file, damage, entry) in enumerate(CASES):
        out = folder / f"out-{number}"
        with damaged(folder / "graph", file, damage):
            found = outcome_of(entry, folder / "graph", folder / "run", out)
        has_files = out.exists() and not (out / "config.json").exists()
        with (folder / "outcomes").open("a") as outcomes:
            outcomes.write(json.dumps([*found, has_files]) + "\n")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The status, the messages and whether output was left, of each case."""
    folder = tmp_path_factory.mktemp("damaged")
    assert main(["make", str(folder / "raw"), *SIZES]) == 0
    assert main(["prepare", str(folder / "raw"), str(folder / "graph")]) == 0
    words = ["train", str(folder / "graph"), *TRAINING, "--fanouts", "4,4"]
    assert main([*words, "--out", str(folder / "run")]) == 0
    (folder / "outcomes").touch()
    # a signal ends this process instead of pytest's
    process = FORKS.Process(target=write_outcomes, args=(folder,))
    process.start()
    process.join()
    lines = (folder / "outcomes").read_text().splitlines()
    where = CASES[len(lines)] if len(lines) < len(CASES) else "the end"
    assert process.exitcode == 0, f"{where} ended with {process.exitcode}"
    return dict(zip(CASES, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("entry", [*PYTHON, *COMMANDS])
@pytest.mark.parametrize("file", DAMAGES)
def test_an_edge_out_of_range_is_an_error_with_the_name_of_the_file(outcomes, file, entry):
    for damage in [value for name, value, reader in CASES if (name, reader) == (file, entry)]:
        status, text, has_files = outcomes[file, damage, entry]
        assert status == 1, (damage, text)
        lines = [line for line in text.splitlines() if line.startswith(("error: ", "hint: "))]
        assert [line.split(":")[0] for line in lines] == ["error", "hint"], (damage, text)
        assert f"graph/{file}" in lines[0], (damage, text)
        assert "--verify" in lines[1] or "prepare the folder again" in lines[1], (damage, text)
        assert not has_files, damage
