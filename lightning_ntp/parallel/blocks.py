"""Plan styles of whole blocks: attention by heads, feed-forward by hidden columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_ntp.parallel.finding import (
    ATTENTION_OUTPUT,
    DOWN,
    GATE,
    HEADS,
    HEADS_PER_KEY_VALUE,
    INTERLEAVED_QKV,
    KEY,
    KEY_VALUE_HEADS,
    PACKED_GATE_UP,
    PACKED_QKV,
    QUERY,
    UP,
    VALUE,
    HeadCount,
    find_heads,
    find_linear,
    find_module,
    head_size,
)
from lightning_ntp.parallel.modules import (
    ColwiseLinear,
    KeyValueLinear,
    RowwiseLinear,
    VocabParallelEmbedding,
    key_value_heads,
)
from lightning_ntp.parallel.refusals import refuse_fused_block
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


@dataclass(frozen=True)
class Attention(ParallelStyle):
    """Shard an attention block by heads: query heads are dealt out, key/value heads follow them.

    The block may have separate or packed query, key and value projections. It must take its head counts at
    run time from its own attributes or from the shapes (``view(..., -1, head_dim)``); the attributes named here
    are set to the local counts. Other parameters of the block (query and key norms) act on local heads, so
    their gradient class is ``partial``.

    Args:
        heads: The name of the block's attribute that holds the number of query heads, also in ``module.config``; or
            the number itself, for a block that takes its heads from the shapes. Found by its usual names if None
            (``num_heads``, ``n_heads``, ...).
        kv_heads: The same for key/value heads; as many as query heads if nothing is found.
        query, key, value, qkv, output: Names of the child projections; found by their usual names if None.
        interleaved: Whether a packed projection holds query, key and value head by head, as in GPT-NeoX and BLOOM,
            and not all queries, then all keys, then all values. Must be said of a ``query_key_value``.
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
    interleaved: bool | None = None
    scaled: tuple[str, ...] = ()

    def apply(self, name: str, module: nn.Module, model: ShardedModel) -> None:
        refuse_fused_block(name, module, "attention")
        heads, kv_heads = self._head_counts(name, module)
        try:
            queries, shared = UnitSpace(heads.number), UnitSpace(kv_heads.number, shared_by=heads.number)
        except ValueError as error:
            raise PlanError(f"attention block {name!r}: {error}") from None
        output = find_linear(name, module, "output", self.output, ATTENTION_OUTPUT)
        size = head_size(f"{name}.{output[0]}", output[1].in_features, heads.number)
        packed = self._packed(name, module)
        if packed is not None:
            own = [_cut_packed(f"{name}.{packed[0]}", packed[1], model, queries, shared, size, bool(self.interleaved))]
        else:
            own = self._cut_separate(name, module, model, queries, shared)
        make_rowwise(f"{name}.{output[0]}", output[1], model, Segment(queries, size))
        _block(name, module, model, [*own, output[1]])
        _LocalHeads(module, model, queries, shared, heads, kv_heads, self.scaled)

    def _head_counts(self, name: str, module: nn.Module) -> tuple[HeadCount, HeadCount]:
        others = (*HEADS_PER_KEY_VALUE, *self.scaled)
        heads = find_heads(name, module, "heads", self.heads, HEADS, (*others, *KEY_VALUE_HEADS, self.kv_heads))
        if heads is None:
            raise PlanError(
                f"style 'attention' found no number of heads on {name!r} ({kind_of(module)}); looked for"
                f" {', '.join(HEADS)}: name the attribute that holds it, {{style: attention, heads: NAME}}, so that it"
                " is kept at the local number (or give the number, if the block takes its heads from the shapes)"
            )
        others = (*others, *HEADS, *heads.attributes)
        kv_heads = find_heads(name, module, "kv_heads", self.kv_heads, KEY_VALUE_HEADS, others)
        return heads, kv_heads or HeadCount(heads.number, ())

    def _packed(self, name: str, module: nn.Module) -> tuple[str, nn.Module] | None:
        """The packed projection, if the block is to be cut by one."""
        if self.qkv is None and find_module(module, self.query, QUERY) is not None:
            return None
        packed = find_module(module, self.qkv, (*PACKED_QKV, INTERLEAVED_QKV))
        if packed is not None and packed[0] == INTERLEAVED_QKV and self.interleaved is None:
            raise PlanError(
                f"{name}.{packed[0]} may hold query, key and value head by head (GPT-NeoX, BLOOM) or one after another,"
                " which cannot be told from its shape: say {style: attention, interleaved: true} or interleaved: false"
            )
        return packed

    def _cut_separate(
        self, name: str, module: nn.Module, model: ShardedModel, queries: UnitSpace, shared: UnitSpace
    ) -> list[nn.Linear]:
        query = find_linear(name, module, "query", self.query, QUERY)
        key = find_linear(name, module, "key", self.key, KEY)
        value = find_linear(name, module, "value", self.value, VALUE)
        sizes = [
            head_size(f"{name}.{child}", linear.out_features, space.count)
            for (child, linear), space in ((query, queries), (key, shared), (value, shared))
        ]
        if sizes[0] != sizes[1]:
            raise PlanError(
                f"{name}: {queries.count} query heads of {sizes[0]} features need keys of the same size, but"
                f" {name}.{key[0]} would have {shared.count} heads of {sizes[1]}: name the attribute that holds the"
                " number of key/value heads, kv_heads: NAME"
            )
        make_colwise(f"{name}.{query[0]}", query[1], model, (Segment(queries, sizes[0]),), enters=False)
        for (child, linear), size in zip((key, value), sizes[1:], strict=True):
            segments = (Segment(shared, size),)
            make_colwise(f"{name}.{child}", linear, model, segments, enters=False, kind=KeyValueLinear)
        return [query[1], key[1], value[1]]


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
        refuse_fused_block(name, module, "mlp")
        child, down = find_linear(name, module, "down", self.down, DOWN)
        full = model.place.family.full_degree
        segment = feature_segment(f"{name}.{child}", down.in_features, self.units, full)
        packed = find_module(module, self.gate_up, PACKED_GATE_UP)
        if packed is not None:
            linear = plain_linear(f"{name}.{packed[0]}", packed[1], "mlp")
            _expect(f"{name}.{packed[0]}", linear.out_features, 2 * down.in_features)
            make_colwise(f"{name}.{packed[0]}", linear, model, (segment, segment), enters=False)
            own = [linear]
        else:
            ups = [find_linear(name, module, "up", self.up, UP)]
            gate = find_module(module, self.gate, GATE)
            if gate is not None:
                ups.append((gate[0], plain_linear(f"{name}.{gate[0]}", gate[1], "mlp")))
            for up_name, linear in ups:
                _expect(f"{name}.{up_name}", linear.out_features, down.in_features)
                make_colwise(f"{name}.{up_name}", linear, model, (segment,), enters=False)
            own = [linear for _, linear in ups]
        make_rowwise(f"{name}.{child}", down, model, segment)
        _block(name, module, model, [*own, down])


class _LocalHeads:
    """Keeps a block's head-count attributes at the local numbers."""

    def __init__(
        self,
        module: nn.Module,
        model: ShardedModel,
        queries: UnitSpace,
        shared: UnitSpace,
        heads: HeadCount,
        kv_heads: HeadCount,
        scaled: tuple[str, ...],
    ) -> None:
        self.module, self.place, self.queries, self.shared = module, model.place, queries, shared
        self.heads, self.kv_heads = heads.attributes, kv_heads.attributes
        self.ratios = [n for n in HEADS_PER_KEY_VALUE if isinstance(getattr(module, n, None), int)]
        self.scaled = {n: int(getattr(module, n)) for n in scaled}
        model.follow(self)

    def relayout(self) -> None:
        local = len(self.place.units(self.queries))
        expanded, _ = key_value_heads(self.place, Segment(self.shared, 1))
        for name in self.heads:
            setattr(self.module, name, local)
        for name in self.kv_heads:
            setattr(self.module, name, len(expanded))
        for name in self.ratios:
            setattr(self.module, name, local // len(expanded))
        for name, whole in self.scaled.items():
            setattr(self.module, name, whole // self.queries.count * local)


def _block(name: str, module: nn.Module, model: ShardedModel, own: Sequence[nn.Module]) -> None:
    """The rest of a block: its other parameters see local activations, and its border is a region."""
    for child_name, child in module.named_modules():
        if child not in own:
            _nest(name, f"{name}.{child_name}", child)
    for child_name, parameter in module.named_parameters():
        if not model.declared(parameter):
            model.declare(f"{name}.{child_name}", parameter, Sharding(None, gradient="partial"))
    Region(name, module, model.place).attach(module)


def _nest(block: str, name: str, module: nn.Module) -> None:
    """Let a module that the plan shards on its own lie inside of a block, whose inputs enter once for all.

    Raises:
        PlanError: If it delivers whole values: the block's border would sum their gradients once more.
    """
    if isinstance(module, ColwiseLinear) and not module.gathers:
        module.enters = False
    elif isinstance(module, ColwiseLinear | RowwiseLinear | VocabParallelEmbedding):
        style = {RowwiseLinear: "rowwise", VocabParallelEmbedding: "embedding_rowwise"}.get(type(module))
        raise PlanError(
            f"{name!r} is {style or 'colwise_gather_output'!r} in the plan, and inside of the block {block!r}: it"
            " delivers whole values where the block computes on shards, so gradients would count once per"
            f" tensor-parallel index. Leave {name!r} out of the plan, or plan the projections of {block!r} one by one"
            " ('colwise', then 'rowwise') in place of the block"
        )


def _cut_packed(
    name: str,
    module: nn.Module,
    model: ShardedModel,
    queries: UnitSpace,
    shared: UnitSpace,
    size: int,
    interleaved: bool,
) -> nn.Linear:
    linear = plain_linear(name, module, "attention")
    wanted = (queries.count + 2 * shared.count) * size
    if linear.out_features != wanted:
        raise PlanError(
            f"{name} has {linear.out_features} output features; {queries.count} query and 2 x {shared.count} key/value"
            f" heads of {size} need {wanted}"
        )
    if not interleaved:
        segments = (Segment(queries, size), Segment(shared, size), Segment(shared, size))
        make_colwise(name, linear, model, segments, enters=False, kind=KeyValueLinear)
    elif shared.count == queries.count:
        make_colwise(name, linear, model, (Segment(queries, 3 * size),), enters=False)
    else:
        raise PlanError(
            f"{name}: interleaved=True needs as many key/value heads as query heads, and there are {shared.count} for"
            f" {queries.count}: split it into separate projections"
        )
    return linear


def _expect(name: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise PlanError(f"{name} has {found} output features but the down projection takes {wanted}")
