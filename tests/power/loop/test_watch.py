"""The loop's side towards the supervisor: who may start, and what goes on in its thread."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from lightning_ntp.power.loop import PowerSettings, PowerWatch
from lightning_ntp.power.loop import watch as module


class Lender:
    """A job in which others have the power of slot 3, as long as they have it."""

    def __init__(self) -> None:
        self.lent, self.looks, self.fatal = True, 0, ""

    def lends(self, slot: int) -> bool:
        return self.lent and slot == 3

    def why_held(self, slot: int) -> str:
        return "GPU-2: the driver hangs"

    def look(self, go_on: Any) -> None:
        self.looks += 1
        if self.looks == 2:
            raise RuntimeError("a look that fails")

    def give_back(self) -> None:
        self.lent = False

    def started(self, slot: int) -> None: ...


@pytest.fixture
def lender() -> Lender:
    return Lender()


@pytest.fixture
def watch(lender: Lender) -> PowerWatch:
    watch = PowerWatch(PowerSettings(interval=0.01))
    watch._job = lender  # type: ignore[assignment]
    return watch


def test_a_returning_rank_waits_until_its_power_is_back(watch: PowerWatch, lender: Lender) -> None:
    threading.Timer(0.2, lender.give_back).start()
    begun = time.monotonic()
    assert watch.unfit(3) == ""
    assert 0.15 < time.monotonic() - begun < module._LONGEST_HOLD / 2
    assert watch._alive() == {3}, "from the question on its GPU counts as one that works"


def test_who_has_lent_nothing_starts_at_once(watch: PowerWatch) -> None:
    assert watch.unfit(2) == "" and watch._alive() == set()


def test_power_that_does_not_come_back_holds_nobody_for_ever(
    watch: PowerWatch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_LONGEST_HOLD", 0.1)
    assert watch.unfit(3) == ""
    assert "slot 3 starts although what its GPU has lent is not back: GPU-2: the driver hangs" in capfd.readouterr().err


def test_at_the_end_of_the_job_nobody_starts(watch: PowerWatch) -> None:
    watch._over.set()
    assert watch.unfit(3) == "the job ends"


def test_a_person_is_not_kept_waiting_but_power_comes_back(watch: PowerWatch) -> None:
    watch.pardon(3)
    assert watch._alive() == {3} and watch._awake.is_set()


def test_findings_do_not_pile_up_and_a_look_that_fails_gives_back(
    watch: PowerWatch, lender: Lender, capfd: pytest.CaptureFixture[str]
) -> None:
    class Listener:
        taken = 0

        def take(self) -> list[Any]:
            self.taken += 1
            return []

    listener = watch._listener = Listener()  # type: ignore[assignment]
    thread = threading.Thread(target=watch._run)
    thread.start()
    deadline = time.monotonic() + 10
    while lender.looks < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    watch._over.set()
    thread.join()
    assert lender.looks >= 4 and listener.taken >= lender.looks  # type: ignore[attr-defined]
    assert not lender.lent
    assert capfd.readouterr().err.count("RuntimeError: a look that fails; it is tried again") == 1
