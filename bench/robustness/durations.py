"""Record how long the tests take: by file, fixture and kind, and the longest tests.

    python -m bench.robustness.durations [--out FILE] [pytest's options]

Runs pytest with its options, such as those of `make test`, and appends one line to
`bench/results/test_durations.jsonl`. The time of a test includes its fixtures. A fixture's time
excludes fixtures it requests by name, and is summed over processes of pytest-xdist. A test's kind
is the marker that selects it in a make target, or `plain`. `--out` also writes all figures to FILE.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness import check_code_is_committed, record

KINDS = ("triton", "processes", "compiled", "budget", "slow", "gpu")
SHOWN = 15  # entries of each list in the recorded line


class Durations:
    """A plugin of pytest that sums the durations of tests and fixtures of all processes."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()
        self.fixtures: Counter[str] = Counter()
        self.kinds: dict[str, str] = {}
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self.tests[report.nodeid] += report.duration
        kinds = [kind for kind in KINDS if kind in report.keywords]
        self.kinds[report.nodeid] = kinds[0] if kinds else "plain"
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the fixtures of a process."""
        self.fixtures.update(node.workeroutput.get("fixture_seconds", {}))


class Fixtures:
    """The part of the plugin that runs in each process."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Time a fixture."""
        begin = time.perf_counter()
        yield
        path = fixturedef.baseid or "pytest"
        self.seconds[f"{path}::{fixturedef.argname}"] += time.perf_counter() - begin

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the sums to the process that reports."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["fixture_seconds"] = dict(self.seconds)


def pytest_configure(config: pytest.Config) -> None:
    """Measure fixtures in a process that pytest-xdist starts with this module as a plugin."""
    config.pluginmanager.register(Fixtures(), "fixture-seconds")


def summed(durations: dict[str, float], groups: dict[str, str]) -> dict[str, float]:
    """Return the sums of durations by group, the largest first."""
    sums: defaultdict[str, float] = defaultdict(float)
    for test, seconds in durations.items():
        sums[groups[test]] += seconds
    return largest(sums)


def largest(seconds: dict[str, float]) -> dict[str, float]:
    """Return the durations of at least 0.1 s, the largest first."""
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return {name: round(value, 2) for name, value in ordered if value >= 0.1}


def main() -> int:
    """Run pytest and record the durations."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file, too")
    options, for_pytest = parser.parse_known_args()
    check_code_is_committed()
    # as in the Makefile: processes read the bytecode of modules and of rewritten tests
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    durations = Durations()
    begin = time.perf_counter()
    status = pytest.main(["-p", "bench.robustness.durations", *for_pytest], [durations])
    elapsed = time.perf_counter() - begin
    files = {test: test.partition("::")[0] for test in durations.tests}
    figures = {
        "by_file": summed(durations.tests, files),
        "by_fixture": largest(durations.fixtures),
        "by_kind": summed(durations.tests, durations.kinds),
        "longest": largest(durations.tests),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1))
    shown = {name: dict(list(values.items())[:SHOWN]) for name, values in figures.items()}
    record(
        "test_durations",
        {"arguments": " ".join(for_pytest)},
        elapsed_s=round(elapsed, 1),
        **durations.outcomes,
        **shown,
    )
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
