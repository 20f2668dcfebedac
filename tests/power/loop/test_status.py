"""What `lightning-ntp status` says of power and pace."""

from __future__ import annotations

from lightning_ntp.commands.status import Status, describe


def test_replicas_have_a_line_each_and_events_are_sentences() -> None:
    full = {"watts": 900.4, "limit_w": 1800.0, "start_w": 900.0, "compute_s": 0.4161, "samples": 21}
    none = {"watts": None, "limit_w": None, "start_w": None, "compute_s": None, "samples": None}
    event = {"time": "2026-01-01T10:00:00+00:00", "event": "power", "slot": None, "step": 7, "text": "replica 0: more"}
    said = describe(Status("job", 1, [2, 1], [], "", [event], {"0": full, "1": none}))
    assert (
        "replica 0: draws 900 W, limits of 1800 W (900 W at start), computes 416 ms per micro-batch, of 21 samples"
        in said
    )
    assert "replica 1: not measured yet" in said
    assert said[-1].endswith("step 7 power: replica 0: more")
