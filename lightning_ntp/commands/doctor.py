"""``lightning-ntp doctor``: would training survive the loss of a device on this machine? If not, why not."""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any, Literal

from lightning_ntp.commands.models import SIZES, add_model, model_tensors, show_bytes
from lightning_ntp.commands.profiles import profile_lines
from lightning_ntp.nvml import Gpu, Inventory, inventory
from lightning_ntp.plan.cost import reshard_cost
from lightning_ntp.plan.policy import RecoveryPolicy, decide
from lightning_ntp.plan.topology import Topology

State = Literal["ok", "warning", "fails"]

_PACKAGES = ("torch", "lightning", "torchmetrics", "nvidia-ml-py")
_LOOKUP_SECONDS = 0.5
_FREE_BYTES = 64 * 2**20
"""For a job's directory."""
_DESCRIPTORS_PER_RANK = 16
_NVML_SECONDS = 15.0
_FATAL_SETTINGS = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS",
    "TORCH_NCCL_PROPAGATE_ERROR",
    "TORCH_NCCL_ENABLE_MONITORING",
    "NCCL_NVLS_ENABLE",
)
"""Variables that, set to anything else than the package does, let torch or NCCL end or block ranks by themselves."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Args:
        what: Its name.
        state: ``fails`` if training would not survive a loss for it.
        text: What was found, and what to do about it.
    """

    what: str
    state: State
    text: str


def main(args: Sequence[str] | None = None) -> None:
    """Run ``lightning-ntp doctor`` with ``args`` (default: the process's arguments after the subcommand).

    Raises:
        SystemExit: With status 1 if training would not survive a loss, and 2 if the arguments are wrong.
    """
    parser = _parser()
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    try:
        checks = examine(options)
    except (ValueError, ImportError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if options.json:
        print(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.what) for check in checks)
        for check in checks:
            first, *rest = check.text.splitlines()
            print(f"{check.state:<8} {check.what:<{width}}  {first}")
            for line in rest:
                print(" " * (11 + width) + line)
    failed = [check.what for check in checks if check.state == "fails"]
    if failed:
        if not options.json:
            print(f"\ntraining would not survive a loss here: {', '.join(failed)}")
        raise SystemExit(1)
    if not options.json:
        print("\ntraining would survive a loss here, as far as this can be known without one")


def examine(options: argparse.Namespace) -> list[Check]:
    """Look at everything.

    Raises:
        ValueError: If the degrees or the model do not fit; says why.
    """
    found = inventory(_NVML_SECONDS)
    degrees = options.degrees or _usual_degrees(len(found.gpus))
    checks = [_versions(), _system(sum(degrees or [1])), _store(), _settings(), _times(options)]
    checks += [_driver(found), *_gpus(found)]
    if degrees:
        topology = Topology.start(degrees)
        checks += [_survival(options, topology), *_memory(options, topology, found)]
    else:
        checks.append(Check("survival", "warning", "no GPU was found: give --degrees to say what a job would have"))
    return checks


# ---- the machine --------------------------------------------------------------------------------------------------


def _versions() -> Check:
    found, missing = [f"Python {sys.version.split()[0]}"], []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("versions", "fails", f"{', '.join(missing)} not installed: pip install {' '.join(missing)}")
    floors = [each.partition(";")[0].strip() for each in requires("lightning-ntp") or () if "extra ==" not in each]
    return Check("versions", "ok", f"{', '.join(found)} (needed: {', '.join(floors)})")


def _system(ranks: int) -> Check:
    if not sys.platform.startswith("linux"):
        return Check("system", "fails", f"{sys.platform}: the supervisor sees deaths through Linux's /proc and pidfds")
    wrong = []
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < _FREE_BYTES or not os.access(tempfile.gettempdir(), os.W_OK):
        wrong.append(f"{tempfile.gettempdir()} has {show_bytes(free)} free: set TMPDIR to somewhere with more")
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # each rank holds connections to every other, of two generations while one follows the other
    needed = 64 + _DESCRIPTORS_PER_RANK * ranks
    if descriptors != resource.RLIM_INFINITY and descriptors < needed:
        wrong.append(f"{descriptors} open files allowed, {ranks} ranks take up to {needed} each: ulimit -n {needed}")
    if wrong:
        return Check("system", "fails", "\n".join(wrong))
    return Check("system", "ok", f"{os.cpu_count()} cores, {show_bytes(free)} free in {tempfile.gettempdir()}")


def _store() -> Check:
    """A store as the supervisor hosts it, and a client as a rank has it."""
    began = time.monotonic()
    with_name = socket.getnameinfo(("127.0.0.1", 0), 0)[0]
    looked_up = time.monotonic() - began
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from lightning_ntp.launch.hosting import host_store

        began = time.monotonic()
        patience = timedelta(seconds=10)
        server = host_store(patience)
        client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=patience)
        client.set("doctor", "here")
        answer = server.get("doctor").decode()
        seconds = time.monotonic() - began
    except (RuntimeError, OSError, ImportError) as error:
        return Check("store", "fails", f"the job's store cannot be hosted on 127.0.0.1: {error}")
    if answer != "here":
        return Check("store", "fails", f"the job's store has answered {answer!r} where 'here' was written")
    text = f"hosted on 127.0.0.1 and reached in {1e3 * seconds:.0f} ms"
    if looked_up > _LOOKUP_SECONDS:
        return Check(
            "store",
            "warning",
            f"{text}; the name of 127.0.0.1 ({with_name}) takes {looked_up:.1f} s to look up: put it into /etc/hosts",
        )
    return Check("store", "ok", text)


def _settings() -> Check:
    from lightning_ntp.comm.backends import NCCL_ENVIRONMENT

    wrong = [
        f"{name}={os.environ[name]}: leave it unset (the package sets {NCCL_ENVIRONMENT[name]})"
        for name in _FATAL_SETTINGS
        if os.environ.get(name, NCCL_ENVIRONMENT[name]) != NCCL_ENVIRONMENT[name]
    ]
    if wrong:
        return Check("environment", "fails", "\n".join(wrong))
    return Check("environment", "ok", "nothing is set that lets NCCL or torch end ranks by themselves")


def _times(options: argparse.Namespace) -> Check:
    heartbeat, timeout = options.heartbeat, options.timeout
    if not (math.isfinite(heartbeat) and math.isfinite(timeout) and heartbeat >= 1 and timeout > heartbeat):
        return Check(
            "time-outs",
            "fails",
            f"timeout={timeout:g} s, heartbeat={heartbeat:g} s: heartbeat must be at least 1 s, and less than timeout,"
            " or collectives fail before a rank that hangs is found",
        )
    text = f"a rank that hangs is ended after {heartbeat:g} s, a collective after {timeout:g} s"
    return Check("time-outs", "ok", text)


# ---- devices ------------------------------------------------------------------------------------------------------


def _driver(found: Inventory) -> Check:
    if not found.gpus:
        return Check("driver", "warning", f"{found.problem or 'no GPU'}: the health of GPUs is not watched")
    limits = "may" if found.may_set_limits else "may not (that takes root)"
    lines = [f"NVIDIA {found.driver}, {len(found.gpus)} GPUs; this process {limits} set power limits", *found.notes]
    lines += profile_lines(found.gpus)
    state: State = "warning" if found.problem else "ok"
    return Check("driver", state, "\n".join([*lines, found.problem] if found.problem else lines))


def _gpus(found: Inventory) -> list[Check]:
    checks = []
    for gpu in found.gpus:
        total, free = (show_bytes(size) if size is not None else "?" for size in (gpu.memory_total, gpu.memory_free))
        lines = [gpu.uuid] if gpu.uuid else []
        if gpu.reading is not None:
            lines = [f"{gpu.uuid}, {total}, {free} free, {gpu.nvlinks} NVLinks, fabric {gpu.fabric}"]
        lines += [f"MIG instance {instance}" for instance in gpu.mig]
        if gpu.reading is not None and gpu.reading.unsupported:
            lines.append(f"unknown here: {', '.join(sorted(gpu.reading.unsupported))}")
        wrong = [f"not healthy: {text}" for text in _ills(gpu)]
        if gpu.problem:
            wrong.append(f"does not say everything: {gpu.problem}")
        checks.append(
            Check(f"GPU {gpu.index} {gpu.name}".rstrip(), "fails" if wrong else "ok", "\n".join([*lines, *wrong]))
        )
    return checks


def _ills(gpu: Gpu) -> list[str]:
    """What is wrong with a device right now, by what would have its rank leave."""
    values = gpu.reading.values if gpu.reading is not None else {}
    named = {
        "recovery_action": "the driver asks for its recovery (action {:.0f})",
        "row_remap_failure": "a row of its memory could not be remapped",
        "sram_threshold_exceeded": "more errors in its SRAM than the vendor accepts",
    }
    ills = [text.format(values[name]) for name, text in named.items() if values.get(name, 0.0) > 0]
    if values.get("temperature_margin_c", 1.0) <= 0:
        ills.append(f"{values.get('temperature_c', math.nan):.0f} degrees C, where it slows down")
    return ills


# ---- the job ------------------------------------------------------------------------------------------------------


def _usual_degrees(gpus: int) -> list[int]:
    """What ``strategy="ntp"`` makes of so many devices."""
    if gpus < 1:
        return []
    return [gpus // 2] * 2 if gpus >= 4 and gpus % 2 == 0 else [gpus]


def _survival(options: argparse.Namespace, topology: Topology) -> Check:
    policy = RecoveryPolicy(options.min_tensor_parallel_size)
    policy.check_degrees(topology.degrees)
    ends = [slot for slot in topology.slots if not decide(topology, [slot], policy).goes_on]
    name = f"degrees {topology.degrees}"
    if not ends:
        return Check("survival", "ok", f"{name}: the loss of any slot is survived")
    if options.redundancy == "neighbor" and topology.world_size > 1:
        return Check("survival", "ok", f"{name}: with neighbours' copies, some steps are done again after a loss")
    why = decide(topology, ends[:1], policy)
    return Check(
        "survival",
        "fails",
        f"{name}: {why}\nuse several replicas (data_parallel_size=2), or NTPStrategy(redundancy='neighbor')",
    )


def _memory(options: argparse.Namespace, topology: Topology, found: Inventory) -> list[Check]:
    if options.model is None and all(getattr(options, name) is None for name in SIZES):
        return [Check("memory", "warning", "not looked at: say which model (--model CLASS, or its sizes)")]
    tensors = model_tensors(options, topology)
    free = min((gpu.memory_free for gpu in found.gpus if gpu.memory_free is not None), default=0)
    if options.memory is not None:
        free = int(options.memory * 2**30)
    policy = RecoveryPolicy(options.min_tensor_parallel_size)
    most, where, held = 0, "", 0
    for slot in topology.slots:
        decision = decide(topology, [slot], policy, shardings=[tensor.sharding for tensor in tensors])
        if not decision.goes_on or decision.after is None:
            continue
        cost = reshard_cost(topology, decision.after, tensors, decision.lost)
        for survivor in cost.after.slots:
            needed = max(cost.held_after[survivor], cost.held_before.get(survivor, 0)) + cost.peak[survivor]
            if needed > most:
                most, held = needed, cost.held_before.get(survivor, 0)
                where = f"slot {survivor} when slot {slot} is lost"
    if not most:
        return []
    text = f"parameters and states: {show_bytes(held)} a slot, up to {show_bytes(most)} while shards move ({where})"
    if not free:
        return [Check("memory", "warning", f"{text}; no GPU to compare with: give --memory GIB")]
    text += f"; {show_bytes(free)} a device, activations come on top"
    return [Check("memory", "ok" if most < free else "fails", text)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ntp doctor",
        description="Look at this machine: would training survive the loss of a device? The exit status is 1 if not.",
        epilog="Nothing is started but a store on 127.0.0.1 and a process that asks the driver, both for a moment.",
    )
    add: Any = parser.add_argument
    add("--degrees", type=int, nargs="+", metavar="N", help="of every replica (default: as strategy='ntp' makes them)")
    add("--min-tensor-parallel-size", type=int, default=1, metavar="N", help="as given to NTPStrategy")
    add("--redundancy", choices=["neighbor"], help="as given to NTPStrategy")
    add("--timeout", type=float, default=1800.0, metavar="SECONDS", help="as given to NTPStrategy")
    add("--heartbeat", type=float, default=30.0, metavar="SECONDS", help="as given to NTPStrategy")
    add("--memory", type=float, metavar="GIB", help="of each device (default: what is free now)")
    add("--json", action="store_true", help="for programs")
    add_model(parser)
    return parser
