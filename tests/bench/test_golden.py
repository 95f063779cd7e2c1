"""The benchmark of recorded checksums notices what has changed."""

import json

import pytest

from bench.harness import OWN_RESULTS
from bench.robustness import golden, golden_runs
from gcnzc.train.config import STRATEGIES

EXACT, ROUNDED = "prepare arrays", "inference SAGE (rounded)"


def check(entries, folder):
    """The exit status for recorded entries."""
    (folder / "golden.json").write_text(json.dumps(entries))
    return golden.main(["check", str(folder / "golden.json")])


def test_a_changed_result_is_noticed_and_others_are_still_compared(tmp_path, capsys):
    recorded = json.loads((OWN_RESULTS / "golden.json").read_text())
    entries = {name: recorded[name] for name in ("seed", "machine", EXACT, ROUNDED)}
    assert check(entries, tmp_path) == 0
    assert capsys.readouterr().out.count("equal   ") == 2
    norm, *sums = entries[ROUNDED]["outputs"]
    # within and outside of the tolerance
    for factor, status in ((1.00001, 0), (1.001, 1)):
        changed = entries | {ROUNDED: {"outputs": [norm * factor, *sums]}}
        assert check(changed, tmp_path) == status
    capsys.readouterr()
    assert check({"gone": "0", EXACT: "0", ROUNDED: entries[ROUNDED]}, tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "failed  gone: KeyError: 'gone'"
    assert lines[1] == f"differs {EXACT}: recorded 0, found {entries[EXACT]}"
    assert lines[2] == f"equal   {ROUNDED}"


def test_names_that_are_not_recorded_are_an_error(tmp_path):
    (tmp_path / "golden.json").write_text(json.dumps({"seed": 1, EXACT: "0"}))
    with pytest.raises(SystemExit, match="2"):
        golden.main(["check", str(tmp_path / "golden.json"), "--only", "gone"])


def test_every_strategy_and_every_recorded_name_has_an_entry():
    used = {own.partition(":")[0] for own in golden_runs.STRATEGIES.values()}
    # which workers are in a quorum depends on their times
    assert used == set(STRATEGIES.targets) - {"decoupled-diloco"}
    recorded = json.loads((OWN_RESULTS / "golden.json").read_text())
    assert set(recorded) == {*golden.NAMES, *golden.ABOUT}
