"""Finding a block's projections and head counts, by what the plan says or by their usual names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lightning_ntp.parallel.registry import PlanError
from lightning_ntp.parallel.styles import kind_of, plain_linear

QUERY = ("q_proj", "wq", "query", "q")
KEY = ("k_proj", "wk", "key", "k")
VALUE = ("v_proj", "wv", "value", "v")
PACKED_QKV = ("qkv_proj", "c_attn", "Wqkv", "wqkv", "qkv")
INTERLEAVED_QKV = "query_key_value"
"""The name under which GPT-NeoX and BLOOM pack head by head, and others q, k and v one after another."""
ATTENTION_OUTPUT = ("o_proj", "wo", "out_proj", "c_proj", "dense", "proj", "o")
HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head")
KEY_VALUE_HEADS = ("num_kv_heads", "num_key_value_heads", "n_kv_heads", "n_kv_head")
HEADS_PER_KEY_VALUE = ("num_key_value_groups", "n_rep")
GATE = ("gate_proj", "w1", "gate")
UP = ("up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h", "up")
DOWN = ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h", "down")
PACKED_GATE_UP = ("gate_up_proj", "w13")

_OTHER_THINGS = ("dim", "size", "idx", "index", "layer", "width", "len", "window", "rank")
"""Parts of names that count something else than heads and may happen to be equal."""


@dataclass(frozen=True)
class HeadCount:
    """A number of heads."""

    number: int
    attributes: tuple[str, ...]
    """The block's attributes that hold it and must be kept at the local number."""


def find_module(module: nn.Module, given: str | None, names: tuple[str, ...]) -> tuple[str, nn.Module] | None:
    """The child that the plan names, or the first one under a usual name."""
    for child in (given,) if given is not None else names:
        found = getattr(module, child, None)
        if isinstance(found, nn.Module):
            return child, found
    return None


def find_linear(
    name: str, module: nn.Module, role: str, given: str | None, names: tuple[str, ...]
) -> tuple[str, nn.Linear]:
    """The same for a projection that a block must have.

    Raises:
        PlanError: If there is none, or it is no plain linear layer.
    """
    found = find_module(module, given, names)
    if found is None:
        children = ", ".join(child for child, _ in module.named_children()) or "none"
        looked = repr(given) if given is not None else ", ".join(names)
        raise PlanError(
            f"{name!r} ({kind_of(module)}) has no {role} projection; looked for {looked} among its children"
            f" ({children}): name it in the plan, {role}: NAME"
        )
    return found[0], plain_linear(f"{name}.{found[0]}", found[1], role)


def find_heads(
    name: str,
    module: nn.Module,
    setting: str,
    given: int | str | None,
    usual: tuple[str, ...],
    others: tuple[object, ...],
) -> HeadCount | None:
    """A number of heads, from a name in the plan, a number in the plan or a usual name.

    Args:
        name: The block's name in the model.
        module: The block.
        setting: The style's field, for messages.
        given: What the plan says: an attribute's name, on the block or its ``config``, or a number.
        usual: Attributes to look for if nothing is given.
        others: Attributes that hold other numbers.

    Returns:
        None if nothing is given and nothing found.

    Raises:
        PlanError: If a name holds no number, or it is not clear which attribute holds a number given.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 1:
            raise PlanError(f"{name}: {setting}={given} must be at least 1")
        return HeadCount(given, _holders(name, module, setting, given, usual, others))
    for attribute in (given,) if given is not None else usual:
        for owner in (module, getattr(module, "config", None)):
            value = getattr(owner, str(attribute), None)
            if isinstance(value, int) and not isinstance(value, bool):
                same = [n for n in usual if getattr(module, n, None) == value]
                if owner is module and str(attribute) not in same:
                    same.append(str(attribute))
                return HeadCount(value, tuple(same))
    if given is not None:
        raise PlanError(f"{name}: {setting}={given!r} names no integer attribute of {kind_of(module)}")
    return None


def _holders(
    name: str, module: nn.Module, setting: str, number: int, usual: tuple[str, ...], others: tuple[object, ...]
) -> tuple[str, ...]:
    """The attribute of the block that holds a number given in the plan; none if nothing on the block is equal to it.

    Left at the whole number, it would silently make wrong heads of the local features.
    """
    equal = [n for n, v in vars(module).items() if type(v) is int and v == number and n not in others]
    if all(n in usual for n in equal):
        return tuple(equal)
    if len(equal) > 1 or any(part in equal[0].lower() for part in _OTHER_THINGS):
        raise PlanError(
            f"{name}: {setting}={number} is a number, and {', '.join(map(repr, equal))} of {kind_of(module)} equal it:"
            f" give the name of the attribute that holds the number of heads, {setting}: NAME, so that the block finds"
            " its local number there"
        )
    return (equal[0],)


def head_size(name: str, features: int, heads: int) -> int:
    """Features per head.

    Raises:
        PlanError: If the features are no multiple of the heads.
    """
    if features % heads:
        raise PlanError(f"{name}: {features} features are no multiple of {heads} heads")
    return features // heads
