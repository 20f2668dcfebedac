"""A simulated machine for the control loop: GPUs with power, heat and clocks, and replicas that compute in lock step.

A GPU follows the formulas of the driver's stand-in (``tests/nvml/src/mock.h``, its names kept):

    P(f) = idle_power + load * dynamic_power * f^3
    f    = min(1, locked / max clock, cbrt((limit - idle_power) / (load * dynamic_power)))
             * max(0, 1 - s * max(0, T - T_max)) * (1/2 if T >= T_slow) * brake, not below the lowest clock
    dT/dt = (ambient + R * P - T) / tau, in steps of tau / 50

It differs in one thing: a GPU that waits for others draws ``idle_power`` meanwhile, so the mean power of an interval,
which heats, is ``idle_power + duty * (P(f) - idle_power)``.

A replica's blocks are computed one after the other, each as slow as its slowest GPU: the sum over blocks of
``flops * max over GPUs of (share / f)``; a part ``serial`` of the time at full degree and full clock follows no clock.
A step takes as long as its slowest replica.

What is written in an interval acts from the end of the *next* one on: one interval of dead time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_ntp.plan.layout import LayoutFamily, UnitSpace
from lightning_ntp.power.control import (
    Block,
    Decision,
    Domain,
    GpuBounds,
    GpuReading,
    Measurement,
    relative_compute_time,
)
from lightning_ntp.power.control.signals import Reason

BLOCKS = (
    Block("attention", UnitSpace(32), 1.0),
    Block("mlp", UnitSpace(448), 2.0),
    Block("output", UnitSpace(997), 0.3),
)


@dataclass(frozen=True)
class Machine:
    """Parameters of the plant. Powers in W, temperatures in degrees C, times in s."""

    replicas: int = 2
    degree: int = 4
    blocks: tuple[Block, ...] = BLOCKS
    idle_power: float = 75.0
    dynamic_power: float = 625.0
    load: float = 1.0
    start_w: float = 450.0
    ceiling_w: float | None = 700.0
    minimum_w: float = 200.0
    maximum_w: float = 700.0
    ambient: float = 30.0
    resistance: float = 0.06
    time_constant: float = 30.0
    t_max: float = 87.0
    t_slow: float = 90.0
    slope: float = 0.02
    max_clock: int = 1980
    start_clock: int | None = None
    spread: float = 0.0
    """How unlike the GPUs are: a standard deviation of dynamic_power and R, as a fraction."""
    serial: float = 0.0
    full_step_s: float = 1.0
    interval_s: float = 10.0
    noise: float = 0.0
    """Standard deviation of a measured compute time, as a fraction."""
    draw_noise: float = 0.01
    batch: int = 64
    budget_w: float | None = None
    lost_draw_w: float | None = None
    seed: int = 0


@dataclass
class Gpu:
    """State of one GPU."""

    name: str
    replica: int
    dynamic_power: float
    resistance: float
    limit_w: float
    locked: int | None
    temperature: float
    acting_limit_w: float = 0.0
    acting_locked: int | None = None
    brake: float = 1.0
    errors: int = 0
    readable: bool = True
    refuses: bool = False
    stuck: bool = False
    power_w: float = 0.0
    clock: float = 1.0
    reasons: frozenset[Reason] = frozenset()


@dataclass
class Record:
    """What really was in one interval, without noise."""

    now_s: float
    limits_w: dict[str, float]
    temperatures: dict[str, float]
    clocks: dict[str, float]
    compute_s: dict[int, float]
    per_sample_s: dict[int, float]
    step_s: float
    power_w: float
    writes: int = 0


@dataclass
class Plant:
    """The machine at work."""

    machine: Machine
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        m, self.random = self.machine, random.Random(self.machine.seed)
        self.family = LayoutFamily(m.degree)
        self.gpus: dict[str, Gpu] = {}
        for replica in range(m.replicas):
            for index in range(m.degree):
                unlike = [1 + m.spread * max(-2.0, min(2.0, self.random.gauss(0, 1))) for _ in range(2)]
                name = f"GPU-{replica}{index}"
                self.gpus[name] = Gpu(
                    name, replica, m.dynamic_power * unlike[0], m.resistance * unlike[1], m.start_w, m.start_clock, 0.0
                )
        self.live = {r: tuple(g.name for g in self.gpus.values() if g.replica == r) for r in range(m.replicas)}
        self.samples = {r: m.batch // m.replicas for r in self.live}
        self.now_s = 0.0
        self.expected: set[str] = set()
        for gpu in self.gpus.values():
            gpu.acting_limit_w, gpu.acting_locked = gpu.limit_w, gpu.locked
            duty_power = m.idle_power + m.load * gpu.dynamic_power * self._clock(gpu, 0.0)[0] ** 3
            gpu.temperature = m.ambient + gpu.resistance * duty_power
        self.domain = Domain(
            tuple(
                GpuBounds(
                    g.name,
                    g.replica,
                    "node0",
                    m.start_w,
                    m.minimum_w,
                    m.maximum_w,
                    m.ceiling_w,
                    m.start_clock,
                    m.max_clock,
                )
                for g in self.gpus.values()
            ),
            budget_w=m.budget_w,
            lost_draw_w=m.lost_draw_w,
        )

    # ---- physics ----------------------------------------------------------------------------------------------

    def _clock(self, gpu: Gpu, temperature: float) -> tuple[float, frozenset[Reason]]:
        m, reasons = self.machine, set[Reason]()
        powered = math.cbrt(max(0.0, gpu.acting_limit_w - m.idle_power) / (m.load * gpu.dynamic_power))
        fraction = 1.0 if gpu.acting_locked is None else min(1.0, gpu.acting_locked / m.max_clock)
        if powered < fraction:
            fraction = powered
            reasons.add("power_cap")
        if temperature > m.t_max:
            fraction *= max(0.0, 1 - m.slope * (temperature - m.t_max))
            reasons.add("sw_thermal")
        if temperature >= m.t_slow:
            fraction *= 0.5
            reasons.add("hw_thermal")
        if gpu.brake < 1:
            fraction *= gpu.brake
            reasons.add("power_brake")
        return max(fraction, 210 / m.max_clock), frozenset(reasons)

    def compute_s(self, replica: int, samples: int | None = None) -> float:
        """Compute time of one step of a replica at the clocks of now, seconds."""
        m, names = self.machine, self.live[replica]
        flops = sum(b.flops * b.largest_share(self.family, m.degree) for b in m.blocks)
        seconds = 0.0
        for block in m.blocks:
            assert block.space is not None
            layout = self.family.layout(block.space, len(names))
            shares = [len(layout.owned[index]) / layout.count for index in layout.indices]
            slowest = max(s / self.gpus[n].clock for s, n in zip(shares, names, strict=True))
            seconds += block.flops * slowest / flops
        equal = m.batch / m.replicas
        count = self.samples[replica] if samples is None else samples
        return m.full_step_s * ((1 - m.serial) * seconds + m.serial) * count / equal

    def _advance(self) -> None:
        m = self.machine
        parts = max(1, math.ceil(m.interval_s / (m.time_constant / 50)))
        fading = math.exp(-m.interval_s / parts / m.time_constant)
        energy = dict.fromkeys(self.gpus, 0.0)
        for _ in range(parts):
            for gpu in self.gpus.values():
                gpu.clock, gpu.reasons = self._clock(gpu, gpu.temperature)
            compute = {r: self.compute_s(r) for r, names in self.live.items() if names}
            step = max(compute.values())
            working = {name: compute[r] / step for r, names in self.live.items() for name in names}
            for name, gpu in self.gpus.items():
                power = m.idle_power + working.get(name, 0.0) * m.load * gpu.dynamic_power * gpu.clock**3
                target = m.ambient + gpu.resistance * power
                gpu.temperature = target + (gpu.temperature - target) * fading
                energy[name] += power / parts
        for name, gpu in self.gpus.items():
            gpu.power_w = energy[name]

    # ---- what the loop sees and does --------------------------------------------------------------------------

    def interval(self) -> Measurement:
        """One interval passes; what was measured in it."""
        m = self.machine
        self._advance()
        self.now_s += m.interval_s
        compute = {r: self.compute_s(r) for r, names in self.live.items() if names}
        self.records.append(
            Record(
                self.now_s,
                {name: gpu.limit_w for name, gpu in self.gpus.items()},
                {name: gpu.temperature for name, gpu in self.gpus.items()},
                {name: gpu.clock for name, gpu in self.gpus.items()},
                compute,
                {r: seconds / self.samples[r] for r, seconds in compute.items()},
                max(compute.values()),
                sum(gpu.power_w for gpu in self.gpus.values()),
            )
        )
        for gpu in self.gpus.values():  # what was written before acts from now on
            gpu.acting_limit_w, gpu.acting_locked = gpu.limit_w, gpu.locked
        measurement = self.measurement({r: s * max(0.5, 1 + self._gauss(m.noise)) for r, s in compute.items()})
        return measurement

    def measurement(self, compute_s: Mapping[int, float]) -> Measurement:
        m = self.machine
        readings = {
            gpu.name: GpuReading(
                gpu.limit_w,
                gpu.power_w * (1 + self._gauss(m.draw_noise)),
                float(round(m.t_max - gpu.temperature)),
                round(gpu.clock * m.max_clock),
                gpu.locked,
                gpu.reasons,
                gpu.errors,
            )
            for gpu in self.gpus.values()
            if gpu.readable
        }
        expected = {self.gpus[name].replica: name for name in self.expected}
        live = {r: (*names, expected[r]) if r in expected else names for r, names in self.live.items()}
        planned = {r: relative_compute_time(self.family, m.blocks, len(names)) for r, names in live.items() if names}
        return Measurement(self.now_s, readings, live, compute_s, dict(self.samples), {}, planned)

    def announce(self, name: str) -> None:
        """A GPU will come back: who decides is told first."""
        self.gpus[name].readable = True
        self.expected.add(name)

    def obey(self, decision: Decision) -> None:
        """Write what the loop says, one by one; the sum is looked at after every write."""
        for write in decision.writes:
            gpu = self.gpus[write.gpu]
            assert abs(gpu.limit_w - write.before_w) < 0.001 or not gpu.readable
            if gpu.refuses:
                continue
            gpu.limit_w = write.after_w
            top = self.domain.by_gpu[write.gpu].top_w
            assert self.machine.minimum_w <= gpu.limit_w <= max(top, self.machine.start_w), f"{write} passes {top} W"
            self.records[-1].writes += 1
            before = write.before_w > write.after_w
            assert self.committed_w() <= self.domain.total_w + 1e-6 or before, f"{write} leaves {self.committed_w()} W"
        assert self.committed_w() <= self.domain.total_w + 1e-6 or any(gpu.refuses for gpu in self.gpus.values())
        for name, clock in decision.clocks_mhz.items():
            if self.gpus[name].locked != clock and not self.gpus[name].stuck:
                self.gpus[name].locked = clock
                self.records[-1].writes += 1

    def committed_w(self) -> float:
        """The limits of those that work and the draw of those that do not."""
        working = {name for names in self.live.values() for name in names} | self.expected
        return sum(gpu.limit_w if name in working else gpu.power_w for name, gpu in self.gpus.items())

    def lose(self, name: str, readable: bool = True) -> None:
        """A GPU works no longer."""
        self.live = {r: tuple(n for n in names if n != name) for r, names in self.live.items()}
        self.gpus[name].readable = readable

    def give_back(self, name: str) -> None:
        """A GPU works again."""
        gpu = self.gpus[name]
        gpu.readable = True
        self.expected.discard(name)
        self.live[gpu.replica] = tuple(sorted({*self.live[gpu.replica], name}))

    def _gauss(self, deviation: float) -> float:
        return self.random.gauss(0, deviation) if deviation else 0.0
