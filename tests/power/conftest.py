"""What tests of the helper share: a directory for journals, UUIDs, and helpers that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.power.client import PowerHelper
from lightning_ntp.power.files import DIRECTORY_VARIABLE
from tests.nvml.mock import MockNvml
from tests.power.standing import Standing


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where journals lie, for this process and those that it starts."""
    path = tmp_path / "power"
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(path))
    return path


@pytest.fixture
def uuids(nvml: MockNvml) -> list[str]:
    """UUIDs of the first four devices."""
    return [nvml.get("uuid", gpu) for gpu in range(4)]


@pytest.fixture
def helper(nvml: MockNvml, directory: Path) -> Iterator[Callable[..., PowerHelper]]:
    """``helper("job")`` gives a helper as a child of this process, closed at the end of the test."""
    made: list[PowerHelper] = []

    def make(job: str = "job", **arguments: Any) -> PowerHelper:
        made.append(PowerHelper(job, **arguments))
        return made[-1]

    yield make
    nvml.release()
    for each in made:
        each.close()


@pytest.fixture
def standing(nvml: MockNvml, directory: Path, tmp_path: Path) -> Iterator[Callable[..., Standing]]:
    """``standing("--lease", "1")`` gives a helper that runs by itself, ended at the end of the test."""
    made: list[Standing] = []

    def make(*arguments: str) -> Standing:
        made.append(Standing(tmp_path, *arguments))
        return made[-1]

    yield make
    nvml.release()
    for each in made:
        each.end()
