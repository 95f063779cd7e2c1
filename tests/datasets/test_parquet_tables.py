"""Parquet as pandas, Spark, dask and others write it gives the graph of its rows."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

import gcnzc
from gcnzc.train.prediction_files import read_times

IDS = [f"u{number}" for number in range(6)]
NODES = pd.DataFrame(
    {
        "id": IDS,
        "age": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
        "level": [3, 1, 4, 1, 5, 9],
        "label": list("yxxyyx"),
        "split": ["train", "train", "val", "val", "test", "test"],
    }
)
EDGES = pd.DataFrame({"src": [*"124503"], "dst": [*"031252"], "weight": np.arange(6.0)})
EDGES[["src", "dst"]] = "u" + EDGES[["src", "dst"]]


def prepare(folder, nodes=NODES, edges=EDGES, options=""):
    """Write tables that are not folders yet, and prepare the graph."""
    for name, table in (("nodes", nodes), ("edges", edges)):
        if isinstance(table, pd.DataFrame):
            table.to_parquet(folder / f"{name}.parquet")
        elif table is not None:
            pq.write_table(table, folder / f"{name}.parquet")
    text = '[edges]\nfile = "edges.parquet"\nbidirected = false\n[nodes]\nfile = "nodes.parquet"\n'
    (folder / "graph.toml").write_text(text + options)
    gcnzc.prepare(folder / "graph.toml", folder / "out")
    return gcnzc.load(folder / "out")


def check(data, nodes=NODES, edges=EDGES):
    """Compare every prepared value with that of pandas."""
    ids = nodes["id"].astype(str).tolist()
    names = np.array([str(n) for n in range(len(ids))]) if data.node_ids is None else data.node_ids
    row = [ids.index(name) for name in names]
    assert sorted(row) == list(range(len(ids)))
    assert data.names.features == ["age", "level"]
    expected = nodes[["age", "level"]].to_numpy(np.float32)[row]
    assert np.array_equal(data.features.numpy(), expected)
    assert data.names.classes == ["x", "y"]
    assert [data.names.classes[label] for label in data.labels] == nodes["label"].iloc[row].tolist()
    for part, word in (("train", "train"), ("valid", "val"), ("test", "test")):
        members = np.flatnonzero((nodes["split"] == word).to_numpy()[row])
        assert data.split[part].tolist() == members.tolist()
    sources, targets = (names[end.numpy()].tolist() for end in data.graph.coo())
    pairs = zip(edges["src"].astype(str), edges["dst"].astype(str), strict=True)
    assert sorted(zip(sources, targets, strict=True)) == sorted(pairs)


SHUFFLED = [3, 0, 5, 1, 4, 2]


@pytest.mark.parametrize(
    "change",
    [
        # of a table that has ids, the index is nothing
        lambda nodes, edges: (nodes.set_index(pd.Index([7, 3, 5, 0, 1, 2])), edges[::-1]),
        lambda nodes, edges: (nodes.set_index("id"), edges.set_index(["src", "dst"])),
        *(
            lambda nodes, edges, names=names: (
                nodes.set_index("id").rename_axis(names[0]),
                edges.set_index(["src", "dst"]).rename_axis(names),
            )
            for names in (["who", "b"], [None, None])
        ),
    ],
)
@pytest.mark.parametrize("first", [None, 0, 1000, 2**62])
def test_an_index_has_ids_and_no_features(change, first, tmp_path):
    nodes, edges = NODES, EDGES
    if first is not None:
        # pandas stores consecutive integers as a range
        ids = {each: first + number for number, each in enumerate(IDS)}
        nodes = NODES.assign(id=NODES["id"].map(ids))
        edges = EDGES.assign(src=EDGES["src"].map(ids), dst=EDGES["dst"].map(ids))
    check(prepare(tmp_path, *change(nodes.copy(), edges.copy())), nodes, edges)


def as_categories(nodes):
    nodes = nodes.astype(dict.fromkeys(("id", "label", "split", "level"), "category"))
    # no row has the first class
    return nodes.assign(label=nodes["label"].cat.set_categories(["a", "y", "x"]))


def with_column(name, kind):
    def change(nodes):
        table = pa.Table.from_pandas(nodes, preserve_index=False)
        place = table.column_names.index(name)
        return table.set_column(place, name, table[name].combine_chunks().cast(kind))

    return change


@pytest.mark.parametrize(
    "change",
    [
        as_categories,
        lambda nodes: nodes.assign(age=nodes["age"].map(str).map(Decimal)),
        lambda nodes: nodes.assign(age=nodes["age"].astype("float16")),
        lambda nodes: nodes.assign(id=nodes["id"].str.encode("utf-8")),
        lambda nodes: nodes.assign(label=nodes["label"].str.encode("utf-8")),
        lambda nodes: nodes.assign(split=nodes["split"].str.encode("utf-8")),
        with_column("id", pa.large_string()),
        with_column("label", pa.large_binary()),
        with_column("id", pa.dictionary(pa.int16(), pa.large_string())),
        with_column("level", pa.uint8()),
        lambda nodes: nodes.convert_dtypes(),
        lambda nodes: nodes.convert_dtypes(dtype_backend="pyarrow"),
    ],
)
def test_types_of_columns(change, tmp_path):
    check(prepare(tmp_path, change(NODES)))


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids.astype(np.uint64),
        lambda ids: ids.astype("Int64"),
        lambda ids: ids.astype("category"),
        lambda ids: ids.map(Decimal),
        lambda ids: ids.map(lambda each: Decimal(f"{each}.00")),
        lambda ids: ids.astype(float) if ids.max() < 2**53 else ids,
    ],
)
@pytest.mark.parametrize("first", [10, 2**62])
def test_integer_ids_of_any_type_are_exact(change, first, tmp_path):
    nodes = NODES.assign(id=np.arange(first, first + 6))
    edges = pd.DataFrame({"src": nodes["id"][SHUFFLED].array, "dst": nodes["id"].array})
    check(prepare(tmp_path, nodes, edges.apply(change)), nodes, edges)
    (tmp_path / "again").mkdir()
    check(prepare(tmp_path / "again", nodes.assign(id=change(nodes["id"])), edges), nodes, edges)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("id", np.array([2.0**60, *range(5)]), r"has the type double and the value 1.15\d+e\+18\n"),
        ("id", [b"\xff%d" % number for number in range(6)], r"the type binary, which is not UTF-8"),
        ("id", [[1]] * 6, r"'id' has the type list.*\n\nhint: ids, labels and parts are integers"),
        ("split", pd.date_range("2024", periods=6), r"'split' has the type timestamp"),
        ("label", [0.5, *range(5)], r"'label' has the type double and the value 0.5\n\nhint"),
        ("age", list("abcdef"), r"'age' has the type .*string, such as 'a', which is not a number"),
        ("age", [b"1"] * 6, r"'age' has the type binary, such as .*, which is not a number"),
    ],
)
def test_values_that_are_not_what_a_column_needs(column, values, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path, NODES.assign(**{column: values}))


@pytest.mark.parametrize(
    "values",
    [
        pd.array([1, None, 0, 1, None, 0], "Int64"),
        np.array([1, np.nan, 0, 1, np.nan, 0]),
        pd.Categorical(["y", None, "x", "y", None, "x"]),
        np.array(["y", None, "x", "y", None, "x"], object),
        np.array(["y", "", "x", "y", "", "x"], object),
    ],
)
def test_missing_labels(values, tmp_path):
    assert prepare(tmp_path, NODES.assign(label=values)).labels.tolist() == [1, -1, 0, 1, -1, 0]


def write_parts(path, table, name, **options):
    path.mkdir()
    for number, row in enumerate(range(0, len(table), 2)):
        table[row : row + 2].to_parquet(path / name.format(number), **options)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("part-{:05d}-3f2a-c000.snappy.parquet", ["_SUCCESS", "._SUCCESS.crc"]),
        ("part.{}.parquet", ["_metadata", "_common_metadata"]),
        ("{}_0", [".part-0.crc"]),
    ],
)
def test_folders_of_part_files(name, others, tmp_path):
    # more than ten parts: part.10 is after part.9
    nodes = pd.concat([NODES.assign(id=[f"{k}{each}" for each in IDS]) for k in "abcd"])
    edges = pd.concat([EDGES.assign(src=k + EDGES["src"], dst=k + EDGES["dst"]) for k in "abcd"])
    for path, table in (("nodes", nodes), ("edges", edges)):
        write_parts(tmp_path / f"{path}.parquet", table.reset_index(drop=True), name, index=False)
        for other in others:
            (tmp_path / f"{path}.parquet" / other).write_bytes(b"x")
    check(prepare(tmp_path, None, None), nodes, edges)


def test_ranges_of_parts_that_do_not_follow_each_other_are_ids(tmp_path):
    nodes = NODES.drop(columns="id")
    (tmp_path / "nodes.parquet").mkdir()
    for number, first in enumerate((0, 4, 2)):
        path = tmp_path / "nodes.parquet" / f"part.{number}.parquet"
        nodes[first : first + 2].to_parquet(path)
    data = prepare(tmp_path, None, pd.DataFrame({"src": [0, 1], "dst": [5, 4]}))
    assert data.features[:, 0].tolist() == NODES["age"].tolist()
    nodes[4:].to_parquet(tmp_path / "nodes.parquet" / "part.3.parquet")
    with pytest.raises(ValueError, match=r"part.3.parquet, row 0.*'__index_level_0__'.* '4'"):
        prepare(tmp_path, None, None)


def test_folders_of_key_and_value_are_columns(tmp_path):
    NODES.to_parquet(tmp_path / "nodes.parquet", partition_cols=["split", "level"], index=False)
    order = NODES.sort_values(["split", "level"])
    check(prepare(tmp_path, None), order.reset_index(drop=True))


def test_wrong_folders(tmp_path):
    write_parts(tmp_path / "nodes.parquet", NODES, "part.{}.parquet")
    NODES[:0].drop(columns="age").to_parquet(tmp_path / "nodes.parquet" / "part.4.parquet")
    with pytest.raises(ValueError, match=r"part.4.parquet has the columns id, level.*but .*part.0"):
        prepare(tmp_path, None)
    (tmp_path / "nodes.parquet" / "part.4.parquet").unlink()
    (tmp_path / "nodes.parquet" / "_delta_log").mkdir()
    with pytest.raises(ValueError, match=r"nodes.parquet is a Delta table"):
        prepare(tmp_path, None)
    (tmp_path / "nodes.parquet" / "_delta_log").rmdir()
    (tmp_path / "nodes.parquet" / "part.csv").write_text("id\n1\n")
    with pytest.raises(ValueError, match="is not a folder of Parquet files: it has the file part"):
        prepare(tmp_path, None)
    # an error in a part names it
    (tmp_path / "nodes.parquet" / "part.csv").unlink()
    (tmp_path / "edges.parquet").unlink()
    write_parts(tmp_path / "edges.parquet", EDGES.replace("u5", "eve"), "part.{}.parquet")
    with pytest.raises(ValueError, match=r"part.1.parquet, row 1, column 'src': no node has the"):
        prepare(tmp_path, None, None)


@pytest.mark.parametrize("kept", [0.9, 0.1])
def test_a_damaged_part_is_named(kept, tmp_path):
    write_parts(tmp_path / "nodes.parquet", NODES, "part.{}.parquet", compression=None)
    path = tmp_path / "nodes.parquet" / "part.1.parquet"
    data = path.read_bytes()
    # a part that is cut, and one whose footer is whole, but not the values
    for damaged in (data[: int(len(data) * kept)], data[:4] + b"\xff" * 300 + data[304:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"part.1.parquet cannot be read: .*\n\nhint: write"):
            prepare(tmp_path, None)


def test_a_filtered_table_has_no_index_among_its_features(tmp_path):
    nodes = NODES[NODES["level"] > 1]
    edges = EDGES[EDGES["src"].isin(nodes["id"]) & EDGES["dst"].isin(nodes["id"])]
    check(prepare(tmp_path, nodes, edges, 'features = ["*"]\n'), nodes.reset_index(), edges)
    # without a column of ids, the rows have those that pandas shows
    edges = pd.DataFrame({"a": [0, 5], "b": [2, 4]}, index=[7, 3])
    (tmp_path / "again").mkdir()
    data = prepare(tmp_path / "again", nodes.drop(columns="id"), edges)
    assert data.node_ids.tolist() == ["0", "2", "4", "5"]
    ends = zip(*(data.node_ids[end.numpy()] for end in data.graph.coo()), strict=True)
    assert sorted(ends) == [("0", "2"), ("5", "4")]


def test_times_of_pairs_in_parts_have_the_order_of_the_pairs(tmp_path):
    pairs = pd.DataFrame({"source": range(24), "target": range(24), "time": range(24)})
    write_parts(tmp_path / "pairs", pairs, "part.{}.parquet")
    assert read_times(tmp_path / "pairs", "s").tolist() == list(range(24))
