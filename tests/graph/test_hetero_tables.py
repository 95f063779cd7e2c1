"""Graphs from tables: keys, labels, splits, times, folders, and what is named."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
from hetero_graphs import assert_same_graph

import gcnzc
from gcnzc.graph import Table, from_tables
from gcnzc.train.config import TrainConfig
from gcnzc.train.run import train

USERS = pd.DataFrame(
    {
        "id": [7, 9, 8, 5],
        "age": [1.0, 2.0, 3.0, 4.0],
        "churn": [True, False, None, True],
        "level": [3, 0, 1, 2],
        "score": [0.5, np.nan, 2.0, 3.0],
        "kind": ["b", "a", None, "b"],
        "part": ["train", "valid", None, "test"],
    }
)
DAYS = pd.DatetimeIndex(
    [
        pd.Timestamp(day)
        for day in ["2024-01-01", "2024-02-01 12:00", "2024-02-02", "2024-03-01", "2023-05-05"]
    ]
)
ORDERS = pd.DataFrame({"user": [7, 9, 9, 5, 8], "date": DAYS, "day": [1, 5, 6, 9, 0]})


def build(
    users=USERS, orders=ORDERS, time="date", key="id", refers="user", features=("age",), **options
):
    tables = {
        "user": Table(users, key, features=features),
        "order": Table(orders, foreign_keys={"user": refers}, time=time),
    }
    return from_tables(tables, **options)


def test_from_tables():
    orders = ORDERS.assign(user=[7, None, 9, 5, 8], date=DAYS + pd.Timedelta("500ms"))
    graph = build(orders=orders)
    forward, reverse = ("order", "f2p_user", "user"), ("user", "rev_f2p_user", "order")
    assert graph.edge_types == [forward, reverse]
    assert graph.edges(forward).edge_index().tolist() == [[0, 2, 3, 4], [0, 1, 3, 2]]
    assert graph.edges(reverse).edge_index().tolist() == [[0, 1, 3, 2], [0, 2, 3, 4]]
    # fractions of a second are rounded up: an order is not visible before its time
    assert graph.nodes("order").time.tolist() == [int(day.timestamp()) + 1 for day in DAYS]
    assert graph.nodes("user").features.flatten().tolist() == [1, 2, 3, 4]
    assert build(reverse=False).edge_types == [forward]
    with pytest.raises(TypeError, match=r"tables is .*, not a dict of tables by name"):
        from_tables([USERS, ORDERS])


def test_rows_are_nodes_for_keys_of_any_type_and_any_index():
    users = USERS.assign(id=[f"u{key}" for key in USERS["id"]]).set_axis(range(100, 104))
    orders = pd.DataFrame({"user": users["id"].tolist()[::-1]}, index=[7] * len(users))
    graph = build(users, orders, time=None)
    assert graph.nodes("user").features[:, 0].tolist() == users["age"].tolist()
    assert graph.edges("f2p_user").edge_index().tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]


def test_from_tables_of_relbench():
    class RelTable:
        def __init__(self, df, pkey_col, fkeys, time_col):
            self.df, self.pkey_col, self.time_col = df, pkey_col, time_col
            self.fkey_col_to_pkey_table = fkeys

    theirs = {
        "user": RelTable(USERS, "id", {}, None),
        "order": RelTable(ORDERS, None, {"user": "user"}, "date"),
    }
    found = from_tables(theirs)
    assert_same_graph(found, build(features=()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": None}, "'user', which has no primary key"),
        ({"refers": "client"}, "refers to the table 'client'"),
        ({"users": USERS.iloc[[0, 0, 2]]}, "'id' of table 'user' has 7 twice"),
        ({"users": USERS.iloc[:3]}, "'user' of table 'order' is 5.* in row 3"),
        ({"users": USERS.replace(2.0, np.nan)}, "'age' of table .* NaN in row 1"),
        *(
            (
                {"orders": ORDERS.assign(user=[7.0, None, key, 9, 9])},
                "in row 2, which is not an exact integer",
            )
            for key in (1.5, 1e300, float("inf"), 2.0**53)
        ),
    ],
)
def test_wrong_tables_are_rejected_with_a_message_that_names_them(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def labels(column, frame=USERS):
    return build(frame, labels={"user": column}).nodes("user").labels


def parts(graph, name):
    return {part: ids.tolist() for part, ids in graph.nodes(name).split.items()}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([True, False, None, True], [1, 0, -1, 1]),
        ([3, 0, 1, 2], [3, 0, 1, 2]),
        (pd.array([3, 0, None, 2], "Int64"), [3, 0, -1, 2]),
        (pd.array([3, 0, None, 2], "UInt8"), [3, 0, -1, 2]),
        (pd.array([True, None, None, False], "boolean"), [1, -1, -1, 0]),
        (pd.Categorical(["b", "a", None, "b"]), [1, 0, -1, 1]),
        (pd.Categorical(["b", "a", None, "b"], ["c", "b", "a"]), [1, 2, -1, 1]),
        ([0.5, 1.0, 2.0, 3.0], [0.5, 1.0, 2.0, 3.0]),
        # the same task with and without missing values
        ([1.0, 0.0, 2.0, 3.0], [1, 0, 2, 3]),
        ([1.0, 0.0, 2.0, None], [1, 0, 2, -1]),
    ],
)
def test_labels_of_a_column(values, expected):
    found = labels("y", USERS.assign(y=values))
    expected = torch.tensor(expected)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_missing_numbers_are_nan_and_several_columns_are_labels():
    assert torch.equal(labels("score").isnan(), torch.tensor([False, True, False, False]))
    assert labels(["churn", "level"]).tolist() == [[1, 3], [0, 0], [-1, 1], [1, 2]]
    both = labels(["churn", "score"])
    assert both.dtype == torch.float32
    expected = [[1, 0.5], [0, float("nan")], [float("nan"), 2], [1, 3]]
    np.testing.assert_array_equal(both.numpy(), np.array(expected, np.float32))


@pytest.mark.parametrize("dtype", [object, "str", "category"])
def test_a_split_of_a_column(dtype):
    graph = build(USERS.assign(part=USERS["part"].astype(dtype)), splits={"user": "part"})
    assert parts(graph, "user") == {"train": [0], "valid": [1], "test": [3]}


@pytest.mark.parametrize("zone", [None, "UTC"])
@pytest.mark.parametrize("unit", ["s", "ns"])
def test_a_split_by_time_has_no_later_rows(zone, unit):
    orders = ORDERS.assign(date=ORDERS["date"].astype(f"datetime64[{unit}]").dt.tz_localize(zone))
    begins = {"valid": pd.Timestamp("2024-02-01 12:00"), "test": "2024-03-01"}
    expected = {"train": [0, 4], "valid": [1, 2], "test": [3]}
    assert parts(build(orders=orders, splits={"order": begins}), "order") == expected
    berlin = {"valid": pd.Timestamp("2024-02-01 13:00", tz="Europe/Berlin"), "test": "2024-03-01"}
    assert parts(build(orders=orders, splits={"order": berlin}), "order") == expected
    integers = build(time="day", splits={"order": {"val": 5, "test": np.int64(9)}})
    assert parts(integers, "order") == expected


def test_a_folder_keeps_labels_and_splits_and_trains(tmp_path):
    graph = build(
        labels={"user": "churn"},
        splits={"user": "part", "order": {"valid": "2024-02-01", "test": "2024-03-01"}},
    )
    gcnzc.prepare(graph, tmp_path / "g")
    own = gcnzc.load(tmp_path / "g").graph
    assert torch.equal(own.nodes("user").labels, graph.nodes("user").labels)
    for name in ("user", "order"):
        assert parts(own, name) == parts(graph, name)
    config = TrainConfig(data=tmp_path / "g", model="rgcn", fanouts=(2,), epochs=1, hidden=4)
    assert "test_accuracy" in train(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": {"client": "churn"}}, "labels has the table 'client', which is not given"),
        ({"labels": {"user": "gone"}}, "table 'user' has no column 'gone' for its labels"),
        ({"splits": {"user": "gone"}}, "table 'user' has no column 'gone' for its split"),
        ({"labels": {"user": "kind"}}, "column 'kind' of table 'user' has type .*astype"),
        (
            {"labels": {"user": "age"}},
            "column 'age' of table 'user' is both a feature",
        ),
        (
            {"labels": {"user": "score"}, "users": USERS.assign(score=[0.5, np.inf, 1, 2])},
            "labels of node type 'user': node 1 has the label inf",
        ),
        ({"users": USERS.assign(age=list("abcd"))}, "column 'age' of table 'user' has .*not num"),
        (
            {"labels": {"user": "score"}, "users": USERS.assign(score=np.nan)},
            "column 'score' of table 'user' has no labels: all 4 values are missing",
        ),
        (
            {"users": USERS.assign(age=[1, 2, 3, 1e300])},
            "column 'age' of table 'user' is 1e[+]300 in row 3",
        ),
        (
            {"users": pd.concat([USERS, USERS[["age"]]], axis=1)},
            "table 'user' has 2 columns 'age'",
        ),
        # of any dtype of times, and without times
        ({"orders": ORDERS[:0]}, "table 'order' has no rows"),
        ({"labels": {"user": []}}, r"labels\['user'\] has no columns"),
        ({"splits": {"user": "kind"}}, "split of node type 'user' has the word '[ab]'"),
        ({"splits": {"user": {"valid": 1, "test": 2}}}, r"splits\['user'\] has times, but table"),
        ({"splits": {"order": {"valid": 1, "test": 2}}}, r"splits\['order'\]\['valid'\] is .*1"),
        ({"splits": {"order": {"valid": "soon", "test": "2024"}}}, "'soon', not a date"),
        ({"splits": {"order": {"test": "2024"}}}, "has the keys .'test'"),
        (
            {"splits": {"order": {"valid": "2024-03-01", "test": "2024-02-01"}}},
            "test begins at 2024-02-01.*, before valid at 2024-03-01",
        ),
        (
            {"time": "day", "splits": {"order": {"valid": float("nan"), "test": 3}}},
            "is nan",
        ),
    ],
)
def test_wrong_labels_and_splits_are_rejected_with_a_message_that_names_them(options, message):
    with pytest.raises(ValueError, match="(?s)" + message):
        build(**options)


def bytes_of(column):
    return column.map(lambda each: f"u{each}".encode())


@pytest.mark.parametrize(
    ("own", "other", "keys"),
    [
        (bytes_of, bytes_of, ["u7", "u9", "u8", "u5"]),
        (bytes_of, lambda column: "u" + column.astype(str), ["u7", "u9", "u8", "u5"]),
        (lambda column: bytes_of(column).astype("category"), bytes_of, ["u7", "u9", "u8", "u5"]),
        (lambda column: column.map(Decimal), lambda column: column, [7, 9, 8, 5]),
        (
            lambda column: column,
            lambda column: column.map("{}.00".format).map(Decimal),
            [7, 9, 8, 5],
        ),
    ],
)
def test_keys_of_bytes_and_decimals(own, other, keys):
    users = USERS.assign(id=own(USERS["id"]), age=USERS["age"].map(Decimal))
    # keys of a table with several rows of one label in its index, and with a missing one
    orders = ORDERS.assign(user=other(ORDERS["user"]).astype(object), date=ORDERS["day"])
    orders = pd.concat([orders, orders[:1].assign(user=None)])
    graph = build(users, orders)
    assert graph.nodes("user").keys.tolist() == keys
    assert graph.nodes("user").features.tolist() == [[1], [2], [3], [4]]
    edges = graph.edges("f2p_user").edge_index()
    assert sorted(zip(*edges.tolist(), strict=True)) == [(0, 0), (1, 1), (2, 1), (3, 3), (4, 2)]


INFINITE = [Decimal(1), Decimal("Infinity"), *map(Decimal, range(2, 5))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"users": USERS.assign(id=[b"a", b"\xff", b"c", b"d"])},
            "'id' of table 'user' has b'.xff'",
        ),
        (
            {"users": USERS.assign(kind=pd.Categorical([b"\xff"] * 4)), "labels": {"user": "kind"}},
            "'kind' of table 'user' has b'.xff'",
        ),
        (
            {"orders": ORDERS.assign(user=[b"\xff"] * 5).set_index("user")},
            "'user' of table 'order' has b'.xff', which is not UTF-8",
        ),
        ({"users": USERS.assign(age=INFINITE[:4])}, "'age' of table 'user' is inf in row 1"),
        ({"orders": ORDERS.assign(day=INFINITE), "time": "day"}, "time of node type 'order'"),
    ],
)
def test_bytes_and_decimals_without_a_value_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
