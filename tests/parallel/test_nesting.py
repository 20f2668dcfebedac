"""A block's inputs enter wherever they are, and what has none is handed on as it is."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_ntp.parallel.nesting import hidden_gradient, map_tensors, tensors_within

ONE = torch.ones(2)


class Pair(NamedTuple):
    x: Tensor
    name: str


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    parts: list[Tensor]
    kept: str = field(default="kept", init=False)


class Rows(list[Tensor]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        ONE,
        (ONE, ONE),
        [ONE, 3],
        Pair(ONE, "name"),
        {"x": ONE, "y": {"z": [ONE]}},
        OrderedDict(x=ONE),
        defaultdict(list, x=ONE),
        Frozen(ONE, [ONE]),
        Rows([ONE]),
        torch.return_types.max((ONE, ONE)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_all_tensors_of_a_nesting_are_replaced_and_its_kind_stays(value: Any) -> None:
    mapped = map_tensors(value, lambda t: t + 1)
    assert type(mapped) is type(value)
    assert [t.tolist() for t in tensors_within(mapped)] == [[2, 2]] * len(tensors_within(value))
    assert [t.tolist() for t in tensors_within(value)] == [[1, 1]] * len(tensors_within(value)), "copied, not changed"


def test_an_immutable_mapping_becomes_a_dict() -> None:
    assert map_tensors(MappingProxyType({"x": 1, "y": ONE}), lambda t: t + 1)["y"].tolist() == [2, 2]


@pytest.mark.parametrize("value", [(1, "a"), [ONE], {"x": ONE}, Frozen(ONE, []), None, torch.Size([2])])
def test_where_nothing_changes_the_same_object_is_handed_on(value: Any) -> None:
    assert map_tensors(value, lambda t: t) is value


def test_a_container_that_holds_itself_is_left_alone() -> None:
    knot: list[Any] = [ONE]
    knot.append(knot)
    assert len(tensors_within(knot)) == 1


def test_a_tensor_with_a_gradient_in_an_unknown_object_is_found() -> None:
    assert hidden_gradient(SimpleNamespace(n=1, x=ONE.clone().requires_grad_())) == "x"
    for harmless in (SimpleNamespace(x=ONE), {"x": ONE}, torch.nn.Linear(2, 2), ONE, 3):
        assert hidden_gradient(harmless) is None
