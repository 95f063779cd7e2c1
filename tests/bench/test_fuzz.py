"""Commands reject damaged files and wrong options with an error and a hint."""

import json

import pytest
from programs import output_of


@pytest.mark.processes
@pytest.mark.parametrize("cases", [40, pytest.param(220, marks=pytest.mark.slow)])
def test_every_invalid_input_ends_a_command_with_an_error_and_a_hint(cases, tmp_path):
    report = tmp_path / "report.json"
    # in a process of its own: it forks, which one with threads must not
    words = ["--seed", "0", "--cases", cases, "--report", report]
    output_of("-m", "bench.robustness.fuzz", *words)
    kinds = json.loads(report.read_text())
    assert len(kinds) == 7
    assert sum(sum(outcomes.values()) for outcomes in kinds.values()) >= 0.9 * cases
    # most inputs are bad, and are rejected
    assert sum(outcomes["rejected"] for outcomes in kinds.values()) >= 0.8 * cases
    assert not any(outcomes["failed"] for outcomes in kinds.values())
