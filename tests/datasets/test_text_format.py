"""Lists of edges as SNAP, KONECT, networkrepository and others publish them."""

import gzip

import numpy as np
import pytest

import gcnzc
from gcnzc.datasets import text_tables
from gcnzc.datasets.table_graph import TableGraph

SNAP = """\
# Directed graph (each unordered pair of nodes is saved once): web-Google.txt
# Webgraph from the Google programming contest, 2002
# Nodes: 4 Edges: 3
# FromNodeId\tToNodeId
0\t11342
0\t824020
11342\t0
"""
MATRIX = "%%MatrixMarket matrix coordinate {} symmetric\n%----\n% UF Sparse\n3 3 3\n"
TRIANGLE = [("1", "2"), ("1", "3"), ("2", "3")]
NAMES = [("ann", "bob"), ("bob", "cid")]
LINKS = [("0", "11342"), ("0", "824020"), ("11342", "0")]


def read(folder, text, file="edges.txt", options=""):
    data = text.encode()
    (folder / file).write_bytes(gzip.compress(data) if file.endswith(".gz") else data)
    (folder / "graph.toml").write_text(f'[edges]\nfile = "{file}"\n{options}\n')
    return TableGraph(folder / "graph.toml")


def edges(graph):
    """Return the edges by the ids in the file."""
    names = graph.mapping.nodes
    sources, targets = (end if names is None else names[end] for end in graph._ends)
    return [(str(a), str(b)) for a, b in zip(sources, targets, strict=True)]


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("web.txt", SNAP, LINKS),
        ("web.txt.gz", SNAP.replace("\n", "\r\n"), LINKS),
        ("out.zachary", "% sym unweighted\n% 3 3 3\n1 2 \n1 3 \n2 3 \n", TRIANGLE),
        ("out.wall", "% asym weighted\n1 2 1 1082\n1   3\t2\t1083\n2\t3 5 1084\n", TRIANGLE),
        ("soc.edges", "% sym unweighted\n1 2\n1 3\n2 3\n", TRIANGLE),
        ("soc.edges", "1,2,0.5,100\n1,3,1,101\n2,3,1e-3,102\n", TRIANGLE),
        ("soc.edges", "1 2\n% later\n1 3\n# and so on\n2 3", TRIANGLE),
        ("soc.mtx", MATRIX.format("pattern") + "1 2\n1 3\n2 3\n", TRIANGLE),
        ("soc.mtx.gz", MATRIX.format("real") + "1 2 0.5\n1 3 1e-3\n2 3 2\n", TRIANGLE),
        ("soc.mtx", "% sizes\n3 3 3\n1 2\n1 3\n2 3\n", TRIANGLE),
        ("soc.mtx", "3 3 3\n\n1 2\n1 3\n2 3\n", TRIANGLE),
        ("soc.mtx", "3 3 3\n% the entries:\n1 2\n1 3\n2 3\n", TRIANGLE),
        # the names of all columns are in the comment above the first row
        ("a.txt", "# by hand\n#time source target\n7 1 2\n8 1 3\n9 2 3\n", TRIANGLE),
        ("a.txt", "% Dst Time Src\n2\t7\t1\n3\t8\t1\n3\t9\t2\n", TRIANGLE),
        ("a.txt", "# time, source, target\n7 1 2\n8 1 3\n9 2 3\n", TRIANGLE),
        ("a.txt", "# from 1 to\n1 2\n1 3\n2 3\n", TRIANGLE),
        ("a.csv", "person,friend\n1,2\n1,3\n2,3\n", TRIANGLE),
        ("soc.txt", MATRIX.format("pattern") + "1 2\n1 3\n2 3\n", TRIANGLE),
        ("a.txt", "\ufeff\n # indented\n\n  1   2\n1 3\n\n 2 3\n", TRIANGLE),
        ("a.csv", "1,2\n1,3\n2,3\n", TRIANGLE),
        ("a.csv", "source target\n1 2\n1 3\n2 3\n", TRIANGLE),
        ("a.csv", "Source;Target;Type\nann;bob;a b\nbob;cid;c\n", NAMES),
        ("a.csv", "# exported\nsource,target,note\nann,bob,#1\nbob,cid,\n", NAMES),
        ("a.txt", "source|target\nann|bob\nbob|cid\n", NAMES),
        ("a.txt", "from to weight\nann bob 1\nbob cid 2\n", NAMES),
        ("a.txt", "# of 2024 May\nfrom to w\nann bob 1\n# of June and July\nbob cid 2\n", NAMES),
        ("a.txt", "% c\nfrom to\n#a bob\nbob cid\n", [("#a", "bob"), ("bob", "cid")]),
        ("a.txt", "source\ttarget\nAda, NY\tBow, MA\n", [("Ada, NY", "Bow, MA")]),
        ("a.csv", 'source,target\n"#a",b\n"c#d","%e"\n', [("#a", "b"), ("c#d", "%e")]),
        ("a.csv", "source,target\n#a,b\nc#d,%e\n", [("#a", "b"), ("c#d", "%e")]),
        # a line within a text in quotes
        ("a.csv", 'source,target,note\nann,bob,"a\n#b"\nbob,cid,\n', NAMES),
        ("a.csv", '# c\nsource,target,note\nann,bob,"a\n#b"\n# c\nbob,cid,"#"\n', NAMES),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, text_tables.BLOCK_BYTES])
def test_published_lists_of_edges(file, text, expected, block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(text_tables, "BLOCK_BYTES", block_bytes)
    graph = read(tmp_path, text, file)
    assert edges(graph) == expected
    # an id that no line has, such as 0, is no node
    assert graph.num_nodes == len({each for pair in expected for each in pair})


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.csv", "#source,target\nann,bob\n", r"'#source,target' may be a row(.|\n)*hint: comm"),
        ("a.csv", "#a,b\n# exported\nann,bob\n", "the comment '#a,b' may be a row"),
        ("a.el", "ann bob\nbob cid\n", "the first line, ann bob, may be an edge or the names"),
        ("a.csv", "ann,bob\n1,2\nbob,cid\n", "the first line, ann,bob, may be an edge"),
        ("a.txt", "ann bob may\nbob cid may\n", "if the first line is an edge, set header = false"),
        ("a.csv", "# c\nsource,target\n#a,b\nc,d\n", "the line '#a,b' may be a row or a comment"),
        ("a.csv", "#a,b\n#c,d\n", r"is empty but for comments\n\nhint: comment = \"\" reads"),
        ("out.a", "% bip unweighted\n1 1\n1 2\n", "has edges between two kinds of nodes"),
        ("a.mtx", MATRIX.format("pattern") + "1 2\n", "has 1 entries, but line 4 says 3"),
        ("a.mtx", "3 4 2\n1 2\n3 4\n", "has edges between two kinds of nodes"),
        ("a.mtx", "1 2\n2 3\n", "line 1: '1 2' does not have the sizes of a sparse m"),
        ("a.mtx", "%%MatrixMarket matrix array real general\n2 2 2\n1\n", "not have the sizes"),
        ("a.mtx", "3 3 2\n1 2\n3 4\n", "line 3, column '1': no node has the id '4'"),
        ("a.dat", "1::5\n2::6\n", r"among 1::5\n\nhint: separator in \[edges\] is the char"),
        ("a.txt", "1 2 3\n2 3\n", r"line 2: 2 cells, but .* 3 columns\n\nhint: .*' ' is in q"),
        ("a.txt", "# c\n\n1 2\n2 3\n3 4 5\n", "line 5: 3 cells, but there are 2 columns"),
        ("a.csv", ",source,target\n0,a,b\n", "the first line has '', .*(.|\n)*index=False"),
        ("a.csv", "ann,bob,3\n", r"the first line has '3', which is not the name of a column"),
    ],
)
def test_what_could_be_read_wrongly_is_an_error(file, text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text, file)


@pytest.mark.parametrize(
    ("file", "head", "bidirected"),
    [
        ("out.a", "% sym unweighted\n", True),
        ("out.a", "% asym unweighted\n", False),
        ("a.mtx", MATRIX.format("pattern"), True),
        ("a.mtx", MATRIX.format("real").replace("symmetric", "skew-symmetric"), True),
        # edges of any direction, which decides without a head
        ("a.mtx", MATRIX.format("pattern").replace("symmetric", "general"), False),
    ],
)
def test_a_file_says_whether_its_edges_have_directions(file, head, bidirected, tmp_path, caplog):
    # all edges of a file that has directions, as those of citations, may go one way
    text = "2 1\n3 1\n3 2\n" if "asym" in head else "1 2\n3 1\n2 3\n"
    read(tmp_path, head + text, file)
    gcnzc.prepare(tmp_path / "graph.toml", tmp_path / "data")
    assert gcnzc.load(tmp_path / "data").graph.num_edges == (6 if bidirected else 3)
    read(tmp_path, head + text, file, f"bidirected = {str(not bidirected).lower()}")
    gcnzc.prepare(tmp_path / "graph.toml", tmp_path / "other")
    assert gcnzc.load(tmp_path / "other").graph.num_edges == (3 if bidirected else 6)
    assert not caplog.text


def test_edges_that_may_have_another_meaning_are_noted(tmp_path):
    (note,) = read(tmp_path, "0,1\n0,1\n1,0\n", "a.csv").notes
    assert "the first line of a.csv, 0,1, is read as an edge" in note
    np.save(tmp_path / "x.npy", np.eye(3))
    (note,) = read(tmp_path, "1 2\n2 1\n", options='[nodes]\nfeatures = "x.npy"').notes
    assert "if the edges count from 1, add the column id" in note


def test_a_table_of_nodes_needs_names_of_columns(tmp_path):
    (tmp_path / "nodes.csv").write_text("0,0.5\n1,1.5\n")
    with pytest.raises(ValueError, match=r"nodes.csv: the first line has only numbers, no names"):
        read(tmp_path, "0 1\n", options='[nodes]\nfile = "nodes.csv"')
    graph = read(tmp_path, "0 1\n", options='[nodes]\nfile = "nodes.csv"\nheader = false\nid = 0')
    assert graph.mapping.features == ["1"]
