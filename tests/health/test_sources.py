"""What people and cluster managers write into files, also such as nobody would want."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_ntp.health import Action, FileSource
from lightning_ntp.health.sources.entries import Entry, EntryError, is_this_host, parse_line, parse_object
from tests.health.sourcing import PIECES, SECONDS, Job, Told, short

anything = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    return Told(caplog)


# ---- what is said -------------------------------------------------------------------------------------------------


SAID = {
    "slot 3 drain maintenance at 18:00": Entry(Action.DRAIN, "maintenance at 18:00", slot=3),
    "  Slot 3  DRAIN\t": Entry(Action.DRAIN, slot=3),
    "gpu GPU-7d2f suspect the fan  is loud": Entry(Action.SUSPECT, "the fan is loud", gpu="GPU-7d2f"),
    "host node7.cluster log": Entry(Action.LOG, host="node7.cluster"),
    '{"slot": 3, "action": "drain"}': Entry(Action.DRAIN, slot=3),
    '{"gpu": "MIG-1", "host": "a", "action": "dead", "text": "x\\ny", "id": [1]}': Entry(
        Action.DEAD, "x y", gpu="MIG-1", host="a"
    ),
    '{"slot": 0, "gpu": null, "action": "ignore", "text": null}': Entry(Action.IGNORE, slot=0),
    "": None,
    "   # slot 3 drain": None,
}


@pytest.mark.parametrize("line", SAID, ids=range(len(SAID)))
def test_a_line_says_about_whom_what_and_why(line: str) -> None:
    assert parse_line(line) == SAID[line]


WRONG = {
    "slots 3 drain": "'slots' is none of 'slot', 'gpu', 'host': write 'slot 3 drain maintenance at 18:00'",
    "slot 3": "'slot 3' does not say which slot, and what to do",
    "slot three drain": "'three' is no number of a slot",
    "slot -1 drain": "'-1' is no number of a slot",
    "slot ٣ drain": "is no number of a slot",
    "slot " + "9" * 5000 + " drain": "is no number of a slot",
    "slot 999999999 drain": "slot=999999999 is no number of a slot",
    "slot 3 dran": "action='dran' is no action; there are ignore, log, suspect, restart, drain, dead",
    "gpu 3 drain": "gpu='3' is a number, which means another device to every process: write its UUID",
    '{"slot": 3': "it is no JSON",
    '{"slot": 3, "slot": 4, "action": "drain"}': "'slot' is there twice",
    '{"slot": 3, "gpu": "GPU-1", "action": "drain"}': "it names both a slot, 3, and a gpu, 'GPU-1'",
    '{"action": "drain"}': "it names neither 'slot' nor 'gpu' nor 'host'",
    '{"slot": 3}': "it does not say what to do: 'action' is one of ignore",
    '{"slot": true, "action": "drain"}': "slot=True is no number",
    '{"slot": 3.0, "action": "drain"}': "slot=3.0 is no number",
    '{"slot": "3", "action": "drain"}': "slot='3' is no number",
    '{"gpu": 3, "action": "drain"}': "gpu=3 is no name",
    '{"host": "", "action": "drain"}': "host='' is no name",
    '{"host": "a\\nb", "action": "drain"}': "is no name",
    '{"slot": 3, "action": 4}': "action=4 is no action",
    '{"slot": 3, "action": "drain", "text": [1]}': "text=list [1] where a text was expected",
    '{"slot": ' + "1" * 9000 + "}": "it is no JSON",
    '{"slot": ' + "[" * 100000: "it is nested too deeply",
}


@pytest.mark.parametrize("line", WRONG, ids=[line[:30] for line in WRONG])
def test_what_cannot_be_understood_is_told_why(line: str) -> None:
    with pytest.raises(EntryError) as raised:
        parse_line(line)
    assert WRONG[line] in str(raised.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
fields = st.sampled_from(["slot", "gpu", "host", "action", "text"])


@given(json_values | st.dictionaries(fields, json_values | st.sampled_from(["drain", "GPU-1"])))
def test_any_object_is_an_entry_or_told(content: Any) -> None:
    try:
        assert isinstance(parse_object(content), Entry)
    except EntryError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("named", "host", "same"),
    [
        ("node7", "node7", True),
        ("NODE7", "node7.a.b", True),
        ("node7.a.b", "node7", True),
        ("node7.a", "node7.b", False),
        ("node", "node7", False),
        ("node7.", "node7", True),
    ],
)
def test_names_of_hosts(named: str, host: str, same: bool) -> None:
    assert is_this_host(named, host) is same


# ---- files --------------------------------------------------------------------------------------------------------


class Written:
    """A file, and a source that reads it."""

    def __init__(self, path: Path, job: Job) -> None:
        self.path, self.source, self.job = path, FileSource(path), job

    def write(self, text: str | bytes, old: bool = True) -> list[tuple[str | int, str, str]]:
        """Replace the file, an hour ago if ``old``, and look."""
        self.path.write_bytes(text.encode() if isinstance(text, str) else text)
        if old:
            self.age()
        return self.look()

    def age(self) -> None:
        an_hour_ago = time.time_ns() - 3600 * 10**9
        os.utime(self.path, ns=(an_hour_ago, an_hour_ago))

    def look(self) -> list[tuple[str | int, str, str]]:
        return short(self.source.look(self.job.watched))


@pytest.fixture
def written(tmp_path: Path, job: Job) -> Written:
    return Written(tmp_path / "wanted", job)


def test_a_line_holds_for_as_long_as_it_is_there(written: Written, told: Told) -> None:
    assert written.look() == []
    assert written.write("slot 1 drain at noon\n") == [(1, "drain", "at noon")]
    assert written.look() == written.look() == []
    assert written.write("# slots\nslot 1 drain at noon\nslot 2 log\n") == [(2, "log", f"said by {written.path}")]
    assert written.write("slot 1 drain at one\nslot 2 suspect\n") == [
        (1, "drain", "at one"),
        (2, "suspect", f"said by {written.path}"),
    ]
    assert written.write("slot 2 suspect\n") == [], "it may be written anew in this moment"
    assert written.look() == [(1, "over", f"{written.path} asks for nothing any more")]
    written.path.unlink()
    assert written.look() == []
    assert [(where, what) for where, what, _ in written.look()] == [(2, "over")]
    assert written.look() == written.look() == [] and told() == []


def test_a_file_that_is_emptied_for_a_moment_changes_nothing(written: Written) -> None:
    written.write("slot 1 drain at noon\n")
    for _ in range(3):
        assert written.write("") == []
        assert written.write("slot 1 drain at noon\n") == []
        written.path.unlink()
        assert written.look() == []
        assert written.write("slot 1 drain at noon\n") == []


def test_a_file_is_replaced_or_appended_to(written: Written) -> None:
    written.write("slot 0 log a\n", old=False)
    with open(written.path, "a") as file:
        file.write("slot 1 log b\n")
    assert written.look() == [(1, "log", "b")]
    (written.path.parent / "next").write_text("slot 0 log a\nslot 1 log c\n")
    os.replace(written.path.parent / "next", written.path)
    assert written.look() == [(1, "log", "c")]


def test_a_change_that_keeps_size_and_time_is_seen_while_it_is_fresh(written: Written) -> None:
    assert written.write("slot 0 log a\n", old=False) == [(0, "log", "a")]
    found = written.path.stat()
    written.path.write_text("slot 0 log b\n")
    os.utime(written.path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert written.look() == [(0, "log", "b")]


def test_a_line_that_is_half_written_is_waited_for(written: Written, told: Told) -> None:
    assert written.write('slot 0 log a\n{"slot": 1, "act', old=False) == [(0, "log", "a")]
    assert written.write("slot 0 log a\nslot 1 drain at no", old=False) == [] and told() == []
    assert written.write("slot 0 log a\nslot 1 drain at noon\n", old=False) == [(1, "drain", "at noon")]
    with open(written.path, "a") as file:
        file.write("slot 2 log x")
    assert written.look() == []
    written.age()
    assert written.look() == [(2, "log", "x")], "somebody's editor writes no line break at the end"


def test_garbage_is_told_once_and_other_lines_hold(written: Written, told: Told) -> None:
    assert written.write("slot 1 drian\nslot 2 log x\n\x00\xff\n") == [(2, "log", "x")]
    first, second = told()
    assert first.startswith(f"health, {written.path}: line 1: action='drian' is no action; there are ignore, log, ")
    assert "line 3: " in second
    written.age()
    assert written.look() == written.look() == [] and told() == []
    written.write("slot 1 drian\nslot 2 log y\n")
    assert told() == [], "it was told"
    written.write("slot 2 log y\n")
    written.write("slot 1 drian\nslot 2 log y\n")
    assert len(told()) == 1, "it is there again"
    written.write("nonsense\n" * 1000)
    messages = told()
    assert len(messages) == 6 and messages[-1].endswith("995 mistakes more like these")


def test_the_worst_of_what_is_said_of_a_slot_holds(written: Written) -> None:
    assert written.write("slot 1 log a\nslot 1 drain b\nslot 1 suspect c\n") == [(1, "drain", "b")]
    assert written.write("slot 1 log a\nslot 1 suspect c\n") == [(1, "suspect", "c")]
    assert written.write("slot 1 ignore a\n") == [] and written.look()[0][:2] == (1, "over")


def test_a_gpu_is_looked_for_in_the_job(written: Written) -> None:
    written.job.devices.pop(3)
    assert written.write("gpu GPU-2 drain x\ngpu GPU-3 drain x\ngpu GPU-elsewhere drain x\n") == [
        ("GPU-2", "drain", "x")
    ]
    written.job.devices[3] = "GPU-3"
    assert written.look() == [("GPU-3", "drain", "x")], "its rank has said it late"
    written.job.devices.clear()
    assert written.look() == written.look() == []


def test_a_host_is_all_slots_of_it_also_those_that_have_left_for_it(
    tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node7.cluster")
    written = Written(tmp_path / "wanted", job)
    assert written.write("host node8 drain\n") == []
    assert written.write("host node7 drain x\n") == [(slot, "drain", "x") for slot in range(4)]
    job.live.discard(2)
    assert written.look() == written.look() == []
    job.live.add(5)
    assert written.look() == [(5, "drain", "x")]
    assert written.write('{"host": "node8", "slot": 1, "action": "dead"}\n') == []
    assert len(written.look()) == 5


def test_another_job_is_told_everything_again(written: Written) -> None:
    written.write("slot 1 drain at noon\n")
    written.job = Job()
    assert written.look() == [(1, "drain", "at noon")]


@pytest.mark.parametrize("kind", ["pipe", "directory", "large", "lines", "closed", "loop"])
def test_what_is_no_file_of_lines_changes_nothing(written: Written, told: Told, kind: str) -> None:
    written.write("slot 1 drain at noon\n")
    written.path.unlink()
    if kind == "pipe":
        os.mkfifo(written.path)
    elif kind == "directory":
        written.path.mkdir()
    elif kind == "large":
        with open(written.path, "wb") as file:
            file.truncate(2**30)
    elif kind == "lines":
        written.path.write_text("slot 2 log\n" * 20000)
    elif kind == "loop":
        written.path.symlink_to(written.path)
    else:
        written.path.write_text("slot 2 log\n")
        written.path.chmod(0)
        if os.access(written.path, os.R_OK):
            pytest.skip("this user may read everything")
    before = time.monotonic()
    assert written.look() == written.look() == written.look() == []
    assert time.monotonic() - before < SECONDS
    (message,) = told()
    assert message.startswith(f"health, {written.path}: it ")
    if kind == "directory":
        written.path.rmdir()
    else:
        written.path.unlink()
    assert written.write("slot 1 drain at noon\nslot 2 log x\n") == [(2, "log", "x")]


@anything
@given(contents=st.lists(st.binary(max_size=50) | st.lists(PIECES, max_size=20).map(lambda x: "".join(x).encode())))
def test_any_file_is_read(tmp_path: Path, contents: list[bytes]) -> None:
    written = Written(tmp_path / "wanted", Job())
    for number, content in enumerate(contents):
        written.write(content, old=number % 2 == 0)
        written.look()


def test_a_source_waits_and_ends_with_its_job(tmp_path: Path, job: Job) -> None:
    path = tmp_path / "wanted"
    path.write_text("slot 1 drain x\n")
    found = FileSource(path, interval=0.02)(job.watched)
    assert short([next(found)]) == [(1, "drain", "x")]
    path.write_text("slot 1 drain y\n")
    assert short([next(found)]) == [(1, "drain", "y")]
    job.over = True
    assert list(found) == []


@pytest.mark.parametrize("interval", [0.0, -1.0, float("nan"), float("inf")])
def test_intervals_are_checked(interval: float) -> None:
    with pytest.raises(ValueError, match="interval="):
        FileSource("x", interval=interval)
