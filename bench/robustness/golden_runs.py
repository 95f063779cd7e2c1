"""Entries of `bench.robustness.golden`: training, predictions, inference and exported programs.

Runs are commands in this process, or in two workers that remain for all runs. Each writes a folder
to the current folder, which other entries read.
"""

import contextlib
import io
import json
import multiprocessing
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import gcnzc
from bench.robustness.golden_graphs import SEED, graph, run, shared_data
from gcnzc import models
from gcnzc.cli import main
from gcnzc.train.run_folder import last_checkpoint

WORKERS = 2
TIMEOUT_S = 300.0  # of a run of the workers
OPTIONS = "--epochs 3 --fanouts 4,4 --hidden 8 --batch-size 64 --lr 0.02 --threads 1"
OPTIONS += f" --no-tuning-profile --device cpu --seed {SEED}"

MAKE = "--nodes 600 --edges 3000 --num-features 12 --classes 4 --seed 1"
# by name of a graph: the commands that write it
GRAPHS: Mapping[str, tuple[str, ...]] = {
    "nodes": (f"make planted {MAKE}", "prepare planted nodes"),
    "links": (f"make planted-links {MAKE}", "prepare planted-links links --task link"),
    "typed": (f"make raw-typed --kind typed {MAKE}", "prepare raw-typed typed"),
    "cora": ("prepare {cora} cora",),
    "cora-links": ("prepare {cora} cora-links --task link",),
}
# by name of a run: its graph and options
RUNS: Mapping[str, tuple[str, str]] = {
    **{model: ("nodes", f"--model {model}") for model in ("sage", "gcn", "gin", "gat", "gatv2")},
    "deep model": (
        "nodes",
        "--model gcn:norm=batch,residual=true,input_linear=true,output_linear=true,jumping=cat",
    ),
    "schedules": (
        "nodes",
        "--schedule cosine --warmup-epochs 1 --average ema --clip-gradients 0.5 "
        "--optimizer adamw:weight_decay=0.01 --decay weights --accumulate 2",
    ),
    "losses": (
        "nodes",
        "--task node:label_inputs=0.5,label_smoothing=0.1,class_weights=balanced,metric=f1_macro "
        "--optimizer sgd --average swa",
    ),
    "muon and local seeds": ("nodes", "--optimizer muon --seed-order local --evaluate sampled"),
    "full batch": ("nodes", "--batch-size all --fanouts -1,-1"),
    "links": ("links", "--task link"),
    "links, in-batch": ("links", "--task link:negatives=in-batch,decoder=dot --model gat"),
    **{model: ("typed", f"--model {model}") for model in ("rgcn", "rgat", "hgt", "hetero-sage")},
    "typed and temporal": ("typed", "--model rgcn --temporal last"),
    "typed links": ("typed", "--model rgcn --task link:edge_type=asked_by"),
    "cora": ("cora", "--model gcn --hidden 16"),
    "cora links": ("cora-links", "--task link --batch-size 2048 --epochs 1"),
}
# by name of a run of several workers: its strategy
STRATEGIES: Mapping[str, str] = {
    "average": "average",
    "local-sgd": "local-sgd:local_steps=2",
    "diloco": "diloco:local_steps=3",
    "muloco": "muloco:local_steps=3",
    "streaming-diloco": "streaming-diloco:local_steps=4,fragments=2",
    "co2": "co2:local_steps=2",
    "selsync": "selsync:window=3",
    "dropcompute": "dropcompute:threshold=none --accumulate 2",
    "topk": "average:compress=topk:0.1",
    "randomk": "average:compress=randomk:0.1",
    "dct": "average:compress=threshold:0.1",
    "sparseloco": "sparseloco:local_steps=3,compress=sparseloco:0.1",
    "saps": "saps:density=0.3",
    "a2cid2": "a2cid2",
    "backup": "backup:grace=1000",
    "fedglomo": "fedglomo:local_steps=2",
}
COMPRESSED = {
    name: f"--optimizer {name}:warmup=4" for name in ("onebit-adam", "onebit-lamb", "zero-one-adam")
}
WORKER_RUNS = {name: f"--strategy {own}" for name, own in STRATEGIES.items()} | COMPRESSED


def arguments(*texts: str) -> list[str]:
    """Return options as words; an option replaces an earlier one of the same name."""
    found = dict(re.findall(r"(--\S+)((?: (?!--)\S+)*)", " ".join(texts)))
    return [word for option in found.items() for word in "".join(option).split()]


def prepared(name: str) -> str:
    """Prepare a graph unless it is there, and return its folder."""
    for command in GRAPHS[name] if not Path(name).exists() else ():
        cora = str(shared_data("cora/cora.npz")) if "{cora}" in command else ""
        run(*(word.replace("{cora}", cora) for word in command.split()))
    return name


def trained(name: str) -> str:
    """Train a run unless it is there, and return its folder."""
    folder = f"run-{name}"
    if not Path(folder).exists():
        data, options = RUNS[name]
        run("train", prepared(data), *arguments(OPTIONS, options), "--out", folder)
    return folder


def results(folder: str) -> dict[str, Any]:
    """Return the loss and the scores of each epoch, and the weights at the end of a run."""
    lines = [json.loads(line) for line in Path(folder, "record.jsonl").read_text().splitlines()]
    found = {
        key: [line[key] for line in lines]
        for key in lines[-1]
        if key.startswith(("loss", "valid_", "test_"))
    }
    state = torch.load(last_checkpoint(Path(folder)))["model"]
    return found | {
        "weights": torch.cat([state[key].double().reshape(-1) for key in sorted(state)])
    }


def train(name: str) -> dict[str, Any]:
    """Return the results of a run."""
    return results(trained(name))


def train_resumed() -> dict[str, Any]:
    """Return the results of a run that is resumed after its first epoch."""
    words = arguments(OPTIONS, "--model gat --epochs 1 --out run-resumed")
    run("train", prepared("nodes"), *words)
    run("train", "--resume", "run-resumed", "--epochs", "3")
    return results("run-resumed")


def predict(name: str, *words: str, pairs: bool = False) -> dict[str, Any]:
    """Return the columns of the file that `gcnzc predict --probabilities` writes."""
    import pandas

    if pairs:
        np.save("pairs.npy", np.random.default_rng(SEED).integers(0, 20, (2, 40)))
        words = (*words, "--pairs", "pairs.npy")
    run("predict", trained(name), *words, "--probabilities", "--out", "predicted.csv")
    table = pandas.read_csv("predicted.csv")
    return {column: table[column] for column in table if table[column].dtype.kind in "if"}


def embed_nodes() -> dict[str, Any]:
    """Return the rows that `gcnzc predict --embeddings` writes."""
    run("predict", trained("gat"), "--embeddings", "--out", "rows.npy")
    return {"rows": np.load("rows.npy")}


def embed() -> dict[str, Any]:
    """Return the features that `gcnzc prepare --embed` computes from edges."""
    run("prepare", prepared("nodes"), "embedded", "--embed", "8")
    return {"features": gcnzc.load("embedded").features}


def infer(name: str, **options: Any) -> dict[str, Any]:
    """Return the outputs of a model with random weights for all nodes."""
    ends, features, _ = graph()
    torch.manual_seed(SEED)
    model = getattr(models, name)(20, 8, 5, 2)
    made = gcnzc.Graph.from_edges(ends[0], ends[1], len(features))
    table = gcnzc.FeatureTable(torch.from_numpy(features))
    return {"outputs": gcnzc.inference(model, made, table, **options)}


def export(name: str) -> dict[str, Any]:
    """Return the outputs of an exported program for all nodes of the graph."""
    run("export", trained(name), "--out", "model.pt2")
    extra = {"gcnzc.json": ""}
    program = torch.export.load("model.pt2", extra_files=extra).module()
    about = json.loads(extra["gcnzc.json"])
    data = gcnzc.load(RUNS[name][0])
    layers, made = len(about["fanouts"]), data.graph
    degrees = [made.in_degrees().long()] * layers if about["needs_degrees"] else []
    arguments = [made.indptr.long()] * layers, [made.indices.long()] * layers, degrees
    with torch.no_grad():
        return {"outputs": program(data.features, *arguments)}


def export_typed(name: str) -> dict[str, Any]:
    """Return the outputs of an exported program of a typed graph for all nodes."""
    run("export", trained(name), "--out", "typed.pt2")
    extra = {"gcnzc.json": ""}
    program = torch.export.load("typed.pt2", extra_files=extra).module()
    about = json.loads(extra["gcnzc.json"])
    made, names = gcnzc.load(RUNS[name][0]).graph, about["arguments"]
    rows = np.load("typed.embeddings.npz") if about["embeddings"] else {}
    x = {
        key: torch.as_tensor(rows[key]) if key in rows else made.nodes(key).features
        for key in names["x"]
    }
    destinations = [
        {key: torch.arange(made.nodes(key).num_nodes) for key in layer}
        for layer in names["destinations"]
    ]
    edges = {"__".join(each): made.edges(tuple(each)) for each in about["edge_types"]}
    indptr, indices = (
        [{key: getattr(edges[key], what).long() for key in layer} for layer in names["edges"]]
        for what in ("indptr", "indices")
    )
    with torch.no_grad():
        return {"outputs": program(x, destinations, indptr, indices)}


@cache
def workers() -> Pool:
    """Return the processes of the workers, which remain for all runs."""
    return multiprocessing.get_context("spawn").Pool(WORKERS)


def stop_workers() -> None:
    """End the processes of the workers, if they were started."""
    if workers.cache_info().currsize:
        workers().terminate()
        workers.cache_clear()


def work(words: Sequence[str], rank: int, port: int) -> str:
    """Run a command as a worker, and return its error."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORKERS, "LOCAL_WORLD_SIZE": WORKERS}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    own |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in own.items()})
    torch.set_num_threads(1)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return err.getvalue()[-300:] or "failed" if status else ""


def train_on_workers(name: str) -> dict[str, Any]:
    """Return the results of a run of two workers."""
    folder = f"run-workers-{name}"
    options = arguments(OPTIONS, WORKER_RUNS[name], f"--timeout-s 60 --out {folder}")
    words = ["train", prepared("nodes"), *options]
    # the store outlives the workers of a run, as with torchrun
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    runs = [workers().apply_async(work, (words, rank, store.port)) for rank in range(WORKERS)]
    try:
        for rank, each in enumerate(runs):
            if error := each.get(TIMEOUT_S):
                raise RuntimeError(f"worker {rank}: {error}")
    except (RuntimeError, multiprocessing.TimeoutError):
        stop_workers()
        raise
    return results(folder)


# by name: returns numbers
ENTRIES: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    **{f"train {name}": partial(train, name) for name in RUNS},
    "train, resumed": train_resumed,
    **{f"train on two workers, {name}": partial(train_on_workers, name) for name in WORKER_RUNS},
    "predict nodes": partial(predict, "sage"),
    "predict nodes, label inputs": partial(predict, "losses", "--nodes", "test"),
    "predict with scratch": partial(predict, "gat", "--scratch", "scratch"),
    "predict links": partial(predict, "links", pairs=True),
    "predict typed": partial(predict, "hgt"),
    "predict typed and temporal": partial(predict, "typed and temporal"),
    "predict typed links": partial(predict, "typed links", pairs=True),
    "predict cora": partial(predict, "cora"),
    "embed-nodes": embed_nodes,
    "embed": embed,
    **{
        f"inference {name}": partial(infer, name) for name in ("SAGE", "GCN", "GIN", "GAT", "GATv2")
    },
    "inference, first layer": partial(infer, "SAGE", layer=1, nodes=[5, 3, 2999]),
    **{f"export {name}": partial(export, name) for name in ("sage", "gcn", "gat")},
    **{f"export {name}": partial(export_typed, name) for name in ("rgcn", "hgt")},
}
