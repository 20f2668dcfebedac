"""PyTorch Lightning training that survives GPU loss: nonuniform tensor parallelism.

Importing this package imports neither torch nor Lightning; it only lets Lightning find the strategies by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_ntp import _autoload

if TYPE_CHECKING:
    from lightning_ntp.lightning.strategy import NTPStrategy

__version__ = "0.1.0"
__all__ = ["NTPStrategy", "__version__"]

_autoload.autoload()


def __getattr__(name: str) -> Any:
    if name == "NTPStrategy":
        from lightning_ntp.lightning.strategy import NTPStrategy

        return NTPStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
