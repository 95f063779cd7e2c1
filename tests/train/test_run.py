"""A run computes the same result for any number of threads, on all kinds of data."""

import importlib.util
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from slow_cases import mark_slow
from training import Listener, assert_same_weights, planted

import gcnzc
import gcnzc.train.run_folder
import gcnzc.train.setup
import gcnzc.train.signals
from gcnzc import load, prepare
from gcnzc.datasets.generate import Shape, generate
from gcnzc.features.cache import CachedTable
from gcnzc.kernels.gather.gpu import KernelConfig
from gcnzc.train.config import EvaluateConfig, TrainConfig
from gcnzc.train.evaluation import evaluate
from gcnzc.train.progress import NullReporter
from gcnzc.train.run import train
from gcnzc.train.run_folder import new_folder
from gcnzc.train.tasks.node import NodeTask
from gcnzc.tune import profiles

needs_dgl = pytest.mark.skipif(not importlib.util.find_spec("dgl"), reason="DGL is not installed")


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Path:
    return planted(tmp_path_factory, 2000, 12000, 24, 4)


@pytest.fixture(scope="module")
def config(graph) -> TrainConfig:
    sizes = {"fanouts": (5, 5), "hidden": 16, "batch_size": 64}
    return TrainConfig(data=graph, **sizes, epochs=2, lr=0.01, dropout=0.2)


def test_results_do_not_depend_on_threads_and_are_reproducible(config, tmp_path):
    train(config, tmp_path / "one")
    for threads in (1, 2, 8):
        train(config.replace(threads=threads), tmp_path / f"threads-{threads}")
        assert_same_weights(tmp_path / "one", tmp_path / f"threads-{threads}")
    train(config.replace(seed=1), tmp_path / "other")
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "one", tmp_path / "other")


MODELS = ("sage", "gcn", "gin", "gat", "gatv2")
# the architecture of Luo et al., 2024
STACK = "norm=layer,residual=true,input_linear=true,output_linear=true,jumping=cat,activation=relu"


@pytest.mark.parametrize("model", mark_slow(zip(MODELS, strict=True), lambda model: model != "gat"))
def test_a_deep_model_learns_and_is_evaluated_and_resumed(model, config, tmp_path):
    heads = ",heads=2" if model.startswith("gat") else ""
    config = config.replace(model=f"{model}:{STACK}{heads}", fanouts=(4, 4, 4, 4))
    line = train(config.replace(epochs=3), tmp_path / "run")
    # there are four classes
    assert line["valid_accuracy"] > 0.5
    again = evaluate(EvaluateConfig(run=tmp_path / "run"))
    assert again["valid_accuracy"] == line["valid_accuracy"]
    train(config.replace(epochs=1), tmp_path / "other")
    train(config.replace(epochs=3, resume=tmp_path / "other"), tmp_path / "other")
    assert_same_weights(tmp_path / "run", tmp_path / "other")


def planned(graph, monkeypatch, folder, **values):
    """Keep a plan for this machine and the features of `graph`."""
    monkeypatch.setenv("GCNZC_CACHE", str(folder))
    usual = {"programs": 5, "warps": 4, "vectors": 2, "hot": 0.3}
    usual |= {"threads": 3, "ahead": 7, "copied_share": 0.5} | values
    choices = {name: profiles.Setting(value, "", "measured", {}) for name, value in usual.items()}
    table = load(graph).table
    key = profiles.make_key(torch.device("cpu"), table)
    profiles.save(profiles.TuningProfile(key, "g", table.num_rows, "2026-01-02T03:04:05", choices))


@pytest.fixture
def loaders(monkeypatch):
    """The settings of all loaders of runs; without those that a CPU has no use for."""
    made = []

    def loader(*given, **options):
        made.append(original(*given, **options))
        return made[-1]

    original = gcnzc.loader.loader.Loader
    monkeypatch.setattr(gcnzc.train.setup, "Loader", loader)
    return made


def test_a_tuning_profile_is_used_and_changes_no_result(config, tmp_path, monkeypatch, loaders):
    config, reporter = config.replace(device="cpu"), Listener()
    train(config, tmp_path / "plain", reporter)
    assert not any("tuning profile" in text for text in reporter.said)
    planned(config.graph.data, monkeypatch, tmp_path / "cache")
    train(config, tmp_path / "planned", reporter)
    assert [text for text in reporter.said if "tuning profile" in text] == [
        "tuning profile of 2026-01-02: 3 threads, 7 prefetched batches, 50% of the rows copied; "
        "--no-tuning-profile ignores it"
    ]
    reporter.said.clear()
    train(config.replace(tuning_profile=False), tmp_path / "no-plan", reporter)
    assert not any("tuning profile of" in text for text in reporter.said)
    # what the command line says goes before it, and look-ahead goes with threads
    train(config.replace(threads=2), tmp_path / "threads", reporter)
    usual, planned_for, without, asked = ((made.threads, made.ahead) for made in loaders)
    assert planned_for == (3, 7)
    assert usual == without
    assert asked == (2, 3)
    for name in ("planned", "no-plan", "threads"):
        assert_same_weights(tmp_path / "plain", tmp_path / name)


@pytest.mark.parametrize(("threads", "ahead"), [(1, 5), (3, 9)])
def test_minibatches_are_the_same_bits_with_any_profile(config, threads, ahead, loaders, tmp_path):
    train(config.replace(epochs=1, device="cpu"), tmp_path / "run")
    (usual,) = loaders
    kernel_config = KernelConfig(programs=1, warps=2, vectors=1)
    planned = gcnzc.Loader(
        usual.graph,
        replace(usual.table, kernel_config=kernel_config),
        usual.seeds,
        list(config.loading.fanouts),
        config.loading.batch_size,
        labels=usual.labels,
        seed=config.loading.seed,
        threads=threads,
        ahead=ahead,
        copied_share=0.3,
    )
    usual.set_epoch(0)
    assert len(usual) > 4
    for mine, its in zip(usual, planned, strict=True):
        for name in ("nodes", "seeds", "x", "y"):
            assert torch.equal(getattr(mine, name), getattr(its, name))
        for ours, theirs in zip(mine.blocks, its.blocks, strict=True):
            assert torch.equal(ours.indices, theirs.indices)


def test_the_cache_size_of_a_profile_is_used_with_an_automatic_cache(
    config, tmp_path, monkeypatch, loaders
):
    planned(config.graph.data, monkeypatch, tmp_path / "cache")
    config = config.replace(epochs=1, device="cpu")
    train(config, tmp_path / "plain")
    train(config.replace(features="cached"), tmp_path / "cached")
    train(config.replace(features="cached", tuning_profile=False), tmp_path / "usual")
    assert not isinstance(loaders[0].table, CachedTable)
    assert [loader.table.num_cached for loader in loaders[1:]] == [
        600,
        400,
    ]
    # hot rows leave others to copy than those that were measured
    assert [loader.copied_share for loader in loaders] == [0.5, 0.0, 0.0]


def test_training_does_not_change_the_callers_random_state(config, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(config.replace(epochs=1), tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "model", mark_slow(zip(MODELS, strict=True), lambda model: model not in ("sage", "gatv2"))
)
def test_every_model_reaches_nearly_the_best_possible_accuracy(model, config, tmp_path):
    # the sums of gin grow with the degree, and without normalization it reaches 0.80
    model = "gin:norm=batch" if model == "gin" else model
    line = train(config.replace(model=model, epochs=6, fanouts=(-1, -1)), tmp_path / "run")
    assert line["best_possible_accuracy"] > 0.8
    assert line["test_accuracy"] > line["best_possible_accuracy"] - 0.08
    assert evaluate(EvaluateConfig(run=tmp_path / "run"))["test_accuracy"] == line["test_accuracy"]


@needs_dgl
def test_dgls_sampler_reaches_the_same_accuracy(config, tmp_path):
    ours = train(config.replace(epochs=5), tmp_path / "ours")["test_accuracy"]
    theirs = train(config.replace(epochs=5, sampler="dgl"), tmp_path / "dgl")["test_accuracy"]
    # three standard errors of a difference between two shares of 560 test nodes
    assert abs(ours - theirs) < 3 * (2 * 0.2 * 0.8 / 560) ** 0.5


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "muon"])
def test_every_optimizer_learns(optimizer, config, tmp_path):
    options = {"optimizer": f"{optimizer}:weight_decay=1e-4"}
    options["lr"] = 0.05 if optimizer == "sgd" else 0.01
    line = train(config.replace(epochs=3, **options), tmp_path / "run")
    assert line["test_accuracy"] > 0.5


def test_early_stopping_ends_a_run(config, tmp_path):
    config = config.replace(epochs=60, patience=2, lr=0.05)
    line = train(config, tmp_path / "run", out := Listener())
    best = line["best_epoch"]
    assert line["epochs"] == best + 2 < 60
    message = f"stopped after epoch {best + 2}: --patience 2: the last 2 evaluations found no "
    assert out.said[-1] == f"{message}better model than that of epoch {best}"
    # a resumed run says it again
    train(config.replace(resume=tmp_path / "run"), tmp_path / "run", again := Listener())
    assert again.said[-1] == out.said[-1]


@pytest.mark.parametrize(
    ("batch_size", "effect"), [(128, "shows 8 steps"), (1024, "shows nothing")]
)
def test_a_run_that_is_too_short_for_a_trace_says_so(batch_size, effect, config, tmp_path):
    config = config.replace(batch_size=batch_size, trace=10)
    train(config, tmp_path / "run", out := Listener())
    found = [line for line in out.said if "--trace" in line]
    assert len(found) == bool(effect)
    assert effect in "".join(found)
    assert (tmp_path / "run" / "timeline.png").exists() == (batch_size < 1024)


@pytest.fixture(scope="module")
def accuracy(config, tmp_path_factory):
    """The accuracy of a run on features of float32."""
    return train(config, tmp_path_factory.mktemp("plain") / "run")["test_accuracy"]


@pytest.mark.parametrize("kind", ["float16", "int8", "sparse", "pitched"])
def test_all_kinds_of_features_are_trained_on(kind, config, accuracy, tmp_path):
    options = {
        "float16": {"feature_dtype": "float16"},
        "int8": {"feature_dtype": "int8", "scales": "columns"},
        "sparse": {"sparse_features": True},
        "pitched": {"pitch_bytes": 128},
    }[kind]
    source = generate("planted", Shape(2000, 12000, 24, 4), seed=3)
    if kind == "sparse":
        rows = np.concatenate(list(source.features.chunks(lambda *a: np.empty(a[1], a[2]))))
        indptr = np.arange(0, rows.size + 1, rows.shape[1])
        np.savez(
            tmp_path / "g.npz",
            edge_index=np.stack(source.edges(lambda *a: np.empty(a[1], a[2]), lambda *a: None)),
            node_label=source.labels(),
            feat_data=rows.ravel(),
            feat_indices=np.tile(np.arange(rows.shape[1]), len(rows)),
            feat_indptr=indptr,
            feat_shape=np.array(rows.shape),
            add_inverse_edge=True,
            **{f"{part}_idx": ids for part, ids in source.split().items()},
        )
        prepare(tmp_path / "g.npz", tmp_path / "g", **options)
    else:
        prepare(source, tmp_path / "g", **options)
    line = train(config.replace(data=tmp_path / "g"), tmp_path / "run")
    exact = kind in ("sparse", "pitched")
    assert line["test_accuracy"] == pytest.approx(accuracy, abs=0 if exact else 0.02)


def test_a_loss_that_is_not_finite_ends_the_run(config, tmp_path, monkeypatch):
    def not_finite(self, logits, labels):
        return logits.sum() * torch.inf

    monkeypatch.setattr(NodeTask, "loss", not_finite)
    with pytest.raises(ValueError, match=r"loss is (nan|inf)(.|\n)*hint: .*--lr"):
        train(config, tmp_path / "run")
    with pytest.raises(ValueError, match="hint: use --precision bf16, since float16 overflows"):
        train(config.replace(precision="fp16"), tmp_path / "fp16")


@pytest.mark.parametrize("strategy", ["average", "local-sgd"])
def test_a_run_that_skips_its_steps_reports_some_and_ends(strategy, config, tmp_path):
    listener = Listener()
    # 17 steps per epoch; gradients overflow after the first ones
    config = config.replace(optimizer="sgd", strategy=strategy, lr=1e9)
    with pytest.raises(ValueError, match=r"the last 1\d steps .* were skipped(.|\n)*hint: .*--lr"):
        train(config, tmp_path / "run", listener)
    said = [line for line in listener.said if "skipped" in line]
    assert 1 <= len(said) <= 6


def test_runs_get_unique_names(config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        assert new_folder(config) == Path(f"runs/graph-sage-{number}")
        # so that no other process takes it
        assert Path(f"runs/graph-sage-{number}").is_dir()


def test_some_steps_are_drawn_as_a_timeline(config, tmp_path):
    train(config.replace(trace=12, threads=2), tmp_path / "run")
    events = json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    # 17 steps an epoch, of which the first ten of the run are left out
    for name in ("sample", "gather", "compute", "wait"):
        assert sum(span["name"] == name for span in spans) == 12, name
    lanes = {event["args"]["name"] for event in events if event["ph"] == "M"}
    # on busy cores one of the two may have come to all
    assert {"model"} < lanes <= {"model", "loader 0", "loader 1"}
    # what one thread does lies one after the other
    for lane in {span["tid"] for span in spans}:
        ordered = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["tid"] == lane)
        assert all(one[1] <= next_[0] + 1e-3 for one, next_ in itertools.pairwise(ordered))
    assert (tmp_path / "run" / "timeline.png").stat().st_size > 5000
    assert not list((tmp_path / "run").glob("timeline*.tmp"))


def test_a_second_run_in_the_same_process_is_refused(config, tmp_path):
    """Its random numbers would be those of the first one's generators."""
    refused = []

    class Second(NullReporter):
        """Starts a run in another thread while the first one trains."""

        def say(self, text):
            if not refused:
                with ThreadPoolExecutor(1) as pool:
                    second = pool.submit(train, config.replace(seed=1), tmp_path / "second")
                    refused.append(second.exception())

    train(config, tmp_path / "first", Second())
    (error,) = refused
    assert isinstance(error, RuntimeError)
    assert "another run is training in this process" in str(error)
    assert "\n\nhint: start a process for each run" in str(error)
    assert not (tmp_path / "second").exists()
    train(config, tmp_path / "alone")
    assert_same_weights(tmp_path / "alone", tmp_path / "first")
    # a run that failed does not prevent the next one
    with pytest.raises(ValueError, match="already has a run"):
        train(config, tmp_path / "alone")
    train(config.replace(epochs=1), tmp_path / "third")


def test_a_run_without_an_average_says_so(config, tmp_path):
    swa = config.replace(average="swa", epochs=40, lr=0.05)
    train(swa.replace(patience=1), tmp_path / "patience", out := Listener())
    assert "from epoch 31 on, and the run ended after epoch" in "".join(out.said)
    train(swa.replace(epochs=2, average="swa:start=0"), tmp_path / "all", out := Listener())
    assert "averages the weights" not in "".join(out.said)
