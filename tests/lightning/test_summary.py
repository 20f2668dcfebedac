"""The model summary counts the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary

from tests.lightning.rigs import Degrees, Regression, Worlds, loader, make_trainer


def _summarized(degrees: Degrees, kind: type[ModelSummary], depth: int) -> dict[str, Any]:
    told: dict[str, Any] = {}

    class Keeping(kind):  # type: ignore[misc, valid-type]
        @staticmethod
        def summarize(summary_data: Any, *numbers: Any, **others: Any) -> None:
            told.update(table=dict(summary_data), numbers=numbers)

    module = Regression()
    module.net.norm.requires_grad_(False)
    make_trainer(degrees, callbacks=[Keeping(depth)]).fit(module, loader(degrees, 8))
    return told


@pytest.mark.parametrize(("kind", "depth"), [(ModelSummary, -1), (RichModelSummary, 1)])
def test_the_summary_has_the_numbers_of_the_dense_run(world: Worlds, kind: type[ModelSummary], depth: int) -> None:
    got, want = world(3).run(_summarized, (2, 1), kind, depth)[0], _summarized(None, kind, depth)
    assert got["numbers"] == want["numbers"]
    assert got["table"]["Name"] == want["table"]["Name"] and got["table"]["Params"] == want["table"]["Params"]
