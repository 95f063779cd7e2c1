import csv
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from gcnzc.datasets import catalog


def test_ogb_datasets_agree_with_the_ogb_package():
    folders = importlib.util.find_spec("ogb").submodule_search_locations
    master = Path(folders[0], "nodeproppred/master.csv")
    with master.open() as file:
        lines = {line[0]: line[1:] for line in csv.reader(file)}
    for place, name in enumerate(lines[""]):
        if lines["is hetero"][place] == "True":
            with pytest.raises(ValueError, match="is heterogeneous"):
                catalog.get(name)
            continue
        entry = catalog.get(name)
        assert entry.num_classes == int(lines["num classes"][place])
        assert entry.num_tasks == int(lines["num tasks"][place])
        assert entry.split == lines["split"][place]
        assert (entry.stored == "once") == (lines["add_inverse_edge"][place] == "True")
        assert (entry.num_features > 0) == (lines["has_node_attr"][place] == "True")
        assert entry.metric == lines["eval metric"][place].replace("acc", "accuracy")
        assert entry.folders == (name.replace("-", "_"), lines["download_name"][place])


def test_sizes_agree_with_the_files(shared_data):
    for path in sorted(shared_data.glob("*/*.npz")):
        entry = catalog.find(path.stem)
        if entry is None:
            assert path.stem == "ecomm_temporal"
            continue
        with np.load(path) as archive:
            labels = archive["node_label"]
            assert entry.num_nodes == len(labels)
            assert entry.num_edges == archive["edge_index"].shape[1]
            assert entry.num_classes == labels.max() + 1
            assert (entry.stored == "once") == archive["add_inverse_edge"]
            columns = archive["feat_shape"][1] if "feat_shape" in archive else 0
            if "node_feat" in archive:
                columns = archive["node_feat"].shape[1]
            assert entry.num_features == columns


def test_names_are_unique_and_found():
    names = catalog.names()
    assert len(set(names)) == len(names)
    for entry in catalog.ENTRIES:
        for name in (entry.name, *entry.folders):
            assert catalog.find(name) is entry
            assert catalog.find(name, (entry.num_nodes, entry.num_edges)) is entry
            assert catalog.find(name, (entry.num_nodes, 1)) is None
    assert catalog.get("OGBN-Arxiv").name == "ogbn-arxiv"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ogbn-arxive", "did you mean ogbn-arxiv"),
        ("papers100M", "did you mean ogbn-papers100M"),
        ("Coar", "did you mean cora"),
        ("xyz", "available datasets are ogbn-arxiv, ogbn-products"),
    ],
)
def test_the_nearest_names_are_suggested(name, hint):
    with pytest.raises(ValueError, match=f"no dataset {name}\n\nhint: {hint}"):
        catalog.get(name)
