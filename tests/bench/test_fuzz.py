"""Commands reject damaged files and wrong options with an error and a hint."""

import json
import subprocess
import sys

import pytest
from limits import HANG_S


@pytest.mark.processes
@pytest.mark.parametrize("cases", [40, pytest.param(220, marks=pytest.mark.slow)])
def test_every_invalid_input_ends_a_command_with_an_error_and_a_hint(cases, tmp_path):
    report = tmp_path / "report.json"
    # in a process of its own: it forks, which one with threads must not
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.robustness.fuzz",
            "--seed",
            "0",
            "--cases",
            str(cases),
            "--report",
            str(report),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=6 * HANG_S,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    kinds = json.loads(report.read_text())
    assert len(kinds) == 7
    assert sum(sum(outcomes.values()) for outcomes in kinds.values()) >= 0.9 * cases
    # most inputs are bad, and are rejected
    assert sum(outcomes["rejected"] for outcomes in kinds.values()) >= 0.8 * cases
    assert not any(outcomes["failed"] for outcomes in kinds.values())
