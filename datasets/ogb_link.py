"""Read and write a link-property set in OGB's layout, without the `ogb` package.

    raw/                   as of a node-property set, but without labels; the edges to train on
    split/<type>/train.pt valid.pt test.pt      dicts of arrays, one row an edge:
        edge, edge_neg                              (E, 2) edges, and pairs that are none
        source_node, target_node, target_node_neg   instead: (E,), (E,) and (E, K)
        weight, year and the like                   not read
    task.json              ours: what OGB keeps in its own tables

The sets that are known are those of https://github.com/snap-stanford/ogb,
`ogb/linkproppred/master.csv`, but for the knowledge graphs, whose edges are of several types.

Letters: N nodes, E edges, D columns of features, K negatives for each edge.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcnzc.datasets import csvgz, pickled
from gcnzc.datasets.ogb import OTHER_KINDS, OgbGraph, Task
from gcnzc.datasets.rows import Array
from gcnzc.datasets.source import PARTS, EdgeDefaults, LinkParts
from gcnzc.datasets.store import building


@dataclass(frozen=True)
class Known:
    """What OGB's table, and its examples, say of a set."""

    metric: str
    split: str
    add_inverse_edge: bool
    symmetric: bool = False  # OGB's examples train on both directions, each edge once


KNOWN: Mapping[str, Known] = {
    "ogbl-ppa": Known("hits@100", "throughput", True),
    "ogbl-collab": Known("hits@50", "time", True),
    "ogbl-citation2": Known("mrr", "time", False, symmetric=True),
    "ogbl-ddi": Known("hits@20", "target", True),
    "ogbl-vessel": Known("auc", "spatial", False, symmetric=True),
}
# what OGB calls the metric that is `auc` here
METRICS = {"rocauc": "auc"}
HINT = f"hint: sets of one type of edges are trained on, such as {', '.join(KNOWN)}"


def is_link_layout(folder: Path) -> bool:
    """Whether `folder` looks like a link-property set in OGB's layout."""
    raw = folder / "raw"
    labelled = any((raw / f"node-label.{form}").is_file() for form in ("csv.gz", "npz"))
    return raw.is_dir() and not labelled and any(folder.glob("split/*/train.pt"))


class OgbLinkGraph(OgbGraph):
    """The graph in a folder of OGB's link-property layout; its nodes have no labels.

    Args:
        folder: holds `raw/` and `split/`.
        name: the graph's, as OGB calls it; what the folder says if None.
        split: the folder in `split/`; the usual one, or the only one, if None.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: it is a knowledge graph, has no such split, or is broken.
    """

    has_links = True

    def usual(self) -> EdgeDefaults | None:
        """Both directions if OGB adds inverse edges, or its examples do; None if nothing tells."""
        known = KNOWN.get(self.name)
        if known is not None and known.symmetric:
            return EdgeDefaults(True, "remove", f"{self.name} is trained in both directions")
        return super().usual()

    def labels(self) -> Array:
        """(N,) of -1: there are none."""
        return np.full(self.num_nodes, -1, np.int64)

    def split(self) -> dict[str, Array]:
        """Parts without nodes."""
        return {part: np.empty(0, np.int64) for part in PARTS}

    def links(self) -> LinkParts:
        """The edges of each part, and their negatives, as stored, for `clean_links`.

        Raises:
            FileNotFoundError: a part is missing.
            ValueError: a file holds something else.
        """
        folder = self.folder / "split" / self.split_name
        told = {part: _read_part(folder / f"{part}.pt") for part in PARTS}
        edges, negatives = {}, {}
        ranked = "target_node_neg" in told["test"]
        for part in PARTS:
            path, arrays = folder / f"{part}.pt", told[part]
            if "edge" in arrays:
                edges[part] = _array(arrays, "edge", path).T
            else:
                ends = [_array(arrays, f"{end}_node", path) for end in ("source", "target")]
                edges[part] = np.stack(ends)
            if part != "train":
                key = "target_node_neg" if ranked else "edge_neg"
                negatives[part] = _array(arrays, key, path)
                if not ranked:
                    negatives[part] = negatives[part].T
        metric = self.link_metric or ("mrr" if ranked else "auc")
        if ranked != (metric == "mrr"):
            raise ValueError(
                f"{folder}: the metric is {metric}, but the negatives are "
                f"{'' if ranked else 'not '}of single edges\n\nhint: mrr goes with target_node_neg"
            )
        return LinkParts(edges, negatives, metric, self.split_name)

    def _refuse_other_kinds(self) -> None:
        for path, kind in OTHER_KINDS.items():
            if (self.folder / path).exists():
                raise ValueError(f"{self.folder} is {kind}: it has {path}\n\n{HINT}")
        if (self.folder / "raw" / "edge_reltype.csv.gz").exists():
            raise ValueError(
                f"{self.folder} is a knowledge graph, whose edges are of several types: it has "
                f"raw/edge_reltype.csv.gz\n\n{HINT}"
            )

    def _find_task(self, name: str | None) -> Task:
        path = self.folder / "task.json"
        told: dict[str, Any] = {}
        if path.is_file():
            try:
                told = json.loads(path.read_text())
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path} is no JSON: {error}\n\nhint: get or write the set again"
                ) from None
        names = [name, told.get("name"), self.folder.name.replace("_", "-"), *self._released_as()]
        called = next((known for known in names if known in KNOWN), None)
        known = KNOWN.get(called or "")
        metric = told.get("eval metric", known.metric if known else None)
        self.link_metric: str | None = METRICS.get(metric or "", metric)
        inverse = told.get("add_inverse_edge")
        return Task(
            name or told.get("name") or called or self.folder.name,
            add_inverse_edge=(
                known.add_inverse_edge
                if known and inverse is None
                else inverse and inverse == "True"
            ),
            split=told.get("split", known.split if known else None),
            origin=told.get("origin"),
        )


def _read_part(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}\n\nhint: OGB's layout has it; get the set again")
    told = pickled.load(path)
    if not isinstance(told, Mapping) or not ({"edge"} <= set(told) or {"source_node"} <= set(told)):
        kind = ", a set of triples" if isinstance(told, Mapping) and "head" in told else ""
        raise ValueError(f"{path} has no edges{kind}\n\n{HINT}")
    return told


def _array(told: Mapping[str, Any], key: str, path: Path) -> Array:
    if key not in told:
        raise ValueError(f"{path} has no {key}\n\nhint: get or write the set again")
    return np.asarray(told[key])


def write(
    path: str | Path,
    edge_index: Array,
    num_nodes: int,
    links: LinkParts,
    *,
    features: Array | None = None,
    add_inverse_edge: bool = False,
    name: str | None = None,
) -> None:
    """Write a set in OGB's link-property layout, as csv.gz; the folder is there when all of it is.

    Args:
        path: the folder; must not exist.
        edge_index: (2, E) sources and destinations of the edges that messages go along.
        num_nodes: N.
        links: the parts and the negatives.
        features: (N, D).
        add_inverse_edge: each edge is stored once, and readers add its reverse.
        name: of the set; that of the folder if None.

    Raises:
        FileExistsError: `path` exists.
        RuntimeError: the disk is full.
    """
    path = Path(path)
    ranked = links.metric == "mrr"
    task = {
        "name": name or path.name,
        "task type": "link prediction",
        "eval metric": "rocauc" if links.metric == "auc" else links.metric,
        "add_inverse_edge": str(add_inverse_edge),
        "split": links.name,
    }
    with building(path) as folder:
        for part in ("raw", "processed", f"split/{links.name}"):
            (folder / part).mkdir(parents=True)
        (folder / "RELEASE_v1.txt").write_text(f"# Release note for {task['name']}\n\n### v1\n")
        (folder / "task.json").write_text(json.dumps(task, indent=1) + "\n")
        csvgz.write(folder / "raw/edge.csv.gz", [np.asarray(edge_index).T])
        csvgz.write(folder / "raw/num-node-list.csv.gz", [np.array([[num_nodes]])])
        csvgz.write(folder / "raw/num-edge-list.csv.gz", [np.array([[len(edge_index[0])]])])
        if features is not None:
            csvgz.write(folder / "raw/node-feat.csv.gz", [features])
        for part in PARTS:
            edges = np.asarray(links.edges[part], np.int64)
            others = links.negatives.get(part)
            told: dict[str, Array]
            if ranked:
                told = {"source_node": edges[0], "target_node": edges[1]}
                more = {} if others is None else {"target_node_neg": np.asarray(others, np.int64)}
            else:
                told = {"edge": np.ascontiguousarray(edges.T)}
                more = {} if others is None else {"edge_neg": np.asarray(others, np.int64).T.copy()}
            torch.save(told | more, folder / f"split/{links.name}/{part}.pt")
