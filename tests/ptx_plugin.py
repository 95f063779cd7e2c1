"""Pytest plugin: tests execute the compiled PTX of Triton kernels instead of interpreting Python.

`python -m pytest -p tests.ptx_plugin tests/kernels` runs existing tests unchanged, without a GPU.
At the end it prints the launches and the requests to global memory of each kernel. The run fails if
there were no launches, or if a test with the marker `triton` passed without one. The plugin must be
loaded with `-p`, before a module with kernels is imported.
"""

import os

# Triton chooses between its compiler and its interpreter when it is imported
os.environ["TRITON_INTERPRET"] = "0"

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from gcnzc.kernels.gather.cached_rows import Peers
from gcnzc.testing.executor import Executor
from gcnzc.testing.triton_driver import execute_on_cpu
from tests.ptx_launches import KERNELS, Report, evenly_spaced, kernels_in

_PROPERTY = "launches of compiled kernels"


class RecordingExecutor(Executor):
    """Counts the launches and requests of each kernel since they were last taken."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.recorded: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def launch(self, program: Any, *arguments: Any, **options: Any) -> None:
        with self._lock:
            before = self._num_requests()
            super().launch(program, *arguments, **options)
            record = self.recorded.setdefault(program.name, [0, 0])
            record[0] += 1
            record[1] += self._num_requests() - before

    def _num_requests(self) -> int:
        return sum(counters.requests.total() for counters in self.counters.values())

    def take(self) -> dict[str, list[int]]:
        """Return the records since the last call, and start new ones."""
        recorded, self.recorded = self.recorded, {}
        self.counters.clear()
        self.launches.clear()
        return recorded


class PtxPlugin:
    """Executes the kernels of a session, and reports their launches.

    With pytest-xdist it is in every process, and the process that starts the others reports.
    """

    def __init__(self, arch: int, most_cases: int | None, required: set[str]) -> None:
        self.arch, self.most_cases, self.report = arch, most_cases, Report(required)
        self.executor, self.stack = RecordingExecutor(), contextlib.ExitStack()
        # memory that kernels reach by addresses that are stored in other memory
        self.owners: list[Any] = []
        self.passed: set[str] = set()

    def start(self) -> None:
        """Execute the PTX of all kernels from now on."""
        options = {"executor": self.executor, "reachable": self._reachable}
        self.stack.enter_context(execute_on_cpu(self.arch, **options))
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        make, owners = Peers.__init__, self.owners

        def make_and_keep(peers: Peers, *given: Any, **named: Any) -> None:
            make(peers, *given, **named)
            owners.extend(peers.owners)

        patch.setattr(Peers, "__init__", make_and_keep)

    def _reachable(self) -> list[Tensor]:
        return [owner for owner in self.owners if isinstance(owner, Tensor)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        for item in items:
            mark = item.get_closest_marker("triton")
            if mark is not None and mark.kwargs.get("slow"):
                item.add_marker(pytest.mark.slow)

    @pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
    def pytest_select_cases(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.most_cases is not None:
            kept = evenly_spaced(items, self.most_cases)
            config.hook.pytest_deselected(items=[item for item in items if item not in kept])
            items[:] = kept

    @pytest.fixture(autouse=True)
    def _record_launches(self, request: pytest.FixtureRequest) -> Iterator[None]:
        yield
        self.owners.clear()
        must_launch = request.node.get_closest_marker("triton") is not None
        request.node.user_properties.append((_PROPERTY, (self.executor.take(), must_launch)))

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
        if report.when == "teardown":
            for key, value in report.user_properties:
                if key == _PROPERTY:
                    recorded, must_launch = value
                    is_required = must_launch and report.nodeid in self.passed
                    self.report.add(report.nodeid, recorded, is_required)

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(session.config, "workerinput")
        is_run = session.exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly
        if is_run and not is_worker and self.report.failures():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"Triton kernels compiled for sm_{self.arch}")
        for line in self.report.lines():
            terminalreporter.write_line(line)
        for failure in self.report.failures():
            terminalreporter.write_line(f"FAILED {failure}", red=True)

    @pytest.hookimpl
    def pytest_unconfigure(self) -> None:
        self.stack.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ptx", "execution of compiled Triton kernels on the CPU")
    group.addoption("--ptx-arch", type=int, default=90, help="compute capability, such as 90")
    group.addoption("--ptx-cases", type=int, help="the most cases of each parametrized test")
    text = "fail unless every kernel in kernels/ is launched"
    group.addoption("--ptx-all-kernels", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    required = kernels_in(KERNELS) if config.getoption("--ptx-all-kernels") else set()
    arch, most_cases = config.getoption("--ptx-arch"), config.getoption("--ptx-cases")
    plugin = PtxPlugin(arch, most_cases, required)
    plugin.start()
    config.pluginmanager.register(plugin, "ptx")
