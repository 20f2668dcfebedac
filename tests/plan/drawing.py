"""What hypothesis draws: families, spaces, shardings, degrees."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from lightning_ntp.plan import LayoutFamily, Segment, Sharding, UnitSpace

quick = settings(max_examples=100, deadline=None)
"""For tests of a second or less. No deadline: the machine may be shared."""

LARGEST = 7
"""Enough indices for three drops that deal unevenly."""


@st.composite
def families(draw: st.DrawFn, full_degree: int | None = None) -> LayoutFamily:
    """A family with any list of dropped indices, complete or not."""
    full = draw(st.integers(1, LARGEST)) if full_degree is None else full_degree
    order = draw(st.permutations(range(full)))
    return LayoutFamily(full, tuple(order[: draw(st.integers(0, full))]))


@st.composite
def spaces(draw: st.DrawFn, full_degree: int, shared: bool | None = None) -> UnitSpace:
    """A space which a family of that degree can cut; ``shared``: units that follow another space."""
    if draw(st.booleans()) if shared is None else shared:
        count = draw(st.integers(1, 12))
        ratio = draw(st.integers(-(-full_degree // count), 6 + full_degree))
        return UnitSpace(count, shared_by=count * ratio)
    return UnitSpace(draw(st.integers(full_degree, 40)))


@st.composite
def cut_shardings(draw: st.DrawFn, full_degree: int, shared: bool | None = None) -> Sharding:
    """One to three segments, as in a packed QKV weight."""
    segments = draw(
        st.lists(st.builds(Segment, spaces(full_degree, shared), st.integers(1, 3)), min_size=1, max_size=3)
    )
    return Sharding(0, tuple(segments), draw(st.sampled_from(["full", "partial"])))


def shardings(full_degree: int) -> st.SearchStrategy[Sharding]:
    """Cut or replicated, of either gradient class."""
    whole = [Sharding(None, gradient="full"), Sharding(None, gradient="partial")]
    return st.one_of(cut_shardings(full_degree), st.sampled_from(whole))
