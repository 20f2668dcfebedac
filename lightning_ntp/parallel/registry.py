"""The registry: every parameter of a model with how it is cut, and the cutting itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_ntp.parallel.context import TensorParallelContext
from lightning_ntp.plan import Layout, Sharding


class PlanError(ValueError):
    """A tensor-parallel plan does not fit the model."""


class Relayout(Protocol):
    """Something that depends on the local sizes."""

    def relayout(self) -> None: ...


@dataclass
class ShardedParameter:
    """One parameter of the model.

    Args:
        name: Its first name in the model.
        parameter: The parameter object; its data is the local shard once the model is cut.
        sharding: How it is cut.
        shape: Its unsharded shape.
        turn: Its position among the parameters, the same on all ranks.
        aliases: All its names (a tied weight has several).
    """

    name: str
    parameter: nn.Parameter
    sharding: Sharding
    shape: torch.Size
    turn: int
    aliases: list[str] = field(default_factory=list)

    def local_shape(self, layouts: Sequence[Layout], index: int) -> torch.Size:
        """The shape of the shard that ``index`` holds under ``layouts``; of a replicated one all or nothing."""
        if self.sharding.dim is None:
            return self.shape if layouts[0].owned.get(index) else torch.Size((0,))
        shape = list(self.shape)
        shape[self.sharding.dim] = self.sharding.local_size(tuple(layouts), index)
        return torch.Size(shape)

    def cut(self, full: Tensor, layouts: Sequence[Layout], index: int) -> Tensor:
        """The shard of an unsharded tensor that ``index`` holds under ``layouts``, as a tensor of its own."""
        dim = self.sharding.dim
        if dim is None:
            return full.detach().clone()
        pieces, base = [], 0
        for segment, layout in zip(self.sharding.segments, layouts, strict=True):
            for first, count in _stretches(layout.owned[index]):
                start = base + first * segment.unit_size
                pieces.append(full.detach().narrow(dim, start, count * segment.unit_size))
            base += segment.size
        return torch.cat(pieces, dim=dim)

    def fill(self, full: Tensor, shard: Tensor, layouts: Sequence[Layout], index: int) -> None:
        """The reverse of :meth:`cut`: put the shard that ``index`` holds into an unsharded tensor."""
        dim = self.sharding.dim
        if dim is None:
            full.copy_(shard)
            return
        base = start = 0
        for segment, layout in zip(self.sharding.segments, layouts, strict=True):
            for first, count in _stretches(layout.owned[index]):
                size = count * segment.unit_size
                full.narrow(dim, base + first * segment.unit_size, size).copy_(shard.narrow(dim, start, size))
                start += size
            base += segment.size


class ShardedModel:
    """A model cut for one tensor-parallel place.

    Args:
        module: The root module.
        place: This rank's place; modules share the object.
    """

    def __init__(self, module: nn.Module, place: TensorParallelContext) -> None:
        self.module = module
        self.place = place
        self.is_cut = False
        self._shardings: dict[Tensor, tuple[Sharding, str]] = {}
        self._declared: set[str] = set()
        self.parameters: tuple[ShardedParameter, ...] = ()
        self._by_parameter: dict[Tensor, ShardedParameter] = {}
        self._followers: list[Relayout] = []
        self.names: frozenset[str] = frozenset()
        """What the module's state dict held when it was registered."""

    def declare(self, name: str, parameter: Tensor, sharding: Sharding) -> None:
        """Say how a parameter is cut. Registered by identity: a tied weight has one sharding for all its uses.

        Raises:
            PlanError: If the same parameter was declared with another sharding under another name.
        """
        known = self._shardings.get(parameter)
        if known is not None and known[0] != sharding:
            raise PlanError(
                f"{name} and {known[1]} are one tied parameter but the plan cuts them differently"
                f" ({sharding} and {known[0]}): give both modules styles that cut the same dimension"
            )
        self._shardings.setdefault(parameter, (sharding, name))
        self._declared.add(name)

    def follow(self, follower: Relayout) -> None:
        """Let ``follower`` take over the local sizes whenever the layout or the device changes."""
        self._followers.append(follower)

    def declared(self, parameter: Tensor) -> bool:
        return parameter in self._shardings

    def declared_as(self, name: str) -> bool:
        """Whether a parameter was declared under this of its names."""
        return name in self._declared

    def freeze(self) -> None:
        """List all parameters; those that nothing was said about are replicated, gradient class ``full``.

        Raises:
            PlanError: If a parameter that is cut is used by a module of which the plan says nothing (a tied head).
        """
        found: dict[nn.Parameter, ShardedParameter] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if parameter not in found:
                sharding = self._shardings.get(parameter, (Sharding(None, gradient="full"), ""))[0]
                found[parameter] = ShardedParameter(name, parameter, sharding, parameter.shape, len(found))
            found[parameter].aliases.append(name)
        self.parameters = tuple(found.values())
        self._by_parameter = {entry.parameter: entry for entry in self.parameters}
        self.names = frozenset(self.module.state_dict(keep_vars=True))
        for entry in self.parameters:
            # fail here, where every rank fails alike, rather than in the first step
            entry.sharding.layouts(self.place.family, self.place.degree)
            self._check_ties(entry)

    def _check_ties(self, entry: ShardedParameter) -> None:
        owners = {alias: self.module.get_submodule(alias.rpartition(".")[0]) for alias in entry.aliases}
        planned = [owners[alias] for alias in entry.aliases if self.declared_as(alias)]
        if entry.sharding.dim is None or not planned:
            return
        for alias, owner in owners.items():
            if not any(owner is each for each in planned):
                name = alias.rpartition(".")[0]
                styles = {nn.Linear: "'colwise_gather_output'", nn.Embedding: "'embedding_rowwise'"}
                style = styles.get(type(owner)) if entry.sharding.dim == 0 else None
                raise PlanError(
                    f"{alias} and {self._shardings[entry.parameter][1]} are one tied parameter, which the plan cuts,"
                    f" but of {name!r} it says nothing, which would compute on a shard as if that were whole:"
                    f" add {name!r}: {style or 'a style that cuts the same dimension'} to the plan, or untie them"
                )

    def layouts(self, entry: ShardedParameter) -> tuple[Layout, ...]:
        """The layouts of a parameter at this rank's live degree."""
        return entry.sharding.layouts(self.place.family, self.place.degree)

    def by_name(self) -> dict[str, ShardedParameter]:
        """All names, aliases included."""
        return {alias: entry for entry in self.parameters for alias in entry.aliases}

    def by_parameter(self) -> Mapping[Tensor, ShardedParameter]:
        return self._by_parameter

    def cut(self) -> None:
        """Cut every parameter from its unsharded value, in place: the parameter objects stay."""
        if self.is_cut:
            raise RuntimeError("the model is cut already")
        with torch.no_grad():
            for entry in self.parameters:
                entry.parameter.grad = None
                if not entry.sharding.replicated:
                    replace_data(entry.parameter, entry.cut(entry.parameter, self.layouts(entry), self.place.index))
        self.is_cut = True
        self.relayout()

    def relayout(self) -> None:
        """Let the modules take over the local sizes of a new layout or device."""
        for follower in self._followers:
            follower.relayout()

    def __iter__(self) -> Iterator[ShardedParameter]:
        return iter(self.parameters)


def replace_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter other data, of another shape maybe; the object stays.

    While any graph is alive (a loss that the user has kept, predictions in a metric), torch goes on with the node that
    accumulates the gradient and expects the shape it was made for. Another dtype makes it forget that node (2.13:
    ``set_data``).
    """
    other = torch.float32 if data.dtype != torch.float32 else torch.float64
    parameter.data = data.new_empty(0, dtype=other)
    parameter.data = data


def end_graphs(parameter: nn.Parameter, name: str) -> None:
    """Let a backward pass through a graph that was made of a parameter's present shard fail, and say why.

    Its gradient would be one of other units, of another shape perhaps. Called before the ranks get other shards.
    Nothing is kept: the node that accumulates gradients is made anew if no graph holds it, and gone at once.
    """
    if not parameter.requires_grad:
        return

    def refuse(gradients: tuple[Tensor, ...]) -> None:
        raise RuntimeError(
            f"a backward pass has come to parameter {name!r} through a graph from before the ranks of this job changed,"
            " when this rank held another shard of it: a graph cannot be used beyond the step in which it was made;"
            " detach what is kept"
        )

    torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(refuse)


def _stretches(units: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs of consecutive units, as (first unit, number of units)."""
    start = 0
    for k in range(1, len(units) + 1):
        if k == len(units) or units[k] != units[k - 1] + 1:
            yield units[start], k - start
            start = k
