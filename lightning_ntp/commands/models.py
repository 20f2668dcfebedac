"""A model by its sizes or by its class, for commands that reckon with it and start nothing."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from lightning_ntp.plan.cost import CutTensor
from lightning_ntp.plan.topology import Topology

if TYPE_CHECKING:
    from lightning_ntp.plan import Sharding

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element."""

SIZES = ("heads", "kv_heads", "hidden", "ffn", "vocab", "layers")


class UsageError(ValueError):
    """The command line asks for something that does not exist."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which model is meant."""
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


def show_bytes(size: float) -> str:
    """A size that a person can read, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def model_tensors(options: argparse.Namespace, topology: Topology) -> list[CutTensor]:
    """The tensors of the model that is meant.

    Raises:
        ValueError: If it is not said clearly, or its sizes do not fit; the message says why.
    """
    if options.moments < 0:
        raise UsageError(f"--moments={options.moments} is below 0: give the number of optimizer states per parameter")
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
