"""What a person wants to know after a run, printed by rank zero."""

import time
from collections.abc import Iterator, Mapping, Sequence
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
AROUND = 10
"""So many steps before a change, and after it, are averaged: the loss of one step depends on its batch."""
BESIDE = ("prepare", "travel")
"""What is done beside a step, and holds nobody up."""


class Report(pl.Callback):
    """Watches a run and prints a summary of it."""

    def __init__(self, data: PythonDocs) -> None:
        self.data = data
        self.losses: list[float] = []
        self.last_loss = float("nan")
        self.tokens = 0
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
        self.losses.append(float(outputs["loss"]))
        self.tokens += batch[0].numel() * len(self.degrees)
        self.seconds = time.perf_counter() - self.started - self.val_seconds

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.val_started = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.val_seconds += time.perf_counter() - self.val_started
        self.last_loss = float(trainer.callback_metrics.get("val_loss", self.last_loss))

    def _changes(self) -> list[dict[str, Any]]:
        """Who was lost and who came back, as events.jsonl tells it."""
        changes: list[dict[str, Any]] = []
        died = 0.0
        for event in read_events(self.events) if self.events.exists() else ():
            if event["event"] == "death":
                died = event["monotonic"]
            elif event["event"] == "change":
                changes.append({**event, "redone": ""})
            elif event["event"] == "replay":
                passed = f"{(event['monotonic'] - died) * 1e3:.0f} ms after the death"
                changes[-1]["redone"] = f"step {event['step']} was begun again and done {passed}"
        return changes

    def _rows(self, change: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """A change, for people."""
        step, seconds = change["step"], change["seconds"]
        who = f"{_slots(change['lost'])} lost" if change["lost"] else f"{_slots(change['joined'])} back"
        degrees = " -> ".join(str(tuple(change[f"degrees_{when}"])) for when in ("before", "after"))
        yield who, f"in step {step}: degrees {degrees}"
        if change["bytes"]:
            size = f"{change['bytes'] / 2**10:,.0f} KiB of weights and moments"
            yield "  moved", f"{size}, from {_slots(change['sources'])}"
        beside = _times({name: each for name, each in seconds.items() if name in BESIDE})
        held_up = _times({name: each for name, each in seconds.items() if name not in BESIDE})
        yield "  took", f"{held_up}; beside the training {beside}" if beside else held_up
        if change["redone"] or change["joined"]:
            yield "  went on", change["redone"] or f"step {step} was finished by all together, none was done again"
        if step < len(self.losses):  # not in the last validation
            before, after = self.losses[:step][-AROUND:], self.losses[step + 1 :][:AROUND]
            yield "  loss", f"{_mean(before)} before, {self.losses[step]:.2f} in step {step}, {_mean(after)} after"

    def print(self, checkpoint: Path, model: LanguageModel) -> None:
        """Print the summary and a sample of ``model``, the whole model on one device."""
        torch.manual_seed(0)
        text = decode(model.model.eval().generate(encode(PROMPT)[None], count=400)[0])
        changes, entropy = self._changes(), unigram_entropy(self.data.val_tokens)
        degrees = [self.degrees, *(tuple(change["degrees_after"]) for change in changes)]
        rows = [
            ("degrees", f"{' -> '.join(map(str, degrees))}: the TP degree of each replica"),
            *(row for change in changes for row in self._rows(change)),
            ("steps", f"{len(self.losses)} in {self.seconds:.0f} s, {self.tokens / self.seconds:,.0f} tokens/s"),
            ("loss at start", f"{self.losses[0]:.2f} nats per character"),
            ("loss at end", f"{self.last_loss:.2f} (on text it has not seen)"),
            ("unigram entropy", f"{entropy:.2f} (what letter frequencies alone give)"),
            ("checkpoint", f"{checkpoint} (one file, {checkpoint.stat().st_size / 1e6:.1f} MB, the unsharded model)"),
        ]
        print(f"\n{' summary ':=^{WIDTH}}")
        for name, value in rows:
            print(f"{name:<16} {value}")
        print(f"{' a sample ':-^{WIDTH}}\n{text}\n{'=' * WIDTH}", flush=True)


def _slots(slots: Sequence[int]) -> str:
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


def _times(seconds: Mapping[str, float]) -> str:
    phases = ", ".join(f"{name} {each * 1e3:.0f} ms" for name, each in seconds.items())
    return f"{sum(seconds.values()) * 1e3:.0f} ms ({phases})" if seconds else ""


def _mean(losses: Sequence[float]) -> str:
    if not losses:
        return "nothing"
    return f"{sum(losses) / len(losses):.2f} in the {len(losses)} step{'s' if len(losses) > 1 else ''}"
