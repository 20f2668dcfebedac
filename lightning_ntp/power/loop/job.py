"""Power and pace of one job: what is measured, decided, written and told in one interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lightning_ntp.nvml.readings import Reading
from lightning_ntp.power.control import (
    BoostSettings,
    BudgetError,
    Controller,
    Decision,
    Domain,
    HeatLimits,
    Lever,
    Measurement,
)
from lightning_ntp.power.loop.domain import Levers, find_levers
from lightning_ntp.power.loop.measuring import Measurer
from lightning_ntp.power.loop.paces import PaceMeter
from lightning_ntp.power.loop.places import Places, Work
from lightning_ntp.power.loop.report import Report
from lightning_ntp.power.loop.settings import PowerSettings
from lightning_ntp.power.loop.telling import Interval, Telling
from lightning_ntp.power.loop.writing import Writer
from lightning_ntp.power.putting_back import Status

_PATIENCE = 60.0
"""Seconds for devices to be named by their ranks."""
_ROUNDED_W = 0.5
"""Drivers round limits."""
_AGAIN_SECONDS, _LONGEST_AGAIN_SECONDS = 5.0, 300.0
"""Between two starts of a helper that was lost: at first, and at most, as it doubles while they are lost again."""
_STEADY_SECONDS = 60.0
"""A helper that was lost after so long is one that works."""
_DENIED_SECONDS = 300.0
"""Until limits are tried again that might not be written: permissions may change."""
Replicas = Mapping[int, tuple[int, ...]]
"""Replica -> its slots that work."""


class PowerJob:
    """See the module. All but :meth:`started`, :meth:`lends` and :meth:`why_held` run in the loop's thread.

    Args:
        settings: See there.
        job_dir: The job's directory.
        places: Who works where.
        alive: Gives the slots that work, or are about to.
        readings: Gives the driver's newest readings, by UUID.
    """

    def __init__(
        self,
        settings: PowerSettings,
        job_dir: Path,
        places: Places,
        alive: Callable[[], set[int]],
        readings: Callable[[], Mapping[str, Reading]],
    ) -> None:
        self._settings, self._job_dir, self._places = settings, job_dir, places
        self._alive, self._readings = alive, readings
        self._paces, self._report = PaceMeter(job_dir), Report(job_dir)
        self._telling = Telling(job_dir, self._report)
        self._measurer = Measurer(self._paces, readings, settings.interval, settings.max_temperature)
        self._levers: Levers | None = None
        self._owing: list[Writer] = []
        """They move nothing any more, and have not put everything back yet."""
        self._controller: Controller | None = None
        self._decision: Decision | None = None
        self._began = self._last = time.monotonic()
        self._not_before = self._denied_until = 0.0
        self._pause, self._set_up_at = _AGAIN_SECONDS, self._began
        self._denied = self._owed = False
        """Limits may not be written; or others were still to be put back when this controller began."""
        self._closed = False
        self.fatal = ""
        """Why the job must end."""

    # ---- from other threads -----------------------------------------------------------------------------------

    def started(self, slot: int) -> None:
        """A rank has started."""
        self._paces.forget(slot)

    def lends(self, slot: int) -> bool:
        """Whether others have power that belongs to this slot's GPU."""
        decision, levers = self._decision, self._levers
        if decision is None or levers is None or levers.writer is None:
            return False
        if slot not in levers.of_slot and slot not in self._places.gpus:
            return False  # nobody knows its GPU
        limits, domain = dict(levers.writer.limits_w), levers.domain
        if levers.of_slot.get(slot) not in decision.limits_w:
            return any(watts > domain.shares_w[gpu] + _ROUNDED_W for gpu, watts in limits.items())
        # it counts as one that works; what was lent may still be out, as a write has failed
        now = sum(limits[gpu] for gpu in decision.limits_w if gpu in limits) + decision.held_w
        return now > domain.total_w + _ROUNDED_W

    def why_held(self, slot: int) -> str:
        """Why :meth:`lends` is still so, for people."""
        writer = None if self._levers is None else self._levers.writer
        refused = [] if writer is None else list(writer.refused.values())
        return "; ".join(f"{each.gpu}: {each.why}" for each in refused[:3]) or "the loop has not come to it"

    # ---- one interval -----------------------------------------------------------------------------------------

    def look(self, go_on: Callable[[], bool]) -> None:
        """One interval.

        Args:
            go_on: Whether the job goes on; asked before each write.
        """
        self._places.look()
        self._settle(last=False)
        work, replicas, now = self._places.work(), self._replicas(), time.monotonic()
        if not work.training or not replicas:
            self.give_back()
            return
        if self._levers is not None and self._levers.writer is not None and self._levers.writer.lost:
            why = self._levers.writer.why_lost
            if now - self._set_up_at > _STEADY_SECONDS:
                self._pause = _AGAIN_SECONDS
            again = f"in {self._pause:g} s another one puts back what this one has not"
            self._report.event("lost", f"the helper that writes limits is gone: {why}; {again}")
            self._forget(now + self._pause)
            self._pause = min(2 * self._pause, _LONGEST_AGAIN_SECONDS)
        if self._levers is not None and (self._lacks_somebody(replicas) or self._may_write_again(now)):
            self._forget(0.0)
        if self._controller is None and not self._set_up(now):
            return
        assert self._controller is not None and self._levers is not None
        self._measurer.changed(replicas)
        idle = self._alive() & self._levers.of_slot.keys() - {s for slots in replicas.values() for s in slots}
        measurement = self._measurer.measure(self._levers, replicas, idle, work, now)
        decision = self._controller.step(measurement)
        self._write(decision, measurement, go_on)
        self._decision = decision
        self._tell(measurement, decision, work, replicas, now)
        self._last = now

    def give_back(self) -> None:
        """Nobody trains: limits are as at the start. Cheap if they are already."""
        if self._controller is not None:
            self._forget(0.0)
            self._telling.times({})
            self._report.forget()

    def close(self) -> None:
        """The job is over. The loop's thread may hang in the driver, and come back later."""
        self._closed = True
        self._forget(float("inf"))
        self._settle(last=True)
        self._paces.close()

    # ---- beginning and ending ---------------------------------------------------------------------------------

    def _replicas(self) -> dict[int, tuple[int, ...]]:
        """Replica -> its slots that work."""
        alive = self._alive()
        found = {r: tuple(s for s in slots if s in alive) for r, slots in self._places.replicas().items()}
        return {replica: slots for replica, slots in found.items() if slots}

    def _set_up(self, now: float) -> bool:
        """Find out what there is to move. False as long as it is too early."""
        homes, named = self._places.homes(self._alive()), self._places.gpus
        unnamed = [slot for slot in homes if slot not in named]
        if now < self._not_before or (named and unnamed and now < self._began + _PATIENCE):
            return False
        settings, self._owed = self._settings, bool(self._owing)
        levers = self._find(settings.writes and not self._denied and not self._owed)
        if levers is None:
            return False
        if self._closed:  # the driver took longer than who closes has waited for this thread
            if levers.writer is not None:
                levers.writer.close()
            return False
        self._levers, self._set_up_at = levers, now
        turned: frozenset[Lever] = frozenset(settings.levers)
        if settings.locked_clocks is None and turned != {"clocks"}:
            turned = frozenset({"power_limit"})
        hot_c = HeatLimits.hot_c if settings.max_temperature is None else settings.max_temperature
        heat = HeatLimits(guard_c=settings.margin, hot_c=hot_c)
        self._controller = Controller(levers.domain, BoostSettings(levers=turned, heat=heat))
        self._last = now  # what was before is no interval
        self._paces.begin_anew()
        self._begin_profiles(levers)
        self._say_what_there_is(levers)
        return True

    def _find(self, writes: bool) -> Levers | None:
        """Take the GPUs. None if the settings do not fit them, which ends the job."""
        alive, named = self._alive(), self._places.gpus
        homes, job = self._places.homes(alive), self._job_dir.name
        try:
            return find_levers(self._settings, job, homes, named, self._readings(), alive, writes, self._deny)
        except BudgetError as error:
            self.fatal = f"PowerManager: {error}"
            self._not_before = float("inf")
            return None

    def _lacks_somebody(self, replicas: Replicas) -> bool:
        """Whether somebody works who was not there when it began, or whose GPU could not be had then."""
        assert self._levers is not None
        of_slot, writer = self._levers.of_slot, self._levers.writer
        alive = self._alive()
        here = {slot for slots in replicas.values() for slot in slots} | alive & self._places.gpus.keys()
        if not of_slot.keys() >= here:
            return True
        return writer is not None and any(of_slot[slot] not in writer.limits_w for slot in alive & of_slot.keys())

    def _may_write_again(self, now: float) -> bool:
        """Whether what has kept this controller from writing is over. Another one is to begin then; as long as it is
        not, this one goes on, or samples would move to and fro.
        """
        if self._levers is None or self._levers.writer is not None or not self._settings.writes or self._owing:
            return False
        if not self._denied:
            return self._owed
        if now < self._denied_until:
            return False
        found = self._find(True)
        if found is None or found.writer is None:
            return False
        denied = found.writer.denied()
        found.writer.close()
        if denied:
            self._deny(denied)
        self._denied = bool(denied)
        return not denied

    def _say_what_there_is(self, levers: Levers) -> None:
        domain, settings = levers.domain, self._settings
        then = "samples move if a replica is slower" if settings.moves_samples else "no samples move"
        if levers.writer is not None:
            shares = sum(domain.shares_w.values())
            ceilings, budget = (max(0.0, top - shares) for top in (_tops(domain), domain.total_w))
            why = (
                "the ceilings are the limits at start"
                if ceilings < _ROUNDED_W
                else (f"the budget leaves {budget:.0f} W and what lost GPUs do not draw, the ceilings {ceilings:.0f} W")
            )
            headroom = min(ceilings, budget)
            self._report.once("began", f"{len(domain.gpus)} GPUs with {shares:.0f} W; headroom {headroom:.0f} W: {why}")
        elif not settings.writes:
            self._report.once("began", f"paces are measured, no limit is written; {then}")
        elif not levers.powered:
            named = bool(self._places.gpus)
            why = "some limits are not known" if named else "no device is one of NVIDIA's driver"
            if settings.on_denied == "error":
                self._deny(why)
            self._report.once("none", f"nothing can be raised: {why}; paces are measured, {then}")

    def _begin_profiles(self, levers: Levers) -> None:
        if not self._settings.profiles or levers.writer is None:
            return
        for answer in levers.writer.profiles(self._settings.profiles):
            if not answer.done:
                self._report.once("profile", f"workload power profiles of {answer.gpu} are as they were: {answer.why}")

    def _deny(self, why: str) -> None:
        """Limits may not be written."""
        again, self._denied = self._denied, True
        self._denied_until = time.monotonic() + _DENIED_SECONDS
        if self._settings.on_denied == "error":
            self.fatal = f"PowerManager(on_denied='error'): power limits cannot be written: {why}"
            return
        moves = self._settings.on_denied == "rebalance" and self._settings.moves_samples
        several = len(self._places.replicas()) > 1
        instead = "samples move instead" if moves and several else "nothing is done about it"
        if not again:
            self._report.once("denied", f"limits cannot be written: {why}; {instead}")

    def _forget(self, not_before: float) -> None:
        """Give everything back; another controller begins no earlier than that."""
        levers, self._levers = self._levers, None
        self._controller = self._decision = None
        self._not_before = not_before
        if levers is not None and levers.writer is not None:
            self._owing.append(levers.writer)
            self._settle(last=False)

    def _settle(self, last: bool) -> None:
        """Let go of helpers that have put everything back; the others try on as long as the job lives."""
        for writer in list(self._owing):
            left = writer.release()
            for answer in left:
                self._report.once("kept", f"{answer.gpu} is not as it was at the start: {answer.why}")
            if last or not left:
                writer.close()
                self._owing.remove(writer)

    # ---- writing ----------------------------------------------------------------------------------------------

    def _write(self, decision: Decision, measurement: Measurement, go_on: Callable[[], bool]) -> None:
        assert self._levers is not None
        writer = self._levers.writer
        if writer is None:
            return
        present = {}
        for gpu in decision.limits_w:
            reading = measurement.gpus.get(gpu)
            now_w = None if reading is None else reading.limit_w
            share_w = self._levers.domain.shares_w[gpu]  # of one that is about to be taken
            present[gpu] = writer.limits_w.get(gpu, share_w) if now_w is None else now_w
        for gpu in writer.write(decision, self._levers.domain, present, go_on):
            self._measurer.written(gpu, time.monotonic())
        for gpu, answer in writer.refused.items():
            if answer.status is Status.DENIED:
                wish = decision.limits_w.get(gpu)
                what = f"{gpu} would have got {wish:.0f} W: " if wish is not None else ""
                self._deny(f"{what}{answer.why}")
                self._forget(0.0)
                return
            self._report.once("refused", f"{gpu} was not written: {answer.why}")

    # ---- telling ----------------------------------------------------------------------------------------------

    def _tell(self, measurement: Measurement, decision: Decision, work: Work, replicas: Replicas, now: float) -> None:
        levers, settings = self._levers, self._settings
        moves = settings.moves_samples and (settings.on_denied == "rebalance" or not self._denied)
        self._telling.times({r: time for r, time in decision.relative_time.items() if r >= 0} if moves else {})
        if levers is None:  # it was denied just now
            return
        gpus = {replica: [levers.of_slot[slot] for slot in slots] for replica, slots in replicas.items()}
        count = self._paces.micro_batches(slot for slots in replicas.values() for slot in slots)
        seconds, steps = max(1e-3, now - self._last), count / work.micro_batches
        self._telling.tell(Interval(measurement, decision, levers, gpus, seconds, steps, work.tokens))


def _tops(domain: Domain) -> float:
    """The sum of the ceilings, W."""
    return sum(each.top_w for each in domain.gpus)
