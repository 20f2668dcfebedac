"""The journal: on disk before anything is written, whole, and read however it looks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.power import files
from lightning_ntp.power.entries import CLAIM, CLOCKS, POWER_LIMIT, PROFILE, Entry
from lightning_ntp.power.files import default_directory
from lightning_ntp.power.journal import Journal, Leftovers, Taken
from lightning_ntp.power.owners import Owner, start_time
from tests.power.dead import dead_owner, leave, left

GPU, OTHER = "GPU-aaaa", "GPU-bbbb"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def journal(directory: Path, said: list[str]) -> Journal:
    return Journal(directory, said.append)


def found(journal: Journal) -> list[Entry]:
    leftovers = Leftovers(journal)
    leftovers.refresh()
    entries = leftovers.entries()
    leftovers.close()
    return entries


def test_an_entry_says_everything_and_goes_once_the_first_value_is_back(journal: Journal, directory: Path) -> None:
    journal.record(GPU, POWER_LIMIT, 700_000, 600_000, "job")
    journal.record(GPU, POWER_LIMIT, 600_000, 650_000, "job")
    (path,) = directory.glob("*.jsonl")
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    here = Owner.here()
    assert record["owner"] == here.record() and here.pid == os.getpid() and here.started == start_time(here.pid)
    assert (record["gpu"], record["lever"], record["job"]) == (GPU, POWER_LIMIT, "job")
    assert (record["first"], record["before"], record["after"]) == (700_000, 600_000, 650_000)
    journal.settle(GPU, POWER_LIMIT, 650_000)
    assert path.exists()
    journal.settle(GPU, POWER_LIMIT, 700_000)
    assert not path.exists() and journal.moved() == []


def test_it_is_synced_before_the_write_file_first_then_directory(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        real(file)

    monkeypatch.setattr(files.os, "fsync", fsync)
    journal.record(GPU, CLOCKS, None, (600, 900), "job")
    assert len(synced) == 2 and synced[0].endswith(".new") and synced[1] == str(directory)


def test_without_room_on_the_disk_it_is_as_it_was(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    journal.record(GPU, POWER_LIMIT, 700_000, 600_000, "job")
    (path,) = directory.glob("*.jsonl")
    before = path.read_bytes()

    def write(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "write", write)
        with pytest.raises(OSError, match="No space"):
            journal.record(OTHER, POWER_LIMIT, 700_000, 500_000, "job")
    assert path.read_bytes() == before and len(journal.moved()) == 1
    journal.record(OTHER, POWER_LIMIT, 700_000, 500_000, "job")
    assert len(path.read_bytes().splitlines()) == 2


def test_a_gpu_belongs_to_one_owner_at_a_time(journal: Journal, directory: Path, said: list[str]) -> None:
    journal.claim(GPU, "first")
    second = Journal(directory, said.append)
    with pytest.raises(Taken, match=f"in use by job 'first' \\(process {os.getpid()}"):
        second.claim(GPU, "second")
    second.claim(OTHER, "second")
    journal.unclaim(GPU)
    second.claim(GPU, "second")


def test_what_a_dead_owner_has_left_keeps_others_out_but_its_claims_do_not(journal: Journal, directory: Path) -> None:
    leave(directory, left(GPU, 700_000, 600_000), Entry(OTHER, CLAIM, None, None, None, dead_owner()))
    with pytest.raises(Taken, match="what job 'gone' has left there is not put back yet"):
        journal.claim(GPU, "job")
    journal.claim(OTHER, "job")


def test_an_owner_in_another_container_lives_as_long_as_it_holds_its_file(
    journal: Journal, directory: Path, said: list[str]
) -> None:
    """Its pid means nothing here; the lock of its file does."""
    path = leave(directory, left(GPU, 700_000, 600_000, namespace="pid:[1]"))
    with open(path) as file:
        assert files.lock(file.fileno())
        assert found(journal) == []
        with pytest.raises(Taken):
            journal.claim(GPU, "job")
    assert [entry.gpu for entry in found(journal)] == [GPU]


def test_only_one_at_a_time_puts_back(journal: Journal, directory: Path, said: list[str]) -> None:
    leave(directory, left(GPU, 700_000, 600_000))
    first, second = Leftovers(journal), Leftovers(Journal(directory, said.append))
    first.refresh()
    second.refresh()
    assert len(first.entries()) == 1 and second.entries() == []
    first.drop(first.entries()[0])
    assert list(directory.glob("*.jsonl")) == []


def test_another_boot_is_dropped_and_another_machine_left_alone(
    journal: Journal, directory: Path, said: list[str]
) -> None:
    old = leave(directory, left(GPU, 700_000, 600_000, boot="before"), name="old")
    far = leave(directory, left(GPU, 700_000, 600_000, boot="there", machine="there"), name="far")
    assert found(journal) == []
    assert not old.exists() and far.exists()
    assert any("of another boot" in line for line in said) and any(
        "of another machine (there)" in line for line in said
    )
    journal.claim(GPU, "job")


@pytest.mark.parametrize(
    "more",
    [b'{"gpu":"GPU-aaaa","lev', b"\xff\xfe\0\n", b"[" * 100_000 + b"\n", b"[1]\n{}\nnull\n"],
    ids=["half a line", "no text", "deep", "other JSON"],
)
def test_what_cannot_be_read_costs_only_itself(journal: Journal, directory: Path, said: list[str], more: bytes) -> None:
    leave(directory, left(GPU, 700_000, 600_000), more=more)
    assert [entry.first for entry in found(journal)] == [700_000]
    assert "lines cannot be read and are left out" in said[0]


def test_garbage_is_set_aside(journal: Journal, directory: Path, said: list[str]) -> None:
    good = leave(directory, left(GPU, 700_000, 600_000))
    leave(directory, name="garbage", more=os.urandom(1000))
    leave(directory, name="empty")
    leave(directory, name="large", more=b"x" * 2_000_000)
    (directory / "folder.jsonl").mkdir()
    (directory / "link.jsonl").symlink_to(good)
    os.mkfifo(directory / "pipe.jsonl")
    assert len(found(journal)) == 1
    assert [path.name for path in directory.glob("*.jsonl")] == ["dead.jsonl"]
    assert len(list(directory.glob("*.unreadable-*"))) == 6 and len(said) == 6
    assert len(found(journal)) == 1 and len(said) == 6


@given(st.binary(max_size=300))
def test_no_line_is_an_entry_by_accident_and_none_raises(line: bytes) -> None:
    with pytest.raises(ValueError):
        Entry.from_line(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(["gpu", "lever", "first", "before", "after", "owner", "job", "wall", "at"]), json_values)
def test_an_entry_with_a_wrong_part_is_none_or_one_that_can_be_used(name: str, value: object) -> None:
    record = json.loads(left(GPU, 700_000, 600_000).to_line()) | {name: value}
    try:
        entry = Entry.from_line(json.dumps(record).encode())
    except ValueError:
        return
    assert type(entry.first) is int and type(entry.after) is int and Entry.from_line(entry.to_line()).key == entry.key


@given(st.sampled_from(["first", "before", "after"]), json_values | st.lists(st.integers(-1, 256), max_size=3))
def test_an_entry_of_profiles_is_as_it_was_or_none(name: str, value: object) -> None:
    entry = left(GPU, frozenset({7, 1}), frozenset(), PROFILE)
    assert Entry.from_line(entry.to_line()) == entry
    record = json.loads(entry.to_line()) | {name: value}
    numbers = isinstance(value, list) and all(type(each) is int and 0 <= each <= 254 for each in value)
    try:
        found = Entry.from_line(json.dumps(record).encode())
    except ValueError:
        assert not numbers
    else:
        assert numbers and isinstance(value, list) and getattr(found, name) == frozenset(value)


def test_of_profiles_what_an_older_driver_leaves_halfway_is_known_and_all_else_is_foreign() -> None:
    a, b, c = (frozenset({number}) for number in (7, 1, 5))
    entry = left(GPU, a | b, b | c, PROFILE)
    assert all(entry.is_ours(now) for now in (a | b, b | c, b))
    assert not any(entry.is_ours(now) for now in (a, c, a | b | c, frozenset()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_journal_of_another_user_is_not_obeyed(journal: Journal, directory: Path, said: list[str]) -> None:
    path = leave(directory, left(GPU, 700_000, 200_000))
    os.chown(path, 54321, 54321)
    assert found(journal) == [] and path.exists() and "it belongs to user 54321" in said[0]


def test_the_newest_comes_first_and_decides_over_clocks(journal: Journal, directory: Path) -> None:
    old, new = (left(GPU, None, (600, 900), CLOCKS, at) for at in (1.0, 2.0))
    leave(directory, old, name="a")
    leave(directory, new, name="b")
    leftovers = Leftovers(journal)
    leftovers.refresh()
    assert leftovers.entries(GPU) == [new, old]
    assert leftovers.newer_elsewhere(old) and not leftovers.newer_elsewhere(new)
    leftovers.close()


def test_where_it_lies(directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_directory() == directory
    monkeypatch.delenv(files.DIRECTORY_VARIABLE)
    monkeypatch.setattr(files, "_SYSTEM_DIRECTORY", str(tmp_path / "lib" / "power"))
    assert default_directory() == tmp_path / "lib" / "power"
    monkeypatch.setattr(files, "_SYSTEM_DIRECTORY", "/proc/none/power")
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert default_directory() == tmp_path / "state" / "lightning_ntp" / "power"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".local" / "state" / "lightning_ntp" / "power"


def test_a_process_that_is_gone_or_whose_number_was_given_again_is_dead() -> None:
    here = Owner.here()
    assert here.seems_alive(here)
    assert dead_owner().seems_alive(here) is False
    assert dead_owner(namespace="pid:[1]").seems_alive(here) is None
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(process.pid) is None, "a zombie does nothing any more"
    process.wait()
