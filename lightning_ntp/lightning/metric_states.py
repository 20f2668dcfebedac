"""The states of torchmetrics in a module, remembered and put back. Read in torchmetrics 1.9."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_ntp.lightning.steps.buffer_copies import version_of

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


# some metrics gather in `_dtype`: the default one at the last `.to()`, which precision="64-true" changes inside of
# steps, so that a sanity check makes it another one
_COUNTS = (
    *("_update_count", "_computed", "_forward_cache", "_cache", "_is_synced", "_to_sync", "_should_unsync"),
    "_dtype",
)
# made by whoever makes the metric
_OF_METRICS = frozenset(vars(nn.Module())) | {"_defaults", "_persistent", "_reductions", "_device", *_OF_THE_GENERATION}
_PLAIN = (bool, int, float, str, list, dict, tuple, Tensor, type(None))


def metric_kinds(module: nn.Module) -> list[str]:
    """The metrics and collections of a module, by path and type."""
    found = [(path, m) for path, m in module.named_modules() if isinstance(m, Metric | MetricCollection)]
    return [f"{path} ({type(m).__name__})" for path, m in found]


def metric_states(module: nn.Module) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """What the metrics of a module have gathered.

    Returns:
        Their states and counts by path; those of one compute group share theirs. And by path and name whatever else
        they keep that may have changed.
    """
    states: dict[str, dict[str, Any]] = {}
    others: dict[str, Any] = {}
    for path, metric in module.named_modules():
        own = vars(metric)
        if isinstance(metric, Metric):
            names = [name for name in (*metric._defaults, *_COUNTS) if name in own]
            states[path] = {name: own[name] for name in names}
            known = _OF_METRICS | set(names)
            others |= {f"{path}.{k}": v for k, v in own.items() if k not in known and isinstance(v, _PLAIN)}
        elif isinstance(metric, MetricCollection):
            others |= {f"{path}.{name}": own[name] for name in _OF_COLLECTIONS}
    return states, others


@torch.no_grad()
def put_metric_states(
    module: nn.Module, states: dict[str, dict[str, Any]], others: dict[str, Any], fresh: bool
) -> None:
    """Let the metrics of a module go on from another one's states.

    Args:
        module: Its metrics have the same paths.
        states: See :func:`metric_states`.
        others: See there.
        fresh: Whether they begin at zero, because what the states have gathered is counted elsewhere; not those which
            are not summed over ranks.
    """
    for path, value in others.items():
        owner, _, name = path.rpartition(".")
        vars(module.get_submodule(owner))[name] = value
    defaults: dict[int, Any] = {}  # of shared states one default, shared
    for path, values in states.items():
        metric = module.get_submodule(path)
        assert isinstance(metric, Metric)
        vars(metric).update(values)
        if not fresh or not metric.sync_on_compute:
            continue
        shared = {name: values[name] for name in metric._defaults if name in values}
        metric.reset()
        for name, state in shared.items():
            if id(state) not in defaults:
                default = metric._defaults[name]
                defaults[id(state)] = (
                    default.clone().to(state.device, state.dtype) if isinstance(default, Tensor) else []
                )
            vars(metric)[name] = defaults[id(state)]


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
