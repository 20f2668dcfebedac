"""Several watches of a job's devices act as one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lightning_ntp.launch.device_watches import DeviceWatches


class Notes:
    """A watch that notes what it is told, and says what it was made with."""

    def __init__(self, condemns: Mapping[int, str], unfit: str = "", fails: bool = False) -> None:
        self.heard: list[tuple[object, ...]] = []
        self._condemns, self._unfit, self._fails = dict(condemns), unfit, fails

    def check(self, slots: int) -> None:
        self.heard.append(("check", slots))

    def begin(self, job_dir: Path) -> None:
        self.heard.append(("begin", job_dir))

    def started(self, slot: int) -> None:
        self.heard.append(("started", slot))

    def ended(self, slot: int) -> None:
        self.heard.append(("ended", slot))

    def condemned(self) -> Mapping[int, str]:
        found, self._condemns = self._condemns, {}
        return found

    def failed(self) -> str:
        return self._unfit

    def leaving(self) -> Mapping[int, str]:
        return self._condemns

    def sent_away(self, slot: int) -> bool:
        return slot in self._condemns

    def unfit(self, slot: int) -> str:
        self.heard.append(("unfit", slot))
        return self._unfit

    def pardon(self, slot: int) -> None:
        self.heard.append(("pardon", slot))

    def close(self) -> None:
        self.heard.append(("close",))
        if self._fails:
            raise OSError("no disk")


def test_each_is_told_everything(tmp_path: Path) -> None:
    first, second = Notes({}), Notes({})
    both = DeviceWatches([first, second])
    both.check(4)
    both.begin(tmp_path)
    both.started(1)
    both.ended(1)
    both.pardon(2)
    both.close()
    told = [("check", 4), ("begin", tmp_path), ("started", 1), ("ended", 1), ("pardon", 2), ("close",)]
    assert first.heard == told and second.heard == told


def test_what_any_of_them_says_counts_and_the_first_gives_the_reason() -> None:
    both = DeviceWatches([Notes({1: "hot"}), Notes({1: "slow", 2: "lost"})])
    assert both.sent_away(2) and not both.sent_away(3)
    assert both.leaving() == {1: "hot", 2: "lost"}
    assert both.condemned() == {1: "hot", 2: "lost"} and both.condemned() == {}


def test_one_of_them_can_end_the_job() -> None:
    assert DeviceWatches([Notes({}), Notes({}, unfit="may not write")]).failed() == "may not write"
    assert DeviceWatches([Notes({}), Notes({})]).failed() == ""


def test_who_objects_first_is_enough() -> None:
    first, second = Notes({}, unfit="it is hot"), Notes({}, unfit="its power is lent")
    assert DeviceWatches([first, second]).unfit(3) == "it is hot"
    assert second.heard == [], "what it would do for the slot is not wanted yet"
    assert DeviceWatches([Notes({}), second]).unfit(3) == "its power is lent"
    assert DeviceWatches([Notes({}), Notes({})]).unfit(3) == ""


def test_all_are_closed_whatever_one_raises() -> None:
    first, second = Notes({}, fails=True), Notes({}, fails=True)
    with pytest.raises(OSError, match="no disk"):
        DeviceWatches([first, second]).close()
    assert first.heard == second.heard == [("close",)]
