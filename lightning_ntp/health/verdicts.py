"""From findings to verdicts: a state machine over a clock, testable without devices, processes or threads.

A condition (see :class:`~lightning_ntp.health.findings.Finding`) leads to at most one verdict of each severity, however
often it comes and goes. A slot that was sent away comes back only when its device has been quiet for a while, twice as
long after each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_ntp.health.findings import Action, Finding
from lightning_ntp.health.rules import Rule, SeverityTable

HEALTHY = "healthy"
"""Signal of a source that has looked at all of a device and found nothing; ``code`` is 1 if the driver says by itself
that the device needs no recovery."""
_UNANSWERED = ("stalled", "nvml_error", "gpu_lost", "reset_required")
"""A device that does not answer cannot have passed its check."""


@dataclass(frozen=True)
class Limits:
    """Times and numbers that keep verdicts calm. Times in seconds.

    Args:
        together: Mistakes of the program that several devices show within this time are one.
        repeats: So often within ``repeat_window`` may a device alone show such a mistake before it is suspected.
        repeat_window: See there.
        quiet: For so long must the device of a slot that was sent away show nothing bad before it may come back;
            twice as long after each further time.
        longest_quiet: But not longer.
        lines: Between two lines about a condition that comes and goes.
        forget: A condition that has been over for so long is forgotten.
    """

    together: float = 2.0
    repeats: int = 3
    repeat_window: float = 3600.0
    quiet: float = 60.0
    longest_quiet: float = 3600.0
    lines: float = 60.0
    forget: float = 3600.0


@dataclass(frozen=True)
class Verdict:
    """What is to be done now.

    Args:
        action: What, at least ``LOG``.
        slot: About whom; -1 if no slot works there.
        name: Of the finding, for people.
        text: The whole line, for people.
        finding: What has led to it.
    """

    action: Action
    slot: int
    name: str
    text: str
    finding: Finding


@dataclass
class _Condition:
    finding: Finding
    rule: Rule
    since: float
    last: float
    over: float | None = None
    """Since when it is over."""
    acted: Action = Action.IGNORE
    """The worst that was done about it."""
    told: float = float("-inf")
    times: int = 1
    untold: int = 0


@dataclass
class _Mistake:
    """A mistake of the program, as devices show it."""

    shown: list[tuple[str, float]] = field(default_factory=list)
    judged: float = float("-inf")


class Verdicts:
    """Judges what the sources find.

    Args:
        table: How bad is it?
        limits: See there.
    """

    def __init__(self, table: SeverityTable, limits: Limits | None = None) -> None:
        self._table, self._limits = table, limits or Limits()
        self._devices: dict[int, str] = {}
        self._live: set[int] = set()
        self._leaving: dict[int, Action] = {}
        self._sent: dict[int, int] = {}
        """How often a slot was sent away."""
        self._out: set[int] = set()
        """Slots that were sent away and are not back."""
        self._conditions: dict[tuple[str, str], _Condition] = {}
        self._mistakes: dict[str, _Mistake] = {}
        self._bad: dict[str, float] = {}
        """When a device or slot was last seen with something that sends a slot away."""
        self._lost: set[str] = set()

    # ---- who works where --------------------------------------------------------------------------------------

    def place(self, devices: Mapping[int, str]) -> None:
        """Which slot works on which device, as far as it is known."""
        self._devices = dict(devices)

    def started(self, slot: int) -> None:
        """A rank works in a slot from now on."""
        self._live.add(slot)
        self._out.discard(slot)
        self._leaving.pop(slot, None)

    def ended(self, slot: int) -> None:
        """There is no rank in a slot any more."""
        self._live.discard(slot)
        if self._leaving.pop(slot, None) is not None:
            self._out.add(slot)

    def sent_away(self, slot: int) -> bool:
        """Whether a slot is empty because of its health, so that it shall be filled again once that is better."""
        return slot in self._out

    def stays(self, slot: int) -> None:
        """The job cannot go on without a slot that was told to leave."""
        self._leaving.pop(slot, None)

    def reconsider(self, slot: int, now: float) -> bool:
        """Whether a slot that was told to leave, and could not, need not any more. If what was wrong with it comes
        again, it is told again.
        """
        places = self._places(slot)
        here = [each for (where, _), each in self._conditions.items() if where in places]
        if any(each.over is None and each.acted >= Action.DRAIN for each in here):
            return False
        if now - max(self._bad.get(place, float("-inf")) for place in places) < self._limits.quiet:
            return False
        for each in here:
            each.acted = min(each.acted, Action.LOG)
        return True

    # ---- judging ----------------------------------------------------------------------------------------------

    def judge(self, findings: Iterable[Finding], now: float) -> list[Verdict]:
        """Take findings in, those of about the same moment together, and look at what is due.

        Args:
            findings: What was found.
            now: Seconds.
        """
        verdicts: list[Verdict] = []
        for finding in findings:
            verdicts += self._hear(finding, now)
        for where, key in list(self._conditions):
            condition = self._conditions[where, key]
            if condition.over is None:
                verdicts += self._decide(where, condition, now)
            elif now - condition.over > self._limits.forget:
                del self._conditions[where, key]
        verdicts += self._judge_mistakes(now)
        return self._not_everybody(verdicts)

    def unfit(self, slot: int, now: float) -> str:
        """Why the device of a slot is not fit for a new rank; empty if nothing speaks against it."""
        places = self._places(slot)
        for (where, _), condition in self._conditions.items():
            blocks = condition.rule.action >= Action.DRAIN or condition.finding.signal in _UNANSWERED
            if where in places and condition.over is None and blocks:
                return f"{self._table.name(condition.finding)}: {condition.finding.text}"
        sent = self._sent.get(slot, 0)
        if sent and slot in self._out:
            needed = min(self._limits.quiet * 2.0 ** min(sent - 1, 32), self._limits.longest_quiet)
            if now - max(self._bad.get(place, float("-inf")) for place in places) < needed:
                return f"its device must show nothing bad for {needed:g} s first"
        return ""

    def standing(self, slot: int) -> list[str]:
        """What is wrong with a slot now, worst first, for people."""
        places = self._places(slot)
        wrong = [
            condition
            for (where, _), condition in self._conditions.items()
            if where in places and condition.over is None and condition.acted >= Action.SUSPECT
        ]
        wrong.sort(key=lambda condition: -condition.acted)
        return [f"{self._table.name(each.finding)}: {each.finding.text}" for each in wrong]

    def worst(self, slot: int) -> Action:
        """The worst that holds of a slot now: ``LOG`` if it is healthy."""
        places = self._places(slot)
        acted = [c.acted for (where, _), c in self._conditions.items() if where in places and c.over is None]
        return max([Action.LOG, *acted])

    def pardon(self, slot: int) -> None:
        """A person says that the device of a slot is as good as new."""
        places = self._places(slot)
        self._conditions = {key: each for key, each in self._conditions.items() if key[0] not in places}
        for place in places:
            self._bad.pop(place, None)
        self._sent.pop(slot, None)
        self._out.discard(slot)

    # ---- taking in --------------------------------------------------------------------------------------------

    def _places(self, slot: int) -> set[str]:
        device = self._devices.get(slot)
        return {_slot_name(slot)} | ({device} if device else set())

    def _slots(self, where: str) -> list[int]:
        """The live slots that a condition is about."""
        return sorted(slot for slot in self._live if where in self._places(slot))

    def _hear(self, finding: Finding, now: float) -> list[Verdict]:
        where = finding.gpu or _slot_name(finding.slot)
        if finding.signal == HEALTHY:
            return self._passed(where, finding, now)
        rule = self._table.rule(finding)
        if rule.action is Action.IGNORE:
            return []
        if finding.signal in ("gpu_lost", "reset_required") and not finding.clears:
            self._lost.add(where)
        condition = self._conditions.get((where, finding.key))
        if finding.clears:
            return [] if condition is None else self._over(where, condition, now)
        if condition is None:
            condition = self._conditions[where, finding.key] = _Condition(finding, rule, now, now)
        else:
            if condition.over is not None:
                condition.since, condition.over = now, None
            condition.finding, condition.rule, condition.last = finding, rule, now
            condition.times += 1
            condition.untold += 1
        if rule.application:
            self._mistakes.setdefault(finding.key, _Mistake()).shown.append((where, now))
        # at once: it may be over again before all that was found is taken in
        return [*self._tell_again(where, condition, now), *self._decide(where, condition, now)]

    def _tell_again(self, where: str, condition: _Condition, now: float) -> list[Verdict]:
        """About something that was told before: a line now and then."""
        known = condition.acted is not Action.IGNORE
        if not known or not condition.untold or now - condition.told < self._limits.lines:
            return []
        often = f" ({condition.untold} times more)" if condition.untold > 1 else " (again)"
        return self._say(where, condition, Action.LOG, condition.finding.text + often, now)

    def _over(self, where: str, condition: _Condition, now: float) -> list[Verdict]:
        if condition.over is not None:
            return []
        if condition.rule.action >= Action.DRAIN and condition.acted >= Action.DRAIN:
            self._bad[where] = now
        condition.over = now
        if condition.acted < Action.SUSPECT or now - condition.told < self._limits.lines:
            return []
        return self._say(where, condition, Action.LOG, "is over", now)

    def _passed(self, where: str, check: Finding, now: float) -> list[Verdict]:
        """A device has passed its check."""
        returned = where in self._lost
        self._lost.discard(where)
        verdicts = []
        for (place, _), condition in self._conditions.items():
            # what has just come is newer than what the check has looked at
            if place != where or condition.over is not None or condition.last >= now:
                continue
            lasts = condition.finding.signal not in ("xid", *_UNANSWERED)  # its source says when it is over
            if returned or not lasts and (condition.rule.passes or check.code == 1):
                verdicts += self._over(where, condition, now)
        return verdicts

    def _decide(self, where: str, condition: _Condition, now: float) -> list[Verdict]:
        rule = condition.rule
        if now - condition.since < rule.hold:
            return []
        if rule.action >= Action.DRAIN:
            self._bad[where] = now
        if condition.acted >= rule.action:
            return []
        condition.acted = rule.action
        text = condition.finding.text + (f" for {now - condition.since:.0f} s" if rule.hold else "")
        return self._say(where, condition, rule.action, text, now)

    def _say(self, where: str, condition: _Condition, action: Action, text: str, now: float) -> list[Verdict]:
        condition.told, condition.untold = now, 0
        name, finding = self._table.name(condition.finding), condition.finding
        slots = self._slots(where)
        if not slots:
            return [Verdict(Action.LOG, -1, name, f"{where}, where no rank works: {name}: {text}", finding)]
        verdicts = []
        for slot in slots:
            done = action
            if action >= Action.RESTART:
                if self._leaving.get(slot, Action.IGNORE) >= action:
                    done = Action.LOG  # it is on its way already
                else:
                    if slot not in self._leaving and action >= Action.DRAIN:
                        self._sent[slot] = self._sent.get(slot, 0) + 1
                    self._leaving[slot] = action
            verdicts.append(Verdict(done, slot, name, f"{_slot_name(slot)}: {name}: {text}", finding))
        return verdicts

    def _judge_mistakes(self, now: float) -> list[Verdict]:
        """The program's mistakes show on all devices, or on the one that runs into it; a bad device shows them alone,
        again and again.
        """
        verdicts: list[Verdict] = []
        for key, mistake in self._mistakes.items():
            horizon = now - self._limits.repeat_window
            mistake.shown = [each for each in mistake.shown[-1000:] if each[1] >= horizon]
            fresh = [each for each in mistake.shown if each[1] > mistake.judged]
            if not fresh or now - min(at for _, at in fresh) < self._limits.together:
                continue
            mistake.judged = now
            places = {where for where, _ in fresh}
            for where in sorted(places):
                condition = self._conditions.get((where, key))
                if condition is None:
                    continue
                if len(places) > 1:
                    if where == min(places):
                        everybody = "all devices" if len(places) >= len(self._live) else f"{len(places)} devices"
                        text = f"{everybody} show it at once: a mistake of the program, nobody leaves for it"
                        verdicts += self._say(where, condition, Action.LOG, text, now)[:1]
                    continue
                others = any(other != where for other, _ in mistake.shown)
                count = sum(each == where for each, _ in mistake.shown)
                if not others and count >= self._limits.repeats and condition.acted < Action.SUSPECT:
                    condition.acted = Action.SUSPECT
                    text = f"{count} times within {now - mistake.shown[0][1]:.0f} s, on this device alone"
                    verdicts += self._say(where, condition, Action.SUSPECT, text, now)
        return verdicts

    def _not_everybody(self, verdicts: list[Verdict]) -> list[Verdict]:
        """All devices at once do not fail: then it is the driver, or the machine, and killing helps nobody."""
        ends = (Action.RESTART, Action.DEAD)
        ending = {verdict.slot for verdict in verdicts if verdict.action in ends}
        if not ending or not self._live <= ending | {s for s, a in self._leaving.items() if a in ends}:
            return verdicts
        judged = []
        for verdict in verdicts:
            if verdict.action in ends:
                self._leaving.pop(verdict.slot, None)
                text = f"{verdict.text}; nobody would be left, so the rank goes on for as long as it can"
                verdict = Verdict(Action.SUSPECT, verdict.slot, verdict.name, text, verdict.finding)
            judged.append(verdict)
        return judged


def _slot_name(slot: int) -> str:
    return f"slot {slot}"
