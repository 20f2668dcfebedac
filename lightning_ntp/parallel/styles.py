"""Plan styles of single modules, and what all styles are made of.

Names follow ``torch.distributed.tensor.parallel`` and the ``tp_plan`` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from lightning_ntp.parallel.modules import ColwiseLinear, KeyValueLinear, RowwiseLinear, VocabParallelEmbedding
from lightning_ntp.parallel.refusals import refuse_computed_weights, refuse_fused_block, refuse_fused_output
from lightning_ntp.parallel.registry import PlanError, ShardedModel
from lightning_ntp.plan import GradientClass, Segment, Sharding, UnitSpace


class ParallelStyle:
    """Makes one module tensor-parallel. Subclasses are frozen dataclasses whose fields are their settings."""

    def apply(self, name: str, module: nn.Module, model: ShardedModel) -> None:
        """Change the class of ``module`` (or its children) and declare its parameters in ``model``.

        Raises:
            PlanError: If the style does not fit the module.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Colwise(ParallelStyle):
    """Shard the output features of a linear layer.

    Args:
        units: Number of units the output features are dealt out in; every unit stays together. By default
            blocks of 8 features where that still balances well, else single features.
        gather_output: Whether the output is gathered, so that it is whole on every index.
    """

    units: int | None = None
    gather_output: bool = False

    def apply(self, name: str, module: nn.Module, model: ShardedModel) -> None:
        linear = plain_linear(name, module, "colwise")
        segment = feature_segment(name, linear.out_features, self.units, model.place.family.full_degree)
        make_colwise(name, linear, model, (segment,), enters=True, gathers=self.gather_output)


@dataclass(frozen=True)
class Rowwise(ParallelStyle):
    """Shard the input features of a linear layer; its output is summed over the replica.

    Args:
        units: As for :class:`Colwise`; give both the same.
    """

    units: int | None = None

    def apply(self, name: str, module: nn.Module, model: ShardedModel) -> None:
        linear = plain_linear(name, module, "rowwise")
        segment = feature_segment(name, linear.in_features, self.units, model.place.family.full_degree)
        make_rowwise(name, linear, model, segment)


@dataclass(frozen=True)
class EmbeddingRowwise(ParallelStyle):
    """Shard the rows of an embedding; lookups are summed over the replica."""

    def apply(self, name: str, module: nn.Module, model: ShardedModel) -> None:
        if type(module).forward is not nn.Embedding.forward:
            raise PlanError(f"style 'embedding_rowwise' needs an nn.Embedding at {name!r}, found {kind_of(module)}")
        assert isinstance(module, nn.Embedding)
        refuse_computed_weights(name, module)
        for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, setting):
                raise PlanError(
                    f"the embedding {name!r} has {setting}={getattr(module, setting)!r}, which needs all rows on one"
                    f" device: unset it or leave the embedding out of the plan"
                )
        # dealt out as the output features of a head are, which may be tied to it
        segment = feature_segment(name, module.num_embeddings, None, model.place.family.full_degree)
        become(module, VocabParallelEmbedding, model, segments=(segment,), rows=None, local_padding=None)
        model.declare(f"{name}.weight", module.weight, Sharding(0, (segment,)))


@dataclass(frozen=True)
class Replicated(ParallelStyle):
    """Every index holds the whole module, used outside sharded regions: gradient class ``full``."""

    gradient_class: ClassVar[GradientClass] = "full"

    def apply(self, name: str, module: nn.Module, model: ShardedModel) -> None:
        for child, parameter in module.named_parameters():
            if not model.declared_as(f"{name}.{child}"):  # what the plan says of an inner module stays
                model.declare(f"{name}.{child}", parameter, Sharding(None, gradient=self.gradient_class))


@dataclass(frozen=True)
class ReplicatedWithGradAllReduce(Replicated):
    """Every index holds the whole module, used inside a sharded region: gradient class ``partial``."""

    gradient_class: ClassVar[GradientClass] = "partial"


def feature_segment(name: str, size: int, units: int | None, full_degree: int) -> Segment:
    """The segment of a feature dimension.

    Blocks of 8 keep matrix kernels aligned (16 bytes in bfloat16); single features balance better where there
    are few.

    Raises:
        PlanError: If ``units`` does not divide the size or the degree is above the number of units.
    """
    if units is None:
        units = size // 8 if size % 8 == 0 and size // 8 >= 8 * full_degree else size
    if isinstance(units, bool) or not isinstance(units, int) or units < 1 or size % units:
        raise PlanError(f"{name}: {size} features cannot be dealt out in units={units!r} equal units")
    if units < full_degree:
        raise PlanError(
            f"{name}: tensor-parallel degree {full_degree} is above its number of units, {units}: an index would"
            f" hold nothing; use a degree of at most {units}"
        )
    return Segment(UnitSpace(units), size // units)


def become(module: nn.Module, kind: type[nn.Module], model: ShardedModel, **attributes: Any) -> None:
    """Turn a module into a sharded one in place: parameters, buffers and hooks stay."""
    module.__class__ = kind
    module.place = model.place  # type: ignore[assignment]
    for key, value in attributes.items():
        setattr(module, key, value)
    model.follow(module)  # type: ignore[arg-type]


def make_colwise(
    name: str,
    linear: nn.Linear,
    model: ShardedModel,
    segments: tuple[Segment, ...],
    *,
    enters: bool,
    gathers: bool = False,
    kind: type[ColwiseLinear] = ColwiseLinear,
) -> None:
    check_enough(name, segments, model)
    extra: dict[str, Any] = {"expand": None} if kind is KeyValueLinear else {}
    become(linear, kind, model, segments=segments, enters=enters, gathers=gathers, **extra)
    sharding = Sharding(0, segments)
    model.declare(f"{name}.weight", linear.weight, sharding)
    if linear.bias is not None:
        model.declare(f"{name}.bias", linear.bias, sharding)


def make_rowwise(name: str, linear: nn.Linear, model: ShardedModel, segment: Segment) -> None:
    check_enough(name, (segment,), model)
    become(linear, RowwiseLinear, model, plan_name=name)
    model.declare(f"{name}.weight", linear.weight, Sharding(1, (segment,)))
    if linear.bias is not None:
        model.declare(f"{name}.bias", linear.bias, Sharding(None, gradient="full"))


def check_enough(name: str, segments: tuple[Segment, ...], model: ShardedModel) -> None:
    degree = model.place.family.full_degree
    for segment in segments:
        if segment.space.dealt < degree:
            raise PlanError(
                f"{name}: tensor-parallel degree {degree} is above its number of units, {segment.space.dealt}: an"
                f" index would hold nothing; use a degree of at most {segment.space.dealt}"
            )


def plain_linear(name: str, module: nn.Module, style: str) -> nn.Linear:
    if isinstance(module, ColwiseLinear | RowwiseLinear):
        raise PlanError(f"two plan entries make {name!r} parallel")
    refuse_fused_block(name, module, style)
    refuse_fused_output(name, module)
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise PlanError(
            f"the plan needs an nn.Linear at {name!r} ({style}), found {kind_of(module)}; other layers need a style of"
            f" their own (subclass lightning_ntp.parallel.ParallelStyle)"
        )
    refuse_computed_weights(name, module)
    return module


def kind_of(module: nn.Module) -> str:
    return type(module).__qualname__
