"""The benchmark of collectives: its formulas, and a small run of processes on this machine."""

import json
import math

import pytest

from bench import harness
from bench.network import collectives
from bench.network.collectives_worker import formula_s
from gcnzc.exchange import Choices, Link, lockstep
from gcnzc.exchange.measure import make_request
from gcnzc.exchange.requests import yield_request

ALPHA_S, BYTES_PER_S, WORKERS = 1e-3, 1e7, 8


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Sum", "doubling"),
        ("Sum", "halving"),
        ("Sum", "ring"),
        ("AllGather", "doubling"),
        ("AllGather", "ring"),
        ("Broadcast", "binomial"),
        ("Broadcast", "chain:8192"),
        ("Broadcast", "chain:65536"),
    ],
)
@pytest.mark.parametrize("size", [4096, 128 << 10])
def test_formulas_equal_the_virtual_clock(kind, name, size):
    algorithms = [yield_request(make_request(kind, size, rank, WORKERS)) for rank in range(WORKERS)]
    link = Link(BYTES_PER_S, message_s=ALPHA_S)
    ran = lockstep(algorithms, link, choices=Choices.always(**{kind: name}))
    expected = formula_s(kind, name, size, WORKERS, ALPHA_S, BYTES_PER_S)
    assert max(ran.seconds) == pytest.approx(expected)


@pytest.mark.processes
def test_a_small_run_records_all_algorithms(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    words = "collectives.py --links here --workers 2 --kinds Sum AllToAll --most-bytes 64 --step 16"
    monkeypatch.setattr("sys.argv", words.split())
    collectives.main()
    lines = [json.loads(text) for text in (tmp_path / "collectives.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["num_bytes"]) for line in lines] == [
        ("Sum", 4),
        ("Sum", 64),
        ("AllToAll", 4),
        ("AllToAll", 64),
    ]
    for line in lines:
        names = ["builtin", "direct"] if line["kind"] == "AllToAll" else None
        assert sorted(line["ways"]) == (names or ["builtin", "doubling", "halving", "ring"])
        assert line["tuned"] in line["ways"]
        assert line["link"] == "here"
        for way in line["ways"].values():
            assert way["equal"]
            assert 0 < way["least_s"] <= way["median_s"] < math.inf
            assert way["formula_s"] > 0


def test_bytes_of_ranks_on_one_machine_cannot_be_counted_separately(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["collectives.py", "--links", "here", "--bytes"])
    with pytest.raises(SystemExit):
        collectives.main()
    assert "share its interface" in capsys.readouterr().err
