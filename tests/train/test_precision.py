"""Runs in mixed precision: `--precision`, the loss scale, and torch's settings."""

import itertools
from functools import partial

import pytest
import torch
from given_gradients import count_gradients
from processes import results
from slow_cases import mark_slow
from torch import nn
from torch.nn import functional
from training import (
    UPDATES,
    Listener,
    Stopped,
    Stopping,
    assert_same_weights,
    lines,
    planted,
    saved,
)

from gcnzc import prepare
from gcnzc.exchange import Group, init_group
from gcnzc.train import checkpoint, precision
from gcnzc.train.build import build_optimizer
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.evaluation import evaluate
from gcnzc.train.precision import Precision, build_precision, check_precision, slow_reason
from gcnzc.train.run import train
from gcnzc.train.tasks.node import NodeTask

CPU = torch.device("cpu")
# a scale with which gradients overflow in the first steps, and which grows often
HIGH = partial(torch.amp.GradScaler, init_scale=2.0**20, growth_interval=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return planted(tmp_path_factory, 600, 3600, 16, 3).parent


@pytest.fixture(scope="module")
def config(folder):
    sizes = {"fanouts": (4, 4), "hidden": 16, "batch_size": 60, "threads": 1}
    return TrainConfig(data=folder / "graph", **sizes, epochs=3, lr=0.02, dropout=0.2)


@pytest.fixture(autouse=True)
def autocast_ends():
    yield
    assert not torch.is_autocast_enabled("cpu")


class Recorder:
    """The dtypes of the features and the logits of training steps."""

    def __init__(self, monkeypatch):
        self.training = set()
        logits = NodeTask.logits

        def watched(task, model, batch):
            found = logits(task, model, batch)
            self.training.add((batch.x.dtype, found.dtype))
            return found

        monkeypatch.setattr(NodeTask, "logits", watched)


CHOICES = {
    "sampled": {"model": "gat:heads=2"},
    "full batch": {
        "batch_size": "all",
        "fanouts": (-1, -1),
        "epochs": 30,
        "model": "sage:norm=layer",
    },
    "labels": {"task": "node:label_inputs=0.5", "model": "gcn", "average": "ema:decay=0.8"},
}


@pytest.mark.parametrize(
    ("choice", "name"),
    # each choice, and each precision
    mark_slow(
        itertools.product(CHOICES, ("bf16", "fp16")),
        lambda choice, name: (name == "fp16") != (choice == "sampled"),
    ),
)
def test_runs_learn_as_in_float32_and_are_evaluated_in_float32(
    choice, name, config, tmp_path, monkeypatch
):
    config = config.replace(**CHOICES[choice])
    expected = train(config, tmp_path / "float32")
    seen = Recorder(monkeypatch)
    found = train(config.replace(precision=name), tmp_path / name)
    assert found["valid_accuracy"] > 0.6
    assert found["valid_accuracy"] == pytest.approx(expected["valid_accuracy"], abs=0.08)
    assert found["options"]["precision"] == name
    dtype = precision.AUTOCAST_DTYPES[name]
    # full-batch features are converted once, others are gathered as they are stored
    features = dtype if choice == "full batch" else torch.float32
    assert seen.training == {(features, dtype)}
    weights = saved(tmp_path / name)["model"].values()
    assert {value.dtype for value in weights if value.is_floating_point()} == {torch.float32}
    again = evaluate(EvaluateConfig(run=tmp_path / name))
    assert again["valid_accuracy"] == pytest.approx(found["valid_accuracy"], abs=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("model", ["sage", "gcn", "gin", "gat", "gatv2"])
def test_runs_on_a_gpu_learn_and_restore_the_settings(model, name, config, tmp_path):
    before = torch.backends.cuda.matmul.allow_tf32
    heads = ",heads=2" if model.startswith("gat") else ""
    config = config.replace(model=f"{model}:norm=layer{heads}", lr=0.005, epochs=12)
    config = config.replace(device="cuda", precision=name)
    assert train(config, tmp_path / "run")["valid_accuracy"] > 0.6
    assert torch.backends.cuda.matmul.allow_tf32 == before
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize(("stored", "given"), [("float16", torch.float16), ("int8", torch.float32)])
def test_features_are_gathered_as_they_are_stored(
    stored, given, folder, config, tmp_path, monkeypatch
):
    prepare(folder / "raw", tmp_path / "graph", feature_dtype=stored)
    seen = Recorder(monkeypatch)
    config = config.replace(data=tmp_path / "graph", precision="bf16")
    assert train(config, tmp_path / "run")["valid_accuracy"] > 0.6
    assert seen.training == {(given, torch.bfloat16)}


RESUMED = {
    "fp16": {"precision": "fp16", "clip_gradients": 0.1, "schedule": "cosine", "average": "ema"},
    "fp16 with compression": {"precision": "fp16", "optimizer": "onebit-adam:warmup=5"},
    "fp16 with local steps": {"precision": "fp16", "strategy": "diloco:local_steps=3"},
}


@pytest.mark.parametrize("choice", RESUMED)
def test_a_run_resumes_bit_for_bit(choice, config, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", HIGH)
    config = config.replace(checkpoint_every_s=0, **RESUMED[choice])
    listener = Listener()
    train(config, tmp_path / "whole", listener)
    with pytest.raises(Stopped):
        train(config, tmp_path / "cut", Stopping(2, 3))
    assert saved(tmp_path / "cut")["in_epoch"]
    train(config.replace(resume=tmp_path / "cut"), tmp_path / "cut")
    whole, cut = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert_same_weights(tmp_path / "whole", tmp_path / "cut")
    assert whole["own"]["scaler"] == cut["own"]["scaler"]
    assert whole["own"]["scaler"]["scale"] != 2.0**20
    skips = [line for line in listener.said if "the loss scale is now" in line]
    assert "step 1 of epoch 1" in skips[0]
    assert skips[0].endswith(f"the loss scale is now {2.0**19:g}")
    for mine, other in zip(lines(tmp_path / "whole"), lines(tmp_path / "cut"), strict=True):
        assert mine["loss"] == other["loss"]


def test_with_other_workers_all_continue_with_the_smallest_scale():
    scaled = Precision("fp16", CPU)
    states = [scaled.state_dict() | {"scale": scale} for scale in (1024.0, 256.0)]
    scaled.load_state_dicts(states[:1])
    assert scaled.loss_scale == 1024
    scaled.load_state_dicts(states)
    assert scaled.loss_scale == 256


def steps_of(config, scaled, steps=6):
    """The parameters after steps of an optimizer, with gradients that are above the clip norm."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = build_optimizer(config, model, Group(), steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(torch.randn(8, 5)), torch.full((8, 3), 9.0))
        scaled.scale(loss).backward()
        count_gradients(optimizer)
        scaled.step(optimizer)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", UPDATES)
def test_the_loss_scale_changes_no_bit_and_gradients_are_clipped_after_unscaling(name, clip):
    config = TrainConfig(lr=0.1, clip_gradients=clip, **UPDATES[name])
    scaled = Precision("fp16", CPU)
    found = steps_of(config, scaled)
    # a power of two
    assert torch.equal(found, steps_of(config, Precision("float32", CPU)))
    assert scaled.loss_scale == 2**16


def test_a_step_without_gradients_keeps_the_loss_scale():
    scaled, model = Precision("fp16", CPU), nn.Linear(5, 3)
    optimizer = build_optimizer(TrainConfig(), model, Group(), 1)
    scaled.scale(model(torch.randn(8, 5)).sum())
    scaled.step(optimizer)
    assert scaled.loss_scale == 2**16


def train_scaled(config, folder):
    """The results of runs on this worker, and its loss scales, with overflows."""
    torch.amp.GradScaler = HIGH
    torch.set_num_threads(1)
    found = {}
    with init_group() as group:
        for optimizer, options in (
            ("sgd", {"optimizer": "sgd"}),
            ("onebit-adam", {"optimizer": "onebit-adam:warmup=5"}),
            ("diloco", {"strategy": "diloco"}),
        ):
            listener = Listener()
            chosen = config.replace(**options)
            line = train(chosen, folder / optimizer, listener, group)
            found[optimizer] = line["valid_accuracy"], listener.said
    return found


def test_workers_skip_the_same_steps(config, tmp_path):
    config = config.replace(precision="fp16", batch_size=30, lr=0.05)
    found = results(2, tmp_path, train_scaled, config, tmp_path)
    for optimizer, (accuracy, said) in found[0].items():
        assert found[1][optimizer][0] == accuracy > 0.5
        files = sorted((tmp_path / optimizer / "checkpoints").iterdir())
        one, other = (checkpoint.load(file)["own"]["scaler"] for file in files)
        assert max(one["scale"], other["scale"]) < 2.0**20
        if optimizer != "diloco":
            assert one == other
            assert any(line.startswith("step 1 of epoch 1 was skipped on all") for line in said)


def test_tf32_is_enabled_only_within_steps(monkeypatch):
    monkeypatch.setattr(precision, "check_precision", lambda name, device: None)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    fast, default = (Precision(name, CPU) for name in ("tf32", "float32"))
    with default.enable_tf32():
        assert matmul.allow_tf32 == before

    def fail_within():
        with fast.enable_tf32():
            # new in torch 2.9
            assert getattr(matmul, "fp32_precision", "tf32") == "tf32"
            raise Stopped

    with pytest.raises(Stopped):
        fail_within()
    assert matmul.allow_tf32 == before
    assert torch.get_float32_matmul_precision() == "highest"
    with fast.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_precisions_that_a_device_does_not_have_are_rejected(monkeypatch, config, tmp_path):
    with pytest.raises(ValueError, match=r"tf32 on cpu: .*\n\nhint: use --precision bf"):
        train(config.replace(precision="tf32", device="cpu"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.version, "hip", None)
    gpu = torch.device("cuda", 0)
    for capability in ((7, 5), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        for name in ("tf32", "bf16"):
            if capability < (8, 0):
                with pytest.raises(ValueError, match=f"{name} on Tesla T4: .*\n\nhint: .* fp16"):
                    check_precision(name, gpu)
            else:
                check_precision(name, gpu)
        check_precision("fp16", gpu)
        check_precision("float32", gpu)


def test_a_slow_precision_is_reported_once(monkeypatch):
    monkeypatch.setattr(precision, "cpu_flags", lambda: frozenset({"avx2"}))
    for name in ("bf16", "fp16"):
        said = []
        build_precision(name, CPU, said.append)
        (line,) = said
        assert line.startswith(f"warning: this processor has no {name} instructions")
    assert "bf16 is faster" not in line
    assert not slow_reason("float32", CPU)
    assert not slow_reason("bf16", torch.device("cuda"))
    monkeypatch.setattr(precision, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    assert not slow_reason("bf16", CPU)
    assert "bf16 is faster" in slow_reason("fp16", CPU)
