"""What is written keeps the budget, also when the driver answers late."""

from __future__ import annotations

from pathlib import Path

from lightning_ntp.power.control import Decision, Domain, GpuBounds, ordered
from lightning_ntp.power.loop.writing import Writer
from tests.nvml.mock import MockNvml
from tests.power.standing import wait_until

CALL = "nvmlDeviceSetPowerManagementLimit"


def test_a_raise_that_comes_late_is_counted_until_it_is_known(
    nvml: MockNvml, directory: Path, uuids: list[str]
) -> None:
    """A driver that hangs may still do it: nobody else gets that power meanwhile."""
    for gpu in range(4):
        nvml.set(gpu, power_limit=300_000, power_min_limit=100_000, power_max_limit=700_000)
    domain = Domain(tuple(GpuBounds(gpu, 0, "node", 300, 100, 700, 700) for gpu in uuids))
    writer = Writer("job", None, True, None)

    def present() -> dict[str, float]:
        return {gpu: nvml.get("power_limit", n) / 1000 for n, gpu in enumerate(uuids[:3])}

    def decide(*limits: float) -> Decision:
        wanted = dict(zip(uuids, limits, strict=False))
        return Decision(wanted, {}, ordered(present(), wanted, 1200, 80), 80, {}, {}, ())

    try:
        writer.open(uuids)
        with nvml.block(CALL, gpu=2):
            writer.write(decide(300, 300, 500), domain, present(), lambda: True)
            writer.write(decide(500, 300, 300), domain, present(), lambda: True)
            nvml.release()
        wait_until(lambda: nvml.history()[-1].gpu == 2)
        assert sum(present().values()) <= 1200 - 80, nvml.history()
        writer.write(decide(500, 300, 300), domain, present(), lambda: True)
        writer.write(decide(500, 300, 300), domain, present(), lambda: True)
        assert list(present().values()) == [500, 300, 300], "it is over once the driver answers"
    finally:
        nvml.release()
        writer.close()
