"""Sick devices leave before they fail: the callback that has a job's devices watched."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_ntp.health import HealthSource, HealthWatch, Limits, SeverityTable
from lightning_ntp.launch import RankIdentity, is_rank, jobs
from lightning_ntp.launch.device_watch import DeviceWatch
from lightning_ntp.lightning.callbacks import carried_log
from lightning_ntp.lightning.callbacks.devices import note_device
from lightning_ntp.lightning.callbacks.logged_state import log_row, row_is_due
from lightning_ntp.lightning.settings import is_number

log = logging.getLogger("lightning_ntp")

_AGAIN_SECONDS = 30.0
"""Between two tries to leave, of a rank without which the job cannot go on."""
_TIMES_RENEW = 5.0
"""So many intervals lie between two tries to reach a lost device: it takes NVML to be started anew."""
_COUNTED = ("suspect", "drain", "dead")


class HealthMonitor(Callback):
    """Watches the job's devices through NVML and other sources: a sick one leaves before it fails.

    The watching is done beside the training: in the launching process, and for NVML in a process of its own, so that a
    driver call that hangs holds up nothing. What is found is judged by a severity table (``docs/health.md``): it is
    logged, or the device is suspected, or its rank leaves at the next step boundary (``drain``), or ends at once
    (``dead``). With ``NTPStrategy(max_restarts=...)`` a rank comes back once its device passes its check again.

    Args:
        rules: Overrides of the severity table: a YAML file, or a mapping with what would be in it.
        sources: More sources of findings, such as :class:`~lightning_ntp.health.FileSource`: callables that are given a
            :class:`~lightning_ntp.health.WatchedJob` and yield :class:`~lightning_ntp.health.Finding`.
        nvml: Whether NVIDIA's driver is asked.
        gpus: UUIDs of the devices by slot, as ``nvidia-smi -L`` prints them; None: ranks find out themselves.
        interval: Seconds between two looks.
        quiet: Seconds for which the device of a slot that was sent away must show nothing bad before it may come back;
            doubled each time.

    Raises:
        OverrideError: If a rule is wrong.
        ValueError: If another argument is.
    """

    ntp_own_attributes = ("sources", "_next_try", "_directory", "_note", "_answers")

    def __init__(
        self,
        rules: str | Path | Mapping[str, Any] | None = None,
        sources: Sequence[HealthSource] = (),
        nvml: bool = True,
        gpus: Sequence[str] | None = None,
        interval: float = 1.0,
        quiet: float = 60.0,
    ) -> None:
        super().__init__()
        for name, seconds in (("interval", interval), ("quiet", quiet)):
            if not (is_number(seconds) and 0 < seconds <= 3600):
                raise ValueError(f"{name}={seconds!r} must be a number of seconds above 0, up to 3600")
        for source in sources:
            if not callable(source):
                raise ValueError(f"sources: {source!r} is not callable: a source is a function that yields findings")
        if isinstance(gpus, str) or any(not isinstance(gpu, str) or not gpu for gpu in gpus or ()):
            raise ValueError(f"gpus={gpus!r} must be a list of UUIDs, one per slot, or None")
        if gpus is not None and len(set(gpus)) < len(gpus) and nvml and not is_rank():
            log.warning("gpus names a device twice: what befalls it befalls all slots that work on it")
        self.rules, self.nvml = rules, nvml
        self.sources, self.gpus = tuple(sources), tuple(gpus or ())
        self.interval, self.quiet = float(interval), float(quiet)
        SeverityTable(rules)  # a mistake is told where it was made
        self._watches = False
        """Sources are asked in this process."""
        self._next_try = 0.0
        self._step = 0
        """Steps when the last batch had ended."""
        self._directory: Path | None = None
        """The job's, in its ranks."""
        self._note: Path | None = None
        self._answers: Path | None = None
        self._read = 0
        """How far the job's log of verdicts was read; all ranks have the same, since they read it alike."""

    def __getstate__(self) -> dict[str, Any]:
        # they are asked in this process, so they need not travel to spawned ranks: a lambda could not
        return {**self.__dict__, "sources": () if self._watches else self.sources}

    def device_watch(self) -> DeviceWatch:
        """For the launcher, in the launching process."""
        from lightning_ntp.nvml import NvmlSource

        self._watches = True
        nvml = [NvmlSource(self.interval, renew=_TIMES_RENEW * self.interval)] if self.nvml else []
        limits = Limits(quiet=self.quiet)
        return HealthWatch([*nvml, *self.sources], SeverityTable(self.rules), limits, self.gpus, self.interval)

    # ---- in the ranks -----------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "drain"):
            log.warning('HealthMonitor does nothing here: it takes Trainer(strategy="ntp"), whose ranks can leave')
            return
        directory = self._directory = RankIdentity.from_environ().job_dir if is_rank() else None
        if directory is None:
            return
        self._read = carried_log.begin(jobs.health_log(directory), self._read)
        slot = RankIdentity.from_environ().slot
        self._note, self._answers = jobs.unwell_note(directory, slot), jobs.stays_note(directory, slot)
        device = trainer.strategy.root_device
        if device.type != "cuda" and self.nvml and not self.gpus and trainer.is_global_zero:
            log.warning("health of GPUs is not watched: the ranks work on %s; training goes on", device.type)
        if not self.gpus:
            note_device(directory, slot, device)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._leave_if_told(trainer)
        self._carry(trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        directory, before, self._step = self._directory, self._step, trainer.global_step
        if directory is not None and row_is_due(trainer, before):
            log_row(trainer, partial(health_metrics, directory))

    @override
    def on_validation_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._carry(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._carry(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._carry(trainer)

    def _leave_if_told(self, trainer: Trainer) -> None:
        note = self._note
        if note is None or not note.exists():  # 2 us; asked in every step
            self._next_try = 0.0  # what comes after a note that was withdrawn is answered anew
            return
        now = time.monotonic()
        if now < self._next_try:
            return
        first, self._next_try = self._next_try == 0.0, now + _AGAIN_SECONDS
        try:
            reason = note.read_text(encoding="utf-8")
            trainer.strategy.drain(trainer.strategy.slot, reason)  # type: ignore[attr-defined]
        except OSError:  # it was withdrawn meanwhile
            self._next_try = 0.0
        except ValueError as error:
            if first and self._answers is not None:
                with contextlib.suppress(OSError):
                    jobs.write_whole(self._answers, str(error).removeprefix("drain: "))

    def _carry(self, trainer: Trainer) -> None:
        """Carry verdicts into the run's events and loggers. All ranks read them, so that any can become rank 0."""
        directory = self._directory
        if directory is None:
            return
        entries, self._read = carried_log.new_entries(jobs.health_log(directory), self._read)
        if entries and trainer.is_global_zero:
            self._log(trainer, directory, entries)

    def _log(self, trainer: Trainer, directory: Path, entries: Sequence[Mapping[str, Any]]) -> None:
        for entry in entries:
            details = {key: entry[key] for key in ("action", "signal", "code", "gpu", "text", "values") if key in entry}
            slot, monotonic = entry["slot"], entry["monotonic"]
            trainer.strategy.record_event("health", slot=slot, monotonic=monotonic, **details)  # type: ignore[attr-defined]
        log_row(trainer, partial(health_metrics, directory))


def health_metrics(directory: Path) -> dict[str, float]:
    """What loggers get: how many slots stand how badly, and the extremes of what was measured."""
    try:
        state = json.loads(jobs.health_state(directory).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    metrics = {
        f"ntp/health/{worst}": float(sum(each["worst"] == worst and each["live"] for each in state.values()))
        for worst in _COUNTED
    }
    values: dict[str, list[float]] = {}
    for each in state.values():
        for name, value in each["values"].items():
            values.setdefault(name, []).append(float(value))
    for name, found in values.items():
        metrics[f"ntp/health/{name}/max"] = max(found)
        metrics[f"ntp/health/{name}/min"] = min(found)
    return metrics
