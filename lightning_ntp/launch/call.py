"""A function call that travels to the ranks by pickle, and one rank's result on its way back."""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import process
from pathlib import Path
from typing import Any

from lightning_ntp.launch.environment import JOB_DIR
from lightning_ntp.launch.obituary import is_first_survivor
from lightning_ntp.launch.unpicklable import explain_unpicklable

COLD_START = "import sys; from lightning_ntp.launch.call import main; main(sys.argv[1])"
"""``python -c`` code that runs a saved call in a new interpreter."""

_RESULT = "result.pkl"


@dataclass(frozen=True)
class Call:
    """``function(*args, **kwargs)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

    def __call__(self) -> Any:
        return self.function(*self.args, **(self.kwargs or {}))


def save_call(call: Call, path: Path) -> None:
    """Pickle ``call`` with what a fresh process needs to find the caller's ``__main__``.

    Raises:
        TypeError: something in it cannot be pickled; the message says what, where, and what to do.
    """
    preparation = multiprocessing.spawn.get_preparation_data("rank")
    del preparation["name"]
    # This class refuses to be pickled outside multiprocessing; its bytes do not.
    preparation["authkey"] = bytes(preparation["authkey"])
    try:
        content = pickle.dumps(call, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(explain_unpicklable(call, error)) from error
    with path.open("wb") as file:
        pickle.dump(preparation, file)
        file.write(content)


def run_saved_call(path: Path) -> None:
    """In a rank: run the call saved at ``path``, as multiprocessing's spawn would."""
    current = process.current_process()
    with path.open("rb") as file:
        preparation = pickle.load(file)
        # While this is set, a script without a main guard that tries to launch again gets an error, not a recursion.
        current._inheriting = True  # type: ignore[attr-defined]
        try:
            multiprocessing.spawn.prepare(preparation)
            call = pickle.load(file)
        finally:
            del current._inheriting  # type: ignore[attr-defined]
    run_call_in_rank(call)


def run_call_in_rank(call: Callable[[], Any]) -> None:
    """Run ``call``; the lowest slot that is still alive leaves what it returned for the caller."""
    result = call()
    directory = os.environ.get(JOB_DIR)
    if directory and is_first_survivor():
        temporary = Path(directory, f"{_RESULT}.{os.getpid()}")
        with temporary.open("wb") as file:
            pickle.dump(result, file, pickle.HIGHEST_PROTOCOL)
        temporary.replace(Path(directory, _RESULT))


def read_result(directory: Path) -> Any:
    """What the lowest living slot returned.

    Raises:
        FileNotFoundError: it returned nothing yet.
    """
    with Path(directory, _RESULT).open("rb") as file:
        return pickle.load(file)


def main(path: str) -> None:
    """Entry point of a cold rank."""
    from lightning_ntp.launch.report import install_excepthook

    install_excepthook()
    run_saved_call(Path(path))
