"""The names under which Lightning knows the strategy, and what stands behind each of them.

Lightning calls what is registered with the parameters given here (``StrategyRegistry.get``: ``factory(**parameters)``).
We register functions, which import the strategy when they are called: a name in a list costs its reader nothing. This
module therefore imports neither torch nor Lightning.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

if TYPE_CHECKING:
    from lightning_ntp.lightning.strategy import NTPStrategy

#: Registered name -> (start method, description). Three names, as Lightning's DDP has them.
STRATEGIES: dict[str, tuple[str, str]] = {
    "ntp": ("popen", "Nonuniform tensor parallelism: every replica at its own degree; the ranks re-run the script"),
    "ntp_spawn": ("spawn", "Nonuniform tensor parallelism; the ranks get the pickled trainer and results come back"),
    "ntp_notebook": ("fork", "Nonuniform tensor parallelism for notebooks; the ranks are forked and results come back"),
}


class StrategyRegistry(Protocol):
    """What we need of Lightning's registries (``lightning.fabric.strategies.registry._StrategyRegistry``)."""

    def __contains__(self, name: object, /) -> bool: ...

    def register(
        self, name: str, strategy: Callable[..., Any], description: str | None = None, **init_params: Any
    ) -> Any: ...


def register_strategies(registry: StrategyRegistry, module_name: str) -> None:
    """Add every name to ``registry``, the registry of the module ``module_name``. A name already there stays.

    The registries of Fabric and of the separate ``pytorch_lightning`` package get the same names with a refusal behind
    them, because "invalid strategy name" would send their users looking for a typing error.
    """
    for name, (start_method, description) in STRATEGIES.items():
        if name in registry:
            continue
        registry.register(name, FACTORIES[module_name], description=description, start_method=start_method)


def make_strategy(**init_params: Any) -> "NTPStrategy":
    """Build the strategy behind a name: ``StrategyRegistry.get("ntp")`` ends here."""
    from lightning_ntp.lightning.strategy import NTPStrategy

    return NTPStrategy(**init_params)


def refuse_pytorch_lightning(**_: Any) -> NoReturn:
    """Refuse the separate ``pytorch_lightning`` package.

    Raises:
        RuntimeError: always. Its classes are other classes than those of ``lightning.pytorch``, so a strategy made for
            one fails ``isinstance`` checks in the other.
    """
    raise RuntimeError(
        "The 'ntp' strategies work with `lightning.pytorch`, but this Trainer comes from the separate package"
        " `pytorch_lightning`, whose classes are different ones. Use `import lightning.pytorch as pl` in place of"
        " `import pytorch_lightning as pl`, for the Trainer, the LightningModule and the callbacks alike."
    )


def refuse_fabric(**_: Any) -> NoReturn:
    """Refuse Fabric.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "The 'ntp' strategies do not support Fabric: NTPStrategy is for `lightning.pytorch.Trainer`."
        ' Use `lightning.pytorch.Trainer(strategy="ntp")`, or another strategy with Fabric.'
    )


FACTORIES: dict[str, Callable[..., Any]] = {
    "lightning.pytorch.strategies": make_strategy,
    "lightning.fabric.strategies": refuse_fabric,
    "pytorch_lightning.strategies": refuse_pytorch_lightning,
    "lightning_fabric.strategies": refuse_fabric,
}
