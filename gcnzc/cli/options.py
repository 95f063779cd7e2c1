"""The commands and their options; those of `train` and `evaluate` are in `gcnzc.train.config`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcnzc.train.config import Device, EvaluateConfig, TrainConfig, check_fanouts
from gcnzc.train.options import Options, option
from gcnzc.train.values import parse_bytes, parse_share
from gcnzc.train.writable import PICTURES, PREDICTIONS, check_output

# of ogbn-papers100M, these are a hundred billion nodes
MAX_SCALE = 1000
# architectures that Triton 3.6 and 3.7 compile for
ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 103, 120, 121)
MIN_MEMORY = 2**20


@dataclass(frozen=True, kw_only=True)
class MakeConfig(Options):
    """Write a synthetic graph, or a small real one, in OGB's layout."""

    path: Path = option(..., positional=True)
    """folder to write"""
    kind: Literal["planted", "rmat", "digits", "typed"] = option("planted")
    """planted communities, with a known best accuracy; an R-MAT graph with power-law degrees; a
    nearest-neighbour graph of handwritten digits; or a heterogeneous graph with times, 4 node types
    and 6 edge types, with a known best accuracy"""
    like: Literal["ogbn-arxiv", "ogbn-products", "ogbn-papers100M", "reddit"] | None = option()
    """use the numbers of nodes, edges, features and classes of this graph"""
    scale: float = option(1.0, above=0, most=MAX_SCALE)
    """with --like: multiply the numbers of nodes and edges"""
    nodes: int = option(100_000, least=1, most=2**50)
    """nodes, of all types"""
    edges: int = option(1_000_000, least=1, most=2**50)
    """undirected edges; with --kind typed, edges of all types"""
    num_features: int = option(100, least=1)
    """features per node"""
    classes: int = option(10, least=1)
    """classes"""
    seed: int = option(0, least=0, most=2**63 - 1)
    """random seed"""

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
    `gcnzc help toml` lists the keys of a .toml.
    """

    source: str = option(..., positional=True)
    """graph to prepare"""
    dest: Path = option(..., positional=True)
    """folder to write"""
    download: bool = option(False)
    """download the OGB dataset SOURCE first, to the folder `downloads` next to DEST"""
    features: Path | None = option()
    """.npy of shape (nodes, columns) to use as features instead of those of SOURCE"""
    embed: int | None = option(least=1)
    """compute so many features per node from the edges"""
    feature_dtype: Literal[
        "auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"
    ] = option("auto")
    """dtype of the stored features; auto keeps float16, bfloat16 and quantized features, and
    converts others to float32. float8 and int8 values are stored with scales"""
    scales: Literal["row", "columns"] = option("row")
    """float8 and int8: one scale per row, or one per block of 16 columns of all rows"""
    normalize_features: bool = option(False)
    """divide each row of features by the sum of its absolute values"""
    sparse_features: bool = option(False)
    """keep sparse features sparse"""
    pitch_bytes: int | None = option(least=0)
    """bytes from the start of one row of features to the next; 0: no padding; default: the most
    efficient pitch for the PCIe bus"""
    bidirected: Literal["auto", "yes", "no"] = option("auto")
    """add the reverse of every edge, or of every edge type; auto uses the setting of SOURCE; if it
    has none, it adds them if all edges go from lower to higher node ids, or the reverse"""
    self_loops: Literal["keep", "add", "remove"] = option("keep")
    """keep self loops, leave exactly one at every node, or remove all"""
    duplicates: Literal["auto", "keep", "remove"] = option("auto")
    """keep or remove duplicate edges; auto uses the setting of SOURCE, or keeps them"""
    split: str | None = option()
    """name or number of the split to use, if SOURCE has several; a .toml names its column"""
    random_split: tuple[int, ...] = option((), least=1)
    """divide the nodes with labels at random: percentages of train, valid and test, such as
    60,20,20"""
    metric: Literal["as-is", "accuracy", "rocauc"] = option("as-is")
    """metric of node classification; as-is: that of SOURCE"""
    task: Literal["as-is", "link"] = option("as-is")
    """link: hold out edges for validation and test, unless SOURCE has a split of its edges"""
    valid_edges: float = option(0.05, least=0)
    """with --task link: fraction of the edges to hold out for validation"""
    test_edges: float = option(0.1, least=0)
    """with --task link: fraction of the edges to hold out for test"""
    seed: int = option(0, least=0, most=2**63 - 1)
    """with --random-split, --task link or --embed: random seed"""
    allow_nan: bool = option(False)
    """accept features that are NaN or infinite"""

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

    data: Path = option(..., positional=True)
    """folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file"""
    verify: bool = option(False)
    """first read and check all of the data; for a prepared folder, also the checksums"""


@dataclass(frozen=True, kw_only=True)
class PredictConfig(Options):
    """Predict the classes of nodes, the scores of pairs, or embeddings of nodes.

    Uses the best model of a run and all neighbours of each node, writes a file, and prints one JSON
    line.
    """

    run: Path = option(..., positional=True)
    """run folder that `gcnzc train` wrote"""
    data: Path | None = option(positional=True)
    """folder of a graph with the same features, which may have other nodes and no labels; default:
    the graph of the run"""
    out: Path = option(...)
    """file to write, .csv, .csv.gz, .parquet or .npy; embeddings: .npy"""
    nodes: str = option("all")
    """nodes to predict: all; train, valid or test; or a file of ids, .csv or .parquet with a column
    `node` or `id` or with one column of any name, or .npy"""
    pairs: Path | None = option()
    """link prediction: file of pairs of ids, .csv or .parquet with the columns `source` and
    `target`, or .npy of shape (2, pairs)"""
    embeddings: bool = option(False)
    """write the output of a layer for every node instead of predictions"""
    layer: int | None = option(least=1)
    """with --embeddings: the layer, from 1; default: the last hidden layer, or in link prediction
    the rows from which scores are computed"""
    node_type: str | None = option()
    """with --embeddings, heterogeneous graphs: type of the nodes; default: that which the model
    classifies, or which both ends of the predicted edges have"""
    probabilities: bool = option(False)
    """also write the probability of each class, or that a pair is an edge"""
    time: str | None = option()
    """temporal runs: time of all pairs, or of the nodes of --embeddings, whose neighbours are
    earlier: an integer, or a date such as 2024-03-01 if the graph has a time unit; default: the
    column `time` of the file of pairs, or the nodes' own times, or after all edges"""
    fanouts: tuple[int, ...] = option((), least=-1)
    """heterogeneous graphs: neighbours sampled per node and edge type, one number per layer, input
    layer first; default: all neighbours"""
    device: Device = option("auto")
    """where to compute; auto: CUDA if there is a GPU"""
    scratch: Path | None = option()
    """folder for layer outputs that do not fit into memory; the same command resumes after an
    interruption, and deletes the folder on success"""
    memory: str = option("auto")
    """with --scratch: memory for layer outputs, such as 2GB; auto: an eighth of what is free"""

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

    run: Path = option(..., positional=True)
    """run folder that `gcnzc train` wrote"""
    data: Path | None = option(positional=True)
    """folder of a graph with the same features, on which the outputs are compared; default: the
    graph of the run"""
    out: Path = option(...)
    """.pt2 file to write; torch.export.load reads it"""

    def check(self) -> None:
        """See `Options`."""
        check_output("--out", self.out, (".pt2",), "`torch.export.load` reads it")


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Options):
    """Check this machine and its software; with --tune, find the fastest settings for it.

    Prints one JSON line. The settings are stored as a tuning profile, which `gcnzc train` uses.
    """

    data: Path | None = option(positional=True)
    """graph to tune for: a folder, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file;
    default: a random graph"""
    tune: bool = option(False)
    """measure which settings load minibatches fastest, and store them as the tuning profile of this
    machine"""
    fanouts: tuple[int, ...] = option((15, 10, 5), least=-1)
    """with --tune: neighbours sampled per node, one number per layer, input layer first; -1 samples
    all"""
    batch_size: int = option(1024, least=1)
    """with --tune: seed nodes per minibatch"""
    row_bytes: int = option(512, least=4)
    """with --tune and without DATA: bytes of a node's features"""
    cache_memory: str = option("0.5")
    """with --tune: GPU memory for the feature cache: a fraction of the free memory, or bytes such
    as 8GB"""
    megabytes: int = option(512, least=1)
    """megabytes of features that are read to measure the memory"""

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

    data: Path | None = option(positional=True)
    """folder of a graph, prepared or in OGB's layout, or a .npz, .toml or PyG .pt file; without it,
    only the bus is measured"""
    split_bytes: Literal[64, 128] = option(128)
    """alignment in bytes at which the host splits read completions into packets (the read
    completion boundary of its root complex)"""
    megabytes: int = option(1024, least=16)
    """size of the page-locked memory that the GPU reads"""
    compile_for: tuple[int, ...] = option(())
    """architectures of GPUs, such as 80,90,100: compile the gather kernel for each, execute it on
    the CPU, and compare its requests with the prediction; needs DATA and Triton 3.6 or 3.7, and no
    GPU"""

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

    runs: tuple[Path, ...] = option(..., positional=True)
    """run folders that `gcnzc train` wrote; the folder of --runs stands for all of its runs"""
    out: Path | None = option()
    """image to write; default: curves.png in the folder of the run, or for several runs,
    comparison.png beside the first one"""

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
