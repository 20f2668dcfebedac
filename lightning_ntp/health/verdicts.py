"""From findings to verdicts: a state machine over a clock, testable without devices, processes or threads.

A condition (see :class:`~lightning_ntp.health.findings.Finding`) leads to at most one verdict of each severity, however
often it comes and goes. A slot that was sent away comes back only when its device has been quiet for a while, twice as
long after each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_ntp.health.conditions import HEALTHY, NOBODY, UNANSWERED, Condition, Limits, Verdict, one_line
from lightning_ntp.health.findings import Action, Finding
from lightning_ntp.health.mistakes import Mistakes, Occasion
from lightning_ntp.health.places import Absences, Places, slot_name
from lightning_ntp.health.rules import OF_OTHERS, SeverityTable

__all__ = ["HEALTHY", "Limits", "Verdict", "Verdicts"]


class Verdicts:
    """Judges what the sources find.

    Args:
        table: How bad is it?
        limits: See there.
    """

    def __init__(self, table: SeverityTable, limits: Limits | None = None) -> None:
        self._table, self._limits = table, limits or Limits()
        self._places = Places()
        self._absences = Absences(self._limits, self._places)
        self._mistakes = Mistakes(self._limits.together, self._limits.repeat_window)
        self._leaving: dict[int, Action] = {}
        self._ending: set[int] = set()
        """Slots whose rank was told to end at once, whatever else was found since."""
        self._conditions: dict[tuple[str, str], Condition] = {}
        self._overflows = False
        """More was found than is kept, which is said once."""
        self._lost: set[str] = set()
        self._now = 0.0
        """When it was last judged."""

    # ---- who works where --------------------------------------------------------------------------------------

    def place(self, devices: Mapping[int, str]) -> None:
        """Which slot works on which device, as far as it is known."""
        self._places.put(devices)

    def started(self, slot: int) -> None:
        """A rank works in a slot from now on."""
        self._places.started(slot)
        self._absences.end(slot)
        self._leaving.pop(slot, None)
        self._ending.discard(slot)
        for condition in self._conditions.values():
            condition.begin_anew(slot)

    def ended(self, slot: int) -> None:
        """There is no rank in a slot any more."""
        self._places.ended(slot)
        self._ending.discard(slot)
        how = self._leaving.pop(slot, None)
        if how is not None:
            self._absences.begin(slot, how)
        for condition in self._at(slot):
            if condition.rule.action is Action.RESTART and condition.over is None:
                condition.over = self._now  # the end of the rank has cured it: the next one must not end for it

    def sent_away(self, slot: int) -> bool:
        """Whether a slot is empty because of its health, so that it shall be filled again once that is better."""
        return slot in self._absences

    def stays(self, slot: int) -> None:
        """The job cannot go on without a slot that was told to leave."""
        self._leaving.pop(slot, None)

    def reconsider(self, slot: int, now: float) -> bool:
        """Whether a slot that was told to leave, and could not, need not any more. If what was wrong with it comes
        again, it is told again.
        """
        here = self._at(slot)
        if any(each.over is None and each.done(slot) >= Action.DRAIN for each in here):
            return False
        if self._absences.quiet(slot, now) < self._limits.quiet:
            return False
        for each in here:
            each.begin_anew(slot)
        return True

    # ---- judging ----------------------------------------------------------------------------------------------

    def judge(self, findings: Iterable[Finding], now: float) -> list[Verdict]:
        """Take findings in, those of about the same moment together, and look at what is due.

        Args:
            findings: What was found.
            now: Seconds.
        """
        self._now, leaving = now, dict(self._leaving)
        verdicts = self._judge_mistakes(now)
        for finding in findings:
            verdicts += self._hear(finding, now)
        for where, key in list(self._conditions):
            condition = self._conditions[where, key]
            if condition.over is None:
                verdicts += self._decide(where, condition, now)
            if self._is_history(condition, now):
                del self._conditions[where, key]
        return self._not_everybody(verdicts, leaving)

    def unfit(self, slot: int, now: float) -> str:
        """Why the device of a slot is not fit for a new rank; empty if nothing speaks against it."""
        for condition in self._at(slot):
            if condition.over is None and condition.blocks:
                return self._describe(condition)
        needed = self._absences.still_needs(slot, now)
        return f"its device must show nothing bad for {needed:g} s first" if needed else ""

    def standing(self, slot: int) -> list[str]:
        """What is wrong with a slot now, worst first, for people."""
        wrong = [each for each in self._at(slot) if each.over is None and each.done(slot) >= Action.SUSPECT]
        wrong.sort(key=lambda condition: -condition.done(slot))
        return [self._describe(each) for each in wrong]

    def worst(self, slot: int) -> Action:
        """The worst that holds of a slot now: ``LOG`` if it is healthy."""
        return max([Action.LOG, *(each.done(slot) for each in self._at(slot) if each.over is None)])

    def pardon(self, slot: int) -> None:
        """A person says that the device of a slot is as good as new."""
        places = self._places.of(slot)
        self._conditions = {key: each for key, each in self._conditions.items() if key[0] not in places}
        for place in places:
            self._lost.discard(place)
            self._mistakes.forget(place)
        self._absences.pardon(slot)

    # ---- taking in --------------------------------------------------------------------------------------------

    def _at(self, slot: int) -> list[Condition]:
        """All conditions of a slot and of its device."""
        places = self._places.of(slot)
        return [condition for (where, _), condition in self._conditions.items() if where in places]

    def _describe(self, condition: Condition) -> str:
        return one_line(f"{self._table.name(condition.finding)}: {condition.finding.text}")

    def _hear(self, finding: Finding, now: float) -> list[Verdict]:
        where = finding.gpu or slot_name(finding.slot)
        if finding.signal == HEALTHY:
            return self._passed(where, finding, now)
        rule = self._table.rule(finding)
        condition = self._conditions.get((where, finding.key))
        if finding.clears or rule.action is Action.IGNORE:
            return [] if condition is None else self._over(where, condition, now)
        if condition is None and len(self._conditions) >= self._limits.most * (1 + (rule.action > Action.SUSPECT)):
            return self._too_many()
        if finding.signal in ("gpu_lost", "reset_required"):
            self._lost.add(where)
        if condition is None:
            condition = self._conditions[where, finding.key] = Condition(finding, rule, now, now)
        else:
            if condition.over is not None:
                condition.since, condition.over = now, None
            condition.finding, condition.rule, condition.last = finding, rule, now
            condition.untold += 1
        if rule.application:
            self._mistakes.show(finding.key, where, now)
        # at once: it may be over before all others are heard
        return self._decide(where, condition, now) or self._tell_again(where, condition, now)

    def _too_many(self) -> list[Verdict]:
        if self._overflows:
            return []
        self._overflows = True
        text = f"more than {self._limits.most} things were found within an hour: of others, only what is grave is heard"
        return [Verdict(Action.LOG, NOBODY, "too many", text, Finding("external", text, gpu="-"))]

    def _tell_again(self, where: str, condition: Condition, now: float) -> list[Verdict]:
        """About something that was told before: a line now and then."""
        if not condition.acted or not condition.untold or now - condition.told < self._limits.lines:
            return []
        often = f" ({condition.untold} times more)" if condition.untold > 1 else " (again)"
        return self._say(where, condition, Action.LOG, condition.finding.text + often, now)

    def _over(self, where: str, condition: Condition, now: float) -> list[Verdict]:
        if condition.over is not None:
            return []
        # also if it was too short to do anything about: who is to come back must have been without it
        if condition.blocks:
            self._absences.bad(where, now)
        condition.over, condition.suspected = now, False
        worst = max(condition.acted.values(), default=Action.IGNORE)
        if worst < Action.SUSPECT or now - condition.told < self._limits.lines:
            return []
        return self._say(where, condition, Action.LOG, "is over", now)

    def _is_history(self, condition: Condition, now: float) -> bool:
        if condition.over is not None:
            return now - condition.over > self._limits.forget
        # what nobody does anything about may never be said to be over
        return condition.action <= Action.LOG and now - condition.last > self._limits.forget

    def _passed(self, where: str, check: Finding, now: float) -> list[Verdict]:
        """A device has passed its check."""
        returned = where in self._lost
        self._lost.discard(where)
        verdicts = []
        for (place, _), condition in self._conditions.items():
            # what has just come is newer than what the check has looked at
            if place != where or condition.over is not None or condition.last >= now:
                continue
            signal = condition.finding.signal
            if condition.suspected or signal in OF_OTHERS or condition.finding.action is not None:
                continue  # of this the driver knows nothing
            fresh = now - condition.last < self._limits.suspicion
            if fresh and signal == "xid" and condition.rule.action is Action.SUSPECT and not returned:
                continue
            lasts = signal not in ("xid", *UNANSWERED)  # its source says when it is over
            if returned or not lasts and (condition.rule.passes or check.code == 1):
                verdicts += self._over(where, condition, now)
        return verdicts

    def _decide(self, where: str, condition: Condition, now: float, text: str = "") -> list[Verdict]:
        rule = condition.rule
        if now - condition.since < rule.hold:
            return []
        if rule.action >= Action.DRAIN:
            self._absences.bad(where, now)
        due = condition.due(self._places.slots(where))
        if not due:
            return []
        for slot in due:
            condition.acted[slot] = condition.action
        if due == [NOBODY] and rule.action is Action.RESTART:
            condition.over = now  # who comes later has lost nothing
        text = text or condition.finding.text + (f" for {now - condition.since:.0f} s" if rule.hold else "")
        return self._say(where, condition, condition.action, text, now, due)

    def _say(
        self, where: str, condition: Condition, action: Action, text: str, now: float, slots: Sequence[int] = ()
    ) -> list[Verdict]:
        condition.told, condition.untold = now, 0
        name, finding = one_line(self._table.name(condition.finding)), condition.finding
        slots = slots or self._places.slots(where)
        if not slots or slots[0] == NOBODY:
            line = one_line(f"{where}, where no rank works: {name}: {text}")
            return [Verdict(Action.LOG, NOBODY, name, line, finding)]
        verdicts = []
        for slot in slots:
            done = action
            if action >= Action.RESTART:
                if self._leaving.get(slot, Action.IGNORE) >= action:
                    done = Action.LOG  # it is on its way already
                else:
                    self._leaving[slot] = action
            verdicts.append(Verdict(done, slot, name, one_line(f"{slot_name(slot)}: {name}: {text}"), finding))
        return verdicts

    def _judge_mistakes(self, now: float) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for occasion in self._mistakes.ended(now):
            verdicts += self._judge_occasion(occasion, now)
        for (where, key), condition in self._conditions.items():
            if condition.suspected and self._mistakes.times(key, where) < self._limits.repeats:
                verdicts += self._over(where, condition, now)
        return verdicts

    def _judge_occasion(self, occasion: Occasion, now: float) -> list[Verdict]:
        where = min(occasion.places)
        condition = self._conditions.get((where, occasion.key))
        if condition is None or not condition.rule.application:
            return []
        if len(occasion.places) > 1:
            everybody = len(occasion.places) >= len(self._places.live)
            who = "all devices" if everybody else f"{len(occasion.places)} devices"
            text = f"{who} show it at once: a mistake of the program, nobody leaves for it"
            return self._say(where, condition, Action.LOG, text, now)[:1]
        if occasion.times < self._limits.repeats or condition.suspected:
            return []
        # the device passes every check meanwhile, which says nothing about this
        condition.suspected, condition.over = True, None
        text = f"{occasion.times} times within {occasion.seconds:.0f} s, on this device alone"
        return self._decide(where, condition, now, text)

    def _may_end(self) -> set[int]:
        """Slots of whose device something is known that ends their rank, unless it is over soon."""
        bad = [w for (w, _), each in self._conditions.items() if each.over is None and each.rule.action is Action.DEAD]
        return {slot for where in bad for slot in self._places.slots(where)}

    def _not_everybody(self, verdicts: list[Verdict], leaving: Mapping[int, Action]) -> list[Verdict]:
        """All devices at once do not fail: then it is the driver, or the machine, and killing helps nobody.

        Args:
            verdicts: What is about to be said.
            leaving: Who was about to leave before.
        """
        ends = (Action.RESTART, Action.DEAD)
        ending = {verdict.slot for verdict in verdicts if verdict.action in ends}
        if not self._places.live <= ending | self._ending | self._may_end():
            self._ending |= ending
            return verdicts
        judged = []
        for verdict in verdicts:
            if verdict.action in ends:
                text = one_line(f"{verdict.text}; nobody would be left, so the rank goes on for as long as it can")
                verdict = Verdict(Action.SUSPECT, verdict.slot, verdict.name, text, verdict.finding)
            judged.append(verdict)
        for slot in ending:
            drains = any(verdict.slot == slot and verdict.action is Action.DRAIN for verdict in verdicts)
            before = max(leaving.get(slot, Action.IGNORE), Action.DRAIN if drains else Action.IGNORE)
            self._leaving.pop(slot, None)
            if before is not Action.IGNORE:
                self._leaving[slot] = before
        return judged
