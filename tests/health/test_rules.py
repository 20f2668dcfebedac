"""How bad is it? Defaults, a user's overrides, and files that are anything but overrides."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ntp.health import Action, Finding, OverrideError, SeverityTable

GPU = "GPU-1"
SECONDS = 5.0
"""Far more than any file takes; an endless one takes hours."""

anything = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def loads_or_says_where(path: Path) -> str:
    """Loads a file; returns what is wrong with it."""
    before = time.monotonic()
    try:
        SeverityTable(path)
        message = ""
    except OverrideError as error:
        message = str(error)
        assert message.startswith(f"{path}: ") and len(message) < 2000, message
    assert time.monotonic() - before < SECONDS
    return message


# ---- what overrides do ------------------------------------------------------------------------------------------


def test_overrides_change_what_they_name_and_nothing_else(tmp_path: Path) -> None:
    path = written(
        tmp_path / "rules.yaml",
        "xid:\n  94: drain\n  '0079': log\n  unknown: ignore\nsignals:\n  straggler: drain\n"
        "  temperature_margin: {action: suspect, hold: 30}\n  recovery_action.2: dead\n",
    )
    changed, default = SeverityTable(path), SeverityTable()
    differing = {key for key, rule in changed.rows() if dict(default.rows())[key] != rule}
    assert differing == {
        *("xid.94", "xid.79", "xid.unknown", "straggler", "temperature_margin", "recovery_action.2"),
    }
    assert changed.rule(Finding("xid", "", GPU, code=94)).action is Action.DRAIN
    assert changed.rule(Finding("xid", "", GPU, code=9999)).action is Action.IGNORE
    margin = changed.rule(Finding("temperature_margin", "", GPU))
    assert (margin.action, margin.hold) == (Action.SUSPECT, 30.0)
    assert changed.rule(Finding("recovery_action", "", GPU, code=2)).action is Action.DEAD


def test_a_mapping_says_the_same_as_a_file(tmp_path: Path) -> None:
    content = {"xid": {13: "suspect"}, "signals": {"fabric": {"hold": 5}}}
    path = written(tmp_path / "rules.yaml", yaml.safe_dump(content))
    assert SeverityTable(path).rows() == SeverityTable(content).rows() != SeverityTable().rows()
    assert SeverityTable(str(path)).rows() == SeverityTable(path).rows()


def test_who_gives_a_mistake_of_the_program_an_action_means_it() -> None:
    finding = Finding("xid", "", GPU, code=13)
    assert SeverityTable().rule(finding).application
    assert not SeverityTable({"xid": {13: "drain"}}).rule(finding).application
    assert SeverityTable({"xid": {13: {"hold": 1}}}).rule(finding).application


@pytest.mark.parametrize("text", ["", "# nothing\n", "xid:\nsignals:\n", "---\n", "xid: {}\n", "{}", "\ufeffxid: {}\n"])
def test_a_file_without_overrides_overrides_nothing(tmp_path: Path, text: str) -> None:
    assert SeverityTable(written(tmp_path / "rules.yaml", text)).rows() == SeverityTable().rows()


def test_an_anchor_is_what_it_stands_for(tmp_path: Path) -> None:
    path = written(tmp_path / "rules.yaml", "xid:\n  94: &how {action: drain, hold: 3}\n  95: *how\n")
    rules = dict(SeverityTable(path).rows())
    assert rules["xid.95"].hold == rules["xid.94"].hold == 3.0


# ---- what is wrong with others ----------------------------------------------------------------------------------


WRONG = {
    # the file's text -> what the message says besides the file's name
    "xid: {94: drian}": "xid: 94: 'drian' is no action; there are ignore, log, suspect, restart, drain, dead",
    "xid: {94: Drain}": "'Drain' is no action",
    "xid: {94: {action: drain, hold: -1}}": "xid: 94: hold=-1 is no number of seconds from 0 to 86400",
    "xid: {94: {hold: true}}": "hold=True",
    "xid: {94: {hold: .nan}}": "hold=nan",
    "xid: {94: {hold: 1.0e+400}}": "hold=inf",
    "xid: {94: {hold: " + "9" * 4000 + "}}": "hold=999",
    "xid: {94: {hold: 0x" + "f" * 9000 + "}}": "xid: 94: hold=",
    "xid: {94: {}}": "xid: 94: neither 'action' nor 'hold' is given",
    "xid: {94: {act: drain}}": "'act' is neither 'action' nor 'hold'",
    "xid: {94: [drain]}": "xid: 94: list ['drain'] where an action was expected",
    "xid: {94: }": "xid: 94: NoneType None where an action was expected",
    "xid: {94: {action: on}}": "True is no action",
    "xid: {94: {action: [a]}}": "['a'] is no action",
    "xid: {4711: drain}": "XID 4711 is not in the catalogue",
    "xid: {-1: drain}": "-1 is neither the number of an XID nor 'unknown'",
    "xid: {1.5: drain}": "1.5 is neither",
    "xid: {true: drain}": "True is neither",
    "xid:\n  ? 0x" + "f" * 9000 + "\n  : drain": "is neither the number of an XID",
    "xid:\n  ? '" + "9" * 9000 + "'\n  : drain": "is neither the number of an XID",
    "xid: {'٧٩': drain}": "is neither the number of an XID",
    "xid: {94: drain, '94': log}": "'94' is there twice",
    "xid:\n  94: drain\n  94: log": "line 3: 94 is there twice",
    "signals: {heat: drain}": "signals: 'heat' is no signal; there are ecc_uncorrected",
    "signals: {xid.79: log}": "'xid.79' is no signal",
    "xid: 7": "xid: int 7 where a mapping was expected",
    "xids: {}": "'xids' is none of the sections 'xid', 'signals'",
    "- xid": "list ['xid'] where a mapping with 'xid' and 'signals' was expected",
    "0": "int 0 where a mapping",
    "false": "bool False where a mapping",
    "[]": "list [] where a mapping",
    "drain": "str 'drain' where a mapping",
    "xid:\n  ? [1, 2]\n  : drain": "line 2: list [1, 2] as a name",
    "a: &a {action: drain}\nxid:\n  94:\n    <<: *a": "line 4: '<<' is not known here",
    "xid: {94: drain": "line 1: is no YAML",
    "xid:\n\tx: 1": "line 2: is no YAML",
    "xid: *nobody": "line 1: is no YAML",
    "xid: {}\n---\nxid: {}": "line 2: is no YAML",
    "\n\nxid: \x07": "line 3: is no YAML",
    "xid: !!python/object:os.system {}": "line 1: is no YAML",
    "\nxid: {94: 2020-13-45}": "line 2: is no YAML: month must be in 1..12",
    "xid: {94: !!int ''}": "line 1: is no YAML",
    "xid: {94: !!bool maybe}": "line 1: is no YAML",
    "xid: {94: !!timestamp then}": "line 1: is no YAML",
    "xid: {94: !!map [1, 2]}": "line 1: is no mapping",
    "xid: !!map ''": "line 1: is no mapping",
    "xid: {94: 1" + ":1" * 9000 + ".0}": "line 1: is no YAML",
    "xid: {94: 1" + ":1" * 9000 + "}": "xid: 94: int",
    "xid: {94: " + "9" * 9000 + "}": "line 1: is no YAML",
    "[" * 60000: "line 1: is no YAML",
    "{a: " * 15000: "line 1: is no YAML",
    "? " * 30000: "is no YAML",
    "- " * 30000: "is no YAML",
    "xid: {a: b}\n" * 6000: "has more than 65536 bytes",
    "&a [*a]": "list [",
    "xid: &a {94: *a}": "is neither 'action' nor 'hold'",
    "&a {*a : 1}": "line 1: dict {} as a name",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:30].encode("unicode_escape").decode())
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, text: str) -> None:
    message = loads_or_says_where(written(tmp_path / "rules.yaml", text))
    assert WRONG[text] in message


@pytest.mark.parametrize(
    "place", ["xid: {{94: {bomb}}}", "xid: {bomb}", "{bomb}", "? {bomb}\n: 1", "xid: {{94: {{action: {bomb}}}}}"]
)
@pytest.mark.parametrize("ends", ["[]", "{}"], ids=["list", "mapping"])
def test_a_small_file_that_stands_for_an_endless_value_takes_no_time(tmp_path: Path, place: str, ends: str) -> None:
    level = "x"
    text = []
    for number in range(40):
        many = ", ".join([level] * 9) if ends == "[]" else ", ".join(f"{at}: {level}" for at in range(9))
        text.append(f"&n{number} {ends[0]}{many}{ends[1]}")
        level = f"*n{number}"
    bomb = "[" + ", ".join(text) + "]"
    assert loads_or_says_where(written(tmp_path / "rules.yaml", place.format(bomb=bomb)))


def test_what_is_no_file_of_text_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "it is no regular file" in loads_or_says_where(tmp_path / "pipe")
    assert "it is no regular file" in loads_or_says_where(tmp_path) or "directory" in loads_or_says_where(tmp_path)
    assert "No such file" in loads_or_says_where(tmp_path / "nothing")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**30)
    assert "has more than 65536 bytes" in loads_or_says_where(tmp_path / "large")
    assert "line 2: cannot be read: it is no UTF-8" in loads_or_says_where(written(tmp_path / "bytes", b"\n\xff"))
    with pytest.raises(OverrideError, match="null byte"):
        SeverityTable("a\0b")


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=5)
    | st.sampled_from(["drain", "unknown", "action", "hold", "xid", "signals", "straggler", 94, 79])
    | st.just(5000).map(lambda digits: 10**digits)
    | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.integers(0, 180)
            | st.sampled_from(["xid", "signals", "action", "hold", "straggler", "unknown"])
            | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@anything
@given(st.dictionaries(st.sampled_from(["xid", "signals", "other"]), values, max_size=3) | values)
def test_any_value_loads_or_is_told(content: Any) -> None:
    if content is None or isinstance(content, str):
        return  # no override, or a file's name
    try:
        SeverityTable(content)
    except OverrideError as error:
        assert str(error).startswith("rules: ") and len(str(error)) < 2000


@anything
@given(value=values)
def test_any_value_in_a_file_loads_or_is_told(tmp_path: Path, value: Any) -> None:
    try:
        text = yaml.safe_dump({"xid": value}, allow_unicode=True)
    except ValueError:  # a number that has too many digits to be written
        return
    loads_or_says_where(written(tmp_path / "rules.yaml", text.encode("utf-8", "surrogatepass")))


tokens = st.sampled_from(
    [
        *("xid", "signals", "94", "drain", "action", "hold", ": ", ":", "\n", "  ", "- ", "{", "}", "[", "]", ", "),
        *("&a ", "*a", "<<: ", "? ", "| ", "> ", "'", '"', "!!map ", "!!set ", "!!omap ", "!!binary ", "!!float "),
        *("#", "%", "@", "`", "---\n", "...\n", "\t", "~", "=", "0x", "1e9", ".inf", "2001-01-01", "\ufeff", "\x00"),
    ]
)


@anything
@given(st.lists(tokens, max_size=25).map("".join) | st.text(max_size=60))
def test_any_text_loads_or_is_told(tmp_path: Path, text: str) -> None:
    loads_or_says_where(written(tmp_path / "rules.yaml", text.encode("utf-8", "surrogatepass")))


@anything
@given(st.binary(max_size=60))
def test_any_bytes_load_or_are_told(tmp_path: Path, content: bytes) -> None:
    loads_or_says_where(written(tmp_path / "rules.yaml", content))


# ---- looking up -------------------------------------------------------------------------------------------------


@given(
    st.text(max_size=10) | st.sampled_from(["xid", "recovery_action", "straggler", "external", "nvml_error"]),
    st.none() | st.integers(),
    st.none() | st.sampled_from(Action),
)
def test_every_finding_has_a_rule_and_a_name(signal: str, code: int | None, action: Action | None) -> None:
    table, finding = SeverityTable(), Finding(signal, "", GPU, code=code, action=action)
    rule = table.rule(finding)
    assert action is None or (rule.action is action and not rule.application)
    assert isinstance(table.name(finding), str)


def test_what_nobody_has_heard_of_is_noted_only() -> None:
    table = SeverityTable()
    assert table.rule(Finding("moon phase", "", GPU)).action is Action.LOG
    assert table.rule(Finding("xid", "", GPU, code=100000)).action is Action.SUSPECT
    assert table.rule(Finding("recovery_action", "", GPU, code=17)).action is Action.SUSPECT
    assert table.rule(Finding("nvml_error", "", GPU, code=17)).action is Action.SUSPECT
