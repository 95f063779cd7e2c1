"""Tests of compiled kernels, which only run with the plugin `tests/ptx_plugin.py`."""

import pytest

from gcnzc.testing.executor import Executor


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Ignore this folder where Triton interprets kernels."""
    return None if config.pluginmanager.hasplugin("ptx") else True


@pytest.fixture
def ptx(request: pytest.FixtureRequest) -> Executor:
    """The executor of all kernels, with its counters."""
    return request.config.pluginmanager.get_plugin("ptx").executor
