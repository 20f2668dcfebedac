"""What survivors do when the membership changes: agree, rebuild, reshard, and say how their step goes on.

A step ends in a vote. Nobody can pass it unless everybody has entered it with complete gradients, and updates
are local and never interrupted. Therefore survivors disagree by at most one step, and only in one way: some have
committed step k and the others stand in its vote, ready. Those go *forward*: they apply their own update. In every
other case the step is *replayed*. Shards move afterwards, so nobody is ever half-stepped.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_ntp.comm import (
    Interrupted,
    JobLost,
    NeighbourCopies,
    Recovery,
    Resharding,
    Restoring,
    Runtime,
    ShardedState,
)
from lightning_ntp.engine.consistency import all_equal
from lightning_ntp.engine.planned import PlannedChange, PlannedEntry
from lightning_ntp.parallel import ShardedModel
from lightning_ntp.plan import Join, Topology, TopologyError
from lightning_ntp.plan.policy import Action, Decision, RecoveryPolicy, decide

_MAX_RETRIES = 3


class Outcome(enum.Enum):
    """How an interrupted step goes on."""

    REPLAY = "replay"
    FORWARD = "forward"


@dataclass(frozen=True)
class Change:
    """A membership change that is complete: for logs, events and hooks.

    Args:
        before, after: The topologies.
        lost: The slots that are gone.
        step: The optimizer steps that were committed when it happened.
        moved_bytes: Bytes of parameters and states that went over the wire, over all ranks.
        sources: The slots that sent them.
        seconds: How long each phase took on this rank: agree, rebuild, reshard.
        gone_back: How many steps the job went back, to the neighbours' copies: they are done again now.
        left: Why the slots of ``lost`` are gone, if they have left as planned.
        planned: Whether it was announced, so that no step was done again.
    """

    before: Topology
    after: Topology
    lost: tuple[int, ...]
    step: int
    moved_bytes: int
    sources: tuple[int, ...]
    seconds: dict[str, float] = field(default_factory=dict)
    gone_back: int = 0
    left: str = ""
    planned: bool = False

    @property
    def joined(self) -> tuple[int, ...]:
        """The slots that have come."""
        return tuple(slot for slot in self.after.slots if slot not in self.before.slots)


class Released(Exception):
    """The policy drops this rank's replica: the rank leaves the job, healthy as it is."""


class PolicyForbids(JobLost):
    """The policy does not allow to go on, though a copy of everything is left."""


class RecoveryEngine:
    """Keeps a cut model in step with the membership, from the first to the last run of a job.

    Args:
        runtime: The rank's runtime.
        on_change: Called on every survivor when a change is complete, before anything goes on.

    Attributes:
        policy: What the user allows.
        committed: Steps of this run that this rank has applied. Written by whoever runs the step.
        ready: Whether this rank stands in the vote of step ``committed + 1`` with complete gradients. Written by
            whoever runs the step.
        records: What every survivor of the last change had brought, by slot.
    """

    def __init__(self, runtime: Runtime, on_change: Callable[[Change], None]) -> None:
        self._runtime, self._on_change = runtime, on_change
        self.policy = RecoveryPolicy()
        self._failures: list[float] = []
        self.committed = 0
        self.ready = False
        self._model: ShardedModel | None = None
        self._states: Callable[[], Iterable[ShardedState]] = tuple
        self._attached = 0
        self._catch_up: Callable[[], None] | None = None
        # a newcomer cuts its model for the place it had at launch, until it gets what it is to hold
        self._layout = runtime.launched if runtime.joining else runtime.generation.topology
        self._rounds = 0
        self._installed = 0
        self._staged: tuple[int, Resharding | Restoring] | None = None
        self.copies: NeighbourCopies | None = None
        """What neighbours keep of each other's shards: the way back when a unit has no holder left."""
        self.planned: PlannedChange | None = None
        self._pending: Recovery | None = None
        self._own: Mapping[str, Any] = {}
        """What this rank has brought to the last change."""
        self._lost: tuple[int, ...] = ()
        self.records: Mapping[int, Mapping[str, Any]] = {}
        self._retries: tuple[int, int] = (-1, 0)
        self.keeps_gradients = False
        """Whether gradients outlive a step, so that they must move too: manual optimization may gather them."""
        self.over = False
        """A rank has left because its script is done. It has passed the last operation of all, so nobody needs more."""
        self.describe: Callable[[], Mapping[str, Any]] = dict
        """More of what the other survivors shall know of this rank; must survive JSON."""
        self.heed: Callable[[Mapping[int, Mapping[str, Any]]], None] = lambda records: None
        """Called with what every survivor has brought, whenever they meet, before anything goes on."""

    def attach(self, model: ShardedModel, states: Callable[[], Iterable[ShardedState]]) -> None:
        """From now on this model is kept, in place of the one before, and steps are counted anew.

        Args:
            model: Cut for :attr:`layout`.
            states: Gives the per-parameter states that move with the parameters.
        """
        self._model, self._states, self.committed, self.ready = model, states, 0, False
        self.copies = None
        self._attached += 1
        self._catch_up = None

    def will_attach(self, catch_up: Callable[[], None]) -> None:
        """All ranks are about to enter an operation after which they call :meth:`attach`.

        Args:
            catch_up: Does so. Called in a rank that has missed the operation's end when others have attached already:
                what moves must have been cut on all survivors. Local.
        """
        self._catch_up = catch_up

    def catch_up(self) -> None:
        """Attach what :meth:`will_attach` has announced, unless that was done meanwhile."""
        if self._catch_up is not None:
            self._catch_up()

    # ---- planned changes --------------------------------------------------------------------------------------

    def may_leave(self, slot: int) -> str:
        """Why a slot cannot leave as planned; empty if it can. The same on all ranks."""
        topology = self._layout
        if slot not in topology.slots:
            return f"slot {slot} is not alive; live slots are {list(topology.slots)}"
        if topology.world_size == 1:
            return f"slot {slot} is the last rank of the job"
        decision = decide(topology, [slot], self.policy, (), ())
        if not decision.goes_on or decision.released:
            least = self.policy.min_tensor_parallel_size
            return (
                f"without slot {slot} its replica would fall below min_tensor_parallel_size={least}, and be dropped"
                " with its healthy ranks"
            )
        return ""

    def plan_leave(self, slot: int, reason: str) -> None:
        """Begin to prepare for the leave of a slot, beside the next step. All members call it at the same step."""
        self._plan(leaver=slot, reason=reason)

    def plan_join(self, joins: Sequence[Join]) -> PlannedChange:
        """Begin to prepare for newcomers, beside the next step. All members call it at the same step.

        Args:
            joins: Who joins.
        """
        return self._plan(joins=joins)

    def plan_settling(self) -> bool:
        """Begin to prepare for members to go back to their places of the launch. All members call it at the same step.

        Returns:
            False if all are there.
        """
        if self._layout.settled(self._runtime.launched) == self._layout:
            return False
        self._plan(settles=True)
        return True

    def _plan(self, **change: Any) -> PlannedChange:
        assert self._model is not None and self.planned is None
        self.planned = PlannedChange(self._runtime, self._model, self._states, self._layout, **change)
        return self.planned

    def switch(self) -> bool:
        """Make the planned change. Collective over all members; see :meth:`PlannedChange.switch`.

        Returns:
            False on the rank that leaves.

        Raises:
            Interrupted: If the membership changes first.
        """
        planned = self.planned
        assert planned is not None
        stays = planned.switch()
        self.planned = None
        if stays:
            lost = () if planned.leaver < 0 else (planned.leaver,)
            self._changed_as_planned(planned, lost, planned.seconds, planned.reason)
        return stays

    def arrive(self, entry: PlannedEntry, standing: Mapping[str, Any]) -> None:
        """In a newcomer that has become a member: take its shards over, and stand where the others stand.

        Args:
            entry: How it came in.
            standing: What :meth:`standing` has said on a member, in the step of the change.
        """
        entry.arrive()
        self.committed, self._installed = int(standing["committed"]), int(standing["installed"])
        self._attached, self._failures = int(standing["attached"]), list(standing["failures"])
        self._changed_as_planned(entry, (), {}, "")

    def standing(self) -> dict[str, Any]:
        """What all members have in common, and a newcomer must know."""
        return {
            "committed": self.committed,
            "installed": self._installed,
            "attached": self._attached,
            "failures": self._failures,
        }

    def _changed_as_planned(
        self, planned: PlannedChange | PlannedEntry, lost: tuple[int, ...], seconds: dict[str, float], left: str
    ) -> None:
        before, self._layout = planned.before, planned.after
        if self.copies is not None:
            if {*planned.after.slots} - {*before.slots}:
                self.copies.joined(self.committed)
            else:
                self.copies.renew()
        change = Change(
            before,
            planned.after,
            lost,
            self.committed,
            planned.moved,
            planned.sources,
            seconds,
            left=left,
            planned=True,
        )
        self._on_change(change)

    def drop_planned(self) -> None:
        """Nothing comes of a planned change."""
        planned, self.planned = self.planned, None
        if planned is not None:
            planned.drop()

    # ---- losses -----------------------------------------------------------------------------------------------

    def operation_result(self, number: int) -> str | None:
        """The result of operation ``number`` (:class:`~lightning_ntp.engine.operations.Operations`), if a survivor of
        the last change has completed it.
        """
        found = (str(r["result"]) for r in self.records.values() if int(r.get("operation", 0)) == number)
        return next(found, None)

    @property
    def layout(self) -> Topology:
        """The topology the shards are cut for."""
        return self._layout

    def agree(self, error: Interrupted) -> Outcome:
        """Agree with the other survivors on the change that interrupted this rank. Shards stay where they are.

        Returns:
            REPLAY: unwind the step to its start, call :meth:`complete`, start it again. FORWARD: the step is committed
            elsewhere; apply the update, count it in :attr:`committed`, call :meth:`complete`.

        Raises:
            JobLost: If the job cannot go on, on all survivors.
        """
        self._pending = recovery = self._recover()
        behind = self._will_stand_at(self._own) < max(map(self._will_stand_at, recovery.records.values()))
        if behind and not self.ready:
            raise RuntimeError(
                f"slot {self._runtime.slot} is at step {self.committed} and others have committed more, but it had not"
                " voted: this should be impossible, please report it"
            )
        return Outcome.FORWARD if behind else Outcome.REPLAY

    def complete(self) -> None:
        """Move the shards, when parameters and states hold the values after :attr:`committed` steps.

        If a unit has no holder left but neighbours have copies of everything, all go back to those, and
        :attr:`committed` is less than before: the caller does the steps in between again.

        Raises:
            JobLost: If a unit has no holder left or a rank lacks the memory, on all survivors.
            Released: If the policy drops this rank's replica.
            PolicyForbids: If it does not allow to go on. The shards are moved then: a checkpoint can be written.
        """
        # evaluation runs in inference mode, whose tensors could never be trained
        with torch.inference_mode(False), torch.no_grad():
            self._complete()

    def _complete(self) -> None:
        recovery, self._pending = self._pending, None
        decision: Decision | None = None
        while recovery is not None and not self.over:
            self._follow(recovery)
            self._settle(recovery)
            decision, way_back = self._decide(recovery)
            try:
                self._reshard(recovery, way_back)
                recovery = None
            except Interrupted:
                recovery = self._recover()
        if decision is not None and not decision.goes_on:
            raise PolicyForbids(str(decision))

    def _decide(self, recovery: Recovery) -> tuple[Decision | None, Restoring | None]:
        """What the policy says of this loss, and the way back if one must be gone; the same on all survivors."""
        lost = [slot for slot in self._layout.slots if slot not in recovery.after.slots]
        if not lost:
            return None, None
        times = [d.at for d in recovery.departures if d.slot in lost and d.kind == "dead"]
        failures = [*self._failures, max(times)] if times else self._failures
        # before a model is cut everybody has all of it
        shardings = [entry.sharding for entry in self._model or ()]
        decision, way_back = decide(self._layout, lost, self.policy, failures, shardings), None
        if decision.action is Action.END:
            way_back = self._way_back(recovery, decision)
            # everything has a copy, so nothing is asked of the shardings
            decision = decide(self._layout, lost, self.policy, failures, ())
        if self._runtime.slot in decision.released:
            raise Released(str(decision))
        # if others are released, their leaving interrupts the next collective, and the survivors decide again
        if not decision.released:
            self._failures = list(failures)
        return decision, way_back

    def _way_back(self, recovery: Recovery, decision: Decision) -> Restoring:
        """To the neighbours' copies."""
        if self.copies is None:
            raise JobLost(str(decision))
        found = self.copies.choose(recovery.records, recovery.after)
        if isinstance(found, str):
            raise JobLost(f"{decision}; {found}")
        return found

    def _recover(self) -> Recovery:
        self.drop_planned()
        if self.copies is not None:
            self.copies.abandon()  # before the process groups are let go
        self._own = self._record()
        recovery = self._runtime.recover(self._own)
        self.records = recovery.records
        self.heed(recovery.records)
        self.over = any(departure.kind == "left" and not departure.reason for departure in recovery.departures)
        self._lost += tuple(s for s in recovery.lost if s not in self._lost)
        self._count_retries(recovery)
        return recovery

    def _count_retries(self, recovery: Recovery) -> None:
        """Collectives that fail again and again although nobody dies: ranks wait for each other in different ones.

        Counted by what is done meanwhile, and not by time: each attempt takes as long as the time-out.
        """
        if recovery.lost:
            self._retries = (-1, 0)
            return
        done = max(int(r["committed"]) + int(r.get("progress", 0)) for r in recovery.records.values())
        self._retries = (done, self._retries[1] + 1 if self._retries[0] == done else 1)
        if self._retries[1] > _MAX_RETRIES:
            raise JobLost(
                f"collectives failed {self._retries[1]} times in step {self.committed} although no rank has died: some"
                " ranks wait in another one than the others. Replicas may have different numbers of batches, or code"
                " with collectives (a forward of the model is one) may run on some ranks only"
            )

    def _record(self) -> dict[str, Any]:
        return {
            **self.describe(),
            "committed": self.committed,
            "ready": self.ready,
            "installed": self._installed,
            "staged": self._staged[0] if self._staged is not None else 0,
            "staged_step": self._stands_at(self._staged[1]) if self._staged is not None else 0,
            "attached": self._attached,
            **({"copies": self.copies.record()} if self.copies is not None else {}),
        }

    def _stands_at(self, resharding: Resharding | Restoring) -> int:
        """The committed steps once this is installed."""
        return resharding.step if isinstance(resharding, Restoring) else self.committed

    def _will_stand_at(self, record: Mapping[str, Any]) -> int:
        """The committed steps of a survivor once it has installed what another one has installed already."""
        installed = max(int(r["installed"]) for r in self.records.values())
        return int(record["staged_step"] if 0 < int(record["staged"]) <= installed else record["committed"])

    def _follow(self, recovery: Recovery) -> None:
        """Others have attached a model already: so must this rank."""
        if self._attached < max(int(r["attached"]) for r in recovery.records.values()):
            self.catch_up()

    def _settle(self, recovery: Recovery) -> None:
        """A reshard whose vote was interrupted: if anybody has installed it, all had received everything."""
        staged, self._staged = self._staged, None
        if staged is not None and any(int(r["installed"]) >= staged[0] for r in recovery.records.values()):
            self._install(*staged)

    def _reshard(self, recovery: Recovery, way_back: Restoring | None) -> None:
        generation, before = self._runtime.generation, self._layout
        started, steps = time.monotonic(), self.committed
        if self._model is None:
            self._layout = recovery.after
            self._tell(before, recovery, 0, (), started)
            return
        try:
            resharding = way_back or Resharding(self._model, self._states(), before, recovery.after)
        except TopologyError as error:
            raise JobLost(str(error)) from None
        moved, sources = resharding.bytes_moved(), resharding.sources()
        self._check_alike(resharding)
        self._check_memory(resharding)
        resharding.receive(generation)
        if self.keeps_gradients and isinstance(resharding, Resharding):
            resharding.travel_gradients(generation.world, recovery.after.slots, generation.slot)
        self._rounds = 1 + max(int(r["installed"]) for r in recovery.records.values())
        self._staged = (self._rounds, resharding)
        # passing this vote means that everybody has received everything
        dist.all_reduce(torch.zeros(1, device=generation.device), group=generation.world)
        self._staged = None
        self._install(self._rounds, resharding)
        self.ready = False
        if self.copies is not None:
            self.copies.changed(self.committed, recovery.records)
        self._tell(before, recovery, moved, sources, started, steps - self.committed)

    def _tell(
        self,
        before: Topology,
        recovery: Recovery,
        moved: int,
        sources: tuple[int, ...],
        started: float,
        gone_back: int = 0,
    ) -> None:
        lost, self._lost = self._lost, ()
        seconds = {**recovery.seconds, "reshard": time.monotonic() - started}
        self._on_change(Change(before, recovery.after, lost, self.committed, moved, sources, seconds, gone_back))

    def _install(self, number: int, resharding: Resharding | Restoring) -> None:
        resharding.install(self._runtime.slot, self._runtime.generation.tensor_parallel)
        self._installed, self._layout = number, resharding.after
        if isinstance(resharding, Restoring):
            self.committed = resharding.step

    def _check_alike(self, resharding: Resharding | Restoring) -> None:
        """Every survivor must be about to move the same tensors: else they would wait for each other."""
        generation = self._runtime.generation
        if not all_equal(resharding.fingerprint(), generation.world, generation.device):
            raise JobLost(
                "the survivors hold different optimizer states or registered states: a rank was lost in the moment in"
                " which they are made or loaded, while the trainer is being set up; start it again"
            )

    def _check_memory(self, resharding: Resharding | Restoring) -> None:
        """Fail before allocating, with the numbers and on all ranks, rather than in the middle on one."""
        generation = self._runtime.generation
        device = generation.device
        if device.type != "cuda":
            return  # the host's memory is shared and its free part says little
        missing = torch.zeros(len(generation.topology.slots), dtype=torch.int64, device=device)
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        missing[generation.rank] = max(0, resharding.extra_bytes(generation.slot) - free)
        dist.all_reduce(missing, group=generation.world)
        for slot, lacking in zip(generation.topology.slots, missing.tolist(), strict=True):
            if lacking:
                raise JobLost(
                    f"slot {slot} lacks {lacking / 2**20:.0f} MiB of device memory for its larger shard; restart from"
                    " the newest checkpoint with a smaller batch or more devices"
                )
