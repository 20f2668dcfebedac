"""What a verdict is made of, and what is remembered of a condition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_ntp.health.findings import Action, Finding
from lightning_ntp.health.rules import Rule

HEALTHY = "healthy"
"""Signal of a source that has looked at all of a device and found nothing; ``code`` is 1 if the driver says by itself
that the device needs no recovery."""
UNANSWERED = ("stalled", "nvml_error", "gpu_lost", "reset_required")
"""A device that does not answer cannot have passed its check."""
NOBODY = -1
"""In place of a slot, where no rank works."""
_LONGEST_LINE = 500


@dataclass(frozen=True)
class Limits:
    """Times and numbers that keep verdicts calm. Times in seconds.

    Args:
        together: Mistakes of the program that are shown within this time, by one device or several, are one.
        repeats: A device that alone shows such a mistake so often within ``repeat_window`` is suspected.
        repeat_window: See there.
        quiet: For so long must the device of a slot that was sent away show nothing bad before it may come back;
            twice as long after each further time.
        longest_quiet: But not longer.
        lines: Between two lines about a condition that comes and goes.
        forget: A condition that has been over for so long is forgotten.
        suspicion: A suspicion for an event, such as an XID, stands for so long, or nobody would see it: the next check
            of the device passes within a second.
        most: So many conditions are kept; of more, only what sends slots away is heard, and of twice as many nothing.
    """

    together: float = 2.0
    repeats: int = 3
    repeat_window: float = 3600.0
    quiet: float = 60.0
    longest_quiet: float = 3600.0
    lines: float = 60.0
    forget: float = 3600.0
    suspicion: float = 600.0
    most: int = 1000


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
class Condition:
    """What is wrong somewhere (see :class:`~lightning_ntp.health.findings.Finding`), from its beginning on.

    Args:
        finding: The last one.
        rule: What is done about it.
        since: When it began, the last time.
        last: When it was found last.
    """

    finding: Finding
    rule: Rule
    since: float
    last: float
    over: float | None = None
    """Since when it is over."""
    acted: dict[int, Action] = field(default_factory=dict)
    """Slot -> the worst that was done about it during the stay of its rank; ``NOBODY`` where none works."""
    told: float = float("-inf")
    untold: int = 0
    suspected: bool = False
    """A mistake of the program that this device alone has made too often."""

    def done(self, slot: int) -> Action:
        """The worst that was done about it to the rank that is there now."""
        return self.acted.get(slot, Action.IGNORE)

    @property
    def action(self) -> Action:
        """What is done about it."""
        return max(self.rule.action, Action.SUSPECT) if self.suspected else self.rule.action

    def begin_anew(self, slot: int) -> None:
        """Nothing was done about this rank yet; that it was noted is not forgotten."""
        if slot in self.acted:
            self.acted[slot] = min(self.acted[slot], Action.LOG)

    @property
    def blocks(self) -> bool:
        """Whether no rank shall be started while it lasts."""
        return self.rule.action >= Action.DRAIN or self.finding.signal in UNANSWERED

    def due(self, slots: Iterable[int]) -> list[int]:
        """Those of the slots, or ``NOBODY``, to whom what the rule says is yet to be done.

        A device may be said to be a slot's after something was found about it, and another rank may come: to such
        a newcomer it is done too, but of what was only noted nobody needs to hear again.
        """
        action, begins = self.action, not self.acted
        return [
            slot
            for slot in list(slots) or [NOBODY]
            if self.done(slot) < action and (begins or slot in self.acted or slot != NOBODY and action > Action.LOG)
        ]


def one_line(text: str) -> str:
    """What sources say, for a terminal: no line breaks, no control characters, not without end."""
    line = " ".join(text[: 2 * _LONGEST_LINE].split())
    line = "".join(each if each.isprintable() else "?" for each in line)
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."
