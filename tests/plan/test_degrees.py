"""From what the user gave to the degree of every replica, or to an error that names the value."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ntp.plan import Topology, TopologyError, resolve_degrees
from tests.plan.drawing import quick

BAD_NUMBERS = [0, -1, -2.0, 2.5, math.nan, math.inf, -math.inf, True, False, "2", "Auto", b"auto", None, [2], 1j]


@pytest.mark.parametrize(
    ("devices", "nodes", "expected"),
    [
        (1, 1, (1,)),
        (2, 1, (2,)),
        (3, 1, (3,)),
        (4, 1, (2, 2)),
        (5, 1, (5,)),
        (6, 1, (3, 3)),
        (8, 1, (4, 4)),
        (8, 3, (8, 8, 8)),
        (1, 4, (1, 1, 1, 1)),
        (7, 2, (7, 7)),
    ],
)
def test_auto(devices: int, nodes: int, expected: tuple[int, ...]) -> None:
    assert resolve_degrees(devices, nodes) == expected


@pytest.mark.parametrize(
    ("given_sizes", "expected"),
    [
        ({"tensor_parallel_size": 4}, (4, 4)),
        ({"tensor_parallel_size": 1}, (1,) * 8),
        ({"data_parallel_size": 1}, (8,)),
        ({"data_parallel_size": 4}, (2,) * 4),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4}, (2,) * 4),
        ({"tensor_parallel_size": 4.0}, (4, 4)),
        ({"degrees": (5, 3)}, (5, 3)),
        ({"degrees": [4, 1, 3]}, (4, 1, 3)),
        ({"degrees": [8.0]}, (8,)),
    ],
)
def test_given_sizes_on_eight_devices(given_sizes: dict[str, Any], expected: tuple[int, ...]) -> None:
    for devices, nodes in ((8, 1), (4, 2)):
        degrees = resolve_degrees(devices, nodes, **given_sizes)
        assert degrees == expected and all(type(degree) is int for degree in degrees)


def test_numpy_integers_are_integers() -> None:
    numpy = pytest.importorskip("numpy")
    assert resolve_degrees(numpy.int64(4), 1, degrees=numpy.array([3, 1])) == (3, 1)
    with pytest.raises(TopologyError, match="True"):
        resolve_degrees(1, 1, numpy.bool_(True))


@quick
@given(st.integers(1, 16), st.integers(1, 4))
def test_auto_uses_every_device(devices: int, nodes: int) -> None:
    assert sum(resolve_degrees(devices, nodes)) == devices * nodes


@quick
@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 13), st.integers(1, 13))
def test_sizes_multiply_to_the_devices_or_are_refused(devices: int, nodes: int, tp: int, dp: int) -> None:
    total = devices * nodes
    asked: list[tuple[dict[str, Any], bool]] = [
        ({"tensor_parallel_size": tp}, total % tp == 0),
        ({"data_parallel_size": dp}, total % dp == 0),
        ({"tensor_parallel_size": tp, "data_parallel_size": dp}, tp * dp == total),
        ({"degrees": (tp, dp)}, tp + dp == total),
    ]
    for sizes, fits in asked:
        if fits:
            degrees = resolve_degrees(devices, nodes, **sizes)
            assert sum(degrees) == total
        else:
            with pytest.raises(TopologyError) as caught:
                resolve_degrees(devices, nodes, **sizes)
            message = str(caught.value)
            assert f"there are {total} devices ({devices} per node x {nodes} nodes)" in message
            for name, size in sizes.items():
                assert f"{name}={size}" in message


@pytest.mark.parametrize("bad", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize("name", ["tensor_parallel_size", "data_parallel_size"])
def test_bad_size_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(TopologyError, match=re.escape(f"{name}={as_given(bad)} is not 'auto' or an integer")):
        resolve_degrees(4, 1, **{name: bad})


@pytest.mark.parametrize("bad", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize("name", ["devices", "nodes"])
def test_bad_number_of_devices_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(TopologyError, match=re.escape(f"{name}={as_given(bad)} is not an integer of at least 1")):
        resolve_degrees(**({"devices": 4, "nodes": 1} | {name: bad}))


@pytest.mark.parametrize("bad", [*BAD_NUMBERS, "auto"], ids=repr)
def test_bad_degree_is_refused_by_position(bad: Any) -> None:
    for call in (lambda: resolve_degrees(4, 1, degrees=(3, bad)), lambda: Topology.start((3, bad))):
        with pytest.raises(TopologyError) as caught:
            call()
        assert f"degrees=(3, {bad!r}): element 1={as_given(bad)} is not an integer of at least 1" in str(caught.value)


@pytest.mark.parametrize("bad", [4, 4.0, math.nan, "4,3", "auto", b"43", True], ids=repr)
def test_degrees_that_are_no_list_are_refused(bad: Any) -> None:
    with pytest.raises(TopologyError, match=re.escape(f"degrees={bad!r} must name the degree of every replica")):
        resolve_degrees(4, 1, degrees=bad)


def test_empty_degrees_are_refused() -> None:
    with pytest.raises(TopologyError, match="degrees is empty"):
        resolve_degrees(4, 1, degrees=())
    with pytest.raises(TopologyError, match="degrees is empty"):
        Topology.start(())


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 4}, {"data_parallel_size": 2}])
def test_degrees_exclude_the_sizes(sizes: dict[str, Any]) -> None:
    with pytest.raises(TopologyError, match=r"leave tensor_parallel_size and data_parallel_size at 'auto'.*\(4, 3\)"):
        resolve_degrees(7, 1, degrees=(4, 3), **sizes)


@pytest.mark.parametrize("bad", [0, math.nan, math.inf, True, "4"], ids=repr)
def test_bad_full_degree_is_refused(bad: Any) -> None:
    with pytest.raises(TopologyError, match=re.escape(f"full_degree={bad!r} is not an integer of at least 1")):
        Topology.start((1,), full_degree=bad)


def test_degree_above_the_full_degree_is_refused() -> None:
    with pytest.raises(TopologyError, match=r"degrees=\(2, 4\): 4 is above the full degree 3"):
        Topology.start((2, 4), full_degree=3)


def as_given(bad: Any) -> str:
    """How an error shows a value: whole floats are taken as the integers they are."""
    return repr(int(bad)) if isinstance(bad, float) and bad.is_integer() else repr(bad)
