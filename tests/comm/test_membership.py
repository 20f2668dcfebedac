"""Ranks die, the others go on in rebuilt groups: real processes, real SIGKILL."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_ntp.comm import Interrupted, StaleGroupError, generation, membership, runtime
from lightning_ntp.plan import Topology
from tests.comm.members import GROUPS, describe, die, start, use_every_group, wait_for_interruption
from tests.harness import World

DEGREES = (3, 2)


def survivors(world: Callable[..., World], n: int, fn: Callable[..., Any], *args: Any, lost: set[int]) -> list[Any]:
    """Run ``fn`` in ``n`` ranks, of which exactly ``lost`` die; the results of the others."""
    run = world(n).start(fn, *args)
    outcomes = run.survive()
    left = [o for o in outcomes if o.slot not in lost]
    story = "\n".join(f"slot {o.slot} {o.state}\n{o.error}{o.stacks}{o.output}" for o in left)
    assert {o.slot for o in outcomes if o.state == "died"} == lost, story
    assert all(o.state == "returned" for o in left), story
    return [o.value for o in left]


def die_while_others_wait(group: str, victim: int) -> Any:
    current = start(DEGREES)
    if current.slot == victim:
        time.sleep(0.15)
        die()
    error = wait_for_interruption(current, getattr(current.generation, group))
    assert f"slot {victim} died (SIGKILL)" in str(error) or str(error) == "seen"
    recovery = current.recover({"slot": current.slot})
    assert set(recovery.seconds) == {"detect", "agree", "rebuild"}
    return describe(recovery), use_every_group(current), current.generation.rank


@pytest.mark.parametrize(("group", "victim"), [(g, v) for g, v in zip(GROUPS, (0, 1, 3, 4), strict=True)])
def test_survivors_wake_in_every_group_and_agree(world: Callable[..., World], group: str, victim: int) -> None:
    results = survivors(world, 5, die_while_others_wait, group, victim, lost={victim})
    agreed = results[0][0]
    start_, left = Topology.start(DEGREES), [slot for slot in range(5) if slot != victim]
    assert agreed == (start_, start_.lose([victim])[0], (victim,), {slot: {"slot": slot} for slot in left})
    assert [r[0] for r in results] == [agreed] * 4
    assert [r[2] for r in results] == [0, 1, 2, 3]


def die_together(victims: tuple[int, ...]) -> Any:
    current = start((2, 2, 2))
    if current.slot in victims:
        time.sleep(0.1)
        die()
    lost: list[int] = []
    while len(lost) < len(victims):  # they may be announced one after the other
        wait_for_interruption(current, current.generation.world)
        lost += current.recover({}).lost
    use_every_group(current)
    return sorted(lost), current.generation.topology.degrees


@pytest.mark.parametrize(
    ("victims", "degrees"), [((1, 4), (1, 2, 1)), ((2, 3), (2, 0, 2)), ((0, 1, 2, 4, 5), (0, 1, 0))]
)
def test_several_die_at_once(world: Callable[..., World], victims: tuple[int, ...], degrees: tuple[int, ...]) -> None:
    results = survivors(world, 6, die_together, victims, lost=set(victims))
    assert results == [(list(victims), degrees)] * (6 - len(victims))


def die_in_recovery(point: str) -> Any:
    current = start(DEGREES)
    if current.slot == 4:
        die()
    second = current.slot == 1
    wait_for_interruption(current, current.generation.world)
    if second and point == "before joining":
        die()
    if second and point == "after joining":
        join = membership.Membership._join
        membership.Membership._join = lambda *a: (join(*a), die())  # type: ignore[assignment,method-assign,misc,return-value]
    if point == "before the commit":  # whoever joins last
        time.sleep(0.2 * second)
        if second:
            membership.Membership.append = lambda *_: die()  # type: ignore[method-assign,assignment,misc]
    if second and point == "in the rebuild":
        generation.Generation.connect = lambda _: die()  # type: ignore[method-assign,assignment,misc]
    if second and point == "after the rebuild":
        generation.Generation.install = lambda _: die()  # type: ignore[method-assign,assignment,misc]
    recovery = current.recover({})
    lost = list(recovery.lost)
    while len(lost) < 2:
        wait_for_interruption(current, current.generation.world)
        lost += current.recover({}).lost
    use_every_group(current)
    return sorted(lost), current.generation.topology


POINTS = ["before joining", "after joining", "before the commit", "in the rebuild", "after the rebuild"]


@pytest.mark.parametrize("point", POINTS)
def test_a_second_death_during_recovery(world: Callable[..., World], point: str) -> None:
    results = survivors(world, 5, die_in_recovery, point, lost={1, 4})
    assert [r[0] for r in results] == [[1, 4]] * 3
    assert len({r[1].degrees for r in results}) == 1 and results[0][1].degrees == (2, 1)


def ask_for_a_new_generation() -> Any:
    current = start((2, 1))
    before = current.generation.number
    if current.slot == 1:
        time.sleep(0.1)
        recovery = current.recover({"why": "a test"})
    else:
        error = wait_for_interruption(current, current.generation.world)
        assert "slot 1 reported: a test" in str(error)
        recovery = current.recover({})
    assert recovery.before == recovery.after and recovery.lost == ()
    return use_every_group(current), current.generation.number > before


def test_a_retry_without_a_death_keeps_everybody(world: Callable[..., World]) -> None:
    assert world(3).run(ask_for_a_new_generation) == [([3, 2, 2, 2], True), ([3, 2, 2], True), ([3, 2], True)]


def break_a_connection() -> Any:
    """A collective fails although everybody lives: its group is closed below the runtime's feet."""
    current = start((2, 1))
    if current.slot == 2:
        from lightning_ntp.comm.backends import abort

        abort("gloo", current.generation.plain_groups())
    began = time.monotonic()
    error = wait_for_interruption(current, current.generation.world)
    waited = time.monotonic() - began
    current.recover({})
    return str(error), waited, use_every_group(current)


def test_a_broken_connection_without_a_death_is_repaired(world: Callable[..., World]) -> None:
    for message, waited, sizes in world(3).run(break_a_connection):
        assert message.startswith("a collective was interrupted") and waited < 10 and sizes[0] == 3


def third_party_calls() -> list[tuple[str, Callable[[int], Any]]]:
    """Everything that libraries call on the default group; takes the rank."""
    import torch.distributed._functional_collectives as functional

    def receive_from_zero(rank: int) -> Any:
        if rank == 0:
            for other in (1, 2):
                dist.send(torch.ones(3), other)
            return None
        return dist.recv(torch.zeros(3), 0)

    def send_objects(rank: int) -> Any:
        box = [{"a": rank}]
        dist.broadcast_object_list(box, 0)
        assert box == [{"a": 0}]

    def all_to_all(rank: int) -> Any:
        sizes = [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
        out = torch.empty(sum(sizes[r][rank] for r in range(3)))
        dist.all_to_all_single(out, torch.full((3,), float(rank)), [sizes[r][rank] for r in range(3)], sizes[rank])
        assert out.tolist() == [float(r) for r in range(3) for _ in range(sizes[r][rank])]

    def functional_all_reduce(rank: int) -> Any:
        assert dist.group.WORLD is not None
        total = functional.all_reduce(torch.ones(3) * rank, "sum", dist.group.WORLD) + 0
        assert total.tolist() == [3.0] * 3

    def metrics(rank: int) -> Any:
        assert [len(t) for t in gather_all_tensors(torch.ones(rank + 1))] == [1, 2, 3]

    def asynchronous(rank: int) -> Any:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        work.wait()

    return [
        ("barrier", lambda rank: dist.barrier()),
        ("broadcast", lambda rank: dist.broadcast(torch.ones(2), 0)),
        ("reduce", lambda rank: dist.reduce(torch.ones(2), 0)),
        ("gather", lambda rank: dist.gather(torch.ones(2), [torch.ones(2)] * 3 if rank == 0 else None)),
        ("scatter", lambda rank: dist.scatter(torch.ones(2), [torch.ones(2)] * 3 if rank == 0 else None)),
        ("all_gather", lambda rank: dist.all_gather([torch.ones(2) for _ in range(3)], torch.ones(2))),
        ("all_gather_into_tensor", lambda rank: dist.all_gather_into_tensor(torch.ones(6), torch.ones(2))),
        ("all_gather_object", lambda rank: dist.all_gather_object([None] * 3, rank)),
        ("reduce_scatter_tensor", lambda rank: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(6))),
        ("broadcast_object_list", send_objects),
        ("all_to_all_single", all_to_all),
        ("functional", functional_all_reduce),
        ("torchmetrics", metrics),
        ("async", asynchronous),
        ("send and recv", receive_from_zero),
        ("monitored_barrier", lambda rank: dist.monitored_barrier()),
    ]


def interrupt_third_party_calls() -> list[str]:
    current = start((2, 1))
    done = []
    for name, call in third_party_calls():
        call(current.generation.rank)
        if current.slot == 0:
            time.sleep(0.03)
            current.membership.retry(current.generation.number, name)
            wait_for_interruption(current)
        else:
            try:
                call(current.generation.rank)
                dist.barrier()  # what needs no other rank has returned at once
            except Interrupted as error:
                assert name in str(error), error
            else:
                raise AssertionError(f"{name} was not interrupted")
        current.membership._check = lambda _: None  # type: ignore[method-assign]  # more retries than a job may need
        current.recover({})
        done.append(name)
    return done


def test_calls_by_third_parties_on_the_default_group_are_interrupted(world: Callable[..., World]) -> None:
    names = [name for name, _ in third_party_calls()]
    assert world(3).run(interrupt_third_party_calls) == [names] * 3


class SumInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


def die_in_backward() -> Any:
    current = start((2, 1))
    x = torch.ones(4, requires_grad=True)
    error = None
    for step in range(1000):
        loss = SumInBackward.apply(x * 2).sum()
        if current.slot == 1 and step == 3:
            die()
        try:
            loss.backward()
        except Interrupted as caught:
            error = str(caught)
            current.recover({})
            x.grad = None
            SumInBackward.apply(x * 2).sum().backward()
            break
        x.grad = None
    assert x.grad is not None
    return error, x.grad.tolist()


def test_a_backward_pass_is_interrupted_and_runs_again(world: Callable[..., World]) -> None:
    results = survivors(world, 3, die_in_backward, lost={1})
    assert results == [("a collective was interrupted: slot 1 died (SIGKILL)", [4.0] * 4)] * 2


def hold_a_group() -> Any:
    current = start((2, 1))
    mine = dist.new_group([0, 1, 2], group_desc="my metrics")
    ones = torch.ones(1)
    dist.all_reduce(ones, group=mine)
    assert ones.item() == 3
    if current.slot == 1:
        die()
    wait_for_interruption(current, mine)
    current.recover({})
    with pytest.raises(StaleGroupError) as caught:
        dist.all_reduce(torch.ones(1), group=mine)
    assert dist.get_backend() == "gloo" and dist.get_world_size() == 2
    again = dist.new_group([0, 1])
    ones = torch.ones(1)
    dist.all_reduce(ones, group=again)
    return str(caught.value), ones.item(), again.group_name != mine.group_name


def test_a_group_of_the_users_held_across_a_death_is_a_clear_error(world: Callable[..., World]) -> None:
    for message, total, renamed in survivors(world, 3, hold_a_group, lost={1}):
        assert "process group 'my metrics' belongs to generation 1" in message and "new_group" in message
        assert total == 2 and renamed


def work_on_the_lane() -> Any:
    current = start((2, 1))
    ran: list[float] = []

    def job() -> None:
        ones = torch.ones(3)
        dist.all_reduce(ones, group=current.generation.sync_tensor_parallel or current.generation.world)
        ran.append(ones[0].item())

    if current.slot == 1:
        time.sleep(0.1)
        die()
    for _ in range(3):
        if current.slot == 0:
            current.lane.submit(job)  # waits for slot 1
    try:
        if current.slot == 0:
            current.lane.drain()
        else:
            wait_for_interruption(current, current.generation.world)
    except Interrupted:
        pass
    lane = current.lane
    current.recover({})
    assert current.lane is lane
    current.lane.submit(job)
    current.lane.drain()
    return ran


def test_the_lane_ends_up_idle_and_works_again(world: Callable[..., World]) -> None:
    assert survivors(world, 3, work_on_the_lane, lost={1}) == [[2.0], [2.0]]


def get_stuck_on_the_lane() -> Any:
    from lightning_ntp.comm import lane as lanes

    lanes._PATIENCE_SECONDS = 0.2
    current = start((1, 1))
    begun, block, lane = threading.Event(), threading.Event(), current.lane
    lane.submit(lambda: begun.set() or block.wait(30) and None)
    begun.wait(30)
    current.recover({})
    replaced = current.lane is not lane
    done = threading.Event()
    current.lane.submit(done.set)
    current.lane.drain()
    block.set()
    return replaced and done.is_set()


def test_a_stuck_lane_is_replaced(world: Callable[..., World]) -> None:
    assert world(2).run(get_stuck_on_the_lane) == [True, True]


def exit_with_a_word(how: str) -> Any:
    """A rank that leaves, or raises, is not dead; its peers get the transport's own error, as without recovery."""
    from lightning_ntp.comm import runtime

    current = start((2, 1))
    dist.barrier()
    if current.slot == 1:
        runtime.shutdown("done")
        return "left"
    try:
        for _ in range(100):
            dist.all_reduce(torch.ones(1))
    except Interrupted:
        return "interrupted"
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


def test_who_leaves_in_good_order_interrupts_nobody(world: Callable[..., World]) -> None:
    assert world(3).run(exit_with_a_word, "left") == ["RuntimeError", "left", "RuntimeError"]


def count_what_stays(rounds: int) -> Any:
    current = start((2, 1))

    def count() -> tuple[int, int, int]:
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return threading.active_count(), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")

    counts = []
    for _ in range(rounds):
        current.membership._check = lambda _: None  # type: ignore[method-assign]
        if current.slot == 0:
            current.recover({})
        else:
            wait_for_interruption(current, current.generation.world)
            current.recover({})
        use_every_group(current)
        time.sleep(0.1)  # for the reaper
        counts.append(count())
    return counts


def test_twenty_generations_leave_no_thread_descriptor_or_memory_behind(world: Callable[..., World]) -> None:
    for counts in world(3).run(count_what_stays, 20):
        early, late = counts[4], counts[-1]
        assert late[0] <= early[0] and late[1] <= early[1] + 2, counts
        assert late[2] - early[2] < 8 << 20, "resident memory grew by more than 0.5 MB per generation"


def lose_a_peer_in_the_middle_of_a_message(elements: int) -> Any:
    """Slot 2 dies while slot 0 sends to it. Gloo forgets the rest of the message, and a thread waits for it."""
    current = start((2, 1))

    def tasks() -> int:
        time.sleep(0.5)  # for what ends in the background
        return len(os.listdir("/proc/self/task"))

    message, before = torch.ones(elements), tasks()
    use_every_group(current)
    if current.slot == 2:
        threading.Timer(0.02, die).start()
    began = time.monotonic()
    try:
        while True:
            dist.broadcast(message, 0)
    except Interrupted:
        current.recover({})
    seconds = [time.monotonic() - began]
    held = [tasks() - before]
    current.recover({})
    use_every_group(current)
    held.append(tasks() - before)
    began = time.monotonic()
    runtime.shutdown()
    return held, [*seconds, time.monotonic() - began]


def test_a_message_that_its_receiver_dies_of_holds_nobody_up(world: Callable[..., World]) -> None:
    for held, (recovery, end) in survivors(world, 3, lose_a_peer_in_the_middle_of_a_message, 50_000_000, lost={2}):
        assert recovery < 10 and end < 10, (recovery, end)
        assert held[1] <= held[0], f"threads of the next generation stay too: {held}"


def send_and_receive(elements: int) -> Any:
    """Slot 2 dies in the middle of a message to slot 0 and of one from slot 1. Then one comes late."""
    current, message = start((2, 1)), torch.ones(elements)
    use_every_group(current)
    began = time.monotonic()
    if current.slot == 2:
        threading.Timer(0.02, die).start()
        for work in (dist.isend(message, 0), dist.irecv(torch.empty(elements), 1)):
            assert work is not None
            work.wait()
        time.sleep(60)
    try:
        dist.recv(message, 2) if current.slot == 0 else dist.send(message, 2)
    except Interrupted:
        current.recover({})
    seconds = time.monotonic() - began
    if current.slot == 1:
        time.sleep(3.0)  # longer than connecting may take
    late = torch.full((3,), float(current.slot))
    dist.recv(late, 1) if current.slot == 0 else dist.send(late, 0)
    return seconds, late.tolist()


def test_messages_are_interrupted_in_the_middle_and_may_come_late(world: Callable[..., World]) -> None:
    for seconds, late in survivors(world, 3, send_and_receive, 50_000_000, lost={2}):
        assert seconds < 5 and late == [1.0] * 3, (seconds, late)
