"""A process that supervises jobs, for a module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.recovery.supervised import SupervisingProcess


@pytest.fixture(scope="module")
def _rejoining_process() -> Iterator[SupervisingProcess]:
    process = SupervisingProcess()
    process.start()  # before the leak check of a test looks
    yield process
    process.close()


@pytest.fixture
def supervised_returns(_rejoining_process: SupervisingProcess) -> Iterator[SupervisingProcess]:
    """For jobs whose ranks are started again."""
    before = _rejoining_process.pid
    yield _rejoining_process
    if _rejoining_process.pid != before:  # a job did not end, in an earlier test
        _rejoining_process.close(keep_files=True)
