"""The house stands on its floors: a module imports from its own room and from the rooms below, never from above."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_ntp"

#: Room (first part of the module's name inside the package) -> the rooms it may import from, besides itself.
ROOMS_BELOW: dict[str, set[str]] = {
    "plan": set(),
    "launch": {"plan"},
    "health": {"plan", "launch"},
    "nvml": {"launch", "health"},
    "power": {"plan", "launch", "health", "nvml"},
    "parallel": {"plan", "launch"},
    "comm": {"plan", "launch", "parallel"},
    "engine": {"plan", "launch", "parallel", "comm"},
    "lightning": {"plan", "launch", "health", "nvml", "power", "parallel", "comm", "engine"},
    # The hook that names the strategies to Lightning, and what stands on top of everything.
    "_autoload": {"lightning"},
    "callbacks": {"lightning"},
    "commands": {"plan", "launch", "health", "nvml", "power", "parallel", "comm", "lightning"},
    "cli": {"_autoload", "lightning", "commands"},
    "__main__": {"cli"},
    "__init__": {"_autoload", "plan", "launch", "parallel", "comm", "engine", "lightning"},
}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"}
#: Packages that a room may not import anywhere, not even inside a function.
CLOSED_TO: dict[str, set[str]] = {
    "plan": {"torch", "torchmetrics", "numpy", *LIGHTNING},
    "launch": LIGHTNING,
    "health": {"torch", "torchmetrics", "numpy", "pynvml", *LIGHTNING},
    "nvml": {"torch", "torchmetrics", "numpy", *LIGHTNING},
    "power": {"torch", "torchmetrics", "numpy", "pynvml", *LIGHTNING},
    "parallel": LIGHTNING,
    "comm": LIGHTNING,
    "engine": LIGHTNING,
}
#: Packages that a room may import inside functions only: what `import` of the room costs, every process pays.
CLOSED_AT_IMPORT: dict[str, set[str]] = {
    "launch": {"torch", "torchmetrics", "numpy"},
    "_autoload": {"torch", *LIGHTNING},
    "cli": {"torch", "jsonargparse", *LIGHTNING},
    "__init__": {"torch", "torchmetrics", "numpy", *LIGHTNING},
}


@dataclass(frozen=True)
class Import:
    """One imported module, and where."""

    importer: str
    line: int
    module: str
    at_import: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    """Every import in a file, except those for type checkers only; relative ones made absolute."""
    parts = ("lightning_ntp", *path.relative_to(PACKAGE).with_suffix("").parts)

    def visit(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child, at_import)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(".".join(parts), node.lineno, alias.name, at_import)
        elif isinstance(node, ast.ImportFrom):
            base = [*parts[: len(parts) - node.level]] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "lightning_ntp":  # `from lightning_ntp import plan`: the room is among the names
                for alias in node.names:
                    yield Import(".".join(parts), node.lineno, f"{module}.{alias.name}", at_import)
            else:
                yield Import(".".join(parts), node.lineno, module, at_import)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_import and not inside)

    yield from visit(ast.parse(path.read_text()), True)


def room_of(module: str) -> str:
    """The room of a module of the package: ``lightning_ntp.plan.layout`` -> ``plan``."""
    return module.split(".")[1] if "." in module else "__init__"


FILES = sorted(PACKAGE.rglob("*.py"))
IMPORTS = [found for path in FILES for found in imports_of(path)]


def test_every_room_has_its_floor() -> None:
    rooms = {room_of(".".join(("lightning_ntp", *path.relative_to(PACKAGE).with_suffix("").parts))) for path in FILES}
    assert rooms <= set(ROOMS_BELOW), f"give {sorted(rooms - set(ROOMS_BELOW))} a place in ROOMS_BELOW"


def test_imports_inside_the_house_point_down() -> None:
    # `import lightning_ntp` alone is light and brings no room in; `from lightning_ntp import NTPStrategy` would.
    inside = [found for found in IMPORTS if found.module.startswith("lightning_ntp.")]
    assert inside
    wrong = [
        str(found)
        for found in inside
        if (to := room_of(found.module)) != (room := room_of(found.importer)) and to not in ROOMS_BELOW[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_below_the_strategy_know_nothing_of_lightning() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.module.partition(".")[0] in CLOSED_TO.get(room_of(found.importer), set())
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_that_every_process_imports_stay_light() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.at_import and found.module.partition(".")[0] in CLOSED_AT_IMPORT.get(room_of(found.importer), set())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["lightning_ntp", "lightning_ntp.plan", "lightning_ntp.launch", "lightning_ntp.cli"])
def test_import_brings_in_neither_torch_nor_lightning(module: str) -> None:
    code = f"import sys, {module}; print(*({{'torch', 'lightning', 'numpy'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (loaded.returncode, loaded.stdout.strip()) == (0, ""), loaded.stderr


def test_the_parser_of_this_test_sees_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "plan").mkdir()
    path = tmp_path / "plan" / "layout.py"
    path.write_text(
        "import torch.nn\n"
        "from ..comm import sync\n"
        "from . import topology\n"
        "from lightning_ntp import engine\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import numpy\n"
        "def f():\n    import lightning\n"
        "class A:\n    import torchmetrics\n"
    )
    found = {(each.module, each.at_import) for each in imports_of(path)}
    assert found == {
        ("torch.nn", True),
        ("lightning_ntp.comm", True),
        ("lightning_ntp.plan", True),
        ("lightning_ntp.engine", True),
        ("typing", True),
        ("lightning", False),
        ("torchmetrics", True),
    }
