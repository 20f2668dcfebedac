"""The hook in ``import torch``: the names are there after installation alone, and nobody's ``import torch`` suffers."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

import pytest

from lightning_ntp import _autoload
from lightning_ntp.lightning import registry as names

TARGET = "lightning.pytorch.strategies"


class Registry(dict[str, Any]):
    """As Lightning's: register() refuses a name that is there."""

    def register(self, name: str, strategy: Any, description: str | None = None, **init_params: Any) -> None:
        if name in self:
            raise ValueError(f"'{name}' is already present in the registry.")
        self[name] = {"strategy": strategy, "description": description, "init_params": init_params}


@pytest.fixture
def clean_import_system(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No hook of ours and no target loaded, whatever other tests have imported; both as before afterwards."""
    finders = [finder for finder in sys.meta_path if not isinstance(finder, _autoload.RegistryFinder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    for name in _autoload.TARGETS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield
    for name in _autoload.TARGETS:  # the tests' fakes; monkeypatch then puts back what was there
        sys.modules.pop(name, None)


def run(code: str, *flags: str, **environment: str) -> str:
    """Run ``code`` in a new interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def module_with_registry(name: str = TARGET) -> ModuleType:
    module = ModuleType(name)
    setattr(module, _autoload.TARGETS[name], Registry())
    return module


def test_installation_alone_makes_the_names_known_to_the_trainer() -> None:
    printed = run(
        """
import inspect, sys
from lightning.pytorch import strategies

registry = strategies.StrategyRegistry
print(*(f"{name}={entry['init_params']['start_method']}" for name, entry in registry.items() if "ntp" in name))
print(*sorted(name for name in sys.modules if name.startswith("lightning_ntp")))
assert inspect.getsource(strategies)
assert "exec_module" not in vars(strategies.__loader__)
"""
    )
    first, second = printed.splitlines()
    assert first == "ntp=popen ntp_spawn=spawn ntp_notebook=fork"
    assert second.split() == [
        "lightning_ntp",
        "lightning_ntp._autoload",
        "lightning_ntp.lightning",
        "lightning_ntp.lightning.registry",
    ]


def test_import_torch_brings_in_nothing_but_the_hook() -> None:
    printed = run(
        "import os, sys; from importlib.metadata import entry_points; import __future__, threading, typing\n"
        "(ours,) = [point for point in entry_points(group='torch.backends') if point.name == 'lightning_ntp']\n"
        "before = set(sys.modules); ours.load()(); print(*sorted(set(sys.modules) - before))"
    )
    assert printed == "lightning_ntp lightning_ntp._autoload"


def test_torch_alone_and_switched_off_hooks_are_left_in_peace() -> None:
    printed = run(
        "import sys, torch; print('lightning_ntp' in sys.modules, 'lightning' in sys.modules)",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert printed == "False False"


def test_the_entry_point_is_installed() -> None:
    points = [point for point in entry_points(group="torch.backends") if point.name == "lightning_ntp"]
    assert [point.load() for point in points] == [_autoload.autoload]


@pytest.mark.usefixtures("clean_import_system")
def test_a_second_call_changes_nothing() -> None:
    module = module_with_registry()
    sys.modules[TARGET] = module
    _autoload.autoload()
    finders, registered = list(sys.meta_path), dict(module.StrategyRegistry)
    _autoload.autoload()
    assert sys.meta_path == finders
    assert module.StrategyRegistry == registered
    assert sum(isinstance(finder, _autoload.RegistryFinder) for finder in sys.meta_path) == 1


@pytest.mark.usefixtures("clean_import_system")
def test_lightning_that_is_loaded_already_gets_the_names_at_once() -> None:
    sys.modules[TARGET] = module = module_with_registry()
    _autoload.autoload()
    assert list(module.StrategyRegistry) == ["ntp", "ntp_spawn", "ntp_notebook"]
    assert all(entry["strategy"] is names.make_strategy for entry in module.StrategyRegistry.values())


@pytest.mark.usefixtures("clean_import_system")
def test_a_name_someone_else_has_taken_stays_theirs() -> None:
    sys.modules[TARGET] = module = module_with_registry()
    module.StrategyRegistry.register("ntp", "theirs")
    _autoload.autoload()
    assert module.StrategyRegistry["ntp"]["strategy"] == "theirs"
    assert "ntp_spawn" in module.StrategyRegistry


class BrokenRegistry(dict[str, Any]):
    def register(self, *_: Any, **__: Any) -> None:
        raise OSError("no")


@pytest.mark.usefixtures("clean_import_system")
def test_failure_is_a_warning_that_names_the_way_out() -> None:
    sys.modules[TARGET] = module = ModuleType(TARGET)
    module.StrategyRegistry = BrokenRegistry()  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match=r"OSError: no.*Pass `lightning_ntp\.NTPStrategy\(\)`"):
        _autoload.autoload()


@pytest.mark.usefixtures("clean_import_system")
@pytest.mark.parametrize("value", [None, 5, object(), BrokenRegistry()])
def test_whatever_it_finds_it_never_raises_even_where_warnings_are_errors(value: object) -> None:
    sys.modules[TARGET] = module = ModuleType(TARGET)
    module.StrategyRegistry = value  # type: ignore[attr-defined]
    _autoload.autoload()  # pytest turns warnings into errors here


@pytest.mark.usefixtures("clean_import_system")
def test_a_broken_import_system_does_not_stop_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", None)
    _autoload.autoload()


class OneModule:
    """A finder and loader of one module, counting how often it ran."""

    def __init__(self, name: str) -> None:
        self.name, self.runs = name, 0

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == self.name else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self.runs += 1
        setattr(module, _autoload.TARGETS[self.name], Registry())


def execute(spec: ModuleSpec) -> ModuleType:
    module = ModuleType(spec.name)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("clean_import_system")
def test_a_module_is_registered_after_it_has_run_and_keeps_its_loader() -> None:
    origin = OneModule(TARGET)
    sys.meta_path.append(origin)
    finder = _autoload.RegistryFinder()
    sys.meta_path.insert(0, finder)
    for run_number in (1, 2):  # the second: importlib.reload
        spec = finder.find_spec(TARGET)
        assert spec is not None and spec.loader is origin
        module = execute(spec)
        assert origin.runs == run_number
        assert "ntp" in module.StrategyRegistry
        assert "exec_module" not in vars(origin)


@pytest.mark.usefixtures("clean_import_system")
def test_a_module_that_fails_to_import_fails_with_its_own_error() -> None:
    class Failing(OneModule):
        def exec_module(self, module: ModuleType) -> None:
            raise ImportError("theirs")

    origin = Failing(TARGET)
    sys.meta_path[:0] = [finder := _autoload.RegistryFinder(), origin]
    spec = finder.find_spec(TARGET)
    assert spec is not None
    with pytest.raises(ImportError, match="theirs"):
        execute(spec)
    assert "exec_module" not in vars(origin)


@pytest.mark.usefixtures("clean_import_system")
def test_two_hooks_that_ask_each_other_do_not_ask_forever() -> None:
    class OtherHook:
        def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
            for finder in sys.meta_path:
                if finder is not self and (spec := finder.find_spec(fullname, None)) is not None:
                    return spec
            return None

    finder, other, origin = _autoload.RegistryFinder(), OtherHook(), OneModule(TARGET)
    sys.meta_path[:0] = [finder, other, origin]
    spec = finder.find_spec(TARGET)
    assert spec is not None
    assert "ntp" in execute(spec).StrategyRegistry


def test_every_other_module_is_none_of_our_business() -> None:
    assert _autoload.RegistryFinder().find_spec("lightning.pytorch") is None


@pytest.mark.usefixtures("clean_import_system")
@pytest.mark.parametrize(
    ("module_name", "advice"),
    [
        ("pytorch_lightning.strategies", "import lightning.pytorch as pl"),
        ("lightning.fabric.strategies", "lightning.pytorch.Trainer"),
        ("lightning_fabric.strategies", "lightning.pytorch.Trainer"),
    ],
)
@pytest.mark.parametrize("name", ["ntp", "ntp_spawn", "ntp_notebook"])
def test_other_namespaces_refuse_and_say_what_to_use(module_name: str, advice: str, name: str) -> None:
    sys.modules[module_name] = module = module_with_registry(module_name)
    _autoload.autoload()
    entry = getattr(module, _autoload.TARGETS[module_name])[name]
    with pytest.raises(RuntimeError, match=advice):
        entry["strategy"](**entry["init_params"])


def test_the_trainer_of_pytorch_lightning_and_fabric_show_the_refusal() -> None:
    printed = run(
        "import warnings; warnings.simplefilter('ignore')\n"
        "import pytorch_lightning, lightning.fabric\n"
        "for make in (pytorch_lightning.Trainer, lightning.fabric.Fabric):\n"
        "    try: make(strategy='ntp', accelerator='cpu', devices=1)\n"
        "    except RuntimeError as error: print(error)"
    )
    first, second = printed.splitlines()
    assert "Use `import lightning.pytorch as pl`" in first
    assert "NTPStrategy is for `lightning.pytorch.Trainer`" in second
