"""A place inside an optimizer's update, where torch has no hook."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override


class InterruptedGroups(list[dict[str, Any]]):
    """Parameter groups that call back when the optimizer's ``step`` goes through them.

    An optimizer has no hook between its closure and its update, nor inside the update. All of torch's, though, loop
    over ``self.param_groups`` there: the loop in ``step`` itself gets a call before it starts and one half-way. Loops
    elsewhere (clipping, zero_grad) find the groups as they are. One loop, and the optimizer has its own list again.

    Args:
        optimizer: Whose groups.
        before: Called before the first parameter changes.
        halfway: Called when half of the parameters have changed.
        split: Whether a group may be cut in two to find the half. The second part is a copy of the group then, so what
            an optimizer writes into it is lost: for processes that do not come back from ``halfway``.
    """

    def __init__(
        self, optimizer: Optimizer, before: Callable[[], None], halfway: Callable[[], None], split: bool
    ) -> None:
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        self._before, self._halfway, self._split = before, halfway, split
        # torch 2.13 wraps `step` twice (profiling, differentiability); the innermost one has the loop
        self._code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
        super().__init__(self._groups)

    def install(self) -> None:
        if not isinstance(self._optimizer.param_groups, InterruptedGroups):
            self._optimizer.param_groups = self

    @staticmethod
    def give_back(optimizer: Optimizer) -> None:
        """Give the optimizer its own list back, if it has not got it yet."""
        groups = optimizer.param_groups
        if isinstance(groups, InterruptedGroups):
            optimizer.param_groups = groups._groups

    @override
    def __iter__(self) -> Iterator[dict[str, Any]]:
        if sys._getframe(1).f_code is not self._code:
            return super().__iter__()
        self.give_back(self._optimizer)
        return self._in_halves()

    def _in_halves(self) -> Iterator[dict[str, Any]]:
        self._before()
        half = sum(len(group["params"]) for group in self._groups) // 2
        seen, reached = 0, False
        for group in self._groups:
            parameters = group["params"]
            here = half - seen
            seen += len(parameters)
            if self._split and not reached and 0 < here < len(parameters):
                yield {**group, "params": parameters[:here]}
                self._halfway()
                reached = True
                yield {**group, "params": parameters[here:]}
                continue
            yield group
            if not reached and seen >= half:
                self._halfway()
                reached = True
