"""What was decided, written through the helper: in an order that keeps the budget, and no more than it allows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from lightning_ntp.power.answers import Answer
from lightning_ntp.power.client import PowerHelper, locked_clocks, power_limit, workload_profiles
from lightning_ntp.power.control import Decision, Domain, next_write
from lightning_ntp.power.putting_back import Status

_AGAIN_SECONDS = 30.0
"""Until a GPU that was not written is raised again. It is lowered at once, as often as it takes."""
SECONDS = 5.0
"""The longest that one message to the helper is waited for."""


class Writer:
    """Writes limits and clocks. Nothing is raised for what the helper or the driver does.

    Args:
        job: For others who want the same GPUs.
        socket: Of a helper that runs by itself; None: a child.
        maximum: Of a child: whether limits may be above the one that was found.
        clocks: The range in which graphics clocks are locked at the start, MHz.
    """

    def __init__(self, job: str, socket: str | None, maximum: bool, clocks: tuple[int, int] | None) -> None:
        self._job, self._socket, self._maximum, self._clocks = job, socket, maximum, clocks
        self._helper: PowerHelper | None = None
        self._lost = threading.Event()
        self.why_lost = ""
        self.limits_w: dict[str, float] = {}
        """What was read back after the last write."""
        self.clocks_mhz: dict[str, int] = {}
        """What was written last."""
        self.refused: dict[str, Answer] = {}
        """GPUs that were not written as wished, since the last time that they were."""
        self._perhaps: dict[str, float] = {}
        """GPU -> the limit that it may get yet, or has got: nobody has said what has become of that raise, watts."""
        self._not_before: dict[str, float] = {}
        """When such a GPU is raised again at the earliest."""

    @property
    def lost(self) -> bool:
        """Whether the helper is gone. It has put everything back, or, if it was killed, the next one that :meth:`open`
        starts does."""
        return self._lost.is_set()

    def open(self, gpus: Sequence[str]) -> dict[str, Answer]:
        """Take GPUs. See :meth:`PowerHelper.open`."""
        self.close()
        self._lost.clear()
        self._perhaps = {}
        self._helper = PowerHelper(self._job, self._socket, self._on_lost, maximum=self._maximum, seconds=SECONDS)
        answers = self._helper.open(gpus, self._clocks)
        self.limits_w = {gpu: float(each.values["limit_w"]) for gpu, each in answers.items() if each.done}
        self.clocks_mhz = {} if self._clocks is None else {gpu: self._clocks[1] for gpu in self.limits_w}
        return answers

    def write(
        self,
        decision: Decision,
        domain: Domain,
        present_w: Mapping[str, float],
        go_on: Callable[[], bool],
    ) -> list[str]:
        """Make the limits and clocks those of a decision, as far as it goes.

        Args:
            decision: What shall be.
            domain: With the budget.
            present_w: GPU -> its limit now, watts, of all GPUs that work.
            go_on: Asked before each write.

        Returns:
            The GPUs that were written.
        """
        written, moment = list[str](), time.monotonic()
        now = {gpu: max(watts, self._perhaps.get(gpu, 0.0)) for gpu, watts in present_w.items()}
        changed = {*(write.gpu for write in decision.writes), *self._perhaps}
        wanted = {gpu: watts for gpu, watts in decision.limits_w.items() if gpu in changed}
        tried = {gpu for gpu, watts in wanted.items() if watts > present_w.get(gpu, 0.0) and self._waits(gpu, moment)}
        tried -= {gpu for gpu, watts in self._perhaps.items() if wanted.get(gpu, watts) < watts}
        for gpu in self._perhaps.keys() & wanted.keys() - tried:
            # nothing below what is counted can exceed the budget; once it is written it is known
            if go_on() and not self._write_limit(gpu, min(wanted[gpu], now[gpu]), now):
                tried.add(gpu)
        while go_on():
            write = next_write(now, wanted, domain.total_w, decision.held_w, tried)
            if write is None:
                break
            done = self._write_limit(write.gpu, write.after_w, now)
            if done:
                written.append(write.gpu)
            if not done or write.after_w == wanted[write.gpu] or now[write.gpu] != write.after_w:
                tried.add(write.gpu)  # a driver that rounds is not asked again and again
        return written + self._write_clocks(decision, go_on)

    def _write_limit(self, gpu: str, watts: float, now: dict[str, float]) -> bool:
        """Write one limit, and let ``now`` follow. Returns whether it was done."""
        if self._helper is None:
            return False
        answer = self._helper.set(power_limit(gpu, watts))[0]
        if self._took(answer):
            self._perhaps.pop(gpu, None)
            now[gpu] = self.limits_w[gpu] = float(answer.values.get("limit_w", watts))
        elif answer.status is Status.FAILED and "limit_w" in answer.values:
            self._perhaps.pop(gpu, None)
            now[gpu] = self.limits_w[gpu] = float(answer.values["limit_w"])
        elif answer.status in (Status.LATE, Status.LOST, Status.FAILED) and watts > now[gpu]:
            now[gpu] = self._perhaps[gpu] = watts
        return answer.done

    def profiles(self, profiles: Sequence[int]) -> list[Answer]:
        """Request workload power profiles, by number, of all GPUs."""
        assert self._helper is not None
        return self._helper.set(*(workload_profiles(gpu, profiles) for gpu in self.limits_w))

    def denied(self) -> str:
        """Why limits may not be written, if so; a limit that is there is written to find out."""
        if self._helper is None:
            return ""
        gpu, watts = next(iter(self.limits_w.items()))
        answer = self._helper.set(power_limit(gpu, watts))[0]
        return answer.why if answer.status is Status.DENIED else ""

    def release(self) -> list[Answer]:
        """Have everything put back.

        Returns:
            What is not back: call it again, or let ``lightning-ntp restore-power`` do it.
        """
        if self._helper is None or self._helper.lost:
            return []
        return [each for each in self._helper.release().values() if not each.done]

    def close(self) -> None:
        """The helper puts back what it has not yet; a child ends. Waits for it, not for ever."""
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.close()

    def _write_clocks(self, decision: Decision, go_on: Callable[[], bool]) -> list[str]:
        written = []
        for gpu, highest in sorted(decision.clocks_mhz.items()):
            if self._clocks is None or self.clocks_mhz.get(gpu) == highest or self._helper is None or not go_on():
                continue
            if self._took(self._helper.set(locked_clocks(gpu, (min(self._clocks[0], highest), highest)))[0]):
                self.clocks_mhz[gpu] = highest
                written.append(gpu)
        return written

    def _took(self, answer: Answer) -> bool:
        if answer.done:
            self.refused.pop(answer.gpu, None)
        else:
            self.refused[answer.gpu] = answer
            self._not_before[answer.gpu] = time.monotonic() + _AGAIN_SECONDS
        return answer.done

    def _waits(self, gpu: str, moment: float) -> bool:
        return gpu in self.refused and moment < self._not_before[gpu]

    def _on_lost(self, why: str) -> None:
        self.why_lost = why
        self._lost.set()
