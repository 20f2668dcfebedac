"""Every error of NVML is in exactly one class."""

import pynvml
import pytest

from lightning_ntp.nvml.errors import _KINDS, CallError, Kind, kind_of, name_of

CODES = {
    name.removeprefix("NVML_ERROR_"): getattr(pynvml, name) for name in dir(pynvml) if name.startswith("NVML_ERROR_")
}


def test_every_error_of_pynvml_is_in_exactly_one_class() -> None:
    placed = [(name, code) for codes in _KINDS.values() for code, name in codes.items()]
    assert sorted(placed) == sorted(CODES.items())
    assert len({code for _, code in placed}) == len(placed)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NOT_SUPPORTED", Kind.UNSUPPORTED),
        ("FUNCTION_NOT_FOUND", Kind.UNSUPPORTED),
        ("ARGUMENT_VERSION_MISMATCH", Kind.UNSUPPORTED),
        ("DEPRECATED", Kind.UNSUPPORTED),
        ("NO_PERMISSION", Kind.PERMISSION),
        ("GPU_IS_LOST", Kind.LOST),
        ("GPU_NOT_FOUND", Kind.LOST),
        ("NOT_FOUND", Kind.LOST),
        ("RESET_REQUIRED", Kind.RESET),
        ("UNKNOWN", Kind.RETRY),
        ("TIMEOUT", Kind.RETRY),
        ("IN_USE", Kind.RETRY),
        ("LIBRARY_NOT_FOUND", Kind.DRIVER),
        ("DRIVER_NOT_LOADED", Kind.DRIVER),
        ("LIB_RM_VERSION_MISMATCH", Kind.DRIVER),
    ],
)
def test_classes_that_others_rely_on(name: str, kind: Kind) -> None:
    assert kind_of(CODES[name]) is kind


def test_an_error_that_a_newer_driver_has_invented_may_go_by() -> None:
    assert kind_of(4711) is Kind.RETRY
    assert name_of(4711) == "error 4711"


def test_an_error_names_call_and_code() -> None:
    assert str(CallError("nvmlDeviceGetName", 15)) == "nvmlDeviceGetName: GPU_IS_LOST (NVML error 15)"
