"""Names, sizes, licences and default options of public datasets.

Sizes and settings of OGB's datasets are from its `master.csv` and its pages at
https://ogb.stanford.edu/docs/nodeprop; Reddit's are from GraphSAGE (Hamilton et al., 2017); the
others were counted.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from gcnzc.datasets.source import Metric


@dataclass(frozen=True)
class Entry:
    """A public dataset."""

    name: str
    num_nodes: int
    num_edges: int  # as stored
    num_features: int  # columns; 0 for no features
    num_classes: int  # of each task
    licence: str
    # edge list: both directions of each undirected edge, one direction, or a directed graph
    stored: Literal["both", "once", "directed"]
    num_tasks: int = 1
    metric: Metric = "accuracy"
    split: str | None = None  # name of the folder in OGB's split/
    folders: tuple[str, ...] = ()  # other names of its files
    download_bytes: int | None = None  # approximate size of OGB's zip
    # train this directed graph with reverse edges, without duplicates
    bidirect_directed: bool = False


_AMAZON = "MIT (repositories); data of McAuley et al."
_COAUTHOR = "MIT (repositories); data of Microsoft Academic Graph, ODC-BY"

ENTRIES = (
    Entry(
        "ogbn-arxiv", 169_343, 1_166_243, 128, 40, "ODC-BY", "directed",
        split="time", folders=("ogbn_arxiv", "arxiv"), download_bytes=83_000_000,
        bidirect_directed=True,
    ),
    Entry(
        "ogbn-products", 2_449_029, 61_859_140, 100, 47, "Amazon license", "once",
        split="sales_ranking", folders=("ogbn_products", "products"),
        download_bytes=1_480_000_000,
    ),
    Entry(
        "ogbn-proteins", 132_534, 39_561_252, 0, 2, "CC-0", "once",
        num_tasks=112, metric="rocauc", split="species", folders=("ogbn_proteins", "proteins"),
        download_bytes=227_000_000,
    ),
    Entry(
        "ogbn-papers100M", 111_059_956, 1_615_685_872, 128, 172, "ODC-BY", "directed",
        split="time", folders=("ogbn_papers100M", "papers100M-bin"),
        download_bytes=60_300_000_000,
    ),
    Entry("reddit", 232_965, 114_615_892, 602, 41, "not stated; posts of reddit.com", "both"),
    Entry("cora", 2_708, 10_556, 1_433, 7, "MIT (repository); data of LINQS", "both"),
    Entry("citeseer", 3_327, 9_104, 3_703, 6, "MIT (repository); data of LINQS", "both"),
    Entry("amazon_computers", 13_752, 491_722, 767, 10, _AMAZON, "both"),
    Entry("amazon_photo", 7_650, 238_162, 745, 8, _AMAZON, "both"),
    Entry("coauthor_cs", 18_333, 163_788, 6_805, 15, _COAUTHOR, "both"),
    Entry("coauthor_physics", 34_493, 495_924, 8_415, 5, _COAUTHOR, "both"),
    Entry("tolokers", 11_758, 519_000, 10, 2, "MIT (repository)", "once", metric="rocauc"),
    Entry("github_musae", 37_700, 289_003, 4_005, 2, "MIT (repository)", "once"),
    Entry(
        "ogbn_arxiv_structure", 169_343, 1_166_243, 0, 40, "ODC-BY", "directed",
        split="time", folders=("arxiv_nofeat",), bidirect_directed=True,
    ),
)  # fmt: skip

# prefix of link property datasets, which gcnzc.datasets.ogb_link reads
_LINK_PREFIX = "ogbl-"
# heterogeneous node property datasets, which gcnzc.datasets.ogb_hetero reads
_HETERO_KIND = ("ogbn-mag", "heterogeneous: it has several node and edge types")
# unsupported datasets, by prefixes of their names
_OTHER_KINDS = (
    ("mag240m", "heterogeneous: it has several node and edge types"),
    ("ogbl-wikikg", "a knowledge graph: it has several edge types"),
    ("ogbl-biokg", "a knowledge graph: it has several node and edge types"),
    ("wikikg90m", "a knowledge graph: it has several edge types"),
    ("ogbg-", "a graph-level dataset: many small graphs with a label each"),
    ("pcqm4m", "a graph-level dataset: many small graphs with a label each"),
)


def names() -> list[str]:
    """Return the names of all datasets in the catalogue."""
    return [entry.name for entry in ENTRIES]


def get(name: str) -> Entry:
    """Return the dataset of this name, in any case.

    Raises:
        ValueError: the name is not in the catalogue, or the dataset is of an unsupported kind.
    """
    refuse_other_kinds(name)
    for entry in ENTRIES:
        if entry.name.lower() == name.lower():
            return entry
    raise ValueError(f"no dataset {name}\n\nhint: {suggest_names(name)}")


def find(name: str, sizes: tuple[int, int] | None = None) -> Entry | None:
    """Find the dataset whose name or file name is `name`.

    Args:
        name: of the dataset or its files.
        sizes: required numbers of nodes and edges; None accepts any.

    Returns:
        The entry, or None.
    """
    for entry in ENTRIES:
        fits = sizes in (None, (entry.num_nodes, entry.num_edges))
        if fits and name in (entry.name, *entry.folders):
            return entry
    return None


def suggest_names(name: str) -> str:
    """Return a hint with the names that are similar to an unknown name, or else all names."""
    known = {entry.name.lower(): entry.name for entry in ENTRIES}
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(known[match] for match in close)}?"
    return f"available datasets are {', '.join(known.values())}"


def refuse_other_kinds(name: str, links: bool = False, hetero: bool = False) -> None:
    """Check that `name` is not the name of a dataset of an unsupported kind.

    Args:
        name: of the dataset.
        links: whether link property datasets are supported.
        hetero: whether heterogeneous node property datasets are supported.

    Raises:
        ValueError: the dataset is graph-level, or has a kind whose argument is False.
    """
    link_kinds = [] if links else [(_LINK_PREFIX, "a link property dataset")]
    hetero_kinds = [] if hetero else [_HETERO_KIND]
    for prefix, kind in [*_OTHER_KINDS, *hetero_kinds, *link_kinds]:
        if name.lower().replace("_", "-").startswith(prefix):
            raise ValueError(
                f"{name} is {kind}\n\n"
                "hint: homogeneous datasets are supported: ogbn-arxiv, ogbn-products, "
                "ogbn-proteins, ogbn-papers100M, or your own; for link prediction ogbl-ppa, "
                "ogbl-collab, ogbl-citation2, ogbl-ddi, ogbl-vessel; for several node types "
                "`gcnzc prepare ogbn-mag`"
            )
