"""The driver library that tests use in place of NVIDIA's: built from ``src/``, steered by :class:`MockNvml`.

Whoever asks NVML, through pynvml or otherwise, in this process or another, finds the mock by the name of the library,
``libnvidia-ml.so.1``. What its GPUs are like lies in a file that all processes share. Names of values (``temperature``,
``power_limit``, ...) are those in ``src/mock.h``, which also has the formulas of the physical model.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

SOURCES = Path(__file__).parent / "src"
LIBRARY_NAME = "libnvidia-ml.so.1"
STATE_VARIABLE = "NVML_MOCK_STATE"
"""Path of the file that holds the GPUs. Without it there is no driver: nvmlInit returns DRIVER_NOT_LOADED."""
ROOT_VARIABLE = "NVML_MOCK_ROOT"
"""0 or 1: may this process call setters? Overrides :meth:`MockNvml.permission`."""

_ANY = -1
_TEXT_SIZE = 96
_KINDS = ("double", "uint", "ulong", "ulonglong", "longlong", "int", "ushort")
"""nvmlValueType_t by number; the number behind the last stands for no type."""
_NO_KIND = len(_KINDS)
_INTEGER, _REAL, _TEXT = range(3)


def build_library(directory: Path, *flags: str) -> Path:
    """Compile the mock into ``directory``.

    Args:
        directory: where it goes; what ``LD_LIBRARY_PATH`` has to name.
        flags: further flags of the compiler, ``-fsanitize=address`` for instance.

    Raises:
        FileNotFoundError: there is no ``cc``.
    """
    path = directory / LIBRARY_NAME
    command = ["cc", "-std=c11", "-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    command += [f"-Wl,-soname,{LIBRARY_NAME}", "-Wl,-z,defs", "-pthread", *flags, "-o", str(path)]
    command += [*map(str, sorted(SOURCES.glob("*.c"))), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"the mock does not compile:\n{done.stderr}"
    return path


class Value(NamedTuple):
    """A named value: where it is, and what."""

    number: int
    of_gpu: bool
    kind: int
    count: int


class Setting(NamedTuple):
    """A successful call of a setter: its name, on which GPU, by which process, with which arguments."""

    call: str
    gpu: int
    pid: int
    arguments: tuple[int, int]


class Rule:
    """Calls that fail or are blocked. It holds until it is removed; as a context manager, inside the block."""

    def __init__(self, mock: MockNvml, serial: int) -> None:
        self._mock, self._serial = mock, serial

    @property
    def hits(self) -> int:
        """How many calls it has made fail or has blocked; -1 once it is removed."""
        return int(self._mock._library.nvmlMockHits(self._mock._state, self._serial))

    def remove(self) -> None:
        """Let calls pass again, and those that are blocked go on."""
        self._mock._library.nvmlMockRemove(self._mock._state, self._serial)

    release = remove

    def wait(self, hits: int = 1, timeout: float = 10.0) -> None:
        """Wait until so many calls were hit, for instance until another process is blocked."""
        deadline = time.monotonic() + timeout
        while self.hits < hits:
            assert time.monotonic() < deadline, f"only {self.hits} of {hits} calls after {timeout} s"
            time.sleep(0.002)

    def __enter__(self) -> Rule:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class MockNvml:
    """GPUs that a test invents, for every process with :meth:`environment` and, after :meth:`adopt`, for this one.

    ``gpu=None`` stands for all GPUs in what sets, and for any GPU in what counts, fails and blocks. Calls are named as
    NVML's functions; a name without version stands for all versions (``nvmlDeviceGetCount`` for ``..._v2`` too,
    ``nvmlInit`` for ``nvmlInitWithFlags`` too).

    Args:
        library: what :func:`build_library` has built.
        state: the file for the GPUs; it must not exist yet.
        gpus: how many there are, with UUIDs ``GPU-00000000-0000-0000-0000-00000000000i``.
        mig: so many MIG devices on every GPU; MIG is off without them.
    """

    def __init__(self, library: Path, state: Path, gpus: int = 8, mig: int = 0) -> None:
        loaded = _load(library)
        code = loaded.nvmlMockCreate(os.fsencode(state), gpus)
        if code:
            raise OSError(code, f"{os.strerror(code)} (0 to {loaded.nvmlMockMaxGpus()} GPUs)", str(state))
        self._open(library, loaded, state)
        self._owner = True
        if mig:
            self.enable_mig(count=mig)

    @classmethod
    def attach(cls, library: Path | None = None, state: Path | None = None) -> MockNvml:
        """The GPUs that another process has made: by default those of this process' environment.

        A process that was started with other variables needs ``attach(mock.library, mock.path)``, then
        ``os.environ.update(mock.variables())`` before its first nvmlInit.
        """
        found = cls.__new__(cls)
        if library is None:
            directories = os.environ["LD_LIBRARY_PATH"].split(os.pathsep)
            library = next(path for path in (Path(one) / LIBRARY_NAME for one in directories) if path.exists())
        found._open(library, _load(library), state or Path(os.environ[STATE_VARIABLE]))
        return found

    def _open(self, library: Path, loaded: ctypes.CDLL, state: Path) -> None:
        self.library, self.path, self._library = library, state, loaded
        self._state = loaded.nvmlMockOpen(os.fsencode(state))
        if not self._state:
            raise FileNotFoundError(f"{state} holds no GPUs of this version of the mock")
        self._owner = False
        self.gpus: int = loaded.nvmlMockGpuCount(self._state)
        self._values, self._calls = _values(loaded), _calls(loaded)

    def close(self) -> None:
        """Who has made the GPUs removes their file and all rules; whoever has initialised NVML keeps the GPUs."""
        if self._state and self._owner:
            self._library.nvmlMockRemove(self._state, 0)
            self.path.unlink(missing_ok=True)
        if self._state:
            self._library.nvmlMockClose(self._state)
            self._state = None

    # Who sees it

    def variables(self, root: bool | None = None) -> dict[str, str]:
        """The environment variables that give a process this mock; ``root`` is for :data:`ROOT_VARIABLE`."""
        path = os.environ.get("LD_LIBRARY_PATH", "")
        directory = str(self.library.parent)
        known = directory in path.split(os.pathsep)
        found = {
            "LD_LIBRARY_PATH": path if known else os.pathsep.join(filter(None, (directory, path))),
            STATE_VARIABLE: str(self.path),
        }
        if root is not None:
            found[ROOT_VARIABLE] = str(int(root))
        return found

    def environment(self, root: bool | None = None) -> dict[str, str]:
        """This process' environment with :meth:`variables`, for a child process."""
        return {**os.environ, **self.variables(root)}

    def adopt(self) -> None:
        """Give the mock to this process' pynvml, by the name of the library if no other has that name already."""
        import pynvml

        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml.nvmlLib = None
        if not hasattr(ctypes.CDLL(LIBRARY_NAME), "nvmlMockOpen"):
            pynvml.nvmlLib = self._library  # the real one was here first

    def forget(self) -> None:
        """Undo every nvmlInit of this process."""
        self._library.nvmlMockForget()

    # Values

    def set(self, gpu: int | None = None, **values: Any) -> None:
        """Set values by name, of one GPU, of all, or of the system.

        Several values under one name take a sequence (from the first on), a mapping of places to values, or one value
        for all: ``set(gpu=1, nvlink_state={3: 0})``.
        """
        for name, given in values.items():
            value = self._find(name)
            for number in self._numbers(gpu) if value.of_gpu else (0,):
                for place, one in _places(value, given):
                    self._set_one(name, value, number, place, one)

    def get(self, name: str, gpu: int | None = None) -> Any:
        """A value by name: a list if there are several under the name. ``gpu`` is needed unless it is the system's."""
        value = self._find(name)
        if value.of_gpu and gpu is None:
            raise ValueError(f"{name} is a value of a GPU; say which: get({name!r}, gpu=0)")
        integer, real, text = c_int64(), c_double(), ctypes.create_string_buffer(_TEXT_SIZE)
        number = 0 if gpu is None else self._checked(gpu)
        found: list[Any] = []
        for place in range(value.count):
            self._library.nvmlMockGet(self._state, value.number, number, place, byref(integer), byref(real), text)
            found.append((integer.value, real.value, text.value.decode())[value.kind])
        return found if value.count > 1 else found[0]

    def reset(self) -> None:
        """Everything as at the start, but for the number of GPUs."""
        self._library.nvmlMockReset(self._state)

    def permission(self, root: bool) -> None:
        """May setters be called? True at first. Processes with :data:`ROOT_VARIABLE` have their own answer."""
        self.set(root=int(root))

    def enable_mig(self, gpu: int | None = None, count: int = 7) -> None:
        """Split one GPU, or all, into so many MIG devices; 0 turns MIG off."""
        self.set(gpu, mig_mode=int(count > 0), mig_pending=int(count > 0), mig_count=count)

    def set_ecc(self, gpu: int | None, count: int, *, corrected: bool, aggregate: bool, location: int) -> None:
        """How many ECC errors there are in one place; ``location`` is an NVML_MEMORY_LOCATION_*."""
        self.set(gpu, ecc_errors={((0 if corrected else 1) * 2 + aggregate) * 8 + location: count})

    def set_link_errors(self, gpu: int | None, link: int, counter: int, count: int) -> None:
        """An error counter of a link; ``counter`` is an NVML_NVLINK_ERROR_DL_*."""
        self.set(gpu, nvlink_errors={link * 5 + counter: count})

    def set_link_counter(self, gpu: int | None, link: int, field: int | str, count: int) -> None:
        """A counter of NVLink 5 of a link: a field from 201 (COUNT_XMIT_PACKETS) to 222 (COUNT_SYMBOL_BER)."""
        self.set(gpu, nvlink_counters={link * 22 + _field_id(field) - 201: count})

    def set_pair(self, first: int, second: int, *, topology: int | None = None, p2p_status: int | None = None) -> None:
        """How near two GPUs are (NVML_TOPOLOGY_*), and whether they reach each other (NVML_P2P_STATUS_*)."""
        for here, there in ((first, second), (second, first)):
            if topology is not None:
                self.set(here, topology={there: topology})
            if p2p_status is not None:
                self.set(here, p2p_status={there: p2p_status})

    def set_processes(self, gpu: int, processes: Mapping[int, int]) -> None:
        """The computing processes: their pids, and their memory in bytes."""
        self.set(gpu, process_pid=list(processes), process_memory=list(processes.values()))
        self.set(gpu, process_count=len(processes))

    def set_retired_pages(self, gpu: int, cause: int, addresses: Sequence[int]) -> None:
        """Pages that are retired for an NVML_PAGE_RETIREMENT_CAUSE_*."""
        self.set(gpu, retired_address={cause * 64 + place: address for place, address in enumerate(addresses)})
        self.set(gpu, retired_count={cause: len(addresses)})

    def set_field(
        self,
        gpu: int | None,
        field: int | str,
        value: float = 0,
        *,
        kind: str | None = None,
        error: int = 0,
        scope: int | None = None,
    ) -> None:
        """What nvmlDeviceGetFieldValues gives for a field, whatever the GPU's other values are.

        Args:
            gpu: which one, or all.
            field: its number, or a name: ``"NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"``.
            value: its value.
            kind: ``double``, ``uint``, ``ulong``, ``ulonglong``, ``longlong``, ``int`` or ``ushort``; the field's
                own if not given, and ``ulonglong`` for one that has none.
            error: its nvmlReturn.
            scope: for one scope only (a link); for all if not given.
        """
        number = _field_id(field)
        own = self._library.nvmlMockFieldType(self._state, number)
        known = _KINDS.index(kind or ("ulonglong" if own == _NO_KIND else _KINDS[own]))
        self._set_field(gpu, number, scope, known, error, value)

    def clear_field(self, gpu: int | None, field: int | str, scope: int | None = None) -> None:
        """Take back what :meth:`set_field` or :meth:`unsupported` have set for the same scope."""
        self._set_field(gpu, _field_id(field), scope, _NO_KIND, 0, 0)

    def _set_field(self, gpu: int | None, field: int, scope: int | None, kind: int, error: int, value: float) -> None:
        for number in self._numbers(gpu):
            code = self._library.nvmlMockSetField(
                self._state, number, field, _ANY if scope is None else scope, kind, error, int(value), value
            )
            assert code == 0, f"too many fields of GPU {number} were set"

    # Events

    def push_event(
        self, gpu: int, event_type: int, data: int = 0, *, gpu_instance: int | None = None, compute_instance: int = 0
    ) -> None:
        """An event, for all sets of all processes in which it is registered by now."""
        nowhere = gpu_instance is None
        self._library.nvmlMockPushEvent(
            self._state,
            self._checked(gpu),
            event_type,
            data,
            0xFFFFFFFF if nowhere else gpu_instance,
            0xFFFFFFFF if nowhere else compute_instance,
        )

    def push_xid(self, gpu: int, xid: int) -> None:
        """A critical XID (nvmlEventTypeXidCriticalError)."""
        self.push_event(gpu, 0x8, xid)

    # Calls

    def fail(
        self, call: str | Iterable[str], code: int, gpu: int | None = None, times: int | None = None, skip: int = 0
    ) -> Rule:
        """Let calls return an error.

        Args:
            call: which one or which ones.
            code: an NVML_ERROR_*.
            gpu: on which GPU; any, and calls on none, if not given.
            times: how many calls; all if not given.
            skip: so many calls pass first.
        """
        return self._fail(self._set_of(call), code, gpu, times, skip)

    def fail_all(self, code: int, gpu: int | None = None) -> Rule:
        """Let all calls return an error but nvmlInit and nvmlShutdown."""
        calls = set(self._calls.values()) - set(self._family("nvmlInit")) - set(self._family("nvmlShutdown"))
        return self._fail(calls, code, gpu, None, 0)

    def missing(self, *calls: str) -> Rule:
        """Let calls return FUNCTION_NOT_FOUND, as pynvml says of a driver that is too old for them."""
        return self.fail(calls, 13)

    def unsupported(self, gpu: int | None, *names: int | str) -> None:
        """Let calls (``nvml...``) and fields (numbers, or ``NVML_FI_...``) be NOT_SUPPORTED."""
        for name in names:
            if isinstance(name, str) and name.startswith("nvml"):
                self.fail(name, 3, gpu)
            else:
                self.set_field(gpu, name, error=3)

    def block(
        self,
        call: str | Iterable[str],
        seconds: float | None = None,
        gpu: int | None = None,
        times: int | None = None,
        skip: int = 0,
    ) -> Rule:
        """Let calls hang for so many seconds, or until the rule is released; then they do what they do."""
        serial = self._library.nvmlMockBlock(
            self._state,
            self._mask(self._set_of(call)),
            _ANY if gpu is None else self._checked(gpu),
            -1.0 if seconds is None else seconds,
            skip,
            _ANY if times is None else times,
        )
        assert serial, "too many rules"
        return Rule(self, serial)

    def release(self) -> None:
        """Remove all rules: nothing is blocked, nothing fails."""
        self._library.nvmlMockRemove(self._state, 0)

    def calls(self, name: str, gpu: int | None = None) -> int:
        """How often a function was called, by all processes."""
        column = _ANY if gpu is None else self._checked(gpu)
        return sum(self._library.nvmlMockCount(self._state, call, column) for call in self._family(name))

    def history(self) -> list[Setting]:
        """Successful calls of setters, by all processes, the oldest first."""
        entry, found, names = (c_int64 * 5)(), [], {number: name for name, number in self._calls.items()}
        number = 0
        while self._library.nvmlMockHistory(self._state, number, entry) == 0:
            found.append(Setting(names[entry[0]], entry[1], entry[2], (entry[3], entry[4])))
            number += 1
        return found

    # The model

    def start_model(self, speed: float | None = None) -> None:
        """Let powers, clocks and temperatures follow the formulas in ``src/mock.h``.

        Args:
            speed: seconds of the model in a real second; if not given, time goes on by :meth:`advance` alone.
        """
        self._library.nvmlMockStartModel(self._state, -1.0 if speed is None else speed)

    def stop_model(self) -> None:
        """Let values stay as they are now."""
        for gpu in range(self.gpus):
            self.speed(gpu)
        self.set(model=0)

    def advance(self, seconds: float) -> None:
        """Let time go on, for all GPUs."""
        self._library.nvmlMockAdvance(self._state, seconds)

    def speed(self, gpu: int) -> float:
        """How fast a GPU computes: its clock, divided by its highest."""
        return float(self._library.nvmlMockSpeed(self._state, self._checked(gpu)))

    # How it is done

    def _find(self, name: str) -> Value:
        if name not in self._values:
            raise ValueError(f"there is no value {name!r}; there are {', '.join(sorted(self._values))}")
        return self._values[name]

    def _checked(self, gpu: int) -> int:
        if not 0 <= gpu < self.gpus:
            raise ValueError(f"there is no GPU {gpu}, only {self.gpus} from 0 on")
        return gpu

    def _numbers(self, gpu: int | None) -> Iterable[int]:
        return range(self.gpus) if gpu is None else (self._checked(gpu),)

    def _set_one(self, name: str, value: Value, gpu: int, place: int, given: Any) -> None:
        where = (self._state, value.number, gpu, place)
        if value.kind == _TEXT:
            code = self._library.nvmlMockSetText(*where, str(given).encode())
        elif value.kind == _REAL:
            code = self._library.nvmlMockSetReal(*where, float(given))
        else:
            code = self._library.nvmlMockSetInteger(*where, int(given))
        if code:
            raise ValueError(f"{name}[{place}] cannot be {given!r}: there are {value.count} places, texts are short")

    def _family(self, name: str) -> list[int]:
        base = {"nvmlInit": r"nvmlInit(WithFlags|_v\d+)?"}.get(name, re.escape(name) + r"(_v\d+)?")
        found = [number for known, number in self._calls.items() if re.fullmatch(base, known)]
        if not found:
            raise ValueError(f"the mock has no function {name!r}")
        return found

    def _set_of(self, names: str | Iterable[str]) -> frozenset[int]:
        chosen = [names] if isinstance(names, str) else names
        return frozenset(number for name in chosen for number in self._family(name))

    def _mask(self, calls: Iterable[int]) -> Any:
        words = (c_uint64 * (len(self._calls) // 64 + 1))()
        for call in calls:
            words[call // 64] |= 1 << (call % 64)
        return words

    def _fail(self, calls: Iterable[int], code: int, gpu: int | None, times: int | None, skip: int) -> Rule:
        serial = self._library.nvmlMockFail(
            self._state,
            self._mask(calls),
            _ANY if gpu is None else self._checked(gpu),
            code,
            skip,
            _ANY if times is None else times,
        )
        assert serial, "too many rules"
        return Rule(self, serial)


def _places(value: Value, given: Any) -> Iterable[tuple[int, Any]]:
    if isinstance(given, Mapping):
        return given.items()
    if isinstance(given, Sequence) and not isinstance(given, str):
        return enumerate(given)
    return ((place, given) for place in range(value.count))


def _field_id(field: int | str) -> int:
    if isinstance(field, int):
        return field
    import pynvml

    return int(getattr(pynvml, field))


def _load(path: Path) -> ctypes.CDLL:
    """Load the library so that others in this process find it by its name, and declare what it exports for tests."""
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer, text = c_void_p, c_char_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "MaxGpus": (c_int, []),
        "GpuCount": (c_int, [pointer]),
        "Create": (c_int, [text, c_int]),
        "Open": (pointer, [text]),
        "Close": (None, [pointer]),
        "Reset": (None, [pointer]),
        "Forget": (None, []),
        "Value": (text, [c_int, POINTER(c_int), POINTER(c_int), POINTER(c_int)]),
        "SetInteger": (c_int, [pointer, c_int, c_int, c_int, c_int64]),
        "SetReal": (c_int, [pointer, c_int, c_int, c_int, c_double]),
        "SetText": (c_int, [pointer, c_int, c_int, c_int, text]),
        "Get": (c_int, [pointer, c_int, c_int, c_int, POINTER(c_int64), POINTER(c_double), text]),
        "StartModel": (None, [pointer, c_double]),
        "Advance": (None, [pointer, c_double]),
        "Speed": (c_double, [pointer, c_int]),
        "Call": (text, [c_int]),
        "Fail": (c_uint64, [pointer, POINTER(c_uint64), c_int, c_uint32, c_int64, c_int64]),
        "Block": (c_uint64, [pointer, POINTER(c_uint64), c_int, c_double, c_int64, c_int64]),
        "Hits": (c_int64, [pointer, c_uint64]),
        "Remove": (None, [pointer, c_uint64]),
        "Count": (c_uint64, [pointer, c_int, c_int]),
        "History": (c_int, [pointer, c_uint64, POINTER(c_int64)]),
        "SetField": (c_int, [pointer, c_int, c_uint32, c_int64, c_uint32, c_uint32, c_int64, c_double]),
        "FieldType": (c_uint32, [pointer, c_uint32]),
        "PushEvent": (None, [pointer, c_int, c_uint64, c_uint64, c_uint32, c_uint32]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"nvmlMock{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _values(library: ctypes.CDLL) -> dict[str, Value]:
    found: dict[str, Value] = {}
    of_gpu, kind, count = c_int(), c_int(), c_int()
    while name := library.nvmlMockValue(len(found), byref(of_gpu), byref(kind), byref(count)):
        found[name.decode()] = Value(len(found), bool(of_gpu.value), kind.value, count.value)
    return found


def _calls(library: ctypes.CDLL) -> dict[str, int]:
    found: dict[str, int] = {}
    while name := library.nvmlMockCall(len(found)):
        found[name.decode()] = len(found)
    return found
