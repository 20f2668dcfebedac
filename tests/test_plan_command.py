"""``lightning-ntp plan``: what a loss would cost, before anything happens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_ntp import cli
from lightning_ntp.commands.plan import build_parser, report

ROOT = Path(__file__).parents[1]
SIZES = "--heads 6 --kv-heads 3 --hidden 96 --ffn 250 --vocab 97 --layers 2"
MODEL = "--model examples.gpt.model.LanguageModel"


def run(line: str) -> str:
    return report(build_parser().parse_args(line.split()))


def test_every_line_of_a_plan() -> None:
    # one layer, 4 heads of 8. A head is 4 x 256 elements of attention, a column of the feed-forward layer 96, a row of
    # the two vocabulary tables 64; an element 12 bytes. Index 3 holds 1 head, 4 columns and 4 rows: 12 + 4.5 + 3 KiB
    printed = run("--degrees 4 4 --lose 7 --heads 4 --hidden 32 --ffn 16 --vocab 16 --layers 1")
    assert printed.splitlines() == [
        "model: 6,752 parameters, 79.1 KiB with 2 optimizer states each; 8 slots, degrees (4, 4)",
        "",
        "slot 7 lost: degrees (4, 4) -> (4, 3)",
        "  moves 19.5 KiB from slot 3",
        # balanced: the first index gets the head and one more column and row each
        "    slot 3 -> slot 4: 15.8 KiB",
        "    slot 3 -> slot 5: 1.9 KiB",
        "    slot 3 -> slot 6: 1.9 KiB",
        "  replica 0: largest share of the model 26.1% -> 26.1%",
        "  replica 1: largest share of the model 26.1% -> 46.0%",
        "  slot 3: holds 20.6 KiB -> 20.6 KiB (+0 B), needs 19.5 KiB free while shards move",
        "  slot 4: holds 20.6 KiB -> 36.4 KiB (+15.8 KiB), needs 51.0 KiB free while shards move",
        "  slot 5: holds 20.6 KiB -> 22.5 KiB (+1.9 KiB), needs 11.2 KiB free while shards move",
        "  slot 6: holds 20.6 KiB -> 22.5 KiB (+1.9 KiB), needs 11.2 KiB free while shards move",
    ]


def test_a_model_by_its_sizes_costs_what_the_same_model_by_its_class_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for lose in ("--lose 5", "--lose 1 --lose 4 2", ""):
        by_sizes = run(f"--degrees 4 3 {lose} {SIZES}")
        assert by_sizes == run(f"--degrees 4 3 {lose} {MODEL}")
    assert run(f"--degrees 4 3 {SIZES} --tied") == run(f"--degrees 4 3 {MODEL} --model-arg tie_embeddings=True")
    assert run(f"--degrees 2 2 {SIZES} --dtype bfloat16 --moment-dtype float32") == run(
        f"--degrees 2 2 {MODEL} --dtype bfloat16 --moment-dtype float32"
    )


def test_several_losses_follow_each_other() -> None:
    printed = run(f"--degrees 4 4 --lose 5 --lose 2 4 {SIZES}")
    assert "slot 5 lost: degrees (4, 4) -> (4, 3)" in printed
    assert "slots 2, 4 lost: degrees (4, 3) -> (3, 2)" in printed


def test_a_loss_without_a_copy_ends_the_plan_with_the_reason() -> None:
    lines = run(f"--degrees 3 2 --lose 0 3 --lose 1 {SIZES}").splitlines()
    assert lines[-1].startswith("slots 0, 3 lost: end; ")
    assert "restart from the newest checkpoint (with redundancy='neighbor' it would go back" in lines[-1]
    lines = run(f"--degrees 3 --lose 0 1 {SIZES}").splitlines()
    assert lines[-1].endswith("restart from the newest checkpoint")  # slot 1 would have kept the copy of slot 0


def test_a_minimum_degree_drops_the_replica() -> None:
    printed = run(f"--degrees 4 3 --lose 4 --min-tensor-parallel-size 3 {SIZES}")
    assert "degrees (4, 3) -> (4, -); replica 1 is dropped (degree 2 is below min_tensor_parallel_size=3)" in printed
    assert "healthy slots 5, 6 leave" in printed
    assert "moves 0 B\n" in printed
    assert "-> gone" in printed


def test_without_slots_every_one_is_shown_in_a_line() -> None:
    lines = run(f"--degrees 4 3 {SIZES}").splitlines()[1:]
    assert [line.partition(" lost")[0] for line in lines] == [f"slot {slot}" for slot in range(7)]
    assert all(" moves " in line and "on a survivor" in line for line in lines)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"--degrees 4 3 --lose 7 {SIZES}", "slot 7 is not alive; live slots are [0, 1, 2, 3, 4, 5, 6]"),
        (f"--degrees 4 3 --lose -1 {SIZES}", "slot -1 is not alive"),
        (f"--degrees 4 0 --lose 1 {SIZES}", "element 1=0 is not an integer of at least 1"),
        (f"--degrees 4 x --lose 1 {SIZES}", "argument --degrees: invalid int value: 'x'"),
        (f"--lose 1 {SIZES}", "the following arguments are required: --degrees"),
        ("--degrees 2 2 --lose 1 --heads 4", "--hidden, --ffn, --vocab, --layers missing: give all sizes"),
        ("--degrees 2 2 --lose 1", "or --model CLASS"),
        (f"--degrees 8 --lose 1 {SIZES}", "tensor-parallel degree 8 is above the number of units, 6"),
        (f"--degrees 2 2 {SIZES} --kv-heads 4", "6 query heads cannot share 4 key/value heads evenly"),
        (f"--degrees 2 2 {SIZES} --hidden 95", "--hidden=95 is no multiple of --heads=6: give --head-dim"),
        (f"--degrees 2 2 {SIZES} --layers 0", "--layers=0 is below 1"),
        (f"--degrees 2 2 {SIZES} --moments -1", "--moments=-1 is below 0"),
        (f"--degrees 2 2 {SIZES} --dtype int8", "argument --dtype: invalid choice: 'int8'"),
        (f"--degrees 2 2 {SIZES} --model-arg dim=3", "--model-arg needs --model"),
        (f"--degrees 4 3 --min-tensor-parallel-size 4 {SIZES}", "--min-tensor-parallel-size=4 is above the starting"),
        (f"--degrees 4 3 --min-tensor-parallel-size 0 {SIZES}", "=0 is not an integer of at least 1"),
        (f"--degrees 2 2 {MODEL} --heads 4", "--model and --heads exclude each other"),
        ("--degrees 2 2 --model Model", "--model='Model' is no class path"),
        ("--degrees 2 2 --model nowhere.Model", "No module named 'nowhere'"),
        ("--degrees 2 2 --model examples.gpt.model.GPT", "examples.gpt.model has no LightningModule 'GPT'"),
        (f"--degrees 2 2 {MODEL} --model-arg dim", "--model-arg='dim' is not NAME=VALUE"),
        (f"--degrees 2 2 {MODEL} --model-arg width=3", "unexpected keyword argument 'width'; give --model-arg"),
        (f"--degrees 2 2 {MODEL} --model-arg dim=97", "dim=97 is no multiple of"),
        (f"--degrees 7 {MODEL}", "degree 7 is above"),
    ],
)
def test_bad_input_ends_with_one_line_that_says_why(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as done:
        cli.main(["plan", *line.split()])
    assert done.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_it_is_a_subcommand_beside_those_of_lightning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-ntp", "plan", "--degrees", "2", "2", "--lose", "3", *SIZES.split()])
    cli.main()
    assert "slot 3 lost: degrees (2, 2) -> (2, 1)" in capsys.readouterr().out
