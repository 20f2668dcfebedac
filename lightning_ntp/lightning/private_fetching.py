"""Where the training loop of Lightning gets its batches, and how a fit is left early.

Private parts of Lightning used here were read in 2.6.6; ``tests/lightning/test_private.py`` fails when one changes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_ntp.lightning.private import worker_init_function

Fetch = Callable[[_DataFetcher], Any]


class _Watched(_DataFetcher):
    """Stands before the fetcher of an epoch: attributes are its own, batches come through ``fetch``."""

    def __init__(self, inner: _DataFetcher, fetch: Fetch) -> None:
        self.__dict__.update(_inner=inner, _fetch=fetch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_inner"], name, value)

    @override
    def __iter__(self) -> _DataFetcher:
        iter(self.__dict__["_inner"])
        return self

    @override
    def __next__(self) -> Any:
        return self.__dict__["_fetch"](self.__dict__["_inner"])


def patch_fetching(trainer: Trainer, epoch_begins: Callable[[], None], fetch: Fetch) -> None:
    """Let every training batch pass through us.

    2.6.6: ``_FitLoop.advance`` calls ``epoch_loop.run(data_fetcher)`` once per epoch, which calls ``next`` on it for
    every batch, then reads its ``done``.

    Args:
        trainer: The trainer of a fit.
        epoch_begins: Called before the first batch of every epoch.
        fetch: Gives the next batch, as the fetcher that it is given would, and sets its ``done``.
    """
    loop = trainer.fit_loop.epoch_loop
    run = partial(type(loop).run, loop)

    def run_epoch(data_fetcher: _DataFetcher) -> None:
        epoch_begins()
        run(_Watched(data_fetcher, fetch))

    loop.run = run_epoch  # type: ignore[method-assign]


def batches_seen(trainer: Trainer) -> int:
    """The training batches so far, through all epochs: the number of the next one. 2.6.6."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def last_batch_of_step(trainer: Trainer) -> bool:
    """2.6.6: whether the newest batch is the last micro-batch of its step."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def set_up_validation(trainer: Trainer, wanted: bool) -> None:
    """Have validation data or not, as the others do: who makes them meets the others in that.

    2.6.6: ``_FitLoop.on_run_start`` does it so, unless the sanity check has; else ``_EvaluationLoop.run``.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    there = trainer.val_dataloaders is not None
    if wanted and not there:
        trainer.validating = True
        loop.setup_data()
        trainer.training = True
    elif there and not wanted:
        loop._combined_loader = None


def training_loaders(trainer: Trainer) -> list[Any]:
    """2.6.6: all of them, however they are combined."""
    loaders = trainer.fit_loop._combined_loader
    return list(loaders.flattened) if loaders is not None else []


def drawing(trainer: Trainer) -> object | None:
    """What draws the indices of this epoch's training batches, of a single loader.

    2.6.6: the iterator of the combined loader has those of its loaders. torch 2.13: that of a loader asks its
    ``_sampler_iter`` for indices, in the main process, and makes another one for each pass.
    """
    combined = trainer.fit_loop._combined_loader
    iterator: Any = combined._iterator if combined is not None else None
    iterators = getattr(iterator, "iterators", [])
    return getattr(iterators[0], "_sampler_iter", None) if len(iterators) == 1 else None


def set_sampler_epoch(trainer: Trainer) -> None:
    """2.6.6: ``_FitLoop.on_advance_start`` does so at the beginning of an epoch."""
    for loader in training_loaders(trainer):
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(trainer.fit_loop.epoch_progress.current.processed)  # type: ignore[attr-defined]


def set_replica(trainer: Trainer, replica: int) -> None:
    """Let this rank's dataloaders give the batches of another replica than the one they were made for.

    2.6.6: loaders are made once in a fit; those of validation too. From their next iteration on.
    """
    fit = trainer.fit_loop
    for combined in (fit._combined_loader, fit.epoch_loop.val_loop._combined_loader):
        for loader in combined.flattened if combined is not None else ():
            sampler = getattr(loader, "sampler", None)
            if isinstance(sampler, DistributedSampler):
                sampler.rank = replica
            init = getattr(loader, "worker_init_fn", None)
            if isinstance(init, partial) and init.func is pl_worker_init_function:
                loader.worker_init_fn = worker_init_function(replica)


def leave_fit() -> Exception:
    """What to raise in a fit so that it ends early, in good order. 2.6.6: the tuner's way."""
    return _TunerExitException()
