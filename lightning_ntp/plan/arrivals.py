"""Where processes that stand by are to work: a pure function, so that it can be looked at without a job."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_ntp.plan.membership import Join
from lightning_ntp.plan.topology import Topology


def choose_joins(topology: Topology, launched: Topology, standby: Mapping[int, str]) -> tuple[Join, ...]:
    """Fill the places that are empty since the launch.

    A slot goes back to its own replica if that has a place; others, spares among them, to the replica of the lowest
    degree. A replica that is gone comes back whole or not at all: at a lower degree it might not fit its devices.

    Args:
        topology: Of now.
        launched: At launch.
        standby: Slots whose process waits, and its uid.

    Returns:
        Who joins, in order of the slots.
    """
    places = [full - now for full, now in zip(launched.degrees, topology.degrees, strict=True)]
    homes = {slot: launched.place(slot)[0] for slot in standby if slot in launched.slots}
    chosen: dict[int, list[int]] = {replica: [] for replica in range(len(places))}
    for slot, home in sorted(homes.items()):
        if len(chosen[home]) < places[home]:
            chosen[home].append(slot)
    others = sorted(set(standby) - {slot for slots in chosen.values() for slot in slots})
    # live ones first: a replica that is gone may stay so for want of others
    order = sorted(chosen, key=lambda r: (topology.degrees[r] == 0, topology.degrees[r]))
    for replica in order:
        while others and len(chosen[replica]) < places[replica]:
            chosen[replica].append(others.pop(0))
    found = [
        Join(slot, standby[slot], replica)
        for replica, slots in chosen.items()
        if topology.degrees[replica] or len(slots) == places[replica]
        for slot in slots
    ]
    return tuple(sorted(found, key=lambda join: join.slot))
