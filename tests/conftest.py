"""Fixtures for all tests: worlds of real processes, and checks that no test leaves anything behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import Crew, World
from tests.harness.leaks import (
    mark_session,
    no_environment_changes,
    no_file_leaks,
    no_process_leaks,
    no_signal_handler_changes,
    no_thread_leaks,
)
from tests.nvml.mock import MockNvml, build_library

_crews: list[Crew] = []
"""The session's crew, once a test has asked for a world."""
_figures: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Register markers; name this session's processes."""
    config.addinivalue_line("markers", "parity: compares training in a world with a dense single-process run")
    config.addinivalue_line("markers", "slow: takes more than about ten seconds")
    config.addinivalue_line("markers", "leaky: exempt from the leak checks (give the reason beside it)")
    config.addinivalue_line("markers", "chaos: every slot at every point, long worlds; runs by `make chaos` only")
    mark_session()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the fork server and its ranks, also after an interrupted session."""
    while _crews:
        _crews.pop().close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests have measured."""
    if _figures:
        terminalreporter.section("figures")
        for line in _figures:
            terminalreporter.write_line(line)


@pytest.fixture
def figure() -> Callable[[str], None]:
    """``figure("recovery 120 ms")`` shows a line at the end of the session."""
    return _figures.append


def _shared_crew() -> Crew:
    if not _crews:
        _crews.append(Crew())
    return _crews[0]


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    """``world(n)`` gives ``n`` processes that look like launched ranks; ``world(n, fresh=True)`` unused ones.

    All tests share the processes: between runs the package's runtime and torch's process groups are torn down.
    """

    def make(n: int, fresh: bool = False) -> World:
        return World(_shared_crew(), n, fresh)

    yield make
    if _crews and _crews[0].open_run is not None:
        _crews[0].open_run.abandon()


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mock of NVIDIA's driver library, built once."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) for the mock of libnvidia-ml.so.1")
    return build_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(
    request: pytest.FixtureRequest,
    nvml_library: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[MockNvml]:
    """Eight GPUs that exist for this process and for those that it starts; another number by indirect parametrization.

    Processes that were started before (the crew of ``world``) do not see them.
    """
    state = tmp_path_factory.mktemp("nvml") / "state"
    mock = MockNvml(nvml_library, state, gpus=getattr(request, "param", 8))
    for name, value in mock.variables().items():
        monkeypatch.setenv(name, value)
    mock.adopt()
    yield mock
    mock.forget()
    mock.close()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("leaky"):
        yield
        return
    with (
        no_file_leaks(),
        no_environment_changes(),
        no_signal_handler_changes(),
        no_thread_leaks(),
        no_process_leaks(lambda: _crews[0].server_pid if _crews else None),
    ):
        yield
