"""How bad is it? The severity table: one rule for every signal, with defaults that a user may override.

XIDs start from NVIDIA's catalogue (``xid_catalog_2025-10-29.tsv``: number, mnemonic, immediate and later action, of
https://docs.nvidia.com/deploy/xid-errors/ as of that date). The catalogue says what an operator shall do; what a
training job shall do follows from that (:data:`_OF_CATALOGUE`), but for those of :data:`_XIDS`, each with its reason.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_ntp.health.findings import Action, Finding
from lightning_ntp.health.overrides import OverrideError, kind, read_overrides, shown

__all__ = ["CATALOGUE", "OF_OTHERS", "OverrideError", "Rule", "SeverityTable", "catalogue"]

CATALOGUE = "xid_catalog_2025-10-29.tsv"
_MINUTE = 60.0
_ALL_LOOKED, _TOGETHER = 1.5, 0.2
"""Seconds in which all devices were looked at, or have had their events: all at once are not lost, the driver is."""


@dataclass(frozen=True)
class Rule:
    """What is done about one signal.

    Args:
        action: What.
        why: For people.
        hold: Seconds for which the condition must last before anything is done.
        application: Whether it is a mistake of the program: nothing is done about it, but for a device that alone shows
            it again and again, which is suspected then.
        passes: Whether the device is as good as before as soon as its check passes; otherwise it takes a reset that the
            driver can show, or a person (``lightning-ntp restart``).
    """

    action: Action
    why: str = ""
    hold: float = 0.0
    application: bool = False
    passes: bool = True


_LOG = Rule(Action.LOG, "for information")
_APPLICATION = Rule(Action.LOG, "a mistake of the program, as a rule", application=True)
_RESET = Rule(Action.DRAIN, "the device needs a reset", passes=False)
_SUSPECT = Rule(Action.SUSPECT, "the vendor's support is to be asked")

_OF_CATALOGUE = {
    "IGNORE": _LOG,
    "UPDATE_SWFW": _LOG,
    "CHECK_UVM": _LOG,
    "": _LOG,
    "RESTART_APP": _APPLICATION,
    "CONTACT_SUPPORT": _SUSPECT,
    "CHECK_MECHANICALS": _SUSPECT,
    "WORKFLOW_NVLINK_ERR": Rule(Action.SUSPECT, "an NVLink has failed"),
    "WORKFLOW_NVLINK5_ERR": Rule(Action.SUSPECT, "an NVLink has failed"),
    "RESET_GPU": _RESET,
    "RESTART_BM": Rule(Action.DEAD, "the device is not on the bus any more", passes=False),
    "RESTART_VM": Rule(Action.DEAD, "the virtual machine must be started again", passes=False),
}
"""Immediate action of the catalogue -> what training does."""

_UNTRUSTED = Rule(Action.DEAD, "what the device's memory holds cannot be trusted: nothing of it may move", passes=False)
_STUCK = Rule(Action.DEAD, "the device makes no progress any more, so it cannot leave in order", passes=False)
_XIDS: dict[int, Rule] = {
    43: _APPLICATION,  # the catalogue ignores it: the channel of a program that was at fault was stopped
    45: Rule(Action.LOG, "work was removed because of another XID, or because the program was killed"),
    46: _STUCK,
    48: _UNTRUSTED,  # a double-bit error: 94 or 95 say whether it was contained, and the recovery action what to do
    62: _STUCK,
    63: Rule(Action.LOG, "a row of the memory was remapped: it takes effect with the next reset"),
    64: Rule(Action.DRAIN, "a row of the memory could not be remapped", passes=False),
    74: Rule(Action.SUSPECT, "an NVLink has failed"),
    94: Rule(Action.RESTART, "a memory error was contained: the program is lost, the device is not"),
    95: _UNTRUSTED,
    109: _STUCK,
    119: _STUCK,
    120: _STUCK,
    140: _UNTRUSTED,
    143: Rule(Action.DEAD, "the device could not be initialised", passes=False),
    # decided by the recovery action itself, which is read at once
    154: Rule(Action.LOG, "the device's recovery action has changed"),
    158: _STUCK,
    171: _SUSPECT,
    172: _SUSPECT,
}

_SIGNALS: dict[str, Rule] = {
    "xid.unknown": Rule(Action.SUSPECT, f"not in the catalogue ({CATALOGUE})"),
    # field 230, NVML_GPU_RECOVERY_ACTION_*
    "recovery_action.0": _LOG,
    "recovery_action.1": _RESET,
    "recovery_action.2": Rule(Action.DRAIN, "the node must be rebooted", passes=False),
    "recovery_action.3": Rule(Action.DRAIN, "peer-to-peer traffic must end before the device is reset", passes=False),
    "recovery_action.4": Rule(Action.DRAIN, "the device shall be drained, then reset", passes=False),
    "recovery_action.5": Rule(Action.DRAIN, "the IMEX domain must be recovered", passes=False),
    "recovery_action.6": Rule(Action.DRAIN, "the device needs a reset of its bus", passes=False),
    "recovery_action.7": Rule(Action.DRAIN, "the system must be rebooted", passes=False),
    "recovery_action.unknown": _SUSPECT,
    "ecc_uncorrected": Rule(Action.SUSPECT, "uncorrected memory errors were counted"),
    "sram_threshold": Rule(Action.DRAIN, "more errors in its SRAM than the vendor accepts", passes=False),
    "row_remap_pending": Rule(Action.LOG, "a row of the memory is remapped at the next reset"),
    "row_remap_failure": Rule(Action.DRAIN, "a row of the memory could not be remapped", passes=False),
    "nvlink_errors": Rule(Action.LOG, "errors on an NVLink, which were corrected"),
    "nvlink_down": Rule(Action.SUSPECT, "an NVLink is down"),
    "fabric": Rule(Action.SUSPECT, "the NVLink fabric is not healthy"),
    "temperature_margin": Rule(Action.DRAIN, "no margin to the temperature at which it slows down", hold=_MINUTE),
    "thermal_slowdown": Rule(Action.SUSPECT, "slowed down by heat", hold=_MINUTE),
    "power_brake": Rule(Action.SUSPECT, "slowed down by the power supply", hold=_MINUTE),
    "pcie_replays": Rule(Action.LOG, "transfers over PCIe were repeated"),
    "gpu_lost": Rule(Action.DEAD, "the device is lost", hold=_ALL_LOOKED),
    "reset_required": Rule(Action.DEAD, "the device does nothing before it is reset", hold=_ALL_LOOKED),
    "gpu_unavailable": Rule(Action.DEAD, "the device is not available any more", hold=_TOGETHER),
    "nvml_error": Rule(Action.SUSPECT, "the driver answers with errors"),
    "stalled": Rule(Action.SUSPECT, "the driver does not answer"),
    # of the other sources
    "maintenance": Rule(Action.DRAIN, "the cluster manager takes it away"),
    "straggler": Rule(Action.SUSPECT, "slower than its peers"),
    "external": Rule(Action.LOG, "said by a source"),
}

OF_OTHERS = ("maintenance", "straggler", "external")
"""Signals of which the driver knows nothing."""


class SeverityTable:
    """The rules, with a user's overrides.

    Args:
        overrides: A YAML file, or what would be in it::

            xid:
              94: drain          # an action of its own for one XID
              unknown: ignore    # for those that the catalogue does not have
            signals:
              straggler: drain
              temperature_margin: {action: drain, hold: 30}

    Raises:
        OverrideError: If something in it is wrong.
    """

    def __init__(self, overrides: str | Path | Mapping[str, Any] | None = None) -> None:
        self._rules: dict[str, Rule] = {**_SIGNALS}
        self._mnemonics: dict[int, str] = {}
        for number, mnemonic, immediate in catalogue():
            self._mnemonics[number] = mnemonic
            # what the catalogue leaves to a workflow of many steps is suspect until something clearer comes
            self._rules[f"xid.{number}"] = _XIDS.get(number) or _OF_CATALOGUE.get(immediate, _SUSPECT)
        if overrides is not None:
            self._override(overrides)

    def rule(self, finding: Finding) -> Rule:
        """What is done about a finding."""
        rule = self._rules.get(finding.key) or self._rules.get(f"{finding.signal}.unknown")
        rule = rule or self._rules.get(finding.signal) or self._rules["external"]
        return rule if finding.action is None else replace(rule, action=finding.action, application=False)

    def name(self, finding: Finding) -> str:
        """A finding's name for people: ``XID 79 (ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS)``."""
        if finding.signal != "xid" or finding.code is None:
            return finding.signal.replace("_", " ")
        mnemonic = self._mnemonics.get(finding.code, "not in the catalogue")
        return f"XID {finding.code} ({mnemonic})"

    def rows(self) -> list[tuple[str, Rule]]:
        """All rules by key, for tables and tests."""
        return sorted(self._rules.items(), key=_order)

    # ---- overrides --------------------------------------------------------------------------------------------

    def _override(self, given: str | Path | Mapping[str, Any]) -> None:
        where, content = "rules", given
        if isinstance(given, str | Path):
            where, content = str(given), read_overrides(Path(given))
        if not isinstance(content, Mapping):
            raise OverrideError(f"{where}: {kind(content)} where a mapping with 'xid' and 'signals' was expected")
        for section in content:
            if section not in ("xid", "signals"):
                raise OverrideError(f"{where}: {shown(section)} is none of the sections 'xid', 'signals'")
        self._override_xids(f"{where}: xid", content.get("xid"))
        self._override_signals(f"{where}: signals", content.get("signals"))

    def _override_xids(self, where: str, section: Any) -> None:
        seen: set[str] = set()
        for code, what in _items(where, section):
            name = code.strip() if isinstance(code, str) else str(code) if _is_number(code) else ""
            if name != "unknown" and not (name.isascii() and name.isdecimal() and len(name) < 10):
                raise OverrideError(f"{where}: {shown(code)} is neither the number of an XID nor 'unknown'")
            name = name if name == "unknown" else str(int(name))
            if f"xid.{name}" not in self._rules:
                last = max(self._mnemonics)
                raise OverrideError(
                    f"{where}: XID {name} is not in the catalogue ({CATALOGUE}, 1 to {last}); write 'unknown' for all"
                    " that are not"
                )
            self._take(where, code, f"xid.{name}", what, seen)

    def _override_signals(self, where: str, section: Any) -> None:
        known = {key for key in _SIGNALS if not key.startswith("xid.")}
        seen: set[str] = set()
        for name, what in _items(where, section):
            if name not in known:
                raise OverrideError(f"{where}: {shown(name)} is no signal; there are {', '.join(sorted(known))}")
            self._take(where, name, str(name), what, seen)

    def _take(self, where: str, name: Any, key: str, what: Any, seen: set[str]) -> None:
        if key in seen:
            raise OverrideError(f"{where}: {shown(name)} is there twice")
        seen.add(key)
        where = f"{where}: {name}"
        rule = self._rules[key]
        if isinstance(what, str):
            what = {"action": what}
        if not isinstance(what, Mapping):
            raise OverrideError(f"{where}: {kind(what)} where an action was expected, or {{action: ..., hold: ...}}")
        for field in what:
            if field not in ("action", "hold"):
                raise OverrideError(f"{where}: {shown(field)} is neither 'action' nor 'hold'")
        if not what:
            raise OverrideError(f"{where}: neither 'action' nor 'hold' is given")
        try:
            action = Action.of(what["action"]) if "action" in what else rule.action
        except (ValueError, AttributeError):
            names = ", ".join(str(action) for action in Action)
            raise OverrideError(f"{where}: {shown(what['action'])} is no action; there are {names}") from None
        hold = what.get("hold", rule.hold)
        if isinstance(hold, bool) or not isinstance(hold, int | float) or not 0 <= hold <= 86400:
            raise OverrideError(f"{where}: hold={shown(hold)} is no number of seconds from 0 to 86400")
        application = rule.application and "action" not in what
        self._rules[key] = replace(rule, action=action, hold=float(hold), application=application)


@lru_cache(maxsize=1)
def catalogue() -> tuple[tuple[int, str, str], ...]:
    """NVIDIA's catalogue: XID, mnemonic, immediate action."""
    text = (files("lightning_ntp.health") / CATALOGUE).read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return tuple(
        (int(row["xid"]), row["mnemonic"].split(" /")[0], (row["immediate_action"] or "").strip()) for row in rows
    )


def _items(where: str, section: Any) -> list[tuple[Any, Any]]:
    if section is None:
        return []
    if not isinstance(section, Mapping):
        raise OverrideError(f"{where}: {kind(section)} where a mapping was expected")
    return list(section.items())


def _is_number(code: object) -> bool:
    """Whether it may be an XID's, and can be written: Python refuses to write integers of thousands of digits."""
    return isinstance(code, int) and not isinstance(code, bool) and 0 <= code < 10**9


def _order(row: tuple[str, Rule]) -> tuple[str, int]:
    signal, _, code = row[0].partition(".")
    return signal, int(code) if code.isdecimal() else -1
