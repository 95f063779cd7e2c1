"""Which Triton kernels tests launch as compiled code: what `ptx_plugin` expects and reports."""

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

KERNELS = Path(__file__).parents[1] / "kernels"


class HasName(Protocol):
    """A test, such as `pytest.Item`."""

    nodeid: str


def kernels_in(folder: Path) -> set[str]:
    """Return the names of Triton kernels that a host program launches, found by parsing.

    They are the functions with the decorator `triton.jit` that no other such function calls.
    """
    kernels, called = set(), set()
    for path in sorted(folder.rglob("*.py")):
        functions = {
            node.name: node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))
        }
        names = {
            call.func.id
            for function in functions.values()
            for call in ast.walk(function)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        }
        kernels |= functions.keys() - names
        # a function of another file, not one of the same name
        called |= names - functions.keys()
    return kernels - called


def _is_jit(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(function) == "triton.jit"


def evenly_spaced(items: Sequence[HasName], most: int) -> list[HasName]:
    """Return at most `most` cases of each parametrized test, the first and the last included."""
    tests: dict[str, list[HasName]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: list[HasName] = []
    for cases in tests.values():
        last, steps = len(cases) - 1, max(1, most - 1)
        kept += [cases[i] for i in sorted({last * step // steps for step in range(most)})]
    return kept


@dataclass
class Report:
    """What the tests of a run launched, also those in other processes."""

    required: set[str] = field(default_factory=set)  # kernels that must be launched
    launches: Counter[str] = field(default_factory=Counter)  # by kernel, as the next two
    requests: Counter[str] = field(default_factory=Counter)
    tests: Counter[str] = field(default_factory=Counter)
    launching_tests: int = 0
    without_launches: list[str] = field(default_factory=list)  # tests that should have launched

    def add(self, test: str, recorded: Mapping[str, Sequence[int]], must_launch: bool) -> None:
        """Add the launches of a test: the number and the requests of each kernel."""
        for name, (launches, requests) in recorded.items():
            self.launches[name] += launches
            self.requests[name] += requests
            self.tests[name] += 1
        self.launching_tests += bool(recorded)
        if must_launch and not recorded:
            self.without_launches.append(test)

    def failures(self) -> list[str]:
        """Return what is wrong."""
        found = [f"{test} launched no Triton kernel" for test in self.without_launches]
        found += [f"{name} was not launched" for name in sorted(self.required - {*self.launches})]
        return found if self.launches else ["no Triton kernel was launched", *found]

    def lines(self) -> list[str]:
        """Return a table of the kernels."""
        row = "{:24} {:>6} {:>9} {:>12}".format
        total = self.launching_tests, self.launches.total(), self.requests.total()
        return [
            row("kernel", "tests", "launches", "requests"),
            *(
                row(name, self.tests[name], self.launches[name], self.requests[name])
                for name in sorted(self.launches)
            ),
            row("total", *total),
        ]
