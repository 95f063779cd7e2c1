"""Read link property datasets in OGB's layout, without the `ogb` package.

    raw/                   as in a node property dataset, without labels; the message-passing edges
    split/<type>/train.pt valid.pt test.pt      dicts of arrays with one row per edge:
        edge, edge_neg                              (E, 2) edges, and pairs without an edge
        source_node, target_node, target_node_neg   instead: (E,), (E,) and (E, K)
        weight, year, ...                           not read
    split/<type>/split_dict.pt                  instead: a dict of these dicts, by split
    task.json              only gcnzc: what OGB has in its master.csv

The metric and whether each edge is stored once come from `task.json`, otherwise from the
`meta_dict.pt` that `ogb.io.DatasetSaver` writes, otherwise from OGB's settings of the dataset.

Supported are the datasets of https://github.com/snap-stanford/ogb, `ogb/linkproppred/master.csv`,
except knowledge graphs, which have several edge types.

Notation: N nodes, E edges, D columns of features, K negatives for each edge.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gcnzc.datasets import pickled
from gcnzc.datasets.ogb import OTHER_KINDS, OgbGraph
from gcnzc.datasets.ogb_layout import Task, read_metadata, read_split_dict, release_names
from gcnzc.datasets.rows import Array
from gcnzc.datasets.source import SPLITS, EdgeDefaults, EdgeSplitArrays


@dataclass(frozen=True)
class Known:
    """Settings of a dataset in OGB's `master.csv` and in OGB's examples."""

    metric: str
    split: str
    add_inverse_edge: bool
    symmetric: bool = False  # OGB's examples add reverse edges and remove duplicates


KNOWN: Mapping[str, Known] = {
    "ogbl-ppa": Known("hits@100", "throughput", True),
    "ogbl-collab": Known("hits@50", "time", True),
    "ogbl-citation2": Known("mrr", "time", False, symmetric=True),
    "ogbl-ddi": Known("hits@20", "target", True),
    "ogbl-vessel": Known("auc", "spatial", False, symmetric=True),
}
# OGB's names of metrics that have another name here
METRICS = {"rocauc": "auc"}
HINT = f"hint: homogeneous datasets are supported, such as {', '.join(KNOWN)}"


class OgbLinkGraph(OgbGraph):
    """A link property dataset in OGB's layout, as a `Source`; its nodes have no labels.

    Args:
        folder: contains `raw/` and `split/`.
        name: OGB's name of the dataset; None uses the name in the folder.
        split: name of a folder in `split/`; None uses the dataset's default split, or the only one.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the dataset is a knowledge graph, has no such split, or is damaged.
    """

    has_links = True

    def edge_defaults(self) -> EdgeDefaults | None:
        """Return both directions if OGB or its examples add inverse edges; None if unknown."""
        known = KNOWN.get(self.name)
        if known is not None and known.symmetric:
            return EdgeDefaults(True, "remove", f"{self.name} is trained in both directions")
        return super().edge_defaults()

    def labels(self) -> Array:
        """Return (N,) int64 of -1, because nodes have no labels."""
        return np.full(self.num_nodes, -1, np.int64)

    def split(self) -> dict[str, Array]:
        """Return empty node splits."""
        return {part: np.empty(0, np.int64) for part in SPLITS}

    def links(self) -> EdgeSplitArrays:
        """Read the edge split as stored; `clean_edge_split` validates it.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file has no edges, or its negatives do not fit the metric.
        """
        folder = self.folder / "split" / self.split_name
        fields = _read_parts(folder)
        edges, negatives = {}, {}
        ranked = "target_node_neg" in fields["test"]
        for part, arrays in fields.items():
            where = f"{folder}: the {part} split"
            if "edge" in arrays:
                edges[part] = _array(arrays, "edge", where).T
            else:
                ends = [_array(arrays, f"{end}_node", where) for end in ("source", "target")]
                edges[part] = np.stack(ends)
            if part != "train":
                key = "target_node_neg" if ranked else "edge_neg"
                negatives[part] = _array(arrays, key, where)
                if not ranked:
                    negatives[part] = negatives[part].T
        metric = self.link_metric or ("mrr" if ranked else "auc")
        if ranked != (metric == "mrr"):
            raise ValueError(
                f"{folder}: the metric is {metric}, but the negatives are "
                f"{'' if ranked else 'not '}of single edges\n\nhint: mrr requires target_node_neg, "
                "other metrics edge_neg"
            )
        return EdgeSplitArrays(edges, negatives, metric, self.split_name)

    def _refuse_other_kinds(self) -> None:
        for path, kind in OTHER_KINDS.items():
            if (self.folder / path).exists():
                raise ValueError(f"{self.folder} is {kind}: it has {path}\n\n{HINT}")
        if (self.folder / "raw" / "edge_reltype.csv.gz").exists():
            raise ValueError(
                f"{self.folder} is a knowledge graph with several edge types: it has "
                f"raw/edge_reltype.csv.gz\n\n{HINT}"
            )

    def _find_task(self, name: str | None) -> Task:
        path, fields = read_metadata(self.folder) or (self.folder, {})
        names = [
            name,
            fields.get("name"),
            self.folder.name.replace("_", "-"),
            *release_names(self.folder),
        ]
        known_name = next((candidate for candidate in names if candidate in KNOWN), None)
        known = KNOWN.get(known_name or "")
        metric = fields.get("eval metric", known.metric if known else None)
        self.link_metric: str | None = None
        if metric is not None:
            self.link_metric = METRICS.get(str(metric), str(metric))
            if not re.fullmatch(r"auc|mrr|hits@[1-9]\d*", self.link_metric):
                raise ValueError(
                    f"{path}: unknown metric {metric}\n\nhint: supported are rocauc, mrr and hits@K"
                )
        inverse = fields.get("add_inverse_edge", known.add_inverse_edge if known else None)
        return Task(
            name or fields.get("name") or known_name or self.folder.name,
            add_inverse_edge=None if inverse is None else str(inverse) == "True",
            split=fields.get("split", known.split if known else None),
            origin=fields.get("origin"),
        )


def _read_parts(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Read the dicts of the splits, from one file or one for each."""
    whole = folder / "split_dict.pt"
    if whole.is_file():
        split = read_split_dict(whole)
        return {part: _check_part(split[part], f"{whole}: the {part} split") for part in SPLITS}
    return {part: _read_part(folder / f"{part}.pt") for part in SPLITS}


def _read_part(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path}\n\nhint: OGB's layout requires it; download the dataset again"
        )
    return _check_part(pickled.load(path), str(path))


def _check_part(fields: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(fields, Mapping) or not {"edge", "source_node"} & set(fields):
        kind = ", but triples" if isinstance(fields, Mapping) and "head" in fields else ""
        raise ValueError(f"{where} has no edges{kind}\n\n{HINT}")
    return fields


def _array(fields: Mapping[str, Any], key: str, where: str) -> Array:
    if key not in fields:
        raise ValueError(f"{where} has no {key}\n\nhint: download or write the dataset again")
    return np.asarray(fields[key])
