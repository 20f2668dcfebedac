"""What cannot be cut the way a plan asks for, told with what to write instead."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_ntp.parallel.registry import PlanError

_WRITE_ATTENTION = (
    "write the attention with nn.Linear projections and F.scaled_dot_product_attention (docs/plans.md shows one), or"
    " leave it out of the plan"
)


def refuse_fused_block(name: str, module: nn.Module, style: str) -> None:
    """Refuse torch's own blocks, whose forward reads weights past the modules that hold them.

    Raises:
        PlanError: If ``module`` is one of them.
    """
    if isinstance(module, nn.MultiheadAttention):
        raise PlanError(
            f"style {style!r} cannot split the nn.MultiheadAttention {name!r}: it computes in one function on a packed"
            f" in_proj_weight and whole head counts; {_WRITE_ATTENTION}"
        )
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        raise PlanError(
            f"style {style!r} cannot take the nn.{type(module).__name__} {name!r} as a whole, for its residuals and"
            f" norms are inside: plan its feed-forward half, {{'{name}.linear1': 'colwise', '{name}.linear2':"
            f" 'rowwise'}} (with `{name}.dropout.p = 0`: it would draw between the two), and leave its attention out"
        )


def refuse_fused_output(name: str, module: nn.Module) -> None:
    """Refuse the output projection of nn.MultiheadAttention, which is never called.

    Raises:
        PlanError: If ``module`` is one.
    """
    if isinstance(module, NonDynamicallyQuantizableLinear):
        raise PlanError(
            f"{name!r} is the output projection of an nn.MultiheadAttention, whose forward takes its weight and never"
            f" calls it: {_WRITE_ATTENTION}"
        )


def refuse_computed_weights(name: str, module: nn.Module) -> None:
    """Refuse a module whose weight or bias is no parameter but made from others in every forward.

    Raises:
        PlanError: If it has a weight norm, spectral norm, pruning mask or other parametrization, or is lazy.
    """
    held = dict(module.named_parameters(recurse=False))
    for wanted in ("weight", "bias"):
        if getattr(module, wanted, None) is not None and (is_parametrized(module, wanted) or wanted not in held):
            raise PlanError(
                f"the {wanted} of {name!r} is computed from other tensors in every forward (weight norm, spectral norm,"
                " pruning or another parametrization), which need it whole: remove that, or leave the module out of"
                " the plan"
            )
    for parameter in held.values():
        if is_lazy(parameter):
            raise PlanError(
                f"{name!r} ({type(module).__qualname__}) has no sizes yet: give it its input size, or run a batch"
                " through the model before `fit`"
            )
