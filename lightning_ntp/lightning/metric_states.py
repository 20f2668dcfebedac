"""The states of torchmetrics in a module, remembered and put back. Read in torchmetrics 1.9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_ntp.lightning.buffer_copies import version_of

# set by whoever knows the current process groups: never put back
_OF_THE_GENERATION = ("process_group", "distributed_available_fn")
_OF_COLLECTIONS = ("_groups", "_groups_checked", "_state_is_copy")


class MetricRecorder:
    """Remembers the states of all metrics of a module.

    Tensors are cloned, since metrics add in place; lists are copied shallowly, since metrics only append. Metrics of
    one compute group share their states and do so again afterwards.
    """

    def __init__(self) -> None:
        self._metrics: list[Metric] = []
        self._collections: list[MetricCollection] = []
        self._last: dict[tuple[int, str], tuple[Tensor, int | None, Tensor]] = {}

    def look_around(self, module: nn.Module) -> None:
        """Find the metrics of a module; again when some were added."""
        self._metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._collections = [m for m in module.modules() if isinstance(m, MetricCollection)]
        self._last = {}

    @torch.no_grad()
    def take(self) -> Callable[[], None]:
        """Remember all states; the result puts them back."""
        if not self._metrics:
            return _nothing
        copies: dict[int, Any] = {}
        saved = []
        for number, metric in enumerate(self._metrics):
            attributes = dict(metric.__dict__)
            for name in metric._defaults:
                state = attributes.get(name)
                if isinstance(state, Tensor):
                    attributes[name] = self._clone((number, name), state, copies)
                elif isinstance(state, list):
                    attributes[name] = copies.setdefault(id(state), list(state))
            saved.append((metric, attributes))
        groups = [(c, {k: _copy_groups(c.__dict__[k]) for k in _OF_COLLECTIONS}) for c in self._collections]

        def restore() -> None:
            fresh: dict[int, Any] = {}  # copies of the copies: a second failure needs them again
            for metric, attributes in saved:
                _restore_metric(metric, attributes, fresh)
            for collection, values in groups:
                collection.__dict__.update({k: _copy_groups(v) for k, v in values.items()})

        return restore

    def _clone(self, key: tuple[int, str], state: Tensor, copies: dict[int, Any]) -> Tensor:
        known = copies.get(id(state))
        if known is not None:
            assert isinstance(known, Tensor)
            return known
        last = self._last.get(key)
        if last is not None and last[0] is state and last[1] == version_of(state) is not None:
            copy = last[2]  # a metric of another stage, say
        else:
            copy = state.detach().clone()
            self._last[key] = (state, version_of(state), copy)
        copies[id(state)] = copy
        return copy


def _restore_metric(metric: Metric, attributes: dict[str, Any], fresh: dict[int, Any]) -> None:
    own = metric.__dict__
    for name in [n for n in own if n not in attributes]:
        del own[name]
    for name, value in attributes.items():
        if name in _OF_THE_GENERATION:
            continue
        if name in metric._defaults and isinstance(value, Tensor | list):
            if id(value) not in fresh:
                fresh[id(value)] = value.clone() if isinstance(value, Tensor) else list(value)
            value = fresh[id(value)]
        own[name] = value


def _copy_groups(value: Any) -> Any:
    return {k: list(v) for k, v in value.items()} if isinstance(value, dict) else value


def _nothing() -> None:
    return None
