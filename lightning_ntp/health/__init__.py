"""The health of a job's devices: what is found, how bad it is, and what becomes of the slot. No torch, no driver."""

from lightning_ntp.health.findings import Action, Finding, HealthSource, WatchedJob
from lightning_ntp.health.rules import OverrideError, Rule, SeverityTable
from lightning_ntp.health.sources import FileSource, HttpSource, StragglerSource
from lightning_ntp.health.verdicts import Limits, Verdict, Verdicts
from lightning_ntp.health.watch import HealthWatch

__all__ = [
    "Action",
    "FileSource",
    "Finding",
    "HealthSource",
    "HealthWatch",
    "HttpSource",
    "Limits",
    "OverrideError",
    "Rule",
    "SeverityTable",
    "StragglerSource",
    "Verdict",
    "Verdicts",
    "WatchedJob",
]
