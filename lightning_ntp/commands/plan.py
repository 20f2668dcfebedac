"""``lightning-ntp plan``: what a loss would cost, before anything happens.

Nothing is started and no model takes memory: the layouts are data, so the plan for a loss is known beforehand.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lightning_ntp.commands.models import UsageError, add_model, model_tensors, show_bytes
from lightning_ntp.plan.cost import CutTensor, ReshardCost, reshard_cost
from lightning_ntp.plan.policy import Action, Decision, PolicyError, RecoveryPolicy, decide, name_slots
from lightning_ntp.plan.redundancy import keepers
from lightning_ntp.plan.topology import Topology


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-ntp plan`` with ``args`` (default: the process's arguments after the subcommand).

    Raises:
        SystemExit: With status 2 and one line that says what is wrong.
    """
    parser = build_parser()
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    try:
        text = report(options)
    except (ValueError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough; Python would complain once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ntp plan",
        description="Print what losing slots would cost: new degrees, what moves from whom to whom, and memory.",
        epilog="Slots count through replica 0, then replica 1, and so on: with --degrees 4 3 replica 1 is slots 4 to 6."
        " The model is either given by its sizes (a decoder-only transformer with gated feed-forward layers) or by"
        " --model.",
    )
    add = parser.add_argument
    add("--degrees", type=int, nargs="+", required=True, metavar="N", help="tensor-parallel degree of every replica")
    add(
        "--lose",
        type=int,
        nargs="+",
        action="append",
        metavar="SLOT",
        help="slots lost together; give it again for what is lost after that. Without it: every slot, each alone",
    )
    add("--min-tensor-parallel-size", type=int, default=1, metavar="N", help="drop a replica below this degree")
    add_model(parser)
    return parser


def report(options: argparse.Namespace) -> str:
    """Everything the command prints.

    Raises:
        ValueError: If the degrees, the slots, the policy or the model do not fit; the message says why.
    """
    topology = Topology.start(options.degrees)
    settings = RecoveryPolicy(options.min_tensor_parallel_size)
    try:
        settings.check_degrees(topology.degrees)
    except PolicyError as error:
        raise UsageError(str(error).replace("min_tensor_parallel_size", "--min-tensor-parallel-size")) from None
    tensors = model_tensors(options, topology)
    size = sum(t.bytes for t in tensors)
    lines = [
        f"model: {sum(t.elements for t in tensors):,} parameters, {show_bytes(size)} with {options.moments} optimizer"
        f" states each; {topology.world_size} slots, degrees {topology.degrees}"
    ]
    if options.lose is None:
        lines += [_one_line(topology, slot, settings, tensors) for slot in topology.slots]
        return "\n".join(lines)
    for lost in options.lose:
        decision = decide(topology, lost, settings, shardings=[t.sharding for t in tensors])
        lines += ["", f"{decision}{_way_back(topology, decision)}"]
        if not decision.goes_on:
            break
        assert decision.after is not None
        lines += describe_cost(reshard_cost(topology, decision.after, tensors, decision.lost))
        topology = decision.after
    return "\n".join(lines)


def describe_cost(cost: ReshardCost) -> list[str]:
    """The lines that say what a change costs."""
    lines = [f"  moves {show_bytes(cost.bytes_moved)}" + (f" from {name_slots(cost.sources)}" if cost.sources else "")]
    lines += [f"    slot {a} -> slot {b}: {show_bytes(size)}" for (a, b), size in cost.transfers.items()]
    for replica in cost.before.live_replicas:
        before, after = cost.largest_share(replica)
        then = f"-> {after:.1%}" if cost.after.degrees[replica] else "-> gone"
        lines.append(f"  replica {replica}: largest share of the model {before:.1%} {then}")
    for slot in cost.after.slots:
        if not cost.extra(slot) and not cost.peak[slot]:
            continue
        lines.append(
            f"  slot {slot}: holds {show_bytes(cost.held_before.get(slot, 0))} -> {show_bytes(cost.held_after[slot])}"
            f" (+{show_bytes(cost.extra(slot))}), needs {show_bytes(cost.peak[slot])} free while shards move"
        )
    return lines


def _one_line(topology: Topology, slot: int, settings: RecoveryPolicy, tensors: Sequence[CutTensor]) -> str:
    decision = decide(topology, [slot], settings, shardings=[t.sharding for t in tensors])
    if not decision.goes_on:
        return f"{decision}{_way_back(topology, decision)}"
    assert decision.after is not None
    cost = reshard_cost(topology, decision.after, tensors, decision.lost)
    most = max((cost.extra(s) for s in cost.after.slots), default=0)
    return f"{decision}; moves {show_bytes(cost.bytes_moved)}, at most +{show_bytes(most)} on a survivor"


def _way_back(topology: Topology, decision: Decision) -> str:
    """What ``redundancy="neighbor"`` would do instead of ending for want of a copy."""
    if decision.action is not Action.END or set(decision.lost) == set(topology.slots):
        return ""
    keeper_of = keepers(topology)
    if any(keeper_of[slot] in decision.lost for slot in decision.lost):
        return ""
    return " (with redundancy='neighbor' it would go back to the neighbours' copies, some steps, and go on)"
