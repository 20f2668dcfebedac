"""A process that supervises jobs, for a module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.recovery.supervised import SupervisingProcess


@pytest.fixture(scope="module")
def _supervising_process() -> Iterator[SupervisingProcess]:
    process = SupervisingProcess()
    process.start()  # before the leak check of a test looks
    yield process
    process.close()


@pytest.fixture
def supervising(_supervising_process: SupervisingProcess) -> Iterator[SupervisingProcess]:
    """Runs jobs under the package's own supervisor."""
    before = _supervising_process.pid
    yield _supervising_process
    if _supervising_process.pid != before:  # a job did not end, in an earlier test
        _supervising_process.close(keep_files=True)
