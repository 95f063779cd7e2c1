"""The commands and their options; those of `train` and `evaluate` are in `gcnzc.train.config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcnzc.train.config import Device, EvaluateConfig, TrainConfig, check_fanouts
from gcnzc.train.options import Options, option
from gcnzc.train.values import parse_bytes, parse_share
from gcnzc.train.writable import PICTURES, PREDICTIONS, check_output

GRAPH = "folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file"
RUN = "run folder that `gcnzc train` wrote"
# of ogbn-papers100M, these are a hundred billion nodes
MAX_SCALE = 1000
# architectures that Triton 3.6 and 3.7 compile for
ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)
MIN_MEMORY = 2**20


@dataclass(frozen=True, kw_only=True)
class MakeConfig(Options):
    """Write a synthetic graph, or a small real one, in OGB's layout."""

    path: Path = option("folder to write", ..., positional=True)
    kind: Literal["planted", "rmat", "digits", "typed"] = option(
        "planted communities, with a known best accuracy; an R-MAT graph with power-law degrees; a "
        "nearest-neighbour graph of handwritten digits; or a heterogeneous graph with times, 4 "
        "node types and 6 edge types, with a known best accuracy",
        "planted",
    )
    like: Literal["ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "reddit"] | None = option(
        "use the numbers of nodes, edges, features and classes of this graph"
    )
    scale: float = option(
        "with --like: multiply the numbers of nodes and edges", 1.0, above=0, most=MAX_SCALE
    )
    nodes: int = option("nodes, of all types", 100_000, least=1, most=2**50)
    edges: int = option(
        "undirected edges; with --kind typed, edges of all types", 1_000_000, least=1, most=2**50
    )
    num_features: int = option("features per node", 100, least=1)
    classes: int = option("classes", 10, least=1)
    seed: int = option("random seed", 0, least=0, most=2**63 - 1)

    def check(self) -> None:
        """See `Options`."""
        if self.kind == "typed" and self.like is not None:
            raise ValueError(
                f"--like {self.like} is a homogeneous graph, but --kind is typed\n\n"
                "hint: --nodes and --edges"
            )


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(Options):
    """Convert a graph to a prepared folder, which is memory-mapped and shared by all workers.

    SOURCE is a folder in OGB's layout, a .npz archive, a .toml that names csv or parquet tables, a
    .pt file of PyG, a prepared folder, or the name of an OGB dataset together with --download.
    """

    source: str = option("graph to prepare", ..., positional=True)
    dest: Path = option("folder to write", ..., positional=True)
    download: bool = option(
        "download the OGB dataset SOURCE first, to the folder `downloads` next to DEST", False
    )
    features: Path | None = option(
        ".npy of shape (nodes, columns) to use as features instead of those of SOURCE"
    )
    embed: int | None = option("compute so many features per node from the edges", least=1)
    feature_dtype: Literal[
        "auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"
    ] = option(
        "dtype of the stored features; auto keeps float16, bfloat16 and quantized features, and "
        "converts others to float32. float8 and int8 values are stored with scales",
        "auto",
    )
    scales: Literal["row", "columns"] = option(
        "float8 and int8: one scale per row, or one per block of 16 columns of all rows", "row"
    )
    normalize_features: bool = option(
        "divide each row of features by the sum of its absolute values", False
    )
    sparse_features: bool = option("keep sparse features sparse", False)
    pitch_bytes: int | None = option(
        "bytes from the start of one row of features to the next; 0: no padding; default: the most "
        "efficient pitch for the PCIe bus",
        least=0,
    )
    bidirected: Literal["auto", "yes", "no"] = option(
        "add the reverse of every edge, or of every edge type; auto uses the setting of SOURCE; if "
        "it has none, it adds them if all edges go from lower to higher node ids, or the reverse",
        "auto",
    )
    self_loops: Literal["keep", "add", "remove"] = option(
        "keep self loops, leave exactly one at every node, or remove all", "keep"
    )
    duplicates: Literal["auto", "keep", "remove"] = option(
        "keep or remove duplicate edges; auto uses the setting of SOURCE, or keeps them", "auto"
    )
    split: str | None = option("name or number of the split to use, if SOURCE has several")
    metric: Literal["as-is", "accuracy", "rocauc"] = option(
        "metric of node classification; as-is: that of SOURCE", "as-is"
    )
    task: Literal["as-is", "link"] = option(
        "link: hold out edges for validation and test, unless SOURCE has a split of its edges",
        "as-is",
    )
    valid_edges: float = option(
        "with --task link: fraction of the edges to hold out for validation", 0.05, least=0
    )
    test_edges: float = option(
        "with --task link: fraction of the edges to hold out for test", 0.1, least=0
    )
    seed: int = option("with --task link or --embed: random seed", 0, least=0, most=2**63 - 1)
    allow_nan: bool = option("accept features that are NaN or infinite", False)

    def check(self) -> None:
        """See `Options`."""
        if self.valid_edges + self.test_edges >= 1:
            raise ValueError(
                f"--valid-edges {self.valid_edges:g} and --test-edges {self.test_edges:g} leave no "
                "edges to train on\n\nhint: their sum is below 1"
            )
        if self.embed is not None and self.features is not None:
            raise ValueError(
                f"--embed {self.embed} with --features {self.features}\n\nhint: omit one of them"
            )


@dataclass(frozen=True, kw_only=True)
class InfoConfig(Options):
    """Print the sizes, dtypes, options and source of a graph as one JSON line."""

    data: Path = option(GRAPH, ..., positional=True)
    verify: bool = option(
        "first read and check all of the data; for a prepared folder, also the checksums", False
    )


@dataclass(frozen=True, kw_only=True)
class PredictConfig(Options):
    """Predict the classes of nodes, the scores of pairs, or embeddings of nodes.

    Uses the best model of a run and all neighbours of each node, writes a file, and prints one JSON
    line.
    """

    run: Path = option(RUN, ..., positional=True)
    data: Path | None = option(
        "folder of a graph with the same features, which may have other nodes and no labels; "
        "default: the graph of the run",
        positional=True,
    )
    out: Path = option("file to write, .csv, .csv.gz, .parquet or .npy; embeddings: .npy", ...)
    nodes: str = option(
        "nodes to predict: all; train, valid or test; or a file of ids, .csv or .parquet with a "
        "column `node`, or .npy",
        "all",
    )
    pairs: Path | None = option(
        "link prediction: file of pairs of ids, .csv or .parquet with the columns `source` and "
        "`target`, or .npy of shape (2, pairs)"
    )
    embeddings: bool = option(
        "write the output of a layer for every node instead of predictions", False
    )
    layer: int | None = option(
        "with --embeddings: the layer, from 1; default: the last hidden layer, or in link "
        "prediction the rows from which scores are computed",
        least=1,
    )
    node_type: str | None = option(
        "with --embeddings, heterogeneous graphs: type of the nodes; default: that which the model "
        "classifies, or which both ends of the predicted edges have"
    )
    probabilities: bool = option(
        "also write the probability of each class, or that a pair is an edge", False
    )
    time: str | None = option(
        "temporal runs: time of all pairs, or of the nodes of --embeddings, whose neighbours are "
        "earlier: an integer, or a date such as 2024-03-01 if the graph has a time unit; default: "
        "the column `time` of the file of pairs, or the nodes' own times, or after all edges"
    )
    fanouts: tuple[int, ...] = option(
        "heterogeneous graphs: neighbours sampled per node and edge type, one number per layer, "
        "input layer first; default: all neighbours",
        (),
        least=-1,
    )
    device: Device = option("where to compute; auto: CUDA if there is a GPU", "auto")
    scratch: Path | None = option(
        "folder for layer outputs that do not fit into memory; the same command resumes after an "
        "interruption, and deletes the folder on success"
    )
    memory: str = option(
        "with --scratch: memory for layer outputs, such as 2GB; auto: an eighth of what is free",
        "auto",
    )

    def check(self) -> None:
        """See `Options`."""
        if self.fanouts:
            check_fanouts(self.fanouts, "--fanouts")
        check_output("--out", self.out, (".npy",) if self.embeddings else PREDICTIONS)
        for name, path in (("pairs", self.pairs), ("nodes", Path(self.nodes))):
            is_file = path is not None and path.exists() and self.out.exists()
            if path is not None and is_file and self.out.samefile(path):
                raise ValueError(
                    f"--out and --{name} are the same file, {path}\n\n"
                    "hint: choose another name for the predictions"
                )
        if self.memory_bytes is not None and self.memory_bytes < MIN_MEMORY:
            raise ValueError(f"--memory must be at least 1MiB, got {self.memory}")
        for name, is_given, other, is_read in (
            ("nodes", self.nodes != "all", "pairs", self.pairs is None),
            ("embeddings", self.embeddings, "pairs", self.pairs is None),
            ("nodes", self.nodes != "all", "embeddings", not self.embeddings),
        ):
            if is_given and not is_read:
                raise ValueError(f"--{name} with --{other}\n\nhint: omit one of them")
        has_time = self.embeddings or self.pairs is not None
        for name, is_given, other, is_read in (
            ("time", self.time is not None, "pairs or --embeddings", has_time),
            ("layer", self.layer is not None, "embeddings", self.embeddings),
            ("node-type", self.node_type is not None, "embeddings", self.embeddings),
            ("memory", self.memory != "auto", "scratch", self.scratch is not None),
        ):
            if is_given and not is_read:
                raise ValueError(f"--{name} has no effect without --{other}\n\nhint: omit it")

    @property
    def memory_bytes(self) -> int | None:
        """The memory in bytes; None for the default."""
        return None if self.memory == "auto" else parse_bytes(self.memory, "--memory")


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Options):
    """Export the best model of a run as a program that torch runs without gcnzc.

    Writes a .pt2 file with torch.export, compares its outputs with the model's, and prints one JSON
    line. The program takes the blocks of a minibatch as plain tensors. Embeddings of node types
    without features are written to a file beside it, with the suffix .embeddings.npz.
    """

    run: Path = option(RUN, ..., positional=True)
    data: Path | None = option(
        "folder of a graph with the same features, on which the outputs are compared; default: the "
        "graph of the run",
        positional=True,
    )
    out: Path = option(".pt2 file to write; torch.export.load reads it", ...)

    def check(self) -> None:
        """See `Options`."""
        check_output("--out", self.out, (".pt2",), "`torch.export.load` reads it")


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Options):
    """Check this machine and its software; with --tune, find the fastest settings for it.

    Prints one JSON line. The settings are stored as a tuning profile, which `gcnzc train` uses.
    """

    data: Path | None = option(
        f"graph to tune for: {GRAPH}; default: a random graph", positional=True
    )
    tune: bool = option(
        "measure which settings load minibatches fastest, and store them as the tuning profile of "
        "this machine",
        False,
    )
    fanouts: tuple[int, ...] = option(
        "with --tune: neighbours sampled per node, one number per layer, input layer first; -1 "
        "samples all",
        (15, 10, 5),
        least=-1,
    )
    batch_size: int = option("with --tune: seed nodes per minibatch", 1024, least=1)
    row_bytes: int = option(
        "with --tune and without DATA: bytes of a node's features", 512, least=4
    )
    cache_memory: str = option(
        "with --tune: GPU memory for the feature cache: a fraction of the free memory, or bytes "
        "such as 8GB",
        "0.5",
    )
    megabytes: int = option(
        "megabytes of features that are read to measure the memory", 512, least=1
    )

    def check(self) -> None:
        """See `Options`."""
        if self.row_bytes % 4:
            raise ValueError(
                f"--row-bytes {self.row_bytes} is not a whole number of float32 elements\n\n"
                "hint: rows of ogbn-papers100M have 512 bytes, of ogbn-products 400"
            )
        check_fanouts(self.fanouts, "--fanouts")
        parse_share(self.cache_memory, "--cache-memory", "of the GPU's free memory")


@dataclass(frozen=True, kw_only=True)
class PcieConfig(Options):
    """Predict and measure how efficiently feature gathers use the PCIe bus.

    Prints one JSON line: with a GPU, the measured rates of the bus; with DATA, the predicted
    traffic of its features, with a GPU also the measured rate, and with --compile-for also the
    requests of the compiled kernel.
    """

    data: Path | None = option(f"{GRAPH}; without it, only the bus is measured", positional=True)
    split_bytes: Literal[64, 128] = option(
        "alignment in bytes at which the host splits read completions into packets (the read "
        "completion boundary of its root complex)",
        128,
    )
    megabytes: int = option("size of the page-locked memory that the GPU reads", 1024, least=16)
    compile_for: tuple[int, ...] = option(
        "architectures of GPUs, such as 80,90,100: compile the gather kernel for each, execute it "
        "on the CPU, and compare its requests with the prediction; needs DATA and Triton 3.6 or "
        "3.7, and no GPU",
        (),
    )

    def check(self) -> None:
        """See `Options`."""
        for arch in self.compile_for:
            if arch not in ARCHITECTURES:
                raise ValueError(
                    f"--compile-for: sm_{arch} is not an architecture that Triton compiles for\n\n"
                    f"hint: use some of {','.join(map(str, ARCHITECTURES))}, such as 90 for H100 "
                    "and H200"
                )
        if self.compile_for and self.data is None:
            raise ValueError(
                "--compile-for needs the features of a graph\n\n"
                "hint: `gcnzc pcie DATA --compile-for 90` counts the requests for its rows"
            )


@dataclass(frozen=True, kw_only=True)
class PlotConfig(Options):
    """Plot loss, scores and epoch times of one or more runs in one image."""

    runs: tuple[Path, ...] = option(
        f"{RUN}; the folder of --runs stands for all of its runs", ..., positional=True
    )
    out: Path | None = option(
        "image to write; default: curves.png in the folder of the run, or for several runs, "
        "comparison.png beside the first one"
    )

    def check(self) -> None:
        """See `Options`."""
        check_output("--out", self.out, PICTURES)


# by name: the options, and the function that runs the command, which is imported on use
COMMANDS: Mapping[str, tuple[type[Options], str]] = {
    "train": (TrainConfig, "gcnzc.cli.commands.train:train_command"),
    "prepare": (PrepareConfig, "gcnzc.cli.commands.data:prepare_command"),
    "make": (MakeConfig, "gcnzc.cli.commands.data:make_command"),
    "info": (InfoConfig, "gcnzc.cli.commands.data:info_command"),
    "evaluate": (EvaluateConfig, "gcnzc.cli.commands.predict:evaluate_command"),
    "predict": (PredictConfig, "gcnzc.cli.commands.predict:predict_command"),
    "export": (ExportConfig, "gcnzc.cli.commands.export:export_command"),
    "check": (CheckConfig, "gcnzc.cli.commands.check:check_command"),
    "pcie": (PcieConfig, "gcnzc.cli.commands.pcie:pcie_command"),
    "plot": (PlotConfig, "gcnzc.cli.commands.plot:plot_command"),
}
