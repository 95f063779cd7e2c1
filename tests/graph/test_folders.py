import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import output_of
from tiny_graph import tiny

from gcnzc.datasets import store
from gcnzc.datasets.rows import allocate_in_memory
from gcnzc.features.table import FeatureTable
from gcnzc.graph.load import info, load, verify
from gcnzc.graph.prepare import prepare
from gcnzc.graph.stored_features import SCALED_DTYPES


def write_meta(folder, meta):
    """As if it had been written so; the checksum is right."""
    whole = meta | {"crc32": store.checksum_of(meta)}
    (folder / "meta.json").write_text(json.dumps(whole))


def edges(dataset):
    sources, destinations = dataset.graph.coo()
    return sorted(zip(sources.tolist(), destinations.tolist(), strict=True))


def pairs(graph):
    return sorted(zip(*graph.edge_index.tolist(), strict=True))


def assert_same(found, expected):
    assert torch.equal(found.graph.indptr, expected.graph.indptr)
    assert torch.equal(found.graph.indices, expected.graph.indices)
    assert torch.equal(found.labels, expected.labels)
    assert found.split.keys() == expected.split.keys()
    assert all(torch.equal(found.split[part], expected.split[part]) for part in found.split)
    assert (found.name, found.num_classes, found.metric) == (
        expected.name,
        expected.num_classes,
        expected.metric,
    )
    assert (found.features is None) == (expected.features is None)
    if found.features is not None and expected.features is not None:
        assert torch.equal(found.features, expected.features)


@pytest.mark.parametrize("form", ["csv", "binary", "npz"])
def test_all_input_formats_give_the_same_folder(tmp_path, form):
    graph = tiny()
    if form == "npz":
        raw = graph.write_npz(tmp_path / "mine.npz")
    else:
        raw = graph.write(tmp_path / "mine", binary=form == "binary")
    read = load(raw)
    assert edges(read) == pairs(graph)
    assert (read.features.numpy() == graph.features).all()
    assert read.labels.tolist() == graph.labels.tolist()
    assert {part: ids.tolist() for part, ids in read.split.items()} == {
        part: ids.tolist() for part, ids in graph.split.items()
    }
    assert (read.name, read.num_classes, read.metric) == ("mine", 3, "accuracy")
    prepare(raw, tmp_path / "prepared")
    opened = load(tmp_path / "prepared")
    assert_same(opened, read)
    assert opened.origin == read.origin
    verify(raw)
    verify(tmp_path / "prepared")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_write_to_a_tensor_changes_the_memory_and_not_the_folder(tmp_path, monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    prepare(tiny().write(tmp_path / "raw"), tmp_path / "a")
    opened, before = load(tmp_path / "a"), load(tmp_path / "a")
    opened.labels[opened.labels > 0] = -1
    opened.split["train"][0] = 7
    assert (opened.labels <= 0).all()
    flags = map_flags(tmp_path / "a/features.npy")
    if has_gpu:
        # the driver locks the pages of a shared mapping without a copy
        assert set(flags) == {"r--s"}
    else:
        opened.features.sub_(opened.features.mean(0))
        opened.graph.indices[0] = 0
        assert abs(opened.features.mean()) < 1e-5
        assert set(flags) == {"rw-p"}
    verify(tmp_path / "a")
    assert_same(before, load(tmp_path / "a"))


def map_flags(file):
    """The access and kind of each memory mapping of a file in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if line.endswith(str(file))]


def test_a_file_larger_than_memory_is_mapped(tmp_path):
    # the kernel compares a private mapping with memory and swap together
    num_bytes = store.HEADER_BYTES + (8 << 40)
    with (tmp_path / "x").open("w+b") as file:
        file.truncate(num_bytes)
        mapped = store._map_file(file.fileno(), num_bytes, read_only=False)
        assert mapped[num_bytes - 1] == 0
        assert set(map_flags(tmp_path / "x")) == {"rw-p"}


# what is done with edges


def test_default_choices_are_made_and_recorded(tmp_path):
    graph = tiny()
    once = load(graph.write(tmp_path / "once", add_inverse_edge=True))
    reverse = sorted((target, source) for source, target in pairs(graph))
    assert edges(once) == sorted(pairs(graph) + reverse)
    assert once.origin["options"] == {
        "bidirected": True,
        "because": "add_inverse_edge is True",
        "self_loops": "keep",
        "duplicates": "keep",
    }
    arxiv = load(graph.write_npz(tmp_path / "a.npz"), name="ogbn-arxiv")
    assert edges(arxiv) == sorted(set(pairs(graph) + reverse))
    assert arxiv.num_classes == 40
    up = np.sort(graph.edge_index, axis=0)
    guessed = load(graph.but(edge_index=up).write_npz(tmp_path / "up.npz"))
    assert guessed.graph.num_edges == 400
    assert guessed.origin["options"]["because"].startswith("all edges point one way")


def test_requested_choices_are_made(tmp_path):
    graph = tiny()
    raw = graph.write(tmp_path / "raw", add_inverse_edge=True)
    plain = load(raw, bidirected=False)
    assert edges(plain) == pairs(graph)
    assert plain.origin["options"]["because"] == "asked for"
    choices = {
        "bidirected": False,
        "self_loops": "add",
        "duplicates": "remove",
    }
    looped = {(i, i) for i in range(40)} | set(pairs(graph))
    assert edges(load(raw, **choices)) == sorted(looped)
    prepare(raw, tmp_path / "a", **choices)
    assert edges(load(tmp_path / "a")) == sorted(looped)
    # a prepared folder records what changed it last
    prepare(tmp_path / "a", tmp_path / "b", self_loops="remove")
    assert edges(load(tmp_path / "b")) == sorted(e for e in looped if e[0] != e[1])
    assert load(tmp_path / "b").origin["options"]["self_loops"] == "remove"
    # asking for no directions asks nothing of equal edges, and the other way round
    raw = graph.write_npz(tmp_path / "a.npz")
    assert load(raw, name="ogbn-arxiv", bidirected=False).graph.num_edges == 200
    assert load(raw, name="ogbn-arxiv", duplicates="keep").graph.num_edges == 400


def test_the_real_arxiv_has_the_published_number_of_edges(tmp_path, shared_data):
    prepare(shared_data / "ogb/arxiv_nofeat", tmp_path / "a")
    found = load(tmp_path / "a")
    # PyG's to_undirected(ogbn-arxiv)
    assert found.graph.num_edges == 2_315_598
    assert found.features is None
    assert (found.num_classes, info(tmp_path / "a")["split"]["name"]) == (40, "time")


@pytest.mark.parametrize("name", ["cora", "tolokers"])
def test_real_datasets_agree_in_both_formats(tmp_path, shared_data, name):
    prepare(shared_data / name / f"{name}.npz", tmp_path / "npz")
    prepare(shared_data / "ogb" / name, tmp_path / "ogb")
    assert_same(load(tmp_path / "npz"), load(tmp_path / "ogb"))


# features


@pytest.mark.parametrize(
    ("columns", "pitch", "reason"),
    [
        (250, 1024, "save 8.57 % of the requests and cost 2.4 %"),
        (50, 200, "too"),
        (32, 128, "contiguous"),
    ],
)
def test_a_pitch_is_chosen_and_its_memory_reported(tmp_path, columns, pitch, reason):
    raw = tiny().write(tmp_path / "raw")
    rows = np.random.default_rng(0).random((40, columns), np.float32)
    prepare(raw, tmp_path / "chosen", features=rows)
    told = info(tmp_path / "chosen")["features"]
    assert told["pitch_bytes"] == pitch
    assert reason in told["pitch_reason"]
    found = load(tmp_path / "chosen").features
    assert found.stride(0) == pitch // 4
    assert found.data_ptr() % 128 == 0
    assert np.array_equal(found.numpy(), rows)
    prepare(raw, tmp_path / "beside", features=rows, pitch_bytes=0)
    assert info(tmp_path / "beside")["features"]["pitch_bytes"] == 4 * columns


def test_the_dtype_of_features_is_kept_or_chosen(tmp_path):
    graph = tiny()
    half = graph.features.astype(np.float16)
    raw = graph.but(features=half).write(tmp_path / "half")
    for kind, expected in ((None, torch.float16), ("float32", torch.float32)):
        prepare(raw, tmp_path / str(kind), feature_dtype=kind)
        found = load(tmp_path / str(kind)).features
        assert found.dtype == expected
        assert (found.numpy() == half).all()
    prepare(graph.write(tmp_path / "single"), tmp_path / "halved", feature_dtype="float16")
    assert (load(tmp_path / "halved").features.numpy() == half).all()
    for kind in (np.int8, np.float64, np.int64):
        raw = graph.but(features=half.astype(kind)).write(tmp_path / kind.__name__)
        found = load(raw).features
        assert found.dtype == torch.float32
    large = graph.features.copy()
    large[7, 3] = 70000
    raw = graph.but(features=large).write(tmp_path / "large")
    with pytest.raises(ValueError, match=r"70000.0 in row 7 is too large for float16\n\nhint: "):
        prepare(raw, tmp_path / "b", feature_dtype="float16", allow_nan=True)


def read_back(folder):
    """The features of a prepared folder as it reads them itself."""
    rows = store.open_folder(folder).rows
    return np.concatenate(list(rows.chunks(allocate_in_memory)))


@pytest.mark.parametrize("dtype", SCALED_DTYPES)
@pytest.mark.parametrize("scales", ["row", "columns"])
@pytest.mark.parametrize("columns", [1, 33])
def test_features_can_be_quantized(tmp_path, dtype, scales, columns, small_chunks):
    graph = tiny(num_columns=3)
    rows = np.random.default_rng(0).standard_normal((40, columns)).astype(np.float32)
    raw = graph.write(tmp_path / "raw")
    prepare(raw, tmp_path / "a", features=rows, feature_dtype=dtype, scales=scales)
    found = load(tmp_path / "a")
    assert found.features is None
    table = found.table
    assert (table.stored_dtype, table.dtype) == (getattr(torch, dtype), torch.float32)
    assert found.table is table
    per = None if scales == "row" else 16
    expected = FeatureTable.quantized(torch.from_numpy(rows), table.stored_dtype, scale_columns=per)
    assert torch.equal(table.rows.view(torch.int8), expected.rows.view(torch.int8))
    assert torch.equal(table.scales, expected.scales)
    ids = torch.arange(40)
    assert np.array_equal(read_back(tmp_path / "a"), table.gather(ids).numpy())
    verify(tmp_path / "a")
    told = info(tmp_path / "a")
    about = {"kind": "codes", "columns": columns, "dtype": dtype, "finite": True}
    about |= {"scales": scales, "scale_columns": per}
    assert told["features"].items() >= about.items()
    assert told["feature_bytes"] == sum(
        path.stat().st_size for path in (tmp_path / "a").glob("features*")
    )
    # taken over as they are, whatever the pitch; or as numbers again
    prepare(tmp_path / "a", tmp_path / "again", pitch_bytes=64)
    again = load(tmp_path / "again").table
    assert again.scale_columns == per
    assert torch.equal(again.rows.view(torch.int8), table.rows.view(torch.int8))
    assert torch.equal(again.gather(ids), table.gather(ids))
    prepare(tmp_path / "a", tmp_path / "numbers", feature_dtype="float32")
    numbers = load(tmp_path / "numbers").features
    assert torch.equal(numbers, table.gather(ids))
    scales = tmp_path / "a" / "features_scales.npy"
    damaged = np.load(scales, mmap_mode="r+")
    damaged[-1] = np.nan
    damaged.flush()
    with pytest.raises(ValueError, match=r"scales is .*NaN(.|\n)*hint: .*--verify"):
        load(tmp_path / "a")
    scales.unlink()
    with pytest.raises(FileNotFoundError, match=r"no file .*features_scales.npy(.|\n)*hint: "):
        load(tmp_path / "a")


@pytest.fixture
def small_chunks(monkeypatch):
    """So that a table of a few rows is many chunks."""
    monkeypatch.setattr("gcnzc.datasets.rows.CHUNK_BYTES", 600)


def test_features_can_be_bfloat16(tmp_path, small_chunks):
    graph = tiny(num_columns=33)
    raw = graph.write(tmp_path / "raw")
    prepare(raw, tmp_path / "a", feature_dtype="bfloat16")
    expected = torch.from_numpy(graph.features).bfloat16()
    # and kept if no other type is asked for
    prepare(tmp_path / "a", tmp_path / "again")
    for name in ("a", "again"):
        found = load(tmp_path / name)
        assert found.features.dtype == found.table.dtype == torch.bfloat16
        assert torch.equal(found.features, expected)
        assert np.array_equal(read_back(tmp_path / name), expected.float().numpy())
    large = graph.features.copy()
    large[30, 3] = -3.4e38
    prepare(raw, tmp_path / "large", features=large)
    with pytest.raises(
        ValueError, match=r"-3.39.*e\+38 in row 30 is too large for bfloat16\n\nhint: "
    ):
        prepare(tmp_path / "large", tmp_path / "b", feature_dtype="bfloat16", allow_nan=True)
    prepare(with_nan(tmp_path / "nan"), tmp_path / "n", feature_dtype="bfloat16", allow_nan=True)
    with pytest.raises(ValueError, match="features that are not finite"):
        load(tmp_path / "n")
    found = load(tmp_path / "n", allow_nan=True)
    assert found.features.isnan().nonzero().tolist() == [[11, 2]]


def test_invalid_quantizations_are_rejected(tmp_path, small_chunks):
    raw = tiny().write(tmp_path / "raw")
    nan = with_nan(tmp_path / "nan")
    for dtype in SCALED_DTYPES:
        for scales in ("row", "columns"):
            with pytest.raises(ValueError, match=r"nan in row 11, column 2(.|\n)*hint: .*--allow"):
                prepare(nan, tmp_path / "a", feature_dtype=dtype, scales=scales)
            words = rf"nan in row 11, column 2, but {dtype} with scales requires finite values"
            with pytest.raises(ValueError, match=words):
                prepare(nan, tmp_path / "a", feature_dtype=dtype, scales=scales, allow_nan=True)
    for dtype in (None, "float16", "bfloat16"):
        with pytest.raises(ValueError, match=r"cannot have scales of columns\n\nhint: "):
            prepare(raw, tmp_path / "a", feature_dtype=dtype, scales="columns")
    kept = sparse(tmp_path / "kept.npz")
    with pytest.raises(ValueError, match=r"sparse features cannot be stored as int8\n\nhint: "):
        prepare(kept, tmp_path / "a", sparse_features=True, feature_dtype="int8")
    assert not (tmp_path / "a").exists()


def test_rows_are_normalized_before_they_are_quantized(tmp_path):
    raw = tiny(num_columns=9).write(tmp_path / "raw")
    prepare(raw, tmp_path / "shares", normalize_features=True)
    prepare(tmp_path / "shares", tmp_path / "one", feature_dtype="int8")
    prepare(raw, tmp_path / "two", normalize_features=True, feature_dtype="int8")
    prepare(raw, tmp_path / "whole", feature_dtype="int8")
    prepare(tmp_path / "whole", tmp_path / "three", normalize_features=True)
    assert np.array_equal(read_back(tmp_path / "one"), read_back(tmp_path / "two"))
    numbers = load(tmp_path / "three").features
    torch.testing.assert_close(numbers.abs().sum(1), torch.ones(40))


def sparse(path, num_columns=9):
    graph = tiny(num_columns=num_columns)
    dense = np.where(graph.features > 1, graph.features, 0)
    rows, columns = np.nonzero(dense)
    return graph.but(features=None).write_npz(
        path,
        feat_data=dense[rows, columns],
        feat_indices=columns.astype(np.int32),
        feat_indptr=np.searchsorted(rows, np.arange(41)),
        feat_shape=np.array(dense.shape),
    )


def test_sparse_features_are_converted_or_kept(tmp_path):
    raw = sparse(tmp_path / "mine.npz")
    prepare(raw, tmp_path / "dense")
    prepare(raw, tmp_path / "kept", sparse_features=True)
    prepare(tmp_path / "kept", tmp_path / "again")
    dense, kept = load(tmp_path / "dense").features, load(tmp_path / "kept").features
    assert kept.layout == torch.sparse_csr
    assert torch.equal(kept.to_dense(), dense)
    assert_same(load(tmp_path / "again"), load(tmp_path / "dense"))
    assert info(tmp_path / "kept")["features"]["kind"] == "sparse"
    verify(tmp_path / "kept")
    with pytest.raises(
        ValueError, match=r"dense features, which cannot be stored as sparse\n\nhint: "
    ):
        prepare(tmp_path / "dense", tmp_path / "b", sparse_features=True)
    prepare(raw, tmp_path / "half", sparse_features=True, feature_dtype="float16")
    half = load(tmp_path / "half").features
    assert half.dtype == torch.float16


@pytest.mark.parametrize("kept", [False, True])
def test_rows_can_be_normalized_to_the_sum_1(tmp_path, kept):
    raw = sparse(tmp_path / "mine.npz")
    plain = load(raw).features
    prepare(raw, tmp_path / "a", normalize_features=True, sparse_features=kept)
    found = load(tmp_path / "a").features
    sums = plain.double().sum(1, keepdim=True)
    assert (sums == 0).any()
    expected = (plain / sums.clamp(min=1e-9)).float()
    torch.testing.assert_close(found.to_dense(), expected, rtol=1e-6, atol=0)
    assert info(tmp_path / "a")["features"]["normalized"]


def test_features_can_be_passed_separately(tmp_path):
    graph = tiny()
    raw = graph.but(features=None).write(tmp_path / "mine")
    table = np.random.default_rng(0).standard_normal((40, 7)).astype(np.float32)
    np.save(tmp_path / "table.npy", table)
    prepare(raw, tmp_path / "a", features=tmp_path / "table.npy")
    prepare(raw, tmp_path / "bare")
    prepare(tmp_path / "bare", tmp_path / "b", features=table)
    assert load(tmp_path / "bare").features is None
    for folder in ("a", "b"):
        found = load(tmp_path / folder)
        assert (found.features.numpy() == table).all()
        assert edges(found) == pairs(graph)
    assert load(tmp_path / "a").origin["features"] == str(tmp_path / "table.npy")


def test_invalid_separate_features_are_rejected(tmp_path):
    raw = tiny().write(tmp_path / "raw")
    np.save(tmp_path / "short.npy", np.zeros((39, 2)))
    np.save(tmp_path / "flat.npy", np.zeros(40))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    (tmp_path / "words.npy").write_text("words")
    for name, error, words in (
        ("short", ValueError, "has 39 rows of features for 40 nodes"),
        ("flat", ValueError, r"shape \(40,\) .* not a table of numbers"),
        ("objects", ValueError, "is not a .npy file of numbers"),
        ("words", ValueError, "is not a .npy file of numbers"),
        ("none", FileNotFoundError, "no file .*none.npy"),
    ):
        with pytest.raises(error, match=words + "(.|\n)*\n\nhint: "):
            prepare(raw, tmp_path / "a", features=tmp_path / f"{name}.npy")
    assert not (tmp_path / "a").exists()


def with_nan(path):
    graph = tiny()
    features = graph.features.copy()
    features[11, 2] = np.nan
    return graph.but(features=features).write(path)


def test_numbers_that_are_not_finite_are_accepted_only_with_the_option(tmp_path):
    raw = with_nan(tmp_path / "raw")
    for refuse in (load, verify, lambda path: prepare(path, tmp_path / "a")):
        with pytest.raises(ValueError, match=r"nan in row 11, column 2\n\nhint: .*--allow-nan"):
            refuse(raw)
    assert os.listdir(tmp_path) == ["raw"]
    prepare(raw, tmp_path / "a", allow_nan=True)
    with pytest.raises(ValueError, match=r"features that are not finite\n\nhint: .*--allow-nan"):
        load(tmp_path / "a")
    with pytest.raises(ValueError, match="features that are not finite"):
        prepare(tmp_path / "a", tmp_path / "b")
    found = load(tmp_path / "a", allow_nan=True).features
    assert np.argwhere(np.isnan(found.numpy())).tolist() == [[11, 2]]
    # other features make it a good one
    prepare(tmp_path / "a", tmp_path / "b", features=np.zeros((40, 2)))
    load(tmp_path / "b")


# labels and splits


def test_one_hot_labels_are_rejected(tmp_path):
    labels = np.eye(5, dtype=np.int64)[np.arange(40) % 5]
    raw = tiny().but(labels=labels).write_npz(tmp_path / "mine.npz")
    with pytest.raises(ValueError, match=r"one-hot(.|\n)*hint: .*argmax"):
        prepare(raw, tmp_path / "a")


def test_one_of_several_splits_can_be_chosen(tmp_path):
    masks = np.zeros((2, 40), bool)
    masks[:, :3] = True
    several = {
        f"{part}_masks": np.roll(masks, shift, axis=1)
        for part, shift in (("train", 0), ("val", 5), ("test", 10))
    }
    raw = tiny().write_npz(tmp_path / "mine.npz", **several)
    assert load(raw, split=1).split["valid"].tolist() == [5, 6, 7]
    prepare(raw, tmp_path / "a", split="0")
    assert load(tmp_path / "a").split["test"].tolist() == [10, 11, 12]
    assert load(tmp_path / "a", split=0).split["test"].tolist() == [10, 11, 12]
    with pytest.raises(ValueError, match=r"was prepared with the split 0, not 1\n\nhint: "):
        load(tmp_path / "a", split=1)


# names


def test_a_named_dataset_is_searched_next_to_the_destination(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"not in .*downloads\n\nhint: --download gets about"
    ):
        prepare("ogbn-arxiv", tmp_path / "a")
    graph = tiny()
    graph.write(tmp_path / "downloads/ogbn_arxiv_v1")
    (tmp_path / "downloads/ogbn_arxiv_v1/task.json").unlink()
    prepare("ogbn-arxiv", tmp_path / "a")
    found = load(tmp_path / "a")
    assert (found.name, found.num_classes) == ("ogbn-arxiv", 40)
    assert found.origin["options"]["duplicates"] == "remove"


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("nowhere/here", FileNotFoundError, "no folder nowhere/here"),
        ("ogbn-arxive", ValueError, "no dataset ogbn-arxive\n\nhint: did you mean ogbn-arxiv"),
        ("cora", ValueError, "cora is not a dataset of OGB"),
    ],
)
def test_missing_sources_are_reported(tmp_path, source, error, words):
    with pytest.raises(error, match=words) as caught:
        prepare(source, tmp_path / "a", download=True)
    assert "\n\nhint: " in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("look", [load, info, verify])
def test_missing_folders_are_reported(tmp_path, look):
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere\n\nhint: "):
        look(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no file .*nowhere.npz\n\nhint: "):
        look(tmp_path / "nowhere.npz")
    with pytest.raises(ValueError, match=r"neither meta.json nor raw/\n\nhint: "):
        look(tmp_path)
    (tmp_path / "words.txt").write_text("words")
    with pytest.raises(ValueError, match=r"words.txt is not a dataset\n\nhint: "):
        look(tmp_path / "words.txt")


# bad input leaves nothing


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edge_index": np.array([[0, 1], [1, 40]])}, "edge 1 has the node 40"),
        ({"split": tiny().split | {"valid": np.array([], int)}}, "the valid split is empty"),
        ({"split": tiny().split | {"valid": tiny().split["test"]}}, "is in the valid split and in"),
    ],
)
@pytest.mark.parametrize("form", ["csv", "binary", "npz"])
def test_invalid_input_leaves_no_folder(tmp_path, changes, words, form):
    graph = tiny().but(**changes)
    if form == "npz":
        raw = graph.write_npz(tmp_path / "raw")
        raw = tmp_path / "raw.npz"
    else:
        raw = graph.write(tmp_path / "raw", binary=form == "binary", num_classes=3)
    with pytest.raises(ValueError, match=words + "(.|\n)*\n\nhint: "):
        prepare(raw, tmp_path / "a")
    with pytest.raises(ValueError, match=words + "(.|\n)*\n\nhint: "):
        load(raw)
    assert os.listdir(tmp_path) == [raw.name]


def test_a_damaged_prepared_folder_is_reported_by_name(tmp_path):
    prepare(tiny().write(tmp_path / "raw"), tmp_path / "a")
    path = tmp_path / "a/indices.npy"
    data = bytearray(path.read_bytes())
    data[-1] = 0x7F
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"indices.npy has the checksum"):
        verify(tmp_path / "a")
    # a wrong edge with a right checksum is found as well
    meta = json.loads((tmp_path / "a/meta.json").read_text())
    meta["files"]["indices.npy"]["crc32"] = store.checksum(path)
    write_meta(tmp_path / "a", meta)
    with pytest.raises(ValueError, match="hint: "):
        verify(tmp_path / "a")


def put(path, place, number, dtype=np.int64):
    """Write a number into the data of a prepared folder's file."""
    data = bytearray(path.read_bytes())
    size = np.dtype(dtype).itemsize
    begin = 4096 + place * size
    data[begin : begin + size] = dtype(number).tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "number", "words"),
    [
        ("labels.npy", 3, "has the label 3, but classes are 0 to 2"),
        ("split/train.npy", 40, "the train split contains the node 40, but nodes are 0 to 39"),
        ("indptr.npy", 1, "indptr.npy goes from 1 to 200, not from 0 to 200"),
    ],
)
def test_labels_and_splits_out_of_range_are_rejected_on_opening(tmp_path, file, number, words):
    graph = tiny()
    prepare(graph.write(tmp_path / "raw"), tmp_path / "a")
    place = int(graph.split["train"][0]) if file == "labels.npy" else 0
    put(tmp_path / "a" / file, place, number)
    with pytest.raises(ValueError, match=words + "(.|\n)*\n\nhint: .*--verify"):
        load(tmp_path / "a")


def test_an_existing_folder_is_kept(tmp_path):
    prepare(tiny().write(tmp_path / "raw"), tmp_path / "a")
    with pytest.raises(FileExistsError, match=r"already exists\n\nhint: "):
        prepare(tmp_path / "raw", tmp_path / "a")
    verify(tmp_path / "a")


# info


def test_info_describes_a_folder(tmp_path):
    (tmp_path / "mapping").mkdir()
    (tmp_path / "mapping/README.md").write_text("Users.")
    raw = tiny().write(
        tmp_path / "mine", best_accuracy=0.9, origin={"seed": 4}, mapping=tmp_path / "mapping"
    )
    told = info(raw)
    assert (told["kind"], told["num_nodes"], told["num_edges"]) == ("ogb", 40, 200)
    assert told["features"] == {"kind": "dense", "columns": 5, "dtype": "float32"}
    prepare(raw, tmp_path / "a")
    prepared = info(tmp_path / "a")
    assert prepared.keys() >= told.keys()
    for key in ("name", "num_nodes", "num_classes", "metric", "best_accuracy", "origin"):
        assert prepared[key] == told[key]
    assert prepared["best_accuracy"] == 0.9
    assert prepared["origin"]["seed"] == 4
    assert prepared["feature_bytes"] == 4096 + 40 * 5 * 4
    assert prepared["disk_bytes"] == sum(
        path.stat().st_size for path in (tmp_path / "a").rglob("*.*") if path.name != "meta.json"
    )
    assert (tmp_path / "a/mapping/README.md").read_text() == "Users."
    prepare(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b/mapping/README.md").read_text() == "Users."
    json.dumps(prepared)
    assert info(tiny().write_npz(tmp_path / "c.npz"))["kind"] == "npz"


# memory, and sudden ends


MEMORY = """
import gzip, json, re, sys, threading, time
from pathlib import Path
import numpy as np
import torch
from gcnzc import load, prepare
from bench.ogb_folders import write_nodes
from gcnzc.datasets.rows import Rows

here, megabytes, form = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rows, columns = megabytes * 2560, 100

def chunks(allocate):
    block = np.arange(2560 * columns, dtype=np.float32).reshape(2560, columns) % 1000
    for _ in range(megabytes):
        yield block

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", text)[1]) >> 10

def watched(work):
    before, peak, end = anonymous(), [0], threading.Event()
    def watch():
        while not end.wait(0.005):
            peak[0] = max(peak[0], anonymous())
    thread = threading.Thread(target=watch)
    thread.start()
    work()
    end.set()
    thread.join()
    return peak[0] - before

# what any graph takes: compiled kernels, a parser's buffers
def write(path, features, nodes):
    write_nodes(path, np.arange(20).reshape(2, 10), np.arange(nodes) % 3,
                {"train": np.array([0]), "valid": np.array([1]), "test": np.array([2])},
                features=features, binary=form != "csv")
write(here / "small", np.zeros((20, 4), np.float32), 20)
prepare(here / "small", here / "small-prepared")
table = Rows(rows, columns, np.dtype(np.float32), chunks, "made")
written = watched(lambda: write(here / "raw", None if form == "csv" else table, rows))
raw = here / "raw/raw"
if form == "csv":
    # many compressed parts, one behind the other, are one gzip file
    block = next(chunks(None)).tolist()
    part = gzip.compress("".join(",".join(map(str, row)) + "\\n" for row in block).encode())
    with (raw / "node-feat.csv.gz").open("wb") as file:
        for _ in range(megabytes):
            file.write(part)
chosen = json.loads(sys.argv[4])
prepared = watched(lambda: prepare(here / "raw", here / "a", **chosen))
opened = watched(lambda: load(here / "a"))
last = load(here / "a").table.gather(torch.tensor([rows - 1]))
print(written, prepared, opened, last[0, -1].item())
"""


def memory(folder, megabytes, form, **chosen):
    """Megabytes that writing, preparing and opening a table took, and its last number."""
    printed = output_of("-c", MEMORY, folder, megabytes, form, json.dumps(chosen))
    return [float(word) for word in printed.split()]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("form", "megabytes"), [pytest.param("stored", 250, marks=pytest.mark.slow), ("csv", 40)]
)
def test_memory_does_not_grow_with_the_table(tmp_path, form, megabytes):
    written, prepared, opened, last = memory(tmp_path, megabytes, form)
    assert max(written, prepared) < 200
    assert opened < 10
    assert last == 999
