"""Registers the strategy names with Lightning after installation alone: no import of this package is needed.

**A repurposed hook.** Lightning resolves ``Trainer(strategy="ntp")`` before it loads any entry point of its own, so a
strategy that lives outside Lightning has no official way to be known by name. PyTorch, however, calls every entry
point of the group ``torch.backends`` at the end of ``import torch`` (meant for out-of-tree devices), and Lightning
always imports torch first. ``pyproject.toml`` names :func:`autoload` in that group. It adds no device and changes
nothing in torch: it puts one finder on ``sys.meta_path``, which waits until Lightning's registry of strategies has
been imported, and adds our names to it. Switch it off, with every other such hook, by
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``; ``import lightning_ntp`` then does the same work.

**What it must never do.** An exception here would break ``import torch`` for everybody in the environment, and a heavy
import would slow it down. Hence: only modules that every interpreter has loaded already, and no error leaves
:func:`autoload` or the finder (registration that fails is reported as a warning). ``tests/test_autoload.py`` checks it.
"""

import sys
from _thread import get_ident
from importlib.machinery import ModuleSpec
from types import ModuleType

#: The modules that end up holding a registry of strategies, each with the name of the registry in it.
TARGETS: dict[str, str] = {
    "lightning.pytorch.strategies": "StrategyRegistry",
    "lightning.fabric.strategies": "STRATEGY_REGISTRY",
    "pytorch_lightning.strategies": "StrategyRegistry",
    "lightning_fabric.strategies": "STRATEGY_REGISTRY",
}


def autoload() -> None:
    """Register the strategy names now where Lightning is loaded, else once it is. Safe to call any number of times."""
    try:
        for name in TARGETS:
            module = sys.modules.get(name)
            if module is not None:
                _register(module)
        if not any(isinstance(finder, RegistryFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, RegistryFinder())
    except Exception as error:
        _warn(error)


class RegistryFinder:
    """Finds nothing itself: asks the other finders for a target module and has it registered after it has run.

    Every other import costs one lookup in a dict of four names.
    """

    def __init__(self) -> None:
        self._searching: set[tuple[str, int]] = set()

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the other finders' spec of a module in :data:`TARGETS`, prepared; None for every other module."""
        # Another hook of this kind may ask the import system from the start, and so us again, on the same thread.
        key = (fullname, get_ident())
        if fullname not in TARGETS or key in self._searching:
            return None
        self._searching.add(key)
        try:
            for finder in list(sys.meta_path):
                find_spec = getattr(finder, "find_spec", None)
                if finder is self or find_spec is None:
                    continue
                spec: ModuleSpec | None = find_spec(fullname, path, target)
                if spec is not None:
                    _register_after_execution(spec)
                    return spec
        finally:
            self._searching.discard(key)
        return None


def _register_after_execution(spec: ModuleSpec) -> None:
    """Let ``spec``'s loader register the module it executes, once.

    The method is replaced on the loader *instance* and put back as soon as it runs, so that the module keeps its real
    loader (``inspect``, ``importlib.resources`` and reloading rely on it) and nothing of ours stays behind.
    """
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        if getattr(module, "__name__", None) != spec.name:  # a loader may serve many modules (zipimporter does)
            execute(module)
            return
        try:
            del loader.exec_module
        except AttributeError:
            pass
        execute(module)
        _register(module)

    try:
        loader.exec_module = exec_module  # type: ignore[method-assign]
    except (AttributeError, TypeError) as error:
        _warn(error)


def _register(module: ModuleType) -> None:
    """Add our names to the registry in ``module``; a module that is still being executed has none yet."""
    try:
        registry = getattr(module, TARGETS[module.__name__], None)
        if registry is not None:
            from lightning_ntp.lightning.registry import register_strategies

            register_strategies(registry, module.__name__)
    except Exception as error:
        _warn(error)


def _warn(error: Exception) -> None:
    """Say what failed: a silent failure would end in Lightning's `invalid strategy name` with no hint of the cause."""
    try:
        import warnings

        warnings.warn(
            f"lightning-ntp could not register its strategies with Lightning ({type(error).__name__}: {error}), so"
            ' Trainer(strategy="ntp") is unknown. Pass `lightning_ntp.NTPStrategy()` instead and report this, please.',
            RuntimeWarning,
            stacklevel=2,
        )
    except Exception:
        # `-W error` turns a warning into an exception: even then `import torch` has to go on.
        pass
