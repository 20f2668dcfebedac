"""The first step against the unsharded model: the same batch, the same weights, two ways to compute.

What a plan or a model does wrong (a head count that does not follow, a residual that is summed twice) shows in the loss
or in a gradient, whatever the reason. All ranks of the job raise together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ntp.comm import Generation, sum_over_owners
from lightning_ntp.parallel import ShardedModel

SMALL_LOSS = 0.1
"""Losses below count as if they were this large: one whose terms cancel (of advantages, say) is all rounding."""
NEGLIGIBLE = 0.1
"""This part of the tolerance, times the largest gradient of all, is rounding too: the gradient of a bias before a norm
or of keys is a sum that cancels."""
SHOWN = 4
_HUGE = 1e300

CAUSES = """\
Usually it is one of these:
 - a head count, split size or width that forward takes from an attribute the plan does not know, or from a constant:
   use one that it sets to the local number (num_heads, ...), shapes (`view(batch, time, -1, head_dim)`), or `scaled=`;
 - a residual connection, a norm or a bias inside a planned block, outside of its projections (then the gradients of
   what comes before the block are off): move it out of the block, or plan the projections by themselves;
 - an input of a block that is no tensor, list or tuple of tensors (then, too, what comes before the block is off);
 - a loss that depends on sharded values: activations between `colwise` and `rowwise`, the output of a `colwise` layer
   that nothing gathers (`colwise_gather_output`), or `parameters()` of which each rank holds its shard;
 - a packed projection in another order than all queries, all keys, all values (interleaved by head, say);
 - in 16 bits, a decision that rounding may turn (routing to experts, an arg max): then nothing is wrong.
NTPStrategy(verify=False) switches this check off."""


class VerificationError(RuntimeError):
    """The sharded model computes something else than the unsharded one."""

    __plain_reason__ = True  # no traceback of ours says where the model or the plan is wrong


class CopiesDifferError(RuntimeError):
    """An update has left copies of a parameter with different bits."""

    __plain_reason__ = True


@dataclass(frozen=True)
class Pass:
    """What one way of computing the first step has given this rank.

    Args:
        loss: Without its graph.
        gradients: This rank's shards, in the order of the parameters.
        largest: The largest gradient of the whole model; 0 if nobody knows.
    """

    loss: Tensor
    gradients: Sequence[Tensor]
    largest: float = 0.0


def tolerance(parameters: Iterable[nn.Parameter], loss: Tensor, half: bool, device: torch.device) -> float:
    """How far the two ways may be apart, relative to the largest number of a tensor.

    A wrong plan is off by a factor or by other data, mostly by more than 0.1; these bounds are the noise of the dtype
    with a margin.

    - 0.1 where numbers have 8 or 11 bits (16-bit parameters, mixed precision, TF32): each of the many roundings on the
      way of a gradient is up to 4e-3, and depth adds them up.
    - 1e-3 in float32: a rounding is 6e-8, and a norm of nearly equal numbers may enlarge it a thousandfold.
    - 1e-5 in float64: not 1e-8, since norms and rotary tables are often computed in float32 whatever comes in.
    """
    dtypes = {p.dtype for p in parameters if p.is_floating_point()} | {loss.dtype}
    if half or dtypes & {torch.bfloat16, torch.float16}:
        return 0.1
    if torch.float32 in dtypes:
        # convolutions use TF32 unless they are told otherwise, matrix products only if told so
        rounds = device.type == "cuda" and (
            torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
        )
        return 0.1 if rounds else 1e-3
    return 1e-5


def sharded_pass(model: ShardedModel, loss: Tensor, generation: Generation) -> Pass:
    """What the sharded model has computed, its gradients complete inside the replica. Collective over the replica."""
    entries = [e for e in model if e.parameter.requires_grad]
    gradients = sum_over_owners(entries, [e.parameter.grad for e in entries], generation)
    return Pass(loss.detach().clone(), gradients)


def unsharded_pass(model: ShardedModel, loss: Tensor, generation: Generation) -> Pass:
    """What the model has computed while it was unsharded: of its gradients this rank's shards. Local."""
    topology, largest = generation.topology, []
    gradients: list[Tensor] = []
    for entry in (e for e in model if e.parameter.requires_grad):
        grad = entry.parameter.grad
        grad = entry.parameter.new_zeros(entry.shape) if grad is None else grad.detach()
        largest.append(grad.abs().max().double() if grad.numel() else grad.new_zeros((), dtype=torch.float64))
        layouts = entry.sharding.layouts(topology.family, generation.degree)
        gradients.append(entry.cut(grad, layouts, generation.index))
        entry.parameter.grad = None  # one whole gradient at a time becomes a shard
    return Pass(
        loss.detach().clone(), gradients, float(torch.stack(largest).nan_to_num(0.0, 0.0).max()) if largest else 0.0
    )


def deviations(sharded: Pass, whole: Pass, bound: float, overflows: bool) -> list[float]:
    """How far the two passes of this rank are apart: the loss, then every trainable parameter. Local.

    Args:
        sharded, whole: The passes.
        bound: The tolerance; says what is negligible.
        overflows: Gradients are scaled and may overflow, which proves nothing.
    """
    pairs = [(sharded.loss, whole.loss, SMALL_LOSS)]
    floor = max(NEGLIGIBLE * whole.largest, torch.finfo(torch.float32).tiny)
    pairs += [(a, b, floor) for a, b in zip(sharded.gradients, whole.gradients, strict=True)]
    found = []
    for one, other, least in pairs:
        if not one.numel():
            found.append(torch.zeros((), dtype=torch.float64, device=one.device))
            continue
        difference, scale = (one - other).abs().max().double(), other.abs().max().double()
        deviation = (difference / scale.clamp_min(least)).nan_to_num(_HUGE, _HUGE).clamp_max(_HUGE)
        # a batch that has no unsharded loss either (all its targets ignored, say) proves nothing
        found.append(torch.where(scale.isfinite(), deviation, 0.0))
    return [0.0 if overflows and value >= _HUGE else float(value) for value in torch.stack(found).tolist()]


def agree(findings: Sequence[float], generation: Generation) -> list[float]:
    """The largest of every finding over all members of the job. Collective over all members."""
    largest = torch.tensor(findings, dtype=torch.float64, device=generation.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=generation.world)
    return [float(value) for value in largest.tolist()]


def check_deviations(model: ShardedModel, found: Sequence[float], bound: float) -> None:
    """Judge what :func:`agree` has returned of all :func:`deviations`. Local.

    Raises:
        VerificationError: Naming the loss or the modules with the largest deviations.
    """
    loss, *gradients = found
    if max(found) <= bound:
        return
    by_module: dict[str, list[tuple[float, str]]] = {}
    entries = [e for e in model if e.parameter.requires_grad]
    for entry, deviation in zip(entries, gradients, strict=True):
        if deviation > bound:
            module, _, name = entry.name.rpartition(".")
            by_module.setdefault(module, []).append((deviation, name))
    worst = sorted(by_module.items(), key=lambda item: -max(item[1])[0])
    lines = [f" - the loss by {_number(loss)}"] if loss > bound else []
    lines += [
        f" - the gradients of {module!r} by {_number(max(names)[0])} ({', '.join(n for _, n in sorted(names)[::-1])})"
        for module, names in worst[:SHOWN]
    ]
    if len(worst) > SHOWN:
        lines.append(f" - those of {len(worst) - SHOWN} more modules by less")
    raise VerificationError(
        "the sharded model does not compute what the unsharded model computes from the same weights and the same batch."
        f" Relative to the largest number, these are off by more than {bound:g}:\n"
        + "\n".join(lines if worst else [*lines, " The gradients are right: only the number itself is wrong."])
        + f"\n{CAUSES}"
    )


def check_copies(differing: Sequence[str], step: int) -> None:
    """Judge the copies after a step. Local: the names are the same on all ranks.

    Args:
        differing: Names of parameters of which copies have different bits.
        step: The steps that are done.

    Raises:
        CopiesDifferError: If there are any.
    """
    if differing:
        shown = ", ".join(differing[:SHOWN]) + (f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else "")
        raise CopiesDifferError(
            f"after step {step} of this fit, copies of {shown} have different bits on different ranks, so the update"
            " was not the same everywhere. Usually it is one of these:\n"
            " - gradients clipped by torch.nn.utils.clip_grad_norm_, which sees the norm of one rank's shards: use"
            " Trainer(gradient_clip_val=...), self.clip_gradients(...), or the norm of"
            " self.trainer.strategy.grad_norm(optimizer);\n"
            " - a learning rate, a weight decay or another number that is computed from a parameter's shape or values"
            " where it is cut: take it from the configuration of the model;\n"
            " - an optimizer that looks at whole parameters or their norms (Muon, LARS, LAMB, Shampoo);\n"
            " - parameters changed by hand, or random numbers drawn, on some ranks only.\n"
            "NTPStrategy(verify=False) switches this check off."
        )


def _number(deviation: float) -> str:
    return f"{deviation:.2g}" if deviation < _HUGE else "an infinite or undefined number"
