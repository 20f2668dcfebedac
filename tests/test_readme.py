"""The README can be run: every command and every block of code in it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [code.strip() for language, code in BLOCKS if language == "bash"]

# The commands as written, in this environment, on little work: the numbers of steps and tests are the reader's choice.
SMALL = {
    "make demo": ["DEMO_ARGUMENTS=--steps 6 --degrees 2 1"],
    "make test": ["TESTS=tests/plan/test_layout.py"],
}


def run(command: list[str], cwd: Path, timeout: float = 110) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env={**os.environ, "COLUMNS": "100"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert [language for language, _ in BLOCKS if language not in ("python", "bash")] == []
    assert set(COMMANDS) == set(SMALL)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: Path) -> None:
    bin_ = Path(sys.executable).parent
    # this interpreter's environment in place of .venv, which the test run may not have made
    arguments = [*command.split(), f"BIN={bin_}", "STAMP=", f"OUTPUT={tmp_path}", *SMALL[command]]
    output = run(arguments, ROOT)
    if command == "make test":
        assert "passed" in output
    else:
        assert "unigram entropy" in output and re.search(r"in step 2: degrees \(2, 1\) -> \(1, 1\)", output)


def test_the_example_trains_on_four_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        PYTHON[0] + "\n    print(f'degrees {trainer.strategy.degrees} steps {trainer.global_step}\\n', end='')\n"
    )
    output = run([sys.executable, str(script)], tmp_path)
    assert output.count("degrees (2, 2) steps 8") == 4


def test_the_other_blocks_run(tmp_path: Path) -> None:
    for code in PYTHON[1:]:
        run([sys.executable, "-c", code], tmp_path)


def test_what_it_says_of_the_global_batch_is_what_happens() -> None:
    assert "`batch_size` is per replica" in README
    # 64 samples in batches of 8 for each of 2 replicas: 4 steps an epoch, 8 in two; the example above counts them
    assert re.search(r"max_epochs=2.*\n.*randn\(64, 10\), batch_size=8", README)


def test_files_and_commands_that_are_named_exist() -> None:
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!http)([^)]+)\)", prose):
        assert (ROOT / target).exists(), target
    commands = set(re.findall(r"`lightning-ntp (\w+)", prose))
    assert commands == {"plan", "status", "drain", "restart", "relayout"}
    assert all((ROOT / f"lightning_ntp/commands/{command}.py").exists() for command in commands)
    config = yaml.safe_load((ROOT / "examples/gpt/config.yaml").read_text())
    assert config["trainer"]["strategy"]["class_path"] == "lightning_ntp.NTPStrategy"
    assert "python -m lightning_ntp fit --config examples/gpt/config.yaml" in README
