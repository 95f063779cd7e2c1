"""A command line that is not valid is an error with a hint, before any work and without torch."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import failed

from gcnzc import compress
from gcnzc.cli import main
from gcnzc.cli.options import COMMANDS
from gcnzc.cli.parser import parse
from gcnzc.datasets.table_options import KEYS
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.options import rows

ROOT = Path(__file__).parents[2]
LARGE = "9" * 30

# by what is wrong: the words, and a part of the error and of the hint
WRONG = {
    "commands": [
        ("trian x", "there is no command 'trian'", "did you mean train?"),
        ("quux", "there is no command 'quux'", "`gcnzc --help` lists the commands"),
        ("--epochs 3 train x", "--epochs is before the command", "gcnzc train --epochs"),
        ("make", "arguments are required: PATH", "`gcnzc make --help`"),
        ("plot", "arguments are required: RUNS", "`gcnzc plot --help`"),
        ("predict r", "arguments are required: --out", "`gcnzc predict --help`"),
        ("train --epochs", "argument --epochs: expected one argument", "`gcnzc train --help`"),
    ],
    "options": [
        ("train --optimiser adam", "unrecognized options: --optimiser", "mean --optimizer?"),
        ("train --dropuot=0.1", "unrecognized options: --dropuot", "did you mean --dropout?"),
        ("train --fan 3", "unrecognized options: --fan", "did you mean --fanouts?"),
        ("train --no-tuning-profil", "--no-tuning-profil", "did you mean --no-tuning-profile?"),
        ("train x --fanouts 10 5", "unrecognized options: 5", "commas and no spaces"),
        ("predict r --out x.csv --epochs 3", "options: --epochs", "`gcnzc predict --help` lists"),
        ("info g x", "unrecognized options: x", "`gcnzc info --help` lists the options"),
    ],
    "options that are written with a value": [
        ("train --heads 4", "unrecognized options: --heads", "--model gat, as in gat:heads=VALUE"),
        ("train --local-steps 4", "options: --local-steps", "as in local-sgd:local_steps=VALUE"),
        ("train --edge-type a", "options: --edge-type", "--task link, as in link:edge_type=VALUE"),
        ("evaluate r --correct-alpha 1", "options: --correct-alpha", "option of --postprocess"),
    ],
    "values": [
        ("train --model sag", "--model: there is no 'sag'", "did you mean sage? choose one of"),
        ("train --strategy topk", "--strategy: there is no 'topk'", "choose one of average"),
        ("train --precision fp8", "--precision: there is no 'fp8'", "choose one of float32"),
        ("train --task node:metric=acuracy", "there is no 'acuracy'", "did you mean accuracy?"),
        ("pcie --split-bytes 32", "--split-bytes: there is no '32'", "choose one of 64, 128"),
        ("help strateg", "help: there is no 'strateg'", "did you mean strategy?"),
        ("help strategy dilco", "--strategy: there is no 'dilco'", "did you mean diloco?"),
        ("help preset tuned/none", "there is no preset 'tuned/none'", "lists all"),
        ("train --preset cora-gcn", "there is no preset 'cora-gcn'", "did you mean tuned/cora-gcn"),
        ("train --preset xyz", "there is no preset 'xyz'", "`gcnzc help preset` lists all"),
        ("pcie --compile-for 80,91", "sm_91 is not an architecture", "use some of 75,80"),
    ],
    "options of a value": [
        ("train --model gat:head=2", "option of --model gat: there is no 'head'", "mean heads?"),
        ("train --strategy average:delay=3", "option of --strategy average: there is no", "choose"),
        ("train --schedule cosine:epochs=3", "there is no 'epochs'", "it has none"),
        ("train --task node:edge_type=a", "there is no 'edge_type'", "choose one of"),
        ("train --model gcn:self_loops=true", "there is no 'self_loops'", "choose one of"),
        ("train --model gat:heads", "heads has no value", "gat:heads=VALUE"),
        ("train --model gat:heads=2,heads=3", "heads is given twice", "gat:heads=VALUE"),
        ("train --strategy decoupled-diloco", "has no quorum", "decoupled-diloco:quorum=VALUE"),
        ("train --task node:target=a", "there is no 'target'", "for graphs of one node type"),
        ("train --model rgcn --task node:label_inputs=0.5", "there is no 'label_inputs'", "rgcn"),
    ],
    "types": [
        ("train --lr abc", "--lr must be a number or none, got 'abc'", "`gcnzc train --help`"),
        ("train --lr nan", "--lr must be a number or none, got 'nan'", "`gcnzc train --help`"),
        ("train --epochs 1.5", "--epochs must be a whole number, got '1.5'", "--help"),
        ("train --fanouts 5,x", "--fanouts must be numbers separated by commas", "--help"),
        ("train --batch-size some", "--batch-size must be a whole number or all", "--help"),
        ("train --model gat:heads=many", "heads of --model gat must be a whole number", "--help"),
        ("train --model gat:skip=no", "skip of --model gat must be true or false", "--help"),
        ("train --optimizer onebit-adam:warmup=some", "warmup of --optimizer onebit-adam", "0.3"),
        ("train --strategy diloco:local_steps=x", "local_steps is 'x'", "an integer"),
        ("train --strategy average:compress=int3", "no compression 'int3'", "topk"),
        ("train --strategy average:compress=int8:0.1", "int8 has no density", "omit :0.1"),
        ("train --strategy streaming-diloco:fragments=0.,a(", "fragments=0.,a( has an", "bias$"),
        ("check --cache-memory 20kB", "--cache-memory must be a fraction of the GPU's", "2GB"),
        ("predict r --out x.csv --scratch s --memory 5", "--memory must be bytes", "2GB"),
    ],
    "bounds": [
        ("train --epochs 0", "--epochs must be at least 1, got 0", "`gcnzc train --help`"),
        (f"train --epochs {LARGE}", "--epochs must be at most 2.14748e+09", "--help"),
        ("train --dropout 1", "--dropout must be below 1, got 1.0", "--help"),
        ("train --lr -1", "--lr must be above 0, got -1.0", "--help"),
        ("train --threads 1025", "--threads must be at most 1024, got 1025", "--help"),
        ("train --timeout-s 1e300", "--timeout-s must be at most 1e+09", "--help"),
        (f"train --seed {2**63}", "--seed must be at most", "--help"),
        ("train --fanouts 5,0", "--fanouts must be at least 1, or -1 for all", "one number per"),
        ("train --fanouts 5,-2", "--fanouts must be at least -1, got -2", "--help"),
        ("train --fanouts=", "--fanouts: no number is given", "one per layer"),
        ("train --fanouts ,", "--fanouts must be numbers separated by commas", "--help"),
        ("train --evaluate sampled:fanouts=0,3,3", "fanouts of --evaluate must be at", "layer"),
        ("train --average ema:decay=1", "decay of --average ema must be below 1", "--help"),
        ("train --schedule step:epochs=0", "epochs of --schedule step must be above 0", "--help"),
        ("train --task node:label_smoothing=1", "label_smoothing of --task node must be", "--help"),
        ("train --model gat:heads=0", "heads is 0", "at least 1"),
        ("train --optimizer onebit-adam:warmup=1.5", "warmup of --optimizer onebit-adam", "100"),
        ("train --strategy co2:eager=1", "eager is 1", "in [0, 1)"),
        ("train --strategy selsync:window=10001", "window is 10001", ""),
        ("train --strategy a2cid2:gossip_rate=1000.5", "gossip_rate is 1000.5", ""),
        ("evaluate r --postprocess correct-and-smooth:correct_alpha=0.5,1.5", "got 1.5", "--help"),
        ("evaluate r --postprocess correct-and-smooth:smooth_steps=-1", "at least 0", "--help"),
        ("evaluate r --postprocess correct-and-smooth:error_scale=0", "above 0", "--help"),
        ("make x --nodes 0", "--nodes must be at least 1, got 0", "`gcnzc make --help`"),
        ("prepare x y --pitch-bytes -1", "--pitch-bytes must be at least 0, got -1", "--help"),
        ("prepare x y --random-split 60,0,40", "--random-split must be at least 1", "--help"),
        ("prepare x y --embed 0", "--embed must be at least 1, got 0", "--help"),
        ("pcie --megabytes 8", "--megabytes must be at least 16, got 8", "`gcnzc pcie --help`"),
        ("check --row-bytes 101", "not a whole number of float32 elements", "512 bytes"),
        ("predict r --out x.npy --embeddings --layer 0", "--layer must be at least 1", "--help"),
        ("predict r --out x.csv --scratch s --memory 1KB", "must be at least 1MiB", "--help"),
    ],
    "contradictions": [
        ("train --optimizer onebit-adam --strategy diloco", "has an exchange of its own", "omit"),
        ("train --strategy muloco --optimizer adam", "muloco is a strategy for muon", "omit --opt"),
        ("train --strategy fedglomo --optimizer adam", "is a strategy for sgd", "omit --optimizer"),
        ("train --strategy fedglomo --precision fp16", "computes several gradients", "omit"),
        ("train --strategy fedglomo --clip-gradients 1", "and clips none", "omit --clip"),
        ("train --strategy dropcompute --accumulate 1", "needs several minibatches", "omit"),
        ("train --strategy streaming-diloco:delay=auto", "delay='auto' with local_steps", "auto"),
        ("train --decay weights", "has no effect without weight decay", "adam:weight_decay=0.01"),
        ("train --warmup-epochs 5 --epochs 5", "the warm-up would be the whole run", "smaller"),
        ("train --evaluate sampled:fanouts=3", "1 fanouts for 3 layers", "one number per layer"),
        ("train --evaluate sampled --fanouts -1,-1", "which sample all neighbours", "needed"),
        ("train --resume r --out x", "--out x with --resume r", "omit --out"),
        ("train --resume r --preset tuned/cora-gcn", "tuned/cora-gcn with --resume", "keep"),
        ("train --model rgcn --sampler dgl", "--sampler dgl with --model rgcn", "omit --sampler"),
        ("train --model rgcn --seed-order local", "--seed-order local with --model", "omit"),
        ("train --model rgcn --features device", "--features device with --model rgcn", "omit"),
        ("train --model rgcn --evaluate exact", "--evaluate exact with --model rgcn", "omit"),
        ("train --model rgcn --batch-size all", "--batch-size all with --model rgcn", "omit"),
        ("train --model rgcn --temporal last --task link:split=random", "later training", "time"),
        ("train --model rgcn --task link:valid_edges=0.5,test_edges=0.5", "no edges", "sum"),
        ("train --batch-size all --fanouts 5,5", "--fanouts 5,5 with --batch-size all", "omit"),
        ("train --batch-size all --task link", "--task link with --batch-size all", "1024"),
        ("train --batch-size all --sampler dgl", "--sampler dgl with --batch-size all", "omit"),
        ("train --batch-size all --seed-order local", "with --batch-size all: each step", "omit"),
        ("train --batch-size all --features cached", "cached with --batch-size all", "omit"),
        ("train --batch-size all --strategy dropcompute", "without minibatches to drop", "omit"),
        ("train --batch-size all --accumulate 2", "an epoch is a single step", "omit"),
        ("train --batch-size all --workers 2", "--workers 2 with --batch-size all", "omit"),
        ("make x --kind typed --like reddit", "--like reddit is a homogeneous graph", "--nodes"),
        ("prepare x y --embed 4 --features f.npy", "--embed 4 with --features f.npy", "omit"),
        ("prepare x y --valid-edges 0.5 --test-edges 0.5", "leave no edges to train on", "sum"),
        ("predict r --out x.csv --nodes test --pairs p.csv", "--nodes with --pairs", "omit"),
        ("pcie --compile-for 80", "--compile-for needs the features of a graph", "pcie DATA"),
        ("evaluate r --evaluate needed --predictions x.npy", "the outputs of all nodes", "exact"),
        ("evaluate r --evaluate auto --postprocess correct-and-smooth", "of all nodes", "exact"),
    ],
    "options without effect": [
        ("train --temporal last", "--temporal last has no effect with --model sage", "rgcn or"),
        ("train --embeddings adam", "--embeddings adam has no effect with --model", "only --model"),
        ("predict r --out x.csv --time 3", "--time has no effect without --pairs", "omit"),
        ("predict r --out x.csv --layer 1", "--layer has no effect without --embeddings", "omit"),
        ("predict r --out x.csv --memory 1GB", "--memory has no effect without", "omit"),
    ],
    "files to write": [
        ("evaluate r --predictions p.csv", "'p.csv' does not end in .npy", "`gcnzc predict`"),
        ("predict r --out p", "'p' does not end in .csv", "use a name that ends in"),
        ("predict r --embeddings --out p.csv", "'p.csv' does not end in .npy", "use a name"),
        ("export r --out m.onnx", "'m.onnx' does not end in .pt2", "torch.export.load"),
    ],
    "numbers of workers": [
        ("train --strategy decoupled-diloco:quorum=1 --workers 2", "quorum of 1 of 2", "give 2"),
        ("train --strategy decoupled-diloco:quorum=5 --workers 4", "quorum of 5 of 4", "3 to 4"),
        ("train --strategy decoupled-diloco:quorum=2", "a quorum of 2 of 1 ranks", ""),
        ("train --strategy fedglomo:participants=3 --workers 2", "3 participants of 2", "fewer"),
    ],
}
CASES = [pytest.param(*each, id=each[0]) for cases in WRONG.values() for each in cases]


@pytest.mark.parametrize(("words", "error", "hint"), CASES)
def test_a_wrong_command_line_is_an_error_with_a_hint(words, error, hint, capsys):
    found = failed(capsys, words.split(), 2)
    assert error in found[0]
    assert hint in found[1]
    assert "--debug" not in found[1]


# by name: the content of a file of options, and a part of the error and of the hint
FILES = [
    ("c.toml", b"epochs = ", "c.toml is not TOML", "write lines such as `epochs = 20`"),
    ("c.toml", b"\xff", "c.toml is not TOML", "write lines"),
    ("c.json", b'{"epochs": ', "c.json is not JSON", "restore it from a copy"),
    ("c.json", b"[" * 100_000, "c.json is not JSON", "restore it from a copy"),
    ("c.json", b"[]", "c.json has no options", "`gcnzc train --help-all`"),
    # after a byte order mark
    ("c.toml", b"\xef\xbb\xbfepochs = 0", "--epochs must be at least 1", ""),
    ("c.json", b'\xef\xbb\xbf{"epochs": 0}', "--epochs must be at least 1", ""),
    ("c.toml", b"[trainng]\nepochs = 3", "c.toml: table: there is no 'trainng'", "mean training?"),
    ("c.toml", b"bach_size = 7", "c.toml: option: there is no 'bach_size'", "mean batch_size?"),
    ("c.json", b'{"heads": 4}', "c.json: option: there is no 'heads'", "choose one of"),
    ("c.toml", b'batch_size = "x"', "c.toml: --batch-size must be a whole number or all", ""),
    ("c.toml", b"epochs = true", "c.toml: --epochs must be a whole number, got True", ""),
    ("c.toml", b"epochs = 1.5", "c.toml: --epochs must be a whole number, got 1.5", ""),
    ("c.toml", b'fanouts = [3, "x"]', "c.toml: --fanouts must be numbers separated", ""),
    ("c.toml", b"dropout = 1", "c.toml: --dropout must be below 1", ""),
    ("c.json", b'{"model": "mlp"}', "c.json: --model: there is no 'mlp'", "choose one of sage"),
    ("c.toml", b'model = "gat:head=2"', "c.toml: option of --model gat: there is", "mean heads?"),
    ("c.toml", b"batch-size = 7\nbatch_size = 8", "batch_size is given twice", ""),
    ("c.toml", b"epochs = 3\n[training]\nepochs = 4", "c.toml: epochs is given twice", ""),
    ("c.toml", b'resume = "x"', "c.toml: resume has no effect in a file", "use --resume"),
    ("c.toml", b'config = "x"', "c.toml: config has no effect in a file", "use --config"),
    ("c.toml", b'strategy = "muloco"\noptimizer = "adam"', "a strategy for muon", "omit --opt"),
    ("c.toml", b'preset = "xyz"', "there is no preset 'xyz'", "lists all"),
]


@pytest.mark.parametrize(("name", "content", "error", "hint"), FILES)
def test_a_wrong_file_of_options_is_an_error_with_a_hint(
    name, content, error, hint, tmp_path, capsys
):
    (tmp_path / name).write_bytes(content)
    found = failed(capsys, ["train", "--config", tmp_path / name], 2)
    assert error in found[0]
    assert hint in found[1]


def test_the_json_of_a_run_is_not_combined_with_a_preset(tmp_path, capsys):
    (tmp_path / "c.json").write_text(json.dumps(TrainConfig().to_dict()))
    words = ["train", "--config", tmp_path / "c.json", "--preset", "tuned/cora-gcn"]
    assert "which has all options" in failed(capsys, words, 2)[0]


@pytest.mark.parametrize(
    ("workers", "words", "error"),
    [
        (4, "--strategy decoupled-diloco:quorum=5", "a quorum of 5 of 4 ranks"),
        ("x", "", "the environment variable WORLD_SIZE is 'x'"),
    ],
)
def test_workers_of_torchrun_are_checked(workers, words, error, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": workers, "MASTER_ADDR": "0.0.0.0"}.items():
        monkeypatch.setenv(name, str(value))
    # neither is the graph read, nor a connection opened
    assert error in failed(capsys, ["train", "no-graph", *words.split()], 2)[0]


# --- help

OPTIONS = [(name, row) for kind, _ in COMMANDS.values() for name, row in rows(kind).items()]
VALUES = [
    (name, value)
    for kind in (TrainConfig, EvaluateConfig)
    for name, row in rows(kind).items()
    for value in (row.of.targets if row.of else ())
]


def shown(capsys, *words):
    capsys.readouterr()
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def test_help_describes_each_option_and_each_value(capsys):
    for name, row in OPTIONS:
        # two names are also those of a command, and of the list of presets
        for spelt in [row.flag] + [name] * (name not in (*COMMANDS, "preset")):
            text = shown(capsys, "help", spelt)
            assert text.startswith(f"{row.flag}: ") or name == "preset"
        for value in row.of.targets if row.of else ():
            assert f"\n  {value}" in text
    for name, value in VALUES:
        row = rows(TrainConfig if name in rows(TrainConfig) else EvaluateConfig)[name]
        head, *lines = shown(capsys, "help", name, value).splitlines()
        # the first sentence of a docstring
        assert re.match(rf"{row.flag} {value}: [A-Z0-9].*[.`]$", head), head
        for option, each in row.of.arguments(value).items():
            # an object has no text
            assert any(re.match(f"  {option}[= ]", line) for line in lines), (value, option)
            # torch documents its options elsewhere
            assert each.help or row.of.targets[value][0].startswith("torch"), (value, option)
        words = " ".join(lines)
        if "compress" in row.of.arguments(value):
            assert all(each in words for each in compress.NAMES)
        assert not re.search(r"\b(?:None|True|False)\b|see `|=[A-Z](?!ALUE)", words), words


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_lists_its_options(command, capsys):
    own = rows(COMMANDS[command][0]).values()
    for words, listed in (
        ([command, "--help"], [row for row in own if row.common]),
        ([command, "--help-all"], own),
        (["help", command], [row for row in own if row.common]),
    ):
        text = shown(capsys, *words)
        first = text.splitlines()[0]
        assert first.startswith(f"usage: gcnzc {command}")
        for row in own:
            name = row.name.upper() if row.positional else row.flag
            found = re.search(rf"^  {name}[, \n]", text, re.MULTILINE)
            assert bool(found) == (row in listed), (words, name)
        assert max(map(len, text.splitlines())) <= 100
    assert len([row for row in own if row.common]) <= 30


def test_the_keys_of_tables_are_listed(capsys):
    text = shown(capsys, "help", "toml")
    assert "\n[nodes]\n" in text
    assert all(f"\n  {key} " in text for keys in KEYS.values() for key in keys)


def test_the_commands_are_listed(capsys):
    text = shown(capsys)
    assert text == shown(capsys, "--help") == shown(capsys, "help")
    for command in COMMANDS:
        assert f"\n  {command} " in text


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["train", "--help-all"], 0),
        (["help", "strategy", "diloco"], 0),
        (["help", "preset"], 0),
        (["--version"], 0),
        (["train", "--epochs", "0"], 2),
        (["train", "--strategy", "diloco:local_step=12"], 2),
        (["predict", "r"], 2),
    ],
)
def test_help_and_wrong_usage_do_not_import_torch(words, status):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gcnzc", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "gcnzc.cli.parser" in loaded
    assert not loaded & {"torch", "numba"}


def test_a_file_of_options_may_name_the_run_folder(tmp_path):
    (tmp_path / "c.toml").write_text(f'out = "{tmp_path / "r"}"\n')
    _, config = parse(["train", "--config", str(tmp_path / "c.toml")])
    assert config.run.out == tmp_path / "r"
