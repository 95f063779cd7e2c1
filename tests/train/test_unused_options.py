"""An option that the chosen model, task, optimizer or features would ignore is an error."""

from dataclasses import MISSING, fields

import numpy as np
import pytest
import torch
from training import planted

from gcnzc import load
from gcnzc.cli import main
from gcnzc.exchange import Group
from gcnzc.graph.hetero import HeteroGraph
from gcnzc.train.config import TrainConfig
from gcnzc.train.encoders import build_encoder
from gcnzc.train.hetero.data import HeteroDataset
from gcnzc.train.hetero.encoder import build_hetero_encoder
from gcnzc.train.hetero_options import HETERO_MODELS, REJECTED
from gcnzc.train.optimizer_options import ONE_BIT, UPDATE_RULES
from gcnzc.train.optimizers import build_method
from gcnzc.train.strategies import STRATEGIES
from gcnzc.train.unused_options import READ_WITH, unused_options

# a value that is not the default
OTHERS = {
    "decoder": "dot",
    "negatives": "both",
    "num_negatives": 2,
    "strict_negatives": False,
    "exclude": "none",
    "compress": "bfloat16",
    "local_steps": "5",
    "warmup": "auto",
    "refresh": 7,
    "outer_lr": 0.5,
    "outer_momentum": 0.5,
    "eager_weight": 0.25,
    "delay": "2",
    "fragments": "modules",
    "sync_threshold": 0.1,
    "sync_window": 7,
    "density": 0.2,
    "compute_threshold": "0.5",
    "max_dropped": 0.2,
    "topology": "complete",
    "gossip_rate": 2.0,
    "asynchronous": True,
    "grace": 0.5,
    "grace_s": 0.5,
    "quorum": 1,
    "probe_interval": 5,
    "participants": 1,
    "local_momentum": 0.5,
    "round_weight": 0.25,
    "heads": 2,
    "output_heads": 1,
    "attention_dropout": 0.1,
    "skip": False,
    "cache_size": "0.3",
    "cache_policy": "in-degree",
    "cache_sharded": True,
    "label_smoothing": 0.1,
    "class_weights": "balanced",
    "evaluate_fanouts": (3, 3, 3),
    "step_epochs": 2.0,
    "step_factor": 0.5,
    "average_decay": 0.9,
    "average_start": 0.5,
    "metric": "f1_macro",
    "label_inputs": 0.5,
    "self_loops": True,
    "residual": True,
    "output_linear": True,
    "activation": "elu",
    "target": "paper",
    "edge_type": "user,buys,item",
    "edge_split": "time",
    "reverse_types": "none",
    "valid_edges": 0.2,
    "test_edges": 0.2,
    "evaluate_negatives": 7,
    "temporal": "last",
    "times": "edge",
    "embedding_dim": 8,
    "embedding_optimizer": "adam",
    "embedding_lr": 0.1,
}
MODELS = ("sage", "gcn", "gin", "gat", "gatv2")
OF_EDGES = (
    "edge_type",
    "edge_split",
    "reverse_types",
    "valid_edges",
    "test_edges",
    "evaluate_negatives",
)
# by choice and option: an option without which it has no effect
NEEDED = {("diloco", "grace_s"): {"quorum": 1}}
NEEDED |= {(model, name): {"task": "link"} for model in HETERO_MODELS for name in OF_EDGES}
ONE_FEATURE = {
    "model": "sage",
    "task": "node",
    "optimizer": "adam",
    "strategy": "average",
    "features": "host",
    "schedule": "constant",
    "average": "none",
    "evaluate": "needed",
    "temporal": "none",
}
# for options that are used with the choices above
OTHER = {"task": "link", "model": "gcn"}


class Recording:
    """A config that notes which options are read."""

    def __init__(self, config):
        self.config, self.seen = config, set()

    def __getattr__(self, name):
        self.seen.add(name)
        return getattr(self.config, name)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    return planted(tmp_path_factory, 300, 1500, 8, 3)


def words_of(name, value):
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{option}"]
    if isinstance(value, tuple):
        return [f"--{option}", ",".join(map(str, value))]
    return [f"--{option}", str(value)]


def test_the_table_has_the_options_of_each_optimizer_and_model(graph):
    data = load(graph)
    loops = HeteroGraph.from_arrays(
        {"a": 2}, {("a", "r", "a"): {"edge_index": np.eye(2, dtype=int)}}
    )
    typed = HeteroDataset(loops, "a", torch.zeros(2), {}, 3, "accuracy", graph)
    hints = {field.name: field for field in fields(TrainConfig)}
    readers = {"optimizer": {}, "strategy": {}, "model": {}}
    for choice, choices in (
        ("optimizer", (*UPDATE_RULES, *ONE_BIT)),
        ("strategy", tuple(STRATEGIES)),
        ("model", (*MODELS, *HETERO_MODELS)),
    ):
        for chosen in choices:
            recording = Recording(TrainConfig(data=graph, **{choice: chosen}))
            if chosen in HETERO_MODELS:
                build_hetero_encoder(recording, typed, 3, "a")
            elif choice == "model":
                build_encoder(recording, data, 3)
            else:
                build_method(recording, torch.nn.Linear(3, 2), Group(), 1000)
            readers[choice][chosen] = recording.seen & set(hints)
    for choice, seen in readers.items():
        names = set().union(*seen.values())
        # steps of other strategies accumulate too, which is not an option of the optimizer
        for name in names - {"optimizer", "strategy", "model", "accumulate"}:
            found = {chosen for chosen in seen if name in seen[chosen]}
            expected = READ_WITH.get(name, {}).get(choice)
            if choice == "model" and name in REJECTED:
                # an error with models on heterogeneous graphs
                expected = expected or MODELS
            assert found == (set(seen) if expected is None else set(expected)), name


def test_an_unused_option_is_an_error_with_the_choices_that_use_it(graph, capsys):
    assert set(OTHERS) == set(READ_WITH)
    shown = set()
    for name, value in OTHERS.items():
        choice, readers = next(iter(READ_WITH[name].items()))
        others = (ONE_FEATURE[choice], OTHER.get(choice, "topk"), "hgt")
        other = next(each for each in others if each not in readers)
        assert name in unused_options(TrainConfig(**{choice: other, name: value})), name
        if other not in shown:
            shown.add(other)
            words = words_of(name, value)
            assert main(["train", str(graph), f"--{choice}", other, *words]) == 2, name
            error, hint = capsys.readouterr().err.splitlines()
            assert f"error: {' '.join(words)} has no effect with --{choice}" in error
            assert f"only --{choice} {' or '.join(readers)} uses it" in hint
        # an option that is used, and one that keeps its default, is none
        for chosen in readers:
            options = {choice: chosen, name: value, **NEEDED.get((chosen, name), {})}
            assert name not in unused_options(TrainConfig(**options))
        default = next(field.default for field in fields(TrainConfig) if field.name == name)
        assert default is not MISSING
        assert not unused_options(TrainConfig(**{choice: other, name: default}))


def test_a_file_may_have_options_for_other_choices(graph, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(
        'strategy = "diloco"\nlocal-steps = "5"\nlayers = 2\nfanouts = [3, 3]\nhidden = 4\n'
    )
    words = ["train", str(graph), "--config", str(file), "--epochs", "1"]
    words += ["--out", str(tmp_path / "run")]
    assert main([*words, "--strategy", "average", "--local-steps", "6"]) == 2
    assert "--local-steps 6 has no effect" in capsys.readouterr().err
    assert main([*words, "--strategy", "average"]) == 0
    warning = "warning: --local-steps 5 has no effect with --strategy average; only --strategy"
    assert capsys.readouterr().err.count(warning) == 1
    # nor is a run that has them lost
    assert main(["train", "--resume", str(tmp_path / "run"), "--epochs", "2"]) == 0
    assert capsys.readouterr().err.count(warning) == 1
