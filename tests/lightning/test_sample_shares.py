"""What can be asked for, and of which loaders; a second fit, and one that is resumed within an epoch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from tests.lightning.rigs import EXACT, EndState, Regression, Worlds, assert_same, make_trainer, rows, slot

REFUSED: list[tuple[Any, str]] = [
    ({0: 3, 5: 1}, "5 is no live replica; live replicas are [0, 1]"),
    ({0: 3, "1": 1}, "'1' is no live replica"),
    ({0: 4, 1: 0}, "replica 1 cannot take 0 samples"),
    ({0: 2.5, 1: 1.5}, "replica 0 cannot take 2.5 samples"),
    ({0: True, 1: 3}, "replica 0 cannot take True samples"),
    ({0: 4}, "replica 1 has no count"),
    (
        {0: 3, 1: 2},
        "the counts {0: 3, 1: 2} sum to 5, but a global batch has 4 samples (batch_size=2 for each of the 2",
    ),
    ([3, 1], "counts=[3, 1] must be a mapping"),
]


class Asks(Callback):
    """Asks in the second step, and notes what it is told and what each rank trains on."""

    def __init__(self, *asked: Any) -> None:
        self.asked = asked
        self.told: list[str] = []
        self.shares: list[dict[int, int]] = []
        self.sizes: list[int] = []
        self.why: set[str] = set()

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        self.why.add(strategy.sharing_problem)
        if trainer.global_step == 1:
            strategy._changes.shares.may_move()
            for counts in self.asked:
                try:
                    strategy.share_samples(counts)
                except ValueError as error:
                    self.told.append(str(error))
        self.shares.append(strategy.sample_shares)


class Sized(Regression):
    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self.asks = asks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.asks.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


def _bad_input() -> Any:
    asks = Asks(*(counts for counts, _ in REFUSED), {0: 3, 1: 1})
    trainer = make_trainer((1, 1), callbacks=[asks])
    strategy: Any = trainer.strategy
    outside = []
    for fit in (lambda: None, lambda: trainer.fit(Sized(asks), DataLoader(rows(16), batch_size=2))):
        fit()
        try:
            strategy.share_samples({0: 3, 1: 1})
        except RuntimeError as error:
            outside.append(str(error))
        assert strategy.sample_shares == {} and "only while a fit is running" in strategy.sharing_problem
    loader = trainer.train_dataloader
    assert type(loader.batch_sampler) is BatchSampler, "the loader is as it was"
    return outside, asks.told, asks.why, asks.shares, asks.sizes


def test_what_is_wrong_with_a_request_is_said(world: Worlds) -> None:
    for rank, (outside, told, why, shares, sizes) in enumerate(world(2).run(_bad_input)):
        assert len(outside) == 2 and all("only while a fit is running" in each for each in outside)
        assert len(told) == len(REFUSED)
        for found, (_, expected) in zip(told, REFUSED, strict=True):
            assert found.startswith("share_samples: ") and expected in found
        assert why == {""}
        # asked for before the second step, from the third on
        assert shares == [{0: 2, 1: 2}] * 2 + [{0: 3, 1: 1}] * 2
        assert sizes == [2, 2, *[(3, 1)[rank]] * 2]


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(rows(8))


def _own_order(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_sampler=BatchSampler(range(8), 2, False))


def _other_loader(kind: str) -> Any:
    asks = Asks({0: 3, 1: 1})
    loaders: dict[str, Any] = {
        "stream": lambda: DataLoader(_Stream(), batch_size=2),
        "several": lambda: [DataLoader(rows(8), batch_size=2), DataLoader(rows(8), batch_size=2)],
        "own order": lambda: _own_order(rows(8)),
    }

    class First(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0] if kind == "several" else batch, batch_idx)

    trainer = make_trainer((1, 1), callbacks=[asks], use_distributed_sampler=kind != "own order", max_steps=2)
    trainer.fit(First(asks), loaders[kind]())
    return asks.told, asks.why, asks.shares, asks.sizes


@pytest.mark.parametrize("kind", ["stream", "several", "own order"])
def test_other_loaders_keep_equal_shares_and_say_so_once(world: Worlds, kind: str) -> None:
    outcomes = world(2).start(_other_loader, kind).wait()
    for outcome in outcomes:
        told, why, shares, sizes = outcome.value
        reason = "only a single DataLoader over a map-style dataset, with the sampler that the Trainer has put in"
        assert len(why) == 1 and reason in why.pop() and len(told) == 1 and reason in told[0]
        assert shares == [{}, {}] and sizes == [2, 2]
        assert outcome.output.count("all replicas take equally many samples: only a single") == 1


def _resumed(directory: str, asked: dict[int, dict[int, int]], workers: int, lost: int | None) -> Any:
    """Two fits, the second one from the middle of the first one's second epoch."""
    from lightning_ntp.callbacks import FaultInjector

    class Whole(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            losses.append(float(self.trainer.strategy.whole_loss(loss)))
            sizes.append(len(batch[0]))
            return loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step in asked and slot() == 1:
                self.trainer.strategy.share_samples(asked[self.trainer.global_step])

    def data() -> DataLoader[Any]:
        return DataLoader(rows(24), batch_size=2, shuffle=True, num_workers=workers)

    losses: list[float] = []
    sizes: list[int] = []
    first = make_trainer((1, 1), max_steps=8, max_epochs=None, default_root_dir=directory)
    first.fit(Whole(), data())
    path = Path(directory) / "half.ckpt"
    first.save_checkpoint(path)
    end, half = EndState(), len(losses)
    faults = [] if lost is None else [{"kind": "kill", "slot": 1, "step": lost, "phase": "backward"}]
    second = make_trainer((1, 1), max_steps=16, max_epochs=None, callbacks=[end, FaultInjector(faults)])
    second.fit(Whole(seed=1), data(), ckpt_path=str(path), weights_only=False)
    return losses, sizes, half, end.parameters


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("lost", [10, pytest.param(None, marks=pytest.mark.chaos)])
def test_a_fit_that_is_resumed_within_an_epoch(world: Worlds, workers: int, lost: int | None, tmp_path: Path) -> None:
    """There the loader begins its epoch anew, and the trainer counts on. Shares are equal at the beginning."""
    want = world(2).run(_resumed, str(tmp_path), {}, workers, None)[0]
    run = world(2, fresh=True).start(_resumed, str(tmp_path), {2: {0: 3, 1: 1}, 8: {0: 1, 1: 3}}, workers, lost)
    got = run.survive()[0].value
    losses, sizes, half, parameters = got
    again = 0 if lost is None else 1
    if again:  # the step that was interrupted
        del losses[lost], sizes[lost]
    assert_same(losses, want[0], EXACT, "losses")
    assert_same(parameters, want[3], EXACT, "parameters")
    ahead = 2 * workers
    assert (half, len(losses)) == (8, 16)
    assert sizes[:8] == [2] * (3 + ahead) + [3] * (5 - ahead)
    alone = 16 if lost is None else lost
    assert sizes[8:alone] == ([2] * (1 + ahead) + [1] * 8)[: alone - 8] and sizes[alone:] == [4] * (16 - alone)


_EXAMPLE = re.search(
    r"^```python\n(.*?)^```$", (Path(__file__).parents[2] / "docs/samples.md").read_text(), re.M | re.S
)


def _example(code: str) -> Any:
    found: dict[str, Any] = {}
    exec(code, found)
    asks = Asks()
    trainer = make_trainer((1, 1), callbacks=[found["Balance"](), asks], max_epochs=3)
    trainer.fit(Sized(asks), DataLoader(rows(28), batch_size=7))
    return asks.shares, asks.sizes


def test_the_example_of_the_page(world: Worlds) -> None:
    assert _EXAMPLE is not None
    for rank, (shares, sizes) in enumerate(world(2).run(_example, _EXAMPLE.group(1))):
        assert shares == [{0: 7, 1: 7}] * 3 + [{0: 9, 1: 5}] * 3
        assert sizes == [7] * 3 + [(9, 5)[rank]] * 3


def _validates() -> Any:
    """The loader of training is that of validation, before every second step."""
    seen: list[list[float]] = []

    class Both(Sized):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(batch[0][:, 0].tolist())

    asks = Asks({0: 3, 1: 1})
    data = rows(16)
    sampler = DistributedSampler(data, 2, slot(), shuffle=False)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    make_trainer((1, 1), callbacks=[asks], val_check_interval=2, num_sanity_val_steps=0).fit(Both(asks), loader, loader)
    return asks.sizes, seen, data.tensors[0][slot() :: 2, 0].tolist()


def test_a_loader_that_is_validated_on_too_gives_its_own_samples_there(world: Worlds) -> None:
    for rank, (sizes, seen, own) in enumerate(world(2).run(_validates)):
        assert sizes == [2, 2, *[(3, 1)[rank]] * 2]
        assert [value for batch in seen for value in batch] == own * 2


def _limited(room: dict[int, int]) -> Any:
    """Ranks whose devices have room for few samples only: here no device says so."""
    from lightning_ntp.lightning.sample_shares import SampleShares

    most, SampleShares._most = SampleShares._most, lambda self: room.get(slot(), most(self))  # type: ignore[method-assign]
    asks = Asks({0: 5, 1: 1})
    try:
        make_trainer((2, 1), callbacks=[asks]).fit(Sized(asks), DataLoader(rows(24), batch_size=3))
    finally:
        SampleShares._most = most  # type: ignore[method-assign]
    return asks.shares, asks.sizes


@pytest.mark.parametrize(
    ("room", "counts", "said"),
    [
        ({1: 4}, (4, 2), "of the counts {0: 5, 1: 1} the memory of the devices allows {0: 4, 1: 2}"),
        (
            {1: 4, 2: 1},
            (3, 3),
            "samples do not move to {0: 5, 1: 1}: the memory of the devices has room for [4, 1] samples",
        ),
        ({1: 5, 2: 1}, (5, 1), ""),
    ],
)
def test_a_request_is_cut_to_what_the_fullest_device_of_a_replica_has_room_for(
    world: Worlds, room: dict[int, int], counts: tuple[int, int], said: str
) -> None:
    outcomes = world(3).start(_limited, room).wait()
    for outcome in outcomes:
        shares, sizes = outcome.value
        assert shares[2:] == [dict(enumerate(counts))] * 2
        assert sizes[-2:] == [counts[outcome.slot // 2]] * 2  # the first step is tried out
    assert outcomes[0].output.count(said or "the memory of the devices") == (1 if said else 0)
