import numpy as np
import pytest
import scipy.sparse
from tiny_graph import rows_of, tiny

import gcnzc
from gcnzc.datasets import rows
from gcnzc.datasets.npz import NpzGraph


def test_a_graph_is_read(tmp_path):
    graph = tiny()
    found = NpzGraph(graph.write_npz(tmp_path / "mine.npz", add_inverse_edge=True))
    assert (found.name, found.num_nodes, found.num_edges) == ("mine", 40, 200)
    assert found.split_name == "standard"
    assert all((found.split()[part] == ids).all() for part, ids in graph.split.items())
    defaults = found.edge_defaults()
    assert defaults.bidirected
    assert NpzGraph(graph.write_npz(tmp_path / "other.npz")).edge_defaults() is None
    assert (rows_of(found.features) == graph.features).all()


def csr_parts(dense):
    """The arrays of sparse features."""
    csr = scipy.sparse.csr_array(dense)
    parts = {"feat_data": csr.data, "feat_indices": csr.indices, "feat_indptr": csr.indptr}
    return parts | {"feat_shape": np.array(csr.shape)}


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 24])
def test_sparse_features_are_converted_to_dense_ones(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(rows, "CHUNK_BYTES", chunk_bytes)
    graph = tiny(num_columns=9)
    dense = np.where(graph.features > 1, graph.features, 0)
    parts = csr_parts(dense)
    found = NpzGraph(graph.but(features=None).write_npz(tmp_path / "a.npz", **parts)).features
    assert (rows_of(found) == dense).all()
    parts["feat_indices"][5] = 9
    with pytest.raises(ValueError, match="column indices are from 0 to 9, but there are 9 columns"):
        NpzGraph(graph.but(features=None).write_npz(tmp_path / "b.npz", **parts))
    parts["feat_indptr"][3] = 1000
    with pytest.raises(ValueError, match="offsets of the sparse rows do not increase"):
        NpzGraph(graph.but(features=None).write_npz(tmp_path / "c.npz", **parts))


@pytest.mark.parametrize(
    ("value", "once"),
    [
        *[("False", False), ("no", False), (b"no", False), (0, False), (False, False)],
        *[("True", True), ("yes", True), (b"True", True), (1, True), ([True], True), (1.0, None)],
    ],
)
def test_add_inverse_edge_is_read_as_a_boolean(tmp_path, value, once):
    path = tiny().write_npz(tmp_path / "a.npz", add_inverse_edge=np.array(value))
    if once is not None:
        assert NpzGraph(path).edge_defaults().bidirected == once
        return
    with pytest.raises(ValueError, match=r"add_inverse_edge is 1.0, which is neither"):
        NpzGraph(path).edge_defaults()


@pytest.mark.parametrize("is_bidirected", [True, False])
def test_bidirected_is_the_name_of_the_option_and_ogbs_name_is_read_too(tmp_path, is_bidirected):
    for given in ({"bidirected": is_bidirected}, {"add_inverse_edge": is_bidirected}):
        path = tiny().write_npz(tmp_path / "a.npz", **{k: np.array(v) for k, v in given.items()})
        defaults = NpzGraph(path).edge_defaults()
        assert defaults is not None, given
        assert defaults.bidirected == is_bidirected
    both = {"bidirected": np.array(is_bidirected), "add_inverse_edge": np.array(not is_bidirected)}
    with pytest.raises(ValueError, match=r"bidirected is (.|\n)*\n\nhint: they mean the same"):
        NpzGraph(tiny().write_npz(tmp_path / "b.npz", **both)).edge_defaults()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"feat_shape": np.array([41, 9])}, r"feat_shape is \[41, 9\] .* for 40 nodes"),
        ({"feat_shape": np.array([40, 2**40])}, "rows of 1,099,511,627,776 columns"),
        ({"feat_indptr": np.zeros(40, np.int64)}, "feat_indptr has the shape"),
        ({"feat_indices": np.zeros((0, 2), np.int64)}, "the CSR arrays indptr, indices and values"),
        ({"edge_index": np.empty((2, 0), np.int64)}, r"no edges: edge_index has shape \(2, 0\)"),
        ({"node_label": np.array(3)}, "node_label is a scalar"),
    ],
)
def test_arrays_of_inconsistent_shapes_are_rejected(tmp_path, parts, words):
    whole = csr_parts(np.zeros((40, 9), np.float32))
    path = tiny().but(features=None).write_npz(tmp_path / "a.npz", **(whole | parts))
    with pytest.raises(ValueError, match=words + r"(.|\n)*\n\nhint: "):
        NpzGraph(path)


def test_splits_are_chosen_by_name_or_number(tmp_path):
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
    path = graph.but(split={}).write_npz(tmp_path / "c.npz")
    with pytest.raises(ValueError, match="the nodes have no split\n\nhint: "):
        gcnzc.load(path)
    gcnzc.prepare(path, tmp_path / "c", random_split=(60, 20, 20))
    assert len(gcnzc.load(tmp_path / "c").split["train"]) == 24


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_graph_to_predict_on_has_neither_labels_nor_splits(tmp_path, is_sparse):
    graph = tiny(num_columns=9)
    arrays = dict(np.load(graph.write_npz(tmp_path / "whole.npz")))
    kept = {key: arrays[key] for key in ("edge_index", "node_feat")}
    if is_sparse:
        kept |= csr_parts(kept.pop("node_feat"))
    np.savez(tmp_path / "bare.npz", **kept)
    bare = NpzGraph(tmp_path / "bare.npz")
    assert (bare.num_nodes, bare.split_name) == (40, "none")
    assert (bare.labels() == -1).all()
    assert not any(map(len, bare.split().values()))
    np.savez(tmp_path / "partial.npz", **kept, train_idx=arrays["train_idx"])
    with pytest.raises(ValueError, match=r"has no array node_label\n\nhint: "):
        NpzGraph(tmp_path / "partial.npz")
    with pytest.raises(ValueError, match="has no split"):
        NpzGraph(tmp_path / "bare.npz", split="standard")


def test_real_npz_files_are_read(shared_data):
    cora = NpzGraph(shared_data / "cora" / "cora.npz")
    assert (cora.num_nodes, cora.num_edges, cora.num_classes) == (2708, 10556, 7)
    assert cora.features.num_columns == 1433
    assert cora.origin["licence"] == "MIT (repository); data of LINQS"
    tolokers = NpzGraph(shared_data / "tolokers" / "tolokers.npz", split="9")
    assert tolokers.metric == "rocauc"
    assert sum(map(len, tolokers.split().values())) == 11758
    with pytest.raises(ValueError, match="no array node_label"):
        NpzGraph(shared_data / "ecomm_temporal" / "ecomm_temporal.npz")
