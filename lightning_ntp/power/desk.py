"""Who holds which GPU, inside the helper; each GPU has a thread of its own, so one that hangs holds up nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from lightning_ntp.power.entries import CLOCKS, POWER_LIMIT, PROFILE
from lightning_ntp.power.hand import Hand, Open
from lightning_ntp.power.journal import Journal, Leftovers
from lightning_ntp.power.levers import Levers, Nvml
from lightning_ntp.power.putting_back import Result, Status
from lightning_ntp.power.requests import Setting
from lightning_ntp.power.scan import Say

_CALL_SECONDS = 2.0
"""For the writes of a request; a driver answers in milliseconds."""
_OPEN_SECONDS = 8.0
"""For a GPU to be taken: NVML starts, and others may be busy with what dead owners have left."""
_AGAIN_SECONDS = 0.5
"""Between two tries to put something back."""
_LOOK_SECONDS = 5.0
"""Between two looks for what others have left that have died since."""
_MOST_PLACES = 128
T = TypeVar("T")


class Place:
    """A GPU, with its thread.

    Args:
        hand: On its levers.
    """

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        self.thread = ThreadPoolExecutor(1, f"gpu-{hand.gpu[-12:]}")
        self.holder: object | None = None
        self.job = ""
        self.leaving: asyncio.Task[None] | None = None
        self.tidying: Future[Result] | None = None

    @property
    def idle(self) -> bool:
        return self.holder is None and self.leaving is None and (self.tidying is None or self.tidying.done())


class Desk:
    """See the module. All but :meth:`end` run in the event loop.

    Args:
        directory: Where journals lie.
        ceiling: As for :class:`~lightning_ntp.power.hand.Hand`.
        say: For the log.
    """

    def __init__(self, directory: Path, ceiling: str, say: Say) -> None:
        self._ceiling, self._say = ceiling, say
        self._nvml, self._journal = Nvml(), Journal(directory, say)
        self._leftovers = Leftovers(self._journal)
        self._places: dict[str, Place] = {}

    async def hello(
        self, client: object, job: str, gpus: Sequence[str], clocks_mhz: tuple[int, int] | None = None
    ) -> dict[str, Open | Result]:
        """Take GPUs for a client; what it had besides is put back."""
        for place in self._held(client):
            if place.hand.gpu not in gpus:
                self._give_back(place)
        answers = await asyncio.gather(*(self._take(client, job, gpu, clocks_mhz) for gpu in gpus))
        return dict(zip(gpus, answers, strict=True))

    async def set(self, client: object, settings: Sequence[Setting]) -> list[Result]:
        """Write values: lower ones first; if one of them is not done, nothing is raised."""
        lowered = [each for each in settings if each.lowers(self._now(each))]
        results = dict(zip(lowered, await self._move_all(client, lowered), strict=True))
        raised = [each for each in settings if each not in results]
        wrong = next((each for each, result in results.items() if result.status is not Status.DONE), None)
        if wrong is None:
            results |= dict(zip(raised, await self._move_all(client, raised), strict=True))
        else:
            why = f"not raised, because {wrong.gpu} was not lowered: {results[wrong].why}"
            results |= dict.fromkeys(raised, Result(Status.REFUSED, why))
        return [results[each] for each in settings]

    async def release(self, client: object, gpus: Sequence[str]) -> dict[str, Result]:
        """Put levers back, of these GPUs or all; the client keeps them."""
        chosen = gpus or [place.hand.gpu for place in self._held(client)]
        answers = await asyncio.gather(*(self._release(client, gpu) for gpu in chosen))
        return dict(zip(chosen, answers, strict=True))

    def state(self) -> dict[str, dict[str, Any]]:
        """Every GPU that somebody holds, from memory: nothing is asked of the driver."""
        state = {}
        for gpu, place in self._places.items():
            if place.holder is None and place.leaving is None:
                continue
            values = place.hand.known()[1]
            limit, profiles = values.get(POWER_LIMIT), values.get(PROFILE)
            state[gpu] = {
                "job": place.job,
                "limit_w": limit / 1000 if isinstance(limit, int) else None,
                "clocks_mhz": values.get(CLOCKS),
                "profiles": sorted(profiles) if isinstance(profiles, frozenset) else None,
                "leaving": place.leaving is not None,
            }
        return state

    def leave(self, client: object) -> None:
        """A client is gone: everything of its GPUs is put back, as soon and as often as it takes."""
        for place in self._held(client):
            self._give_back(place)

    async def tidy(self) -> None:
        """Put back what dead owners have left, now and whenever one more is found. Never ends."""
        disk = ThreadPoolExecutor(1, "journals")  # never waited for: a disk may hang too
        while True:
            await asyncio.wrap_future(disk.submit(self._leftovers.refresh))
            for gpu in {entry.gpu for entry in self._leftovers.entries()}:
                place = self._place(gpu)
                if place is not None and place.idle:
                    place.tidying = place.thread.submit(place.hand.put_back_leftovers)
            await asyncio.sleep(_LOOK_SECONDS)

    def end(self, seconds: float) -> bool:
        """Put everything back, at the end; the event loop need not run any more.

        Args:
            seconds: The longest that it may take.

        Returns:
            Whether all is back. What is not stays in the journal.
        """
        deadline, left = time.monotonic() + seconds, list(self._places.values())
        for last in (False, True):
            futures = {place: place.thread.submit(place.hand.close) for place in left}
            wait(futures.values(), max(0.0, deadline - time.monotonic()))
            left = [place for place, future in futures.items() if not _is_over(future)]
            if last or not left:
                break
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
        for place in left:
            self._say(
                f"{place.hand.gpu}: not everything was put back; it is in the journal: lightning-ntp restore-power"
            )
        return not left

    # ---- one GPU ----------------------------------------------------------------------------------------------

    async def _take(self, client: object, job: str, gpu: str, clocks_mhz: tuple[int, int] | None) -> Open | Result:
        place = self._place(gpu)
        if place is None:
            return Result(Status.REFUSED, f"the helper has no room for more than {_MOST_PLACES} GPUs")
        if place.leaving is not None:
            return Result(Status.REFUSED, f"it is still being put back after job {place.job!r}")
        if place.holder not in (None, client):
            return Result(Status.REFUSED, f"it is in use by job {place.job!r}")
        place.holder, place.job = client, job
        answer = await self._ask(place, lambda: place.hand.open(job, clocks_mhz), _OPEN_SECONDS)
        if isinstance(answer, Result):
            self._give_back(place)
        return answer

    async def _release(self, client: object, gpu: str) -> Result:
        place = self._places.get(gpu)
        if place is None or place.holder is not client:
            return Result(Status.REFUSED, "it was not taken")
        return await self._ask(place, place.hand.put_back, _CALL_SECONDS, sure=True)

    async def _move_all(self, client: object, settings: Iterable[Setting]) -> list[Result]:
        return await asyncio.gather(*(self._move(client, each) for each in settings))

    async def _move(self, client: object, setting: Setting) -> Result:
        place = self._places.get(setting.gpu)
        if place is None or place.holder is not client or place.leaving is not None:
            return Result(Status.REFUSED, "it was not taken")
        return await self._ask(place, lambda: place.hand.move(setting.lever, setting.value), _CALL_SECONDS)

    async def _ask(self, place: Place, call: Callable[[], T], seconds: float, sure: bool = False) -> T | Result:
        """Make a call in the GPU's thread.

        Args:
            place: The GPU.
            call: What to do.
            seconds: The longest that is waited for it.
            sure: Whether it is done later too. Otherwise what has not begun in time, as the driver hangs, never will.
        """
        future = asyncio.wrap_future(place.thread.submit(call))
        try:
            return await asyncio.wait_for(asyncio.shield(future) if sure else future, seconds)
        except asyncio.TimeoutError:
            return Result(Status.LATE, f"the driver has not answered within {seconds:g} s")
        except Exception as error:
            self._say(f"{place.hand.gpu}: {error!r}")
            return Result(Status.FAILED, str(error))

    def _give_back(self, place: Place) -> None:
        if place.leaving is None:
            place.leaving = asyncio.get_running_loop().create_task(self._keep_giving_back(place))

    async def _keep_giving_back(self, place: Place) -> None:
        while True:
            with contextlib.suppress(Exception):  # tried again, and at the end once more
                if (await asyncio.wrap_future(place.thread.submit(place.hand.close))).over:
                    break
            await asyncio.sleep(_AGAIN_SECONDS)
        place.holder, place.leaving = None, None
        if place.idle:
            self._drop(place)

    def _place(self, gpu: str) -> Place | None:
        if gpu not in self._places:
            for idle in [place for place in self._places.values() if place.idle]:
                if len(self._places) >= _MOST_PLACES:
                    self._drop(idle)
            if len(self._places) >= _MOST_PLACES:
                return None
            hand = Hand(Levers(gpu, self._nvml), self._journal, self._leftovers, self._ceiling, self._say)
            self._places[gpu] = Place(hand)
        return self._places[gpu]

    def _drop(self, place: Place) -> None:
        self._places.pop(place.hand.gpu).thread.shutdown(wait=False)

    def _held(self, client: object) -> list[Place]:
        return [place for place in self._places.values() if place.holder is client]

    def _now(self, setting: Setting) -> Any:
        place = self._places.get(setting.gpu)
        return place.hand.known()[1].get(setting.lever) if place is not None else None


def _is_over(future: Future[Result]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None and future.result().over
