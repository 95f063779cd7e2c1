"""Graphs in csv and parquet files, which a TOML file describes."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest
import torch

import gcnzc
from gcnzc.cli import main
from gcnzc.datasets.names import NamesFolder, read_names
from gcnzc.datasets.store import read_meta
from gcnzc.graph.load import verify

NODES = """\
name,age,x1,x2,kind,part,note
ann,31,0.5,1,cat,train,"a
note"
bob,42,1.5,2,dog,train,

"c,d",53,2.5,3,cat,val,
007,64,3.5,4,,test,
7,75,4.5,5,dog,test,
"""
EDGES = """\
from,to,weight
ann,bob,1
bob,"c,d",2
"c,d",007,3
007,7,4
"""
OPTIONS = """\
name = "people"

[edges]
file = "edges.csv"
bidirected = true

[nodes]
file = "nodes.csv"
id = "name"
features = ["age", "x*"]
label = "kind"
split = "part"
"""
PLAIN = '[edges]\nfile = "edges.csv"\n[nodes]\nfile = "nodes.csv"\n'
FEATURES = [[31 + 11 * i, i + 0.5, i + 1] for i in range(5)]


def names_in(folder):
    return read_names(NamesFolder.find(folder, read_meta(folder)["files"]))


def write(folder, *, options=OPTIONS, nodes=NODES, edges=EDGES):
    folder.mkdir(exist_ok=True)
    (folder / "graph.toml").write_text(options)
    (folder / "nodes.csv").write_text(nodes)
    (folder / "edges.csv").write_text(edges)
    return folder / "graph.toml"


def prepare(path, dest, **options):
    gcnzc.prepare(path, dest, **options)
    verify(dest)
    return gcnzc.load(dest)


def split_of(data):
    return [data.split[part].tolist() for part in ("train", "valid", "test")]


def check_people(data):
    assert (data.name, data.num_classes, data.graph.num_edges) == ("people", 2, 8)
    assert data.labels.tolist() == [0, 1, 0, -1, 1]
    assert split_of(data) == [[0, 1], [2], [4]]
    assert torch.equal(data.features, torch.tensor(FEATURES))
    assert data.graph.indices.tolist() == [1, 0, 2, 1, 3, 2, 4, 3]


def test_damaged_names_are_reported(tmp_path):
    gcnzc.prepare(write(tmp_path / "in"), tmp_path / "data")
    for file, attribute in (("nodes.csv", "node_ids"), ("classes.csv", "names")):
        path = tmp_path / "data" / "mapping" / file
        path.write_bytes(path.read_bytes()[:-2] + b"!\n")
        with pytest.raises(ValueError, match=f"{file} is damaged: its checksum"):
            getattr(gcnzc.load(tmp_path / "data"), attribute)


def test_names_are_those_of_the_loaded_folder(tmp_path, monkeypatch):
    gcnzc.prepare(write(tmp_path / "in"), tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    data, moved, other = (gcnzc.load("data") for _ in range(3))
    ids = gcnzc.load("data").node_ids.tolist()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert data.node_ids.tolist() == ids
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"no file .*nodes\.csv(?s:.*)hint: was the folder"):
        moved.node_ids  # noqa: B018
    # prepared again: the ids would be those of other nodes
    others = pd.read_csv(tmp_path / "in" / "nodes.csv")[::-1]
    others.to_csv(tmp_path / "in" / "nodes.csv", index=False)
    gcnzc.prepare(tmp_path / "in" / "graph.toml", tmp_path / "data")
    with pytest.raises(ValueError, match=r"nodes\.csv is damaged: its checksum"):
        other.node_ids  # noqa: B018


def test_names_are_numbered_and_saved(tmp_path, capsys):
    path = write(tmp_path / "in")
    assert main(["prepare", str(path), str(tmp_path / "data")]) == 0
    out, err = capsys.readouterr()
    check_people(gcnzc.load(tmp_path / "data"))
    verify(tmp_path / "data")
    assert "columns that are not used: weight of edges.csv, note of nodes.csv" in err
    assert "1 of 5 labels are missing; 1 of these nodes were removed from the splits" in err
    assert json.loads(out)["split"]["dropped_without_label"]["test"] == 1
    names = names_in(tmp_path / "data")
    assert names.nodes.tolist() == ["ann", "bob", "c,d", "007", "7"]
    assert (names.classes, names.features) == (["cat", "dog"], ["age", "x1", "x2"])
    first = (tmp_path / "data/mapping/nodes.csv").read_text().splitlines()[:2]
    assert first == ["node,id", "0,ann"]
    # other features have no names
    np.save(tmp_path / "x.npy", np.ones((5, 2)))
    again = prepare(tmp_path / "data", tmp_path / "again", features=tmp_path / "x.npy")
    assert again.features.shape == (5, 2)
    assert names_in(tmp_path / "again").features is None
    assert names_in(tmp_path / "again").classes == ["cat", "dog"]


def test_labelled_nodes_are_divided_at_random(tmp_path, capsys):
    """As the key and the flag say; the order of nodes with names does not matter."""
    plain = OPTIONS.replace('split = "part"\n', "")
    nodes = "name,age,x1,x2,kind\n" + "".join(
        f"n{i},{i},0,1,{'cat' if i % 3 else ''}\n" for i in range(60)
    )
    edges = "from,to\nn1,n2\nn2,n0\n"
    path = write(tmp_path / "a", options=plain, nodes=nodes, edges=edges)
    words = ["prepare", str(path), str(tmp_path / "flag"), "--random-split", "50,25,20"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["split"]["percentages"] == [50, 25, 20]
    flag = gcnzc.load(tmp_path / "flag")
    sizes = {part: len(ids) for part, ids in flag.split.items()}
    assert sizes == {"train": 20, "valid": 10, "test": 8}
    assert all((flag.labels[ids] >= 0).all() for ids in flag.split.values())
    assert len(torch.cat([*flag.split.values()]).unique()) == 38
    head, *rows = nodes.splitlines(keepends=True)
    other = write(
        tmp_path / "b",
        options=plain + "random_split = [50, 25, 20]\n",
        nodes=head + "".join(reversed(rows)),
        edges=edges,
    )
    key = gcnzc.load(other)
    for part, ids in flag.split.items():
        assert {*flag.node_ids[ids]} == {*key.node_ids[key.split[part]]}
    # a prepared folder, and arrays with masks, have another split
    again = prepare(tmp_path / "flag", tmp_path / "again", random_split=(60, 20, 20), seed=1)
    assert again.origin["split"]["seed"] == 1
    assert len(again.split["train"]) == 24
    with pytest.raises(ValueError, match="replaces the split"):
        gcnzc.prepare(path, tmp_path / "no", random_split=(60, 20, 20), split="standard")


def test_edges_may_be_kept_in_one_direction(tmp_path):
    options = OPTIONS.replace("bidirected = true", "bidirected = false")
    assert prepare(write(tmp_path / "in", options=options), tmp_path / "one").graph.num_edges == 4
    path = write(tmp_path / "in", options=OPTIONS.replace("bidirected", "directed"))
    with pytest.raises(ValueError, match=r"no key named 'directed'(.|\n)*did you mean bidirected"):
        gcnzc.prepare(path, tmp_path / "no")


def test_gzip_semicolons_and_files_without_header(tmp_path):
    options = OPTIONS.replace('edges.csv"', 'edges.txt.gz"\nsource = 0\ntarget = 1\nheader = false')
    options = options.replace('nodes.csv"', 'nodes.csv"\nseparator = ";"')
    nodes = NODES.replace(",", ";").replace("c;d", "c,d")
    path = write(tmp_path / "in", options=options, nodes=nodes)
    edges = EDGES.partition("\n")[2]
    (tmp_path / "in/edges.txt.gz").write_bytes(gzip.compress(edges.encode("utf-8-sig")))
    check_people(prepare(path, tmp_path / "data"))


def test_parquet_gives_what_csv_gives(tmp_path):
    options = OPTIONS.replace(".csv", ".parquet")
    path = write(tmp_path / "in", options=options)
    (tmp_path / "in/nodes.parquet").touch()
    (tmp_path / "in/edges.parquet").touch()
    with pytest.raises(ValueError, match=r"edges.parquet cannot be read: .*\n\nhint: "):
        gcnzc.prepare(path, tmp_path / "data")
    texts = dict.fromkeys(("name", "from", "to"), str)
    for file in ("nodes", "edges"):
        table = pd.read_csv(tmp_path / f"in/{file}.csv", dtype=texts)
        table.to_parquet(tmp_path / f"in/{file}.parquet")
    check_people(prepare(path, tmp_path / "data"))
    integers = pd.DataFrame({"source": [0, 1, 2], "target": [1, 2, 0], "w": [0.5, 1, 2]})
    integers.to_parquet(tmp_path / "in/edges.parquet")
    np.save(tmp_path / "in/x.npy", np.eye(3))
    path.write_text('[edges]\nfile = "edges.parquet"\n[nodes]\nfeatures = "x.npy"\n')
    assert prepare(path, tmp_path / "integers").graph.num_edges == 3


@pytest.mark.parametrize("kind", [bool, int, str])
def test_parquet_tables_have_masks(tmp_path, kind):
    folder = tmp_path / "in"
    folder.mkdir()
    yes, no = ("yes", "no") if kind is str else (kind(1), kind(0))
    nodes = pd.DataFrame({"id": [2, 0, 1], "y": [0, 1, 0]})
    for part, row in (("train", 1), ("val", 2), ("test", 0)):
        nodes[f"is_{part}"] = [yes if row == place else no for place in range(3)]
    nodes.to_parquet(folder / "nodes.parquet")
    pd.DataFrame({"source": [0, 1], "target": [1, 2]}).to_parquet(folder / "edges.parquet")
    path = folder / "graph.toml"
    path.write_text(PLAIN.replace(".csv", ".parquet"))
    assert split_of(prepare(path, tmp_path / "data")) == [[0], [1], [2]]
    # a missing value is neither true nor false
    nodes["is_train"] = [no, yes, None]
    nodes.to_parquet(folder / "nodes.parquet")
    with pytest.raises(ValueError, match=r"nodes.parquet, row 2, column 'is_train'.*\n\nhint: "):
        prepare(path, tmp_path / "damaged")


def test_ids_that_are_the_numbers_need_no_names(tmp_path):
    nodes = "id,a,y,is_train,is_val,is_test\n2,2.5,0,0,0,1\n0,0.5,1,1,0,0\n1,1.5,0,0,1,0\n"
    path = write(tmp_path / "in", options=PLAIN, nodes=nodes, edges="u,v\n0,1\n1,2\n")
    data = prepare(path, tmp_path / "data")
    assert data.features[:, 0].tolist() == [0.5, 1.5, 2.5]
    assert data.labels.tolist() == [1, 0, 0]
    assert split_of(data) == [[0], [1], [2]]
    assert names_in(tmp_path / "data").nodes is None
    path.write_text(PLAIN + 'features = "x.npy"\n')
    np.save(tmp_path / "in/x.npy", np.eye(3))
    with pytest.raises(ValueError, match=r"cannot determine the row order of .*x.npy: by id"):
        gcnzc.prepare(path, tmp_path / "again")


def test_edges_alone_make_a_graph_to_predict_on(tmp_path):
    options, edges = '[edges]\nfile = "edges.csv"\n', "a,b\n30,4\n4,100\n"
    path = write(tmp_path / "in", options=options, edges=edges)
    assert prepare(path, tmp_path / "data").graph.indices.tolist() == [1, 0]
    assert names_in(tmp_path / "data").nodes.tolist() == ["4", "30", "100"]


def test_classes_have_the_order_that_is_given(tmp_path):
    options = OPTIONS + 'classes = ["dog", "bird", "cat"]\n'
    data = prepare(write(tmp_path / "in", options=options), tmp_path / "data")
    assert data.labels.tolist() == [2, 0, 2, -1, 0]
    assert data.num_classes == 3
    tasks = "id,x,a,b,split\n0,1,0,1,train\n1,1,1,,val\n2,1,1,0,test\n"
    options = PLAIN + 'label = ["a", "b"]\n'
    path = write(tmp_path / "in", options=options, nodes=tasks, edges="u,v\n0,1\n")
    data = prepare(path, tmp_path / "tasks")
    assert data.labels.shape == (3, 2)
    assert (data.metric, int(data.labels.isnan().sum())) == ("rocauc", 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        # the file that describes the tables
        ({"options": "edges = ="}, r"is not TOML: .*line 1"),
        ({"options": OPTIONS + 'lable = "x"\n'}, r"line 13: no key named 'lable' in \[nodes\]"),
        ({"options": "[nodes]\n"}, "names no file of edges"),
        ({"options": '[edges]\nfile = "edges.csv"\n[nodes]\nid = "x"\n'}, "line 4: id names a col"),
        ({"options": OPTIONS.replace("edges.csv", "e.csv")}, "no file .*e.csv"),
        ({"options": OPTIONS.replace("edges.csv", "e.xls")}, "e.xls is not a table"),
        ({"options": OPTIONS.replace('"kind"', '"sort"')}, "no column 'sort', which label in"),
        ({"options": OPTIONS.replace('"x*"', '"z*"')}, r"no column 'z\*', which features"),
        ({"options": OPTIONS.replace('"x*"', '"kind"')}, "the column 'kind' is not a feature"),
        ({"options": OPTIONS.replace('"x*"', '"note"')}, "line 2, column 'note': 'a\\\\nnote' is"),
        ({"options": OPTIONS.replace('label = "kind"', 'label = "part"')}, "'part' has two roles"),
        ({"options": OPTIONS.replace('split = "part"\n', "")}, "the nodes have no split"),
        ({"options": PLAIN, "nodes": "id,is_train\n"}, "has masks is_train, but none of valid, t"),
        ({"options": OPTIONS + "random_split = [60, 20]\n"}, r"random_split is \[60, 20\]"),
        ({"options": OPTIONS + "random_split = [6, 2, 2]\n"}, "line 13: random_split, but also"),
        ({"nodes": NODES.replace("x2", "x1")}, "nodes.csv has several columns 'x1'"),
        ({"options": OPTIONS + 'classes = ["cat", "d"]\n'}, "line 4, column 'kind': 'dog' is not"),
        # ids
        ({"edges": EDGES + "eve,ann,5\n"}, "edges.csv, line 6, column 'from': no node has the id"),
        ({"edges": EDGES + "ann,,5\n"}, "edges.csv, line 6, column 'to': the id is missing"),
        ({"edges": EDGES + "ann,bob\n"}, "edges.csv, line 6: 2 cells, but there are 3 columns"),
        ({"edges": "from,to\nann,bob,1\n"}, "edges.csv, line 2: 3 cells, but there are 2 columns"),
        ({"edges": EDGES.replace("from,to", "a,b")}, "cannot determine the endpoint columns"),
        ({"edges": "from,to\n"}, "edges.csv has no rows"),
        ({"nodes": NODES + "bob,1,1,1,cat,,\n"}, "line 9, column 'name': the id 'bob' is also in "),
        # values
        ({"nodes": NODES.replace("2.5", "")}, "line 6, column 'x1': nan"),
        ({"nodes": NODES.replace("2.5", "1e300")}, r"line 6, column 'x1': 1e\+300 .*\n\nhint: sc"),
        ({"nodes": NODES.replace("2.5", "two")}, "line 6, column 'x1': 'two' is not a number"),
        ({"nodes": NODES.replace("cat", "0.5").replace("dog", "1")}, "label '0.5' is not a class"),
        ({"nodes": NODES.replace("val", "vale")}, "line 6, column 'part': 'vale' is not a part"),
        ({"nodes": NODES.replace("ann", "\udce9")}, "nodes.csv is not UTF-8"),
    ],
)
def test_nothing_is_dropped_silently(changed, message, tmp_path):
    given = {key: text for key, text in changed.items() if "\udce9" not in text}
    path = write(tmp_path / "in", **given)
    if given != changed:
        (tmp_path / "in/nodes.csv").write_bytes(changed["nodes"].encode(errors="surrogateescape"))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        gcnzc.prepare(path, tmp_path / "data")
    assert "\n\nhint: " in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["in"]


COUNTRIES = """\
id,x,label,split
NA,1,NA,train
DE,2,EU,val
null,3,N/A,train
None,-nan,,val
nan,NA,None,test
-1,6,-1,test
"""


def test_only_empty_cells_and_listed_texts_are_missing_among_texts(tmp_path):
    edges = "source,target\nNA,DE\nnull,None\nnan,-1\n"
    path = write(tmp_path / "in", options=PLAIN, nodes=COUNTRIES, edges=edges)
    gcnzc.prepare(path, tmp_path / "data", allow_nan=True)
    data = gcnzc.load(tmp_path / "data", allow_nan=True)
    assert data.node_ids.tolist() == ["NA", "DE", "null", "None", "nan", "-1"]
    assert data.names.classes == ["-1", "EU", "N/A", "NA", "None"]
    assert data.labels.tolist() == [3, 1, 2, -1, 4, 0]
    # columns of numbers keep their list
    assert data.features[:, 0].isnan().tolist() == [False, False, False, True, True, False]
    path.write_text(PLAIN + 'missing = ["N/A", "None"]\n')
    gcnzc.prepare(path, tmp_path / "listed", allow_nan=True)
    data = gcnzc.load(tmp_path / "listed", allow_nan=True)
    assert (data.names.classes, data.labels.tolist()) == (["-1", "EU", "NA"], [2, 1, -1, -1, -1, 0])


def test_missing_numbers_among_labels_and_missing_words_of_a_split(tmp_path):
    nodes = "id,x,label,split\n0,1,0,train\n1,1,255.0,train\n2,1,NA,val\n3,1,1,val\n4,1,-100,test\n"
    nodes += "5,1,0,test\n6,1,1,not used\n"
    path = write(tmp_path / "in", options=PLAIN, nodes=nodes, edges="u,v\n0,1\n")
    with pytest.raises(ValueError, match=r"'-100' is not a class(.|\n)*missing = \[\"-100\"\]"):
        gcnzc.prepare(path, tmp_path / "data")
    path.write_text(PLAIN + "missing = [255, -100]\n")
    with pytest.raises(ValueError, match=r"'not used' is not a part(.|\n)*missing in \[nodes\]"):
        gcnzc.prepare(path, tmp_path / "data")
    path.write_text(PLAIN + 'missing = [255, -100, "not used"]\n')
    data = prepare(path, tmp_path / "data")
    assert data.labels.tolist() == [0, -1, -1, 1, -1, 0, 1]
    assert split_of(data) == [[0], [3], [5]]
