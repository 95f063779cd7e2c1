"""The benchmark of collectives: a small run of processes on this machine."""

import json
import math

import pytest

from bench import harness
from bench.network import collectives


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
        ours = "direct" if line["kind"] == "AllToAll" else "doubling"
        assert sorted(line["ways"]) == ["builtin", ours]
        assert line["link"] == "here"
        for way in line["ways"].values():
            assert way["equal"]
            assert 0 < way["least_s"] <= way["median_s"] < math.inf


def test_bytes_of_ranks_on_one_machine_cannot_be_counted_separately(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["collectives.py", "--links", "here", "--bytes"])
    with pytest.raises(SystemExit):
        collectives.main()
    assert "share its interface" in capsys.readouterr().err
