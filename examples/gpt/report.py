"""What a person wants to know after a run, printed by rank zero."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from data import PythonDocs, decode, encode, unigram_entropy
from model import LanguageModel
from torch import Tensor

from lightning_ntp.engine.events import read_events

WIDTH = 78
PROMPT = "The "


class Report(pl.Callback):
    """Watches a run and prints a summary of it."""

    def __init__(self, data: PythonDocs) -> None:
        self.data = data
        self.first_loss = self.last_loss = float("nan")
        self.steps = self.tokens = 0
        self.degrees: tuple[int, ...] = ()
        self.events = Path()
        self.started = self.seconds = self.val_seconds = self.val_started = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.degrees = tuple(getattr(trainer.strategy, "degrees", None) or (1,) * trainer.world_size)
        self.events = Path(trainer.log_dir or trainer.default_root_dir) / "events.jsonl"
        self.started, self.val_seconds = time.perf_counter(), 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: tuple[Tensor, Tensor], idx: int
    ) -> None:
        if self.steps == 0:
            self.first_loss = float(outputs["loss"])
        self.steps += 1
        self.tokens += batch[0].numel() * len(self.degrees)
        self.seconds = time.perf_counter() - self.started - self.val_seconds

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.val_started = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.val_seconds += time.perf_counter() - self.val_started
        self.last_loss = float(trainer.callback_metrics.get("val_loss", self.last_loss))

    def _losses(self) -> Iterator[tuple[str, str]]:
        """What became of devices that were lost: one change at a time, as events.jsonl tells it."""
        change: dict[str, Any] = {}
        died = 0.0
        for event in read_events(self.events) if self.events.exists() else ():
            if event["event"] == "death":
                died = event["monotonic"]
            elif event["event"] == "change":
                change = event
                before, after = (tuple(change[f"degrees_{when}"]) for when in ("before", "after"))
                slots = ", ".join(map(str, change["lost"]))
                yield f"lost slot {slots}", f"in step {change['step']}: degrees {before} -> {after}"
                sources = ", ".join(map(str, change["sources"]))
                yield "  moved", f"{change['bytes'] / 2**10:,.0f} KiB of weights and moments, from slots {sources}"
                phases = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in change["seconds"].items())
                yield "  recovery", f"{sum(change['seconds'].values()) * 1e3:.0f} ms: {phases}"
            elif event["event"] == "replay":
                seconds = event["monotonic"] - died
                yield (
                    "  went on",
                    f"step {event['step']} was begun again and done {seconds * 1e3:.0f} ms after the death",
                )

    def print(self, checkpoint: Path, model: LanguageModel) -> None:
        """Print the summary and a sample of ``model``, the whole model on one device."""
        torch.manual_seed(0)
        text = decode(model.model.eval().generate(encode(PROMPT)[None], count=400)[0])
        replicas = " and ".join(f"a replica of TP degree {degree}" for degree in self.degrees)
        rows = {
            "degrees": f"{self.degrees}: {replicas}",
            **dict(self._losses()),
            "steps": f"{self.steps} in {self.seconds:.0f} s, {self.tokens / self.seconds:,.0f} tokens/s",
            "loss at start": f"{self.first_loss:.2f} nats per character",
            "loss at end": f"{self.last_loss:.2f} (on text it has not seen)",
            "unigram entropy": f"{unigram_entropy(self.data.val_tokens):.2f} (what letter frequencies alone give)",
            "checkpoint": f"{checkpoint} (one file, {checkpoint.stat().st_size / 1e6:.1f} MB, the unsharded model)",
        }
        print(f"\n{' summary ':=^{WIDTH}}")
        for name, value in rows.items():
            print(f"{name:<16} {value}")
        print(f"{' a sample ':-^{WIDTH}}\n{text}\n{'=' * WIDTH}", flush=True)
