"""Names, sizes, licences and default options of public graphs.

Sizes and settings of OGB's sets are those of its `master.csv` and of its pages at
https://ogb.stanford.edu/docs/nodeprop; Reddit's are GraphSAGE's (Hamilton et al., 2017); the others
were counted.
"""

import difflib
from dataclasses import dataclass
from typing import Literal

from gcnzc.datasets.source import Metric


@dataclass(frozen=True)
class Entry:
    """One graph."""

    name: str
    num_nodes: int
    num_edges: int  # as stored
    num_features: int  # 0: it has none
    num_classes: int  # of each task
    licence: str
    stored: Literal["both", "once", "directed"]  # what the edge list holds of an edge
    num_tasks: int = 1
    metric: Metric = "accuracy"
    split: str | None = None  # the folder in OGB's split/
    folders: tuple[str, ...] = ()  # other names its files go by
    download_bytes: int | None = None  # of OGB's zip, about
    # a directed graph that is nevertheless trained in both directions, each edge once
    bidirect_directed: bool = False

    @property
    def feature_bytes(self) -> int:
        """Of all features as float32."""
        return self.num_nodes * self.num_features * 4

    @property
    def edges_trained_on(self) -> int:
        """Edges once both directions are there, before equal ones are removed."""
        return self.num_edges * (2 if self.stored == "once" or self.bidirect_directed else 1)


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

# of sets of links, which are read by gcnzc.datasets.ogb_link
_LINKS = "ogbl-"
# sets of other kinds, by the first letters of their names
_OTHER_KINDS = (
    ("ogbn-mag", "heterogeneous: its nodes and edges are of several types"),
    ("mag240m", "heterogeneous: its nodes and edges are of several types"),
    ("ogbl-wikikg", "a knowledge graph: its edges are of several types"),
    ("ogbl-biokg", "a knowledge graph: its nodes and edges are of several types"),
    ("wikikg90m", "a knowledge graph: its edges are of several types"),
    ("ogbg-", "a graph-level set: many small graphs with a label each"),
    ("pcqm4m", "a graph-level set: many small graphs with a label each"),
)


def names() -> list[str]:
    """Of all graphs that are known."""
    return [entry.name for entry in ENTRIES]


def get(name: str) -> Entry:
    """The graph of this name.

    Raises:
        ValueError: none is known, or it is of a kind that is not trained on here.
    """
    refuse_other_kinds(name)
    for entry in ENTRIES:
        if entry.name.lower() == name.lower():
            return entry
    raise ValueError(f"no dataset {name}\n\nhint: {nearest(name)}")


def find(name: str, sizes: tuple[int, int] | None = None) -> Entry | None:
    """The graph whose files go by this name, if one is known and has these nodes and edges."""
    for entry in ENTRIES:
        fits = sizes in (None, (entry.num_nodes, entry.num_edges))
        if fits and name in (entry.name, *entry.folders):
            return entry
    return None


def nearest(name: str) -> str:
    """The hint for a name that is not known."""
    known = {entry.name.lower(): entry.name for entry in ENTRIES}
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(known[match] for match in close)}?"
    return f"known are {', '.join(known.values())}"


def refuse_other_kinds(name: str, links: bool = False) -> None:
    """Demand that `name` is not that of a set of another kind.

    Args:
        name: of the set.
        links: whether it may be a set of links.

    Raises:
        ValueError: it is heterogeneous, of whole graphs, or of links where these may not be.
    """
    own = [] if links else [(_LINKS, "a link-level set: it asks which edges exist")]
    for front, kind in [*_OTHER_KINDS, *own]:
        if name.lower().replace("_", "-").startswith(front):
            raise ValueError(
                f"{name} is {kind}\n\n"
                "hint: sets of one type of nodes and of edges are trained on: ogbn-arxiv, "
                "ogbn-products, ogbn-proteins, ogbn-papers100M, or your own; for links ogbl-ppa, "
                "ogbl-collab, ogbl-citation2, ogbl-ddi, ogbl-vessel"
            )
