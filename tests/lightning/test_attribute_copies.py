"""Plain attributes of a module are put back when a step is undone."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from lightning_ntp.lightning.steps.attribute_copies import LONG, AttributeRecorder


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.rate, self.name, self.nothing, self._own = 1, 0.5, "a", None, 2
        self.outputs: list[Any] = [1, [2]]
        self.recent: deque[int] = deque([1, 2], maxlen=3)
        self.by_name: dict[str, int] = {"a": 1}
        self.groups: defaultdict[str, list[int]] = defaultdict(list, {"x": [1]})
        self.seen, self.times = {1, 2}, Counter("aab")


def test_everything_plain_is_put_back_in_place_and_as_often_as_asked() -> None:
    module, recorder = Module(), AttributeRecorder()
    recorder.look_around(module)
    restore = recorder.take()
    before = {k: (v, type(v)) for k, v in vars(module).items()}
    outputs = module.outputs
    for _ in range(2):
        module.count += 1
        module.rate, module.name, module._own = 2.0, "b", 7
        module.nothing = 3  # type: ignore[assignment]
        module.outputs.append(3)
        module.recent.append(9)
        module.by_name["b"] = 2
        module.groups["y"].append(1)
        module.seen.clear()
        module.times.update("zz")
        restore()
        assert (module.count, module.rate, module.name, module.nothing, module._own) == (1, 0.5, "a", None, 2)
        assert module.outputs is outputs and outputs == [1, [2]]
        assert list(module.recent) == [1, 2] and module.recent.maxlen == 3
        assert module.by_name == {"a": 1} and module.groups == {"x": [1]} and module.groups["new"] == []
        module.groups.pop("new")
        assert module.seen == {1, 2} and module.times == Counter("aab")
    assert {k: (v, type(v)) for k, v in vars(module).items()} == before


@pytest.mark.parametrize("length", [LONG, LONG + 1])
def test_a_long_list_is_cut_back(length: int) -> None:
    module, recorder = Module(), AttributeRecorder()
    module.outputs = list(range(length))
    recorder.look_around(module)
    restore = recorder.take()
    module.outputs += [1, 2]
    restore()
    assert module.outputs == list(range(length))


def test_what_lightning_keeps_is_left_alone() -> None:
    module, recorder = Module(), AttributeRecorder()
    recorder.look_around(module)
    restore = recorder.take()
    module.eval()
    module._current_fx_name = "training_step"
    restore()
    assert not module.training and module._current_fx_name == "training_step"
