"""What tests of the source share: devices, a quick source, and what it has warned of."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from lightning_ntp.nvml import NvmlSource
from tests.nvml.mock import MockNvml


@pytest.fixture
def uuids(nvml: MockNvml) -> list[str]:
    """UUIDs of the first three devices."""
    return [nvml.get("uuid", gpu) for gpu in range(3)]


@pytest.fixture
def source() -> NvmlSource:
    """One that does not take long over anything."""
    return NvmlSource(interval=0.1, stall=0.5, renew=0.1)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Gives the warnings so far."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
