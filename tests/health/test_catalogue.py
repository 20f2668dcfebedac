"""What is done about each signal by default: stated here once more, independently of the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lightning_ntp.health
from lightning_ntp.health import Action, Finding, SeverityTable
from lightning_ntp.health.rules import _OF_CATALOGUE, _XIDS, catalogue

GPU = "GPU-1"
LOG, SUSPECT, RESTART, DRAIN, DEAD = Action.LOG, Action.SUSPECT, Action.RESTART, Action.DRAIN, Action.DEAD

XIDS = {
    **dict.fromkeys([79, 48, 95], DEAD),
    94: RESTART,
    64: DRAIN,
    **dict.fromkeys([63, 154, 13, 31, 43, 45, 68], LOG),
}
SIGNALS: dict[tuple[str, int | None], Action] = {
    **{("recovery_action", code): DRAIN for code in range(1, 8)},
    ("recovery_action", 0): LOG,
    ("temperature_margin", None): DRAIN,
    ("row_remap_failure", None): DRAIN,
    ("sram_threshold", None): DRAIN,
    ("maintenance", None): DRAIN,
    ("gpu_lost", None): DEAD,
    ("reset_required", None): DEAD,
    ("gpu_unavailable", None): DEAD,
    ("stalled", None): SUSPECT,
    ("straggler", None): SUSPECT,
    ("nvlink_down", None): SUSPECT,
    ("row_remap_pending", None): LOG,
}


@pytest.mark.parametrize(("code", "action"), XIDS.items())
def test_the_action_of_an_xid(code: int, action: Action) -> None:
    rule = SeverityTable().rule(Finding("xid", "", GPU, code=code))
    assert (rule.action, rule.hold) == (action, 0.0)
    assert rule.application == (code in (13, 31, 43, 68))


@pytest.mark.parametrize(("key", "action"), SIGNALS.items())
def test_the_action_of_a_signal(key: tuple[str, int | None], action: Action) -> None:
    rule = SeverityTable().rule(Finding(key[0], "", GPU, code=key[1]))
    holds = {"temperature_margin": 60.0, "gpu_lost": 1.5, "reset_required": 1.5, "gpu_unavailable": 0.2}
    assert (rule.action, rule.hold) == (action, holds.get(key[0], 0.0))


def test_every_row_of_the_catalogue_has_a_rule_and_a_reason() -> None:
    rows, table = catalogue(), SeverityTable()
    assert len(rows) == len({number for number, _, _ in rows}) == 172
    rules = dict(table.rows())
    for number, mnemonic, immediate in rows:
        rule, name = rules[f"xid.{number}"], table.name(Finding("xid", "", GPU, code=number))
        assert rule.why and rule is (_XIDS.get(number) or _OF_CATALOGUE[immediate]), (number, immediate)
        assert name == f"XID {number} ({mnemonic})" and name.isprintable() and " /" not in name, name
    assert {number for number, _, _ in rows} >= _XIDS.keys()


def test_nobody_leaves_for_what_the_program_may_have_done() -> None:
    for key, rule in SeverityTable().rows():
        assert not rule.application or rule.action is LOG, key
        assert rule.action >= DRAIN or rule.passes, key


def test_the_device_of_a_contained_error_is_as_good_as_before() -> None:
    assert SeverityTable().rule(Finding("xid", "", GPU, code=94)).passes
    assert not SeverityTable().rule(Finding("xid", "", GPU, code=79)).passes


def test_nothing_prints_but_through_the_log_and_the_console() -> None:
    files = sorted(Path(lightning_ntp.health.__path__[0]).rglob("*.py"))
    assert len(files) > 10
    calls = [(file.name, node) for file in files for node in ast.walk(ast.parse(file.read_text()))]
    prints = [name for name, node in calls if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"]
    assert prints == []
