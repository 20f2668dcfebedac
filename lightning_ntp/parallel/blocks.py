"""Plan styles of whole blocks: attention by heads, feed-forward by hidden columns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_ntp.parallel.modules import ColwiseLinear, KeyValueLinear, key_value_heads
from lightning_ntp.parallel.region import Region
from lightning_ntp.parallel.registry import PlanError, ShardedModel
from lightning_ntp.parallel.styles import (
    ParallelStyle,
    feature_segment,
    kind_of,
    make_colwise,
    make_rowwise,
    plain_linear,
)
from lightning_ntp.plan import Segment, Sharding, UnitSpace

QUERY = ("q_proj", "wq", "query", "q")
KEY = ("k_proj", "wk", "key", "k")
VALUE = ("v_proj", "wv", "value", "v")
PACKED_QKV = ("qkv_proj", "c_attn", "Wqkv", "wqkv", "qkv", "query_key_value")
ATTENTION_OUTPUT = ("o_proj", "wo", "out_proj", "c_proj", "dense", "proj", "o")
HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
KEY_VALUE_HEADS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head")
HEADS_PER_KEY_VALUE = ("num_key_value_groups", "n_rep")
GATE = ("gate_proj", "w1", "gate")
UP = ("up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h", "up")
DOWN = ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h", "down")
PACKED_GATE_UP = ("gate_up_proj", "w13")


@dataclass(frozen=True)
class Attention(ParallelStyle):
    """Shard an attention block by heads: query heads are dealt out, key/value heads follow them.

    The block may have separate or packed query, key and value projections. It must take its head counts at
    run time from its own attributes or from the shapes (``view(..., -1, head_dim)``); the attributes named here
    are set to the local counts. Other parameters of the block (query and key norms) act on local heads, so
    their gradient class is ``partial``.

    Args:
        heads: Number of query heads, or the name of the block's attribute that holds it. Found by its usual
            names if None (``num_heads``, ``n_heads``, ...; also in ``module.config``).
        kv_heads: The same for key/value heads; as many as query heads if nothing is found.
        query, key, value, qkv, output: Names of the child projections; found by their usual names if None.
        scaled: Further integer attributes of the block that are in proportion to the query heads
            (``split_size``, say) and must be scaled to the local ones.
    """

    heads: int | str | None = None
    kv_heads: int | str | None = None
    query: str | None = None
    key: str | None = None
    value: str | None = None
    qkv: str | None = None
    output: str | None = None
    scaled: tuple[str, ...] = ()

    def apply(self, name: str, module: nn.Module, model: ShardedModel) -> None:
        heads = _count(name, module, "heads", self.heads, HEADS)
        if heads is None:
            raise PlanError(
                f"style 'attention' found no number of heads on {name!r} ({kind_of(module)}); looked for"
                f" {', '.join(HEADS)}: name it in the plan, {{style: attention, heads: 16}}"
            )
        kv_heads = _count(name, module, "kv_heads", self.kv_heads, KEY_VALUE_HEADS) or heads
        try:
            queries, shared = UnitSpace(heads), UnitSpace(kv_heads, shared_by=heads)
        except ValueError as error:
            raise PlanError(f"attention block {name!r}: {error}") from None
        output = _child(name, module, "output", self.output, ATTENTION_OUTPUT)
        head_size = _head_size(f"{name}.{output[0]}", output[1].in_features, heads)
        packed = _find(module, self.qkv, PACKED_QKV)
        separate = _find(module, self.query, QUERY)
        if self.qkv is None and separate is not None:
            packed = None
        if packed is not None:
            widths = [Segment(queries, head_size), Segment(shared, head_size), Segment(shared, head_size)]
            linear = plain_linear(f"{name}.{packed[0]}", packed[1], "attention")
            if linear.out_features != sum(s.size for s in widths):
                raise PlanError(
                    f"{name}.{packed[0]} has {linear.out_features} output features; {heads} query and 2 x {kv_heads}"
                    f" key/value heads of {head_size} need {sum(s.size for s in widths)}"
                )
            make_colwise(f"{name}.{packed[0]}", linear, model, tuple(widths), enters=False, kind=KeyValueLinear)
        else:
            for role, given, names, space in (
                ("query", self.query, QUERY, queries),
                ("key", self.key, KEY, shared),
                ("value", self.value, VALUE, shared),
            ):
                child, linear = _child(name, module, role, given, names)
                size = _head_size(f"{name}.{child}", linear.out_features, space.count)
                kind = ColwiseLinear if role == "query" else KeyValueLinear
                make_colwise(f"{name}.{child}", linear, model, (Segment(space, size),), enters=False, kind=kind)
        make_rowwise(f"{name}.{output[0]}", output[1], model, Segment(queries, head_size))
        _block(name, module, model)
        _LocalHeads(module, model, queries, shared, self)


@dataclass(frozen=True)
class MLP(ParallelStyle):
    """Shard a feed-forward block by hidden columns: gate and up projections colwise, down projection rowwise.

    Args:
        gate, up, down, gate_up: Names of the child projections; found by their usual names if None. A plain MLP
            has no gate; ``gate_up`` is a packed gate and up projection.
        units: Number of units the hidden columns are dealt out in; see :class:`Colwise`.
    """

    gate: str | None = None
    up: str | None = None
    down: str | None = None
    gate_up: str | None = None
    units: int | None = None

    def apply(self, name: str, module: nn.Module, model: ShardedModel) -> None:
        child, down = _child(name, module, "down", self.down, DOWN)
        full = model.place.family.full_degree
        segment = feature_segment(f"{name}.{child}", down.in_features, self.units, full)
        packed = _find(module, self.gate_up, PACKED_GATE_UP)
        if packed is not None:
            linear = plain_linear(f"{name}.{packed[0]}", packed[1], "mlp")
            _expect(f"{name}.{packed[0]}", linear.out_features, 2 * down.in_features)
            make_colwise(f"{name}.{packed[0]}", linear, model, (segment, segment), enters=False)
        else:
            ups = [_child(name, module, "up", self.up, UP)]
            gate = _find(module, self.gate, GATE)
            if gate is not None:
                ups.append((gate[0], plain_linear(f"{name}.{gate[0]}", gate[1], "mlp")))
            for up_name, linear in ups:
                _expect(f"{name}.{up_name}", linear.out_features, down.in_features)
                make_colwise(f"{name}.{up_name}", linear, model, (segment,), enters=False)
        make_rowwise(f"{name}.{child}", down, model, segment)
        _block(name, module, model)


class _LocalHeads:
    """Keeps a block's head-count attributes at the local numbers."""

    def __init__(
        self, module: nn.Module, model: ShardedModel, queries: UnitSpace, shared: UnitSpace, style: Attention
    ) -> None:
        self.module, self.place, self.queries, self.shared = module, model.place, queries, shared
        self.heads = [n for n in {*HEADS, style.heads} if isinstance(getattr(module, str(n), None), int)]
        self.kv_heads = [
            n for n in {*KEY_VALUE_HEADS, style.kv_heads} if isinstance(getattr(module, str(n), None), int)
        ]
        self.ratios = [n for n in HEADS_PER_KEY_VALUE if isinstance(getattr(module, n, None), int)]
        self.scaled = {n: int(getattr(module, n)) for n in style.scaled}
        model.follow(self)

    def relayout(self) -> None:
        local = len(self.place.units(self.queries))
        expanded, _ = key_value_heads(self.place, Segment(self.shared, 1))
        for name in self.heads:
            setattr(self.module, str(name), local)
        for name in self.kv_heads:
            setattr(self.module, str(name), len(expanded))
        for name in self.ratios:
            setattr(self.module, name, local // len(expanded))
        for name, whole in self.scaled.items():
            setattr(self.module, name, whole // self.queries.count * local)


def _block(name: str, module: nn.Module, model: ShardedModel) -> None:
    """The rest of a block: its other parameters see local activations, and its border is a region."""
    for child, parameter in module.named_parameters():
        if not model.declared(parameter):
            model.declare(f"{name}.{child}", parameter, Sharding(None, gradient="partial"))
    Region(name, module, model.place).attach(module)


def _find(module: nn.Module, given: str | None, names: tuple[str, ...]) -> tuple[str, nn.Module] | None:
    for child in (given,) if given is not None else names:
        found = getattr(module, child, None)
        if isinstance(found, nn.Module):
            return child, found
    return None


def _child(name: str, module: nn.Module, role: str, given: str | None, names: tuple[str, ...]) -> tuple[str, nn.Linear]:
    found = _find(module, given, names)
    if found is None:
        children = ", ".join(child for child, _ in module.named_children()) or "none"
        looked = repr(given) if given is not None else ", ".join(names)
        raise PlanError(
            f"{name!r} ({kind_of(module)}) has no {role} projection; looked for {looked} among its children"
            f" ({children}): name it in the plan, {role}: NAME"
        )
    return found[0], plain_linear(f"{name}.{found[0]}", found[1], role)


def _count(name: str, module: nn.Module, setting: str, given: int | str | None, names: tuple[str, ...]) -> int | None:
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise PlanError(f"{name}: {setting}={given} must be at least 1")
        return given
    for attribute in (given,) if given is not None else names:
        for owner in (module, getattr(module, "config", None)):
            value = getattr(owner, str(attribute), None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    if given is not None:
        raise PlanError(f"{name}: {setting}={given!r} names no integer attribute of {kind_of(module)}")
    return None


def _head_size(name: str, features: int, heads: int) -> int:
    if features % heads:
        raise PlanError(f"{name}: {features} features are no multiple of {heads} heads")
    return features // heads


def _expect(name: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise PlanError(f"{name} has {found} output features but the down projection takes {wanted}")
