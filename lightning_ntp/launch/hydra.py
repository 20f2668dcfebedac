"""Hydra: all ranks of a job share the supervisor's output directory."""

from __future__ import annotations

import sys


def overrides(slot: int) -> list[str]:
    """Command line arguments to append for the rank in ``slot``; empty when Hydra does not run this process.

    Without them each rank would compute an output directory of its own from the time of day, and write over the
    supervisor's ``.hydra/``. Slot 0 keeps the log file's name.

    Raises:
        RuntimeError: in a multirun, where re-running the script would repeat the whole sweep.
    """
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return []
    config = module.HydraConfig.get()
    if str(getattr(config.mode, "name", config.mode)) == "MULTIRUN":
        raise RuntimeError(
            'Hydra runs a multirun (sweep), in which strategy="ntp" cannot re-run the script: every rank would repeat'
            ' the whole sweep. Use strategy="ntp_spawn", which returns to the caller, or start single runs.'
        )
    directory = str(config.runtime.output_dir).replace("\\", "\\\\").replace('"', '\\"')
    name = str(config.job.name)
    return [
        f'hydra.run.dir="{directory}"',
        "hydra.output_subdir=null",
        f'hydra.job.name="{name if slot == 0 else f"{name}_slot{slot}"}"',
    ]
