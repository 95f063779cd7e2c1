from pathlib import Path

import numpy as np
import pytest
from tiny_graph import tiny

from gcnzc.datasets import rows
from gcnzc.datasets.npz import NpzGraph
from gcnzc.datasets.rows import in_memory


def test_a_graph(tmp_path: Path) -> None:
    graph = tiny()
    found = NpzGraph(graph.write_npz(tmp_path / "mine.npz", add_inverse_edge=True))
    assert (found.name, found.num_nodes, found.num_edges) == ("mine", 40, 200)
    assert found.split_name == "standard"
    assert all((found.split()[part] == ids).all() for part, ids in graph.split.items())
    usual = found.usual()
    assert usual is not None
    assert usual.bidirected
    assert NpzGraph(graph.write_npz(tmp_path / "other.npz")).usual() is None
    assert found.features is not None
    assert graph.features is not None
    assert (np.concatenate(list(found.features.chunks(in_memory))) == graph.features).all()


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 24])
def test_sparse_features_are_made_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk_bytes)
    graph = tiny(num_columns=9)
    assert graph.features is not None
    dense = np.where(graph.features > 1, graph.features, 0)
    lines, columns = np.nonzero(dense)
    parts = {
        "feat_data": dense[lines, columns],
        "feat_indices": columns.astype(np.int32),
        "feat_indptr": np.searchsorted(lines, np.arange(41)),
        "feat_shape": np.array(dense.shape),
    }
    found = NpzGraph(graph.but(features=None).write_npz(tmp_path / "a.npz", **parts)).features
    assert found is not None
    assert (np.concatenate(list(found.chunks(in_memory))) == dense).all()
    parts["feat_indices"][5] = 9
    with pytest.raises(ValueError, match="columns 0 to 9 are named, but there are 9"):
        NpzGraph(graph.but(features=None).write_npz(tmp_path / "b.npz", **parts))
    parts["feat_indptr"][3] = 1000
    with pytest.raises(ValueError, match="offsets of the sparse rows do not rise"):
        NpzGraph(graph.but(features=None).write_npz(tmp_path / "c.npz", **parts))


def test_splits_are_chosen_by_name_or_number(tmp_path: Path) -> None:
    graph = tiny()
    masks = np.random.default_rng(1).integers(2, size=(3, 40)).astype(bool)
    several = dict.fromkeys(("train_masks", "val_masks", "test_masks"), masks)
    path = graph.write_npz(tmp_path / "a.npz", **several)
    assert NpzGraph(path).split_name == "standard"
    assert (NpzGraph(path, split="2").split()["valid"] == np.flatnonzero(masks[2])).all()
    with pytest.raises(ValueError, match="no split 3\n\nhint: it has standard, 0, 1, 2"):
        NpzGraph(path, split="3")
    made = {f"made_{part}_idx": ids for part, ids in graph.split.items()}
    path = graph.but(split={}).write_npz(tmp_path / "b.npz", **made)
    assert NpzGraph(path).split_name == "made"
    assert (NpzGraph(path).split()["test"] == graph.split["test"]).all()
    with pytest.raises(ValueError, match="has no split\n\nhint: "):
        NpzGraph(graph.but(split={}).write_npz(tmp_path / "c.npz"))


def test_the_real_ones(shared_data: Path) -> None:
    cora = NpzGraph(shared_data / "cora" / "cora.npz")
    assert (cora.num_nodes, cora.num_edges, cora.num_classes) == (2708, 10556, 7)
    assert cora.features is not None
    assert (cora.features.num_columns, cora.origin["licence"]) == (
        1433,
        "MIT (repository); data of LINQS",
    )
    tolokers = NpzGraph(shared_data / "tolokers" / "tolokers.npz", split="9")
    assert tolokers.metric == "rocauc"
    assert sum(map(len, tolokers.split().values())) == 11758
    with pytest.raises(ValueError, match="no array node_label"):
        NpzGraph(shared_data / "ecomm_temporal" / "ecomm_temporal.npz")
