"""``lightning-ntp plan``: what a loss would cost, before anything happens.

Nothing is started and no model takes memory: the layouts are data, so the plan for a loss is known beforehand.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_ntp.plan.cost import CutTensor, ReshardCost, reshard_cost
from lightning_ntp.plan.policy import Action, Decision, PolicyError, RecoveryPolicy, decide, name_slots
from lightning_ntp.plan.redundancy import keepers
from lightning_ntp.plan.topology import Topology

if TYPE_CHECKING:
    from lightning_ntp.plan import Sharding

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element."""

SIZES = ("heads", "kv_heads", "hidden", "ffn", "vocab", "layers")


class UsageError(ValueError):
    """The command line asks for something that does not exist."""


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
    sizes = parser.add_argument_group("a model by its sizes")
    sizes.add_argument("--heads", type=int, metavar="N", help="query heads")
    sizes.add_argument("--kv-heads", type=int, metavar="N", help="key/value heads (default: as many as query heads)")
    sizes.add_argument("--hidden", type=int, metavar="N", help="width of the residual stream")
    sizes.add_argument("--head-dim", type=int, metavar="N", help="width of a head (default: hidden / heads)")
    sizes.add_argument("--ffn", type=int, metavar="N", help="width of the feed-forward layers")
    sizes.add_argument("--vocab", type=int, metavar="N", help="vocabulary rows")
    sizes.add_argument("--layers", type=int, metavar="N", help="number of layers")
    sizes.add_argument("--tied", action="store_true", help="the output layer uses the embedding's weight")
    model = parser.add_argument_group("a model by its class")
    model.add_argument("--model", metavar="CLASS", help="class path of a LightningModule with configure_tp_plan()")
    model.add_argument(
        "--model-arg", action="append", default=[], metavar="NAME=VALUE", help="argument for its constructor"
    )
    state = parser.add_argument_group("what is kept per parameter")
    state.add_argument("--dtype", choices=WIDTHS, help="of the parameters (default: float32, or the model's own)")
    state.add_argument("--moments", type=int, default=2, metavar="N", help="optimizer states per parameter (AdamW: 2)")
    state.add_argument("--moment-dtype", choices=WIDTHS, help="of the optimizer states (default: as the parameter)")
    return parser


def report(options: argparse.Namespace) -> str:
    """Everything the command prints.

    Raises:
        ValueError: If the degrees, the slots, the policy or the model do not fit; the message says why.
    """
    if options.moments < 0:
        raise UsageError(f"--moments={options.moments} is below 0: give the number of optimizer states per parameter")
    topology = Topology.start(options.degrees)
    settings = RecoveryPolicy(options.min_tensor_parallel_size)
    try:
        settings.check_degrees(topology.degrees)
    except PolicyError as error:
        raise UsageError(str(error).replace("min_tensor_parallel_size", "--min-tensor-parallel-size")) from None
    tensors = _tensors(options, topology)
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


def show_bytes(size: float) -> str:
    """A size that a person can read, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


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


def _tensors(options: argparse.Namespace, topology: Topology) -> list[CutTensor]:
    given = [f"--{name.replace('_', '-')}" for name in SIZES if getattr(options, name) is not None]
    if options.model is not None:
        if given:
            raise UsageError(f"--model and {', '.join(given)} exclude each other: the class knows its sizes")
        return _of_class(options, topology)
    if options.model_arg:
        raise UsageError("--model-arg needs --model")
    missing = [f"--{name.replace('_', '-')}" for name in SIZES if name != "kv_heads" and getattr(options, name) is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} missing: give all sizes of the model, or --model CLASS")
    return _of_sizes(options, topology)


def _of_sizes(options: argparse.Namespace, topology: Topology) -> list[CutTensor]:
    from lightning_ntp.parallel.styles import feature_segment  # what the plan styles do, and so torch
    from lightning_ntp.plan import Segment, Sharding, UnitSpace

    for name in (*SIZES, "head_dim"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')}={value} is below 1")
    heads, hidden, layers = options.heads, options.hidden, options.layers
    kv_heads = heads if options.kv_heads is None else options.kv_heads
    if options.head_dim is None and hidden % heads:
        raise UsageError(f"--hidden={hidden} is no multiple of --heads={heads}: give --head-dim as well")
    head = options.head_dim or hidden // heads
    full = topology.full_degree
    width = WIDTHS[options.dtype or "float32"]
    kept = width + options.moments * WIDTHS[options.moment_dtype or options.dtype or "float32"]

    def tensor(name: str, shape: tuple[int, ...], sharding: Sharding, count: int = 1) -> CutTensor:
        return CutTensor(name, shape, sharding, kept, count)

    queries = Segment(UnitSpace(heads), head)
    shared = Segment(UnitSpace(kv_heads, shared_by=heads), head)
    columns = feature_segment("ffn", options.ffn, None, full)
    rows = Segment(UnitSpace(options.vocab), 1)
    tensors = [
        tensor("embedding", (options.vocab, hidden), Sharding(0, (rows,))),
        tensor("q", (heads * head, hidden), Sharding(0, (queries,)), layers),
        tensor("k, v", (kv_heads * head, hidden), Sharding(0, (shared,)), 2 * layers),
        tensor("o", (hidden, heads * head), Sharding(1, (queries,)), layers),
        tensor("gate, up", (options.ffn, hidden), Sharding(0, (columns,)), 2 * layers),
        tensor("down", (hidden, options.ffn), Sharding(1, (columns,)), layers),
        tensor("norms", (hidden,), Sharding(None, gradient="full"), 2 * layers + 1),
    ]
    if not options.tied:
        output = feature_segment("vocab", options.vocab, None, full)
        tensors.append(tensor("output", (options.vocab, hidden), Sharding(0, (output,))))
    for each in tensors:
        each.sharding.layouts(topology.family, full)  # a degree above the units fails here, with the reason
    return tensors


def _of_class(options: argparse.Namespace, topology: Topology) -> list[CutTensor]:
    import torch
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from lightning_ntp.lightning.model_plan import plan_of
    from lightning_ntp.parallel import TensorParallelContext, parallelize

    kind = _find_class(options.model)
    arguments = dict(_argument(text) for text in options.model_arg)
    try:
        with torch.device("meta"):
            module = kind(**arguments)
            if is_overridden("configure_model", module):
                module.configure_model()
    except TypeError as error:
        raise UsageError(f"--model {options.model} cannot be made: {error}; give --model-arg NAME=VALUE") from None
    plan = plan_of(module, None) if topology.full_degree > 1 else {}
    sharded = parallelize(module, plan, TensorParallelContext(topology.family, topology.full_degree))
    tensors = []
    for entry in sharded:
        width = WIDTHS[options.dtype] if options.dtype else entry.parameter.element_size()
        moment = WIDTHS[options.moment_dtype] if options.moment_dtype else width
        moments = options.moments if entry.parameter.requires_grad else 0
        tensors.append(CutTensor(entry.name, tuple(entry.shape), entry.sharding, width + moments * moment))
    return tensors


def _find_class(path: str) -> Any:
    from lightning.pytorch import LightningModule

    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise UsageError(f"--model={path!r} is no class path: write it as package.module.Class")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as the other subcommands do: a console script starts without it
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        raise UsageError(f"--model={path!r}: {error} (looked in {os.getcwd()} and among installed packages)") from None
    if not isinstance(found, type) or not issubclass(found, LightningModule):
        raise UsageError(f"--model={path!r}: {module_name} has no LightningModule {name!r}")
    return found


def _argument(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--model-arg={text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a plain string
