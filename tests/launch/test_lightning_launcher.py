"""The launcher under a Trainer: what runs where, and what comes back."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ntp.launch import RanksFailedError
from tests.launch.lightning_script import Module, trainer
from tests.launch.scripts import run

ROOT = Path(__file__).parents[2]
ENV = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


@pytest.mark.slow
def test_script_fits_then_tests_in_the_ranks_and_the_supervisor_does_neither(tmp_path: Path) -> None:
    done = run("-m", "tests.launch.lightning_script", tmp_path, "pass", cwd=ROOT, env=ENV)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]
    assert not list(tmp_path.glob("exception-*")) and not list(tmp_path.glob("on_exception*"))
    # SystemExit passes through Lightning's handlers; its callbacks must not run in the supervisor.
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_exception_runs_callbacks_in_the_ranks_only_and_is_printed_once(tmp_path: Path) -> None:
    done = run("-m", "tests.launch.lightning_script", tmp_path, "fail", cwd=ROOT, env=ENV)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: no second step") == 1, done.stderr
    assert "(raised by all 2 ranks)" in done.stderr
    assert sorted(path.name for path in tmp_path.glob("exception-*")) == ["exception-0", "exception-1"]
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert saved["global_step"] == 1  # the ranks' weights, not the supervisor's untrained ones


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with")  # forked ranks inherit the filters
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.chaos), "fork"])
def test_weights_metrics_and_results_come_back_to_the_caller(method: Any, tmp_path: Path) -> None:
    module, job = Module(), trainer(tmp_path, method)
    before = module.layer.weight.detach().clone()
    job.fit(module)
    # Two steps of SGD on a sum over 2 rows of ones: each adds -0.1 * 2 to a weight.
    torch.testing.assert_close(module.layer.weight.detach(), before - 0.4)
    assert job.state.finished and "loss" in job.callback_metrics
    assert job.checkpoint_callback is not None
    assert Path(job.checkpoint_callback.best_model_path).exists()  # type: ignore[attr-defined]
    (results,) = job.test(module, verbose=False)
    expected = 2 * (module.layer.weight.sum() + module.layer.bias.sum()).item()
    assert results["test_loss"] == pytest.approx(expected, rel=1e-5)  # float32, one layer
    with pytest.raises(NotImplementedError, match="Make a new Trainer"):
        job.fit(module)


@pytest.mark.slow
def test_exception_in_spawned_ranks_reaches_the_caller(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="no second step"):
        trainer(tmp_path, "spawn").fit(Module(fail=True))
    assert sorted(path.name for path in tmp_path.glob("exception-*")) == ["exception-0", "exception-1"]


def test_model_that_cannot_be_pickled_is_named_before_anything_starts(tmp_path: Path) -> None:
    module = Module()
    module.activation = lambda x: x  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r'activation \(function: .*strategy="ntp"'):
        trainer(tmp_path, "spawn").fit(module)


def test_ranks_of_another_launcher_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_ERROR_FILE": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="TorchElasticEnvironment.*Start the script once"):
        trainer(tmp_path, "popen").fit(Module())
