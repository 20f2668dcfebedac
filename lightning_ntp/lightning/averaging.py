"""Callbacks that keep a second model, made before the first one is cut."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.callbacks.weight_averaging import WeightAveraging


def refuse_averaging_callbacks(trainer: Trainer) -> None:
    """Refuse weight averaging where the model is cut.

    Lightning 2.6.6: these callbacks copy the module in their ``setup``, unsharded, then average shards into the copy,
    and write that into checkpoints.

    Raises:
        NotImplementedError: If there is such a callback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise NotImplementedError(
                f"{type(callback).__name__} averages a copy of the whole module, but tensor parallelism cuts the"
                " module: remove the callback, or train with tensor_parallel_size=1"
            )
