"""``spawn`` and ``fork``: a call in ranks whose result comes back to the caller."""

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_ntp.launch import RankIdentity, RanksFailedError, Supervisor, run_call
from tests.launch.scripts import run

STORE = "127.0.0.1:9"


def add(a: int, b: int) -> tuple[int, int, int]:
    me = RankIdentity.from_environ()
    return a + b + me.slot, me.world_size, os.getpid()


def fail(slots: set[int]) -> None:
    if RankIdentity.from_environ().slot in slots:
        raise ValueError("out of range")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_result_of_slot_zero_comes_back(method: Any) -> None:
    total, world, pid = run_call(2, add, 40, 2, start_method=method, store_address=STORE)
    assert (total, world) == (42, 2)
    assert pid != os.getpid()
    assert threading.active_count() == 1


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_exception_of_the_ranks_reaches_the_caller_with_its_traceback(method: Any) -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)in fail.*ValueError: out of range\n\(raised by all 2 ranks\)"):
        run_call(2, fail, {0, 1}, start_method=method, store_address=STORE)


def test_fork_needs_no_pickle_and_keeps_the_callers_state() -> None:
    secret = threading.Lock()  # cannot be pickled
    assert run_call(1, lambda: secret.locked(), start_method="fork", store_address=STORE) is False


def test_fork_is_refused_once_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # there is no GPU to initialise here
    with pytest.raises(RuntimeError, match="CUDA is already initialised"):
        run_call(1, add, 1, 2, start_method="fork")


class Holder:
    def __init__(self) -> None:
        self.fine = 1
        self.parts = [{"deep": {"activation": lambda x: x}}]


def test_what_cannot_be_pickled_is_named_with_the_way_out() -> None:
    with pytest.raises(TypeError) as caught:
        run_call(2, print, Holder(), start_method="spawn", store_address=STORE)
    message = str(caught.value)
    assert message.startswith("args[0].parts[0]['deep']['activation'] (function: <function Holder.__init__")
    assert 'strategy="ntp"' in message and 'strategy="ntp_notebook"' in message and "top level" in message


def test_module_with_a_local_class_inside_is_named() -> None:
    import torch

    class Local(torch.nn.Module):
        pass

    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1), Local()))
    with pytest.raises(TypeError, match=r"args\[0\]\.0\.1 \(.*Local"):
        run_call(2, print, model, start_method="spawn", store_address=STORE)


def test_objects_of_the_callers_main_module_arrive(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from lightning_ntp.launch import run_call\n"
        "class Point:\n    x = 3\n"
        "def f(p):\n    return type(p).__module__, p.x\n"
        "if __name__ == '__main__':\n"
        "    for cold in (False, True):\n"
        f"        print(run_call(2, f, Point(), store_address={STORE!r}, cold=cold))\n"
    )
    done = run("script.py", cwd=tmp_path)
    assert done.stdout == "('__mp_main__', 3)\n" * 2, done.stderr


def test_ranks_that_share_a_store_can_meet() -> None:
    assert run_call(2, meet) == 1


def meet() -> int:
    from torch.distributed import TCPStore

    me = RankIdentity.from_environ()
    store = TCPStore(me.store_host, me.store_port, is_master=False, timeout=timedelta(seconds=20))
    store.set(f"slot/{me.slot}", str(me.slot))
    return int(store.get(f"slot/{1 - me.slot}"))


@pytest.mark.parametrize("ranks", [0, -1, float("nan"), True, "2"])
def test_number_of_ranks_must_be_a_positive_integer(ranks: Any) -> None:
    with pytest.raises(ValueError, match="ranks="):
        Supervisor(ranks)


def test_start_method_must_be_known() -> None:
    with pytest.raises(ValueError, match="forkserver"):
        Supervisor(1, "forkserver")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="need a call"):
        Supervisor(1, "spawn")
    with pytest.raises(ValueError, match="stop_grace"):
        Supervisor(1, stop_grace=timedelta(seconds=-1))


def test_incomplete_identity_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="LIGHTNING_NTP_SLOT, LIGHTNING_NTP_UID"):
        RankIdentity.from_environ({"LIGHTNING_NTP_STORE": "h:1"})
    whole = RankIdentity(1, 2, "u", "j", "h", 5, Path("/d"), joins=True)
    assert RankIdentity.from_environ(whole.to_environ()) == whole
    with pytest.raises(RuntimeError, match=r"LIGHTNING_NTP_SLOT=7 is not in 0\.\.1"):
        RankIdentity.from_environ({**whole.to_environ(), "LIGHTNING_NTP_SLOT": "7"})
