"""The plan floor: who holds which units and what moves from whom to whom. Pure Python, no torch.

Everything here is data that can be printed, compared and tested without starting a process.
"""

from lightning_ntp.plan.arrivals import choose_joins
from lightning_ntp.plan.exchange import Exchange, Move, Run, copy_exchange, reduce_exchange
from lightning_ntp.plan.layout import Layout, LayoutFamily, UnitSpace
from lightning_ntp.plan.membership import Departure, Entry, Join, Roster
from lightning_ntp.plan.policy import Action, Decision, PolicyError, RecoveryPolicy, decide
from lightning_ntp.plan.reshard import plan_reshard
from lightning_ntp.plan.sharding import GradientClass, Segment, Sharding
from lightning_ntp.plan.sync import SyncPlan, plan_sync
from lightning_ntp.plan.topology import Relabel, Topology, TopologyError, resolve_degrees

__all__ = [
    "Action",
    "Decision",
    "Departure",
    "Entry",
    "Exchange",
    "GradientClass",
    "Join",
    "Layout",
    "LayoutFamily",
    "Move",
    "PolicyError",
    "RecoveryPolicy",
    "Relabel",
    "Roster",
    "Run",
    "Segment",
    "Sharding",
    "SyncPlan",
    "Topology",
    "TopologyError",
    "UnitSpace",
    "choose_joins",
    "copy_exchange",
    "decide",
    "plan_reshard",
    "plan_sync",
    "reduce_exchange",
    "resolve_degrees",
]
