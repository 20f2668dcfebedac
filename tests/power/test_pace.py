import random

import pytest

from lightning_ntp.power.control.pace import NoiseMeter, PaceFilter


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03])
def test_noise_is_learned_from_differences(noise: float) -> None:
    rng, meter = random.Random(1), NoiseMeter()
    for _ in range(300):
        meter.hear(0.7 + rng.gauss(0, noise))
    assert meter.deviation == pytest.approx(noise, rel=0.5)
    assert meter.level == pytest.approx(0.7, abs=noise / 2)


def test_the_error_that_the_filter_believes_in_is_the_one_it_makes() -> None:
    errors, believed = [], []
    for seed in range(60):
        rng, found = random.Random(seed), PaceFilter(0.1, 0.06)
        truth = 0.1 + rng.gauss(0, 0.06)
        for _ in range(25):
            found.update(truth + rng.gauss(0, 0.03))
        errors.append(found.value - truth)
        believed.append(found.error)
    actual = (sum(e * e for e in errors) / len(errors)) ** 0.5
    assert actual == pytest.approx(sum(believed) / len(believed), rel=0.4)


def test_what_was_learned_before_a_move_stays_learned() -> None:
    found = PaceFilter(0.2, 0.06)
    for _ in range(10):
        found.update(0.25)
    found.move(0.25)
    assert found.value == pytest.approx(0, abs=0.01)


def test_a_load_that_jumps_is_believed_soon() -> None:
    rng, found = random.Random(2), PaceFilter(0.0, 0.06)
    for _ in range(200):
        found.update(rng.gauss(0, 0.01))
    for _ in range(15):
        found.update(0.05 + rng.gauss(0, 0.01))
    assert found.value == pytest.approx(0.05, abs=0.01)


def test_an_outlier_is_not() -> None:
    rng, found = random.Random(3), PaceFilter(0.0, 0.06)
    for _ in range(100):
        found.update(rng.gauss(0, 0.01))
    found.update(0.3)
    assert abs(found.value) < 0.02
