"""`evenly verify`: what it prints and what it exits with."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from evenly.cli import main

EXAMPLES = Path(__file__).parent.parent / "examples"


def evenly_verify(*words: str) -> Result:
    return CliRunner().invoke(main, ["verify", *words])


def test_the_repeated_samples_of_a_plain_torch_program_are_named() -> None:
    done = evenly_verify(str(EXAMPLES / "foreign_ddp.py"), "-n", "1,2", "--steps", "12")
    assert done.exit_code == 1, done.output
    said = " ".join(done.stdout.split())
    assert "samples differs at step 12: samples repeated" in said
    assert "step 12 has 118 samples, that of the reference 117; used a second time: 515." in said
    assert "The effect: the gradient of" in said
    assert "Not the same numbers on 2 as on 1 process." in said


HEALTHY = """
import sys, torch, evenly
assert sys.argv[1:] == ["--width", "8"], sys.argv
net = torch.nn.Linear(8, 1)
with torch.no_grad():
    net.weight.fill_(0.5), net.bias.fill_(0.0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
trace = evenly.trace(net, optimizer)
while not trace.done:
    net(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_module_with_arguments_that_keeps_its_bits_gives_exit_code_0_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(HEALTHY)
    words = ["-m", "program", "-n", "1,2", "--steps", "3", "--promise", "bits", "--json"]
    done = evenly_verify(*words, "--", "--width", "8")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["promise"], found["holds"], found["reference"]) == ("bits", True, 1)
    (count,) = found["counts"]
    assert (count["processes"], count["holds"], count["steps"]) == (2, True, 3)
    assert count["quantities"]["gradient"]["status"] == "identical"
    assert count["quantities"]["samples"]["status"] == "absent"
    assert found["verdict"] == "The same bits on 2 as on 1 process."


def test_a_program_that_fails_records_nothing_or_takes_too_long_gives_exit_code_2(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise OSError('no data here')")
    done = evenly_verify(str(program))
    assert done.exit_code == 2
    assert "on 1 process the program failed (exit code 1)" in done.stderr
    assert "OSError: no data here" in done.stderr
    program.write_text("print('trained')")
    done = evenly_verify(str(program), "--json")
    assert done.exit_code == 2
    assert "evenly.trace(model, optimizer)" in json.loads(done.stdout)["error"]
    program.write_text("import time; time.sleep(100)")
    began = time.monotonic()
    done = evenly_verify(str(program), "--timeout", "6")
    assert done.exit_code == 2
    assert "did not end within 6 s" in done.stderr
    assert time.monotonic() - began < 30


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("")
    for words, said in (
        (["-n", "two"], "is not a list such as 1,2,3"),
        (["-n", "2"], "at least two process counts"),
        (["-n", "1,0"], "at least two process counts"),
        (["--steps", "0"], "give 1 or more"),
        (["--timeout", "0"], "a number of seconds"),
        (["--promise", "luck"], "is not one of"),
    ):
        done = evenly_verify(str(program), *words)
        assert done.exit_code == 2
        assert said in done.stderr
    assert "there is no script" in evenly_verify("nowhere.py").stderr
