"""What the files that keep a watcher running call is a command that there is."""

from __future__ import annotations

import shlex

import click
import pytest
import yaml

from mcore_rlhf.cli.app import app
from tests.helpers.killed import PROJECT

LAUNCH = PROJECT / "tools" / "launch"


def words(file: str) -> list[str]:
    text = (LAUNCH / file).read_text()
    if file.endswith(".yaml"):
        (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
        return list(map(str, container["command"]))
    start = "ExecStart=" if file.endswith(".service") else "exec srun "
    (line,) = [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]
    return shlex.split(line.replace('"$@"', "ROOT --to hf --into OUT").replace("${SLURM_CPUS_PER_TASK:-4}", "4"))


@pytest.mark.parametrize("file", ["watch.service", "watch.sbatch", "watch.yaml"])
def test_it_is_a_command(file: str) -> None:
    program, command, *arguments = words(file)
    assert (program, command) == ("mcore-rlhf", "watch")
    watch = app.get_command(click.Context(app), command)
    assert watch is not None
    given = watch.make_context(command, arguments).params
    assert given["to"] == "hf"
    assert given["into"]
