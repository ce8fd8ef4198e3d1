"""The lines of the page on object storage, run in their order against a server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.manager.run.steps import committed
from mcore_rlhf.storage.objects import open_url
from tests.contract.test_store import GOLDENS
from tests.helpers.object_store import BUCKET, S3

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "object-storage.md").read_text(encoding="utf-8")


def test_the_page_runs(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDENS / "megatron" / "tp1_bf16_do", tmp_path / "run7" / "global_step_2" / "actor")
    adopt(tmp_path / "run7" / "global_step_2")
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for line in block.splitlines() if line.startswith("mcore-rlhf ")]
    assert len(lines) >= 9
    s3.upload(tmp_path / "run7", "run7")
    for line in lines:
        words = shlex.split(line.replace("s3://checkpoints", f"s3://{BUCKET}").replace("/scratch", str(tmp_path)))
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, f"{line}\n{done.output}"
    for option, said in (
        ("nonsense=1", "obstore cannot open such a store"),
        ("nonsense", "should be KEY=VALUE, found 'nonsense'"),
    ):
        refused = CliRunner().invoke(app, ["steps", f"s3://{BUCKET}/tp2", "--store-option", option])
        assert refused.exit_code == 2, refused.output
        assert said in refused.output


def test_the_pages_training_is_mirrored_and_goes_on(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = compile(block.replace("s3://checkpoints", f"s3://{BUCKET}"), "train.py", "exec")
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["still_waiting"] == []
    assert [step.step for step in committed(open_url(f"s3://{BUCKET}/grpo-7b"))] == [10, 20, 30]
    told = json.loads(CliRunner().invoke(app, ["steps", "checkpoints", "--json"]).stdout)
    assert [(step["step"], step["mirror"]) for step in told] == [(20, "mirrored"), (30, "mirrored")]
    table = CliRunner().invoke(app, ["steps", "checkpoints"])
    assert "grpo-7b: 3 steps" in table.stdout
    shutil.rmtree("checkpoints")
    exec(code, found)
    assert found["resumed"].step == 30


def test_a_job_in_yaml_takes_urls_and_options_of_stores(s3: S3, tmp_path: Path) -> None:
    s3.upload(GOLDENS / "megatron" / "tp1_bf16_do", "source")
    (tmp_path / "job.yaml").write_text(
        f"source: s3://{BUCKET}/source\ntarget: s3://{BUCKET}/target\nto: hf\n"
        "store_option: [region=eu-west-1]\nconnections: 3\nlayout: plain\n"
    )
    done = CliRunner().invoke(app, ["convert", "--config", str(tmp_path / "job.yaml"), "--verify"])
    assert done.exit_code == 0, done.output
    put = [request.key for request in s3.requests if request.method == "PUT"]
    assert "target/model.safetensors" in put
    words = ["convert", "--config", str(tmp_path / "job.yaml"), "--overwrite", "--verify", "--dtype", "float32"]
    again = CliRunner().invoke(app, [*words, "--layout", "prefix", "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["proved"]
