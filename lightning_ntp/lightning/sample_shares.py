"""Replicas take other numbers of samples than in the launch, from a batch on that all ranks agree on.

A request of any rank is a note in the job's store, and its number rides in the vote of a step. All ranks say in it how
many batches of the epoch their loaders have drawn: the shares change behind the last of them, so nothing that a worker
has fetched ahead is in vain, and all ranks deal every batch alike. A rank that dies in the vote may leave some that
have heard it and some that have not: what was heard is in the records that survivors bring to a recovery.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler

from lightning_ntp.comm import Runtime
from lightning_ntp.lightning import private_fetching as fetching
from lightning_ntp.lightning.batches import Batches
from lightning_ntp.lightning.dealt_batches import let_be
from lightning_ntp.lightning.drawing import Drawing, deal_by_shares
from lightning_ntp.plan.dealing import Counts, covers, deal
from lightning_ntp.plan.sample_limits import UNLIMITED, most_samples, within
from lightning_ntp.plan.share_schedule import Entry, ShareSchedule

log = logging.getLogger("lightning_ntp")

_LOOKED_AFTER = 100
"""Steps between looks at how much device memory there is: other processes rarely come and go."""


class SampleShares:
    """Carries requests to all ranks, in the votes of steps.

    Args:
        current: The rank's runtime.
        trainer: Of the running fit.
        batches: Keeps the shares.
        record: Appends an event to the run's file, on rank 0.
    """

    def __init__(
        self,
        current: Runtime,
        trainer: Trainer,
        batches: Batches,
        record: Callable[..., None],
    ) -> None:
        self._runtime, self._trainer, self._batches = current, trainer, batches
        self._record = record
        self._wanted = 0
        """The number of this rank's newest request."""
        self._asked: Counts | None = None
        """What it asks for."""
        self._heard: tuple[int, ...] | None = None
        self._drawn_by: list[BatchSampler] = []
        self._memory: tuple[int, int] = (0, 0)
        self._told = False

    # ---- what can be asked for ----------------------------------------------------------------------------------

    def watch(self, loader: object) -> None:
        """A training loader is set up: from its next pass on it draws by the shares."""
        found = deal_by_shares(loader, self._counts_at)
        if found is not None and found not in self._drawn_by:
            self._drawn_by.append(found)

    def _counts_at(self, epoch: int, number: int) -> Counts | None:
        # a loader of the user's own may be validated on too
        return self._batches.schedule.at(epoch, number) if self._trainer.training else None

    def end(self) -> None:
        """The fit is over: the loaders are the user's again."""
        while self._drawn_by:
            let_be(self._drawn_by.pop())

    @property
    def why_not(self) -> str:
        """Why samples cannot move between replicas; empty if they can."""
        if self._trainer.train_dataloader is None:
            return "the training data are not set up yet: ask in on_train_start or later"
        shared = self._batches.shared(self._trainer)
        if shared.why_not:
            return shared.why_not
        if not isinstance(fetching.drawing(self._trainer), Drawing):
            return f"{type(shared.source).__name__} does not give the batches that its batch sampler draws"
        return ""

    def may_move(self) -> bool:
        """Whether samples can move between replicas; if not, the log says once why shares stay equal."""
        why = self.why_not
        if why and not self._told and self._trainer.train_dataloader is not None:
            self._told = True
            log.warning("all replicas take equally many samples: %s", why)
        return not why

    @property
    def samples(self) -> int:
        """Samples of a global batch; 0 if they cannot be told."""
        return self._batches.shared(self._trainer).batch_size * self._replicas

    @property
    def counts(self) -> dict[int, int]:
        """Live replica -> samples of a whole batch, as they are now; empty if they cannot be told."""
        size, live = self._batches.shared(self._trainer).batch_size, self._live
        if not size:
            return {}
        now = self._batches.counts(self._trainer, max(0, self._trainer.fit_loop.batch_idx))
        return self._sizes(now, size, live)

    @property
    def coming(self) -> dict[int, int]:
        """As :attr:`counts`, once what was announced has come, and what this rank has asked for."""
        size, schedule = self._batches.shared(self._trainer).batch_size, self._batches.schedule
        newest = self._asked if self._wanted > schedule.version else schedule.newest
        return self._sizes(newest, size, self._live) if size else {}

    def request(self, counts: Mapping[int, int] | None) -> None:
        """Let replicas take so many samples of every global batch, from one of the next steps on. From any rank.

        Args:
            counts: Live replica -> samples; None: equally many, as in the launch.

        Raises:
            ValueError: If samples cannot move, or the counts are wrong; says why.
        """
        if self._runtime.joining:
            return  # what it asks for while it sets up the others have asked for in their time
        why = self.why_not or (self._mistake(counts) if counts is not None else "")
        if why:
            raise ValueError(f"share_samples: {why}")
        note = None if counts is None else {str(replica): int(count) for replica, count in counts.items()}
        self._post(note)

    def _post(self, note: Mapping[str, int] | None) -> None:
        number = self._runtime.membership.count("shares")
        self._runtime.membership.post(_key(number), json.dumps(note))
        self._wanted = number
        self._asked = None if note is None else tuple(note.get(str(each), 0) for each in range(self._replicas))

    def _mistake(self, counts: Any) -> str:
        live, whole = self._live, self.samples
        if not isinstance(counts, Mapping):
            return f"counts={counts!r} must be a mapping from replicas to numbers of samples, or None for equal shares"
        for replica, count in counts.items():
            if isinstance(replica, bool) or not isinstance(replica, int) or replica not in live:
                return f"{replica!r} is no live replica; live replicas are {list(live)}"
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                return (
                    f"replica {replica} cannot take {count!r} samples: every replica takes a whole number, at least 1"
                )
        missing = [replica for replica in live if replica not in counts]
        if missing:
            return f"replica {missing[0]} has no count: every live replica takes at least one sample"
        if sum(counts.values()) != whole:
            size = self._batches.shared(self._trainer).batch_size
            return (
                f"the counts {dict(counts)} sum to {sum(counts.values())}, but a global batch has {whole} samples"
                f" (batch_size={size} for each of the {self._replicas} replicas of the launch):"
                " moving samples must not change it"
            )
        return ""

    @property
    def _replicas(self) -> int:
        """Of the launch."""
        return len(self._runtime.launched.replicas)

    @property
    def _live(self) -> tuple[int, ...]:
        return self._runtime.generation.topology.live_replicas

    def _sizes(self, counts: Counts | None, size: int, live: tuple[int, ...]) -> dict[int, int]:
        """Live replica -> samples of a whole batch."""
        whole = [range(size)] * self._replicas
        return {replica: len(part) for replica, part in deal(whole, counts, live).items()}

    # ---- in the vote --------------------------------------------------------------------------------------------

    def ballot(self) -> tuple[int, ...]:
        """The newest request, the batches drawn, whether this rank cannot deal, and what its replica has room for.

        The largest number counts, so the last ones are negative: a replica has room for what its fullest rank has.
        """
        room = [-UNLIMITED] * self._replicas
        generation, drawing = self._runtime.generation, fetching.drawing(self._trainer)
        schedule = self._batches.schedule
        if generation.rank == 0 and self._wanted <= schedule.version and not covers(schedule.newest, self._live):
            self._post(None)  # a replica is back that they leave out: loaders draw in vain, all fetch by number
        wanted = self._wanted if self._wanted > schedule.version else 0
        room[generation.replica] = -self._most()
        drawn = drawing.drawn if isinstance(drawing, Drawing) else 0
        return (wanted, drawn, int(bool(self.why_not)), *room)

    def counted(self, votes: tuple[int, ...]) -> None:
        """What the vote has said."""
        self._heard = votes

    def step_done(self, committed: int, gathering: bool) -> None:
        """A step is committed: what was announced in its vote is settled."""
        heard, self._heard = self._heard, None
        before = self._batches.schedule
        if heard is None or heard[0] <= before.version:
            return
        number, drawn, cannot, *room = heard
        note = json.loads(self._runtime.membership.read(_key(number)))
        if self._first and before.version:
            self._runtime.membership.remove(_key(before.version))  # everybody is past it
        entry = None
        if cannot:
            self._warn("samples do not move: a rank's training data cannot be dealt, the others' can")
        else:
            counts = self._settle(note, [-each for each in room])
            if counts is not None and counts[0] != before.newest:
                entry = Entry(self._batches.shared(self._trainer).epoch, drawn, counts[0])
        self._take_over(before.announce(number, entry), committed)

    def _settle(self, note: dict[str, int] | None, most: list[int]) -> tuple[Counts | None] | None:
        """The counts that a request leads to, in a tuple; None if they cannot be. The same on all ranks."""
        if note is None:
            return (None,)
        asked = {int(replica): count for replica, count in note.items()}
        counts: Counts = tuple(asked.get(replica, 0) for replica in range(len(most)))
        if not covers(counts, self._live):  # somebody is back since
            self._warn(f"samples do not move to {asked}: live replicas are {list(self._live)}, and all need a share")
            return None
        cut = within(counts, most)
        if cut is None:
            self._warn(f"samples do not move to {asked}: the memory of the devices has room for {most} samples only")
            return None
        if cut != counts:
            self._warn(f"of the counts {asked} the memory of the devices allows {dict(enumerate(cut))}")
        return (None if len({*cut}) == 1 else cut,)

    # ---- what all ranks know ------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """What a survivor brings to a recovery."""
        schedule = self._batches.schedule
        return {"shares": schedule.record()} if schedule.version else {}

    def heed(self, records: Mapping[int, Mapping[str, Any]]) -> None:
        """What the survivors have brought: whoever has missed an announcement takes it over."""
        known = [ShareSchedule.of(record["shares"]) for record in records.values() if "shares" in record]
        newest = max(known, key=lambda schedule: schedule.version, default=ShareSchedule())
        if newest.version > self._batches.schedule.version:
            self._take_over(newest, None)

    def _take_over(self, schedule: ShareSchedule, committed: int | None) -> None:
        before, self._batches.schedule = self._batches.schedule, schedule
        if not self._first or schedule.entries == before.entries:
            return
        entry = schedule.entries[-1]
        size, live, everybody = self._batches.shared(self._trainer).batch_size, self._live, range(self._replicas)
        now, then = self._sizes(before.newest, size, live), self._sizes(entry.counts, size, live)
        batch = entry.batch + self._batches.offset(self._trainer)
        over = batch >= self._trainer.num_training_batches
        log.warning(
            "samples per batch: %s, from %s on",
            ", ".join(f"replica {replica}: {now[replica]} -> {then[replica]}" for replica in live),
            "the next epoch" if over else f"batch {batch} of this epoch",
        )
        details = {} if committed is None else {"step": committed}
        self._record(
            "shares",
            before=[now.get(replica, 0) for replica in everybody],
            after=[then.get(replica, 0) for replica in everybody],
            epoch=entry.epoch,
            batch=batch,
            **details,
        )

    @property
    def _first(self) -> bool:
        return self._runtime.generation.rank == 0

    def _warn(self, message: str) -> None:
        if self._first:
            log.warning(message)

    # ---- memory -------------------------------------------------------------------------------------------------

    def _most(self) -> int:
        """The samples that this rank's device has room for. (No machine with a GPU has confirmed it yet.)"""
        device, now = self._runtime.generation.device, self._batches.largest
        if device.type != "cuda" or not now:
            return UNLIMITED
        looks, total = self._memory
        if looks % _LOOKED_AFTER == 0:
            total = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        self._memory = (looks + 1, total)
        # in the vote there are gradients, but no activations any more
        static, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return most_samples(now, static, peak, total)


def _key(number: int) -> str:
    return f"shares/{number}"
