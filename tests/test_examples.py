"""The GPT example: the model is right, it learns, and the script says so in a summary."""

import math
import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from examples.gpt.data import CHARACTERS, VOCAB_SIZE, PythonDocs, Windows, decode, encode, unigram_entropy
from examples.gpt.model import GPT, Attention, LanguageModel, rotary_table, rotate

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "examples/gpt/train.py"


def train(*arguments: str, output: Path, timeout: float = 100) -> str:
    done = subprocess.run(
        [sys.executable, str(TRAIN), "--accelerator", "cpu", "--output", str(output), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=output,
        env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_text_survives_its_tokens_and_no_degree_divides_the_vocabulary() -> None:
    text = "def f(x):\n    return ~x  # {tilde}"
    assert decode(encode(text)) == text
    assert encode("\N{SNOWMAN}").tolist() == [VOCAB_SIZE - 1]
    assert all(VOCAB_SIZE % degree for degree in range(2, 73))
    assert len(set(CHARACTERS)) == VOCAB_SIZE == LanguageModel().hparams["vocab_size"]


def test_windows_hold_the_tokens_and_those_that_follow() -> None:
    windows = Windows(torch.arange(10), seq_len=4, stride=2)
    assert [windows[index][0].tolist() for index in range(len(windows))] == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
    assert all(torch.equal(tokens + 1, following) for tokens, following in (windows[i] for i in range(len(windows))))


def test_training_and_validation_text_do_not_overlap() -> None:
    data = PythonDocs()
    assert len(data.train_tokens) > 8 * len(data.val_tokens) > 100_000
    assert data.train_tokens.data_ptr() + 8 * len(data.train_tokens) == data.val_tokens.data_ptr()


def test_unigram_entropy_of_equally_common_tokens_is_the_logarithm_of_their_number() -> None:
    # rel: the sum of eight rounded terms
    assert unigram_entropy(torch.arange(8).repeat(5)) == pytest.approx(math.log(8), rel=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_does_not_see_the_future(tied: bool) -> None:
    torch.manual_seed(0)
    model = GPT(VOCAB_SIZE, dim=24, hidden=50, tie_embeddings=tied).double()
    tokens = torch.randint(VOCAB_SIZE, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = torch.randint(VOCAB_SIZE, (2, 5))
    # float64 rounding only: the same sums over the same numbers
    torch.testing.assert_close(model(tokens)[:, :7], model(changed)[:, :7], rtol=1e-12, atol=1e-12)
    assert (model.lm_head.weight is model.tok_embeddings.weight) == tied


def test_the_parts_of_the_attention_that_indices_hold_add_up_to_the_whole() -> None:
    """Query heads 0-1, 2-3, 4 and 5 at TP degree 4, each index with the key/value head that its heads need."""
    torch.manual_seed(0)
    whole = Attention(dim=24, num_heads=6, num_kv_heads=3).double()
    x, (cos, sin) = torch.randn(2, 5, 24, dtype=torch.float64), rotary_table(5, 4)
    total = torch.zeros_like(x)
    for heads, kv_head in (([0, 1], 0), ([2, 3], 1), ([4], 2), ([5], 2)):
        part = Attention(dim=24, num_heads=6, num_kv_heads=3).double()
        q_rows = torch.tensor([head * 4 + feature for head in heads for feature in range(4)])
        kv_rows = torch.arange(kv_head * 4, kv_head * 4 + 4)
        for name, weight in {
            "q_proj": whole.q_proj.weight[q_rows],
            "k_proj": whole.k_proj.weight[kv_rows],
            "v_proj": whole.v_proj.weight[kv_rows],
            "o_proj": whole.o_proj.weight[:, q_rows],
        }.items():
            getattr(part, name).weight = nn.Parameter(weight.detach())
        total += part(x, cos, sin)
    # float64 rounding only
    torch.testing.assert_close(total, whole(x, cos, sin), rtol=1e-12, atol=1e-12)


def test_rotation_depends_on_the_distance_between_two_positions_only() -> None:
    cos, sin = rotary_table(20, 8)
    q, k = torch.randn(8).double(), torch.randn(8).double()
    products = [torch.dot(rotate(q, cos[t + 3], sin[t + 3]), rotate(k, cos[t], sin[t])).item() for t in range(15)]
    # The table is float32: its rounding (6e-8) times the size of the products.
    assert products == pytest.approx([products[0]] * 15, abs=1e-5)


def test_the_plan_of_the_model_names_modules_it_has() -> None:
    model = LanguageModel()
    names = [name for name, _ in model.named_modules()]
    for pattern in model.configure_tp_plan():
        assert any(fnmatchcase(name, pattern) for name in names), pattern


@pytest.mark.parametrize(("sizes", "named"), [({"dim": 20}, "dim=20"), ({"num_kv_heads": 4}, "num_kv_heads=4")])
def test_sizes_that_do_not_fit_are_refused_by_name(sizes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LanguageModel(**sizes)


def test_the_script_is_short() -> None:
    assert len(TRAIN.read_text().splitlines()) <= 80


def test_it_learns_more_than_letter_frequencies(tmp_path: Path) -> None:
    pl.seed_everything(1, verbose=False)
    data, model = (
        PythonDocs(seq_len=32, batch_size=16),
        LanguageModel(dim=48, num_layers=1, hidden=120, warmup_steps=10),
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=120,
        limit_val_batches=10,
        check_val_every_n_epoch=None,
        val_check_interval=120,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, data)
    # A smaller model for fewer steps than the demo's, which ends far lower.
    assert trainer.callback_metrics["val_loss"] < unigram_entropy(data.val_tokens) - 0.4


SUMMARY = ("degrees", "steps", "loss at start", "loss at end", "unigram entropy", "checkpoint", "a sample")


def test_the_script_runs_in_one_process_and_ends_with_a_summary(tmp_path: Path) -> None:
    printed = train("--strategy", "auto", "--devices", "1", "--steps", "4", "--seq-len", "32", output=tmp_path)
    assert all(name in printed for name in SUMMARY), printed
    assert re.search(r"degrees +\(1,\)", printed)
    restored = LanguageModel.load_from_checkpoint(tmp_path / "gpt.ckpt")
    assert restored.model.max_seq_len == 32


LOST_AND_BACK = r"""
degrees +\(2, 1\) -> \(1, 1\) -> \(2, 1\): the TP degree of each replica
slot 1 lost +in step 20: degrees \(2, 1\) -> \(1, 1\)
  moved +[\d,]+ KiB of weights and moments, from slot 2
  took +\d+ ms \((detect \d+ ms, )?agree \d+ ms, rebuild \d+ ms, reshard \d+ ms\)
  went on +step 20 was begun again and done \d+ ms after the death
  loss +[\d.]+ in the 10 steps before, [\d.]+ in step 20, [\d.]+ in the \d+ steps? after
slot 1 back +in step (?P<step>\d+): degrees \(1, 1\) -> \(2, 1\)
  moved +[\d,]+ KiB of weights and moments, from slot 0
  took +\d+ ms \(wait \d+ ms, switch \d+ ms\); beside the training \d+ ms \(prepare \d+ ms, travel \d+ ms\)
  went on +step (?P=step) was finished by all together, none was done again
  loss +[\d.]+ in the 10 steps before, [\d.]+ in step (?P=step), ([\d.]+ in the \d+ steps?|nothing) after
"""


@pytest.mark.parametrize("fault", [True, pytest.param(False, marks=pytest.mark.chaos)])
def test_the_script_loses_a_rank_gets_it_back_and_saves_the_whole_model(fault: bool, tmp_path: Path) -> None:
    more = ["--steps", "60", "--restart-after", "0.1"] if fault else ["--steps", "4", "--no-fault"]
    printed = train("--degrees", "2", "1", "--seq-len", "32", *more, output=tmp_path)
    assert all(len(re.findall(rf"^ *-* ?{name}", printed, flags=re.MULTILINE)) == 1 for name in SUMMARY), printed
    assert bool(re.search(LOST_AND_BACK, printed)) == ("lost" in printed) == fault, printed
    restored = LanguageModel.load_from_checkpoint(tmp_path / "gpt.ckpt")
    assert {n: p.shape for n, p in restored.named_parameters()} == {
        n: p.shape for n, p in LanguageModel(max_seq_len=32).named_parameters()
    }
