"""What the guide shows of clusters is what the example prints, and fits those who read it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "clusters.py"
PAGE = ROOT / "docs" / "guide" / "clusters.md"
SCHEMA = json.loads((Path(__file__).parent / "schemas" / "kubeflow-trainer.json").read_text())
OTHERS = ["--nodes", "2", "--least-nodes", "1", "--devices", "4", "--script", "fit.py --fast"]


def printed(form: str, *options: str) -> str:
    return subprocess.run(  # noqa: S603 - our own example
        [sys.executable, EXAMPLE, form, *options], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize(("form", "language"), [("slurm", "bash"), ("kubernetes", "yaml")])
def test_the_guide_shows_what_the_example_prints(form: str, language: str) -> None:
    shown = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert printed(form) in shown


@pytest.mark.parametrize("options", [[], OTHERS])
def test_a_manifest_fits_the_schema(options: list[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    runtime, job = yaml.safe_load_all(printed("kubernetes", *options))
    for resource in (runtime, job):
        jsonschema.validate(resource, SCHEMA)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    for broken in ({"numNodes": "2"}, {"nodes": 2}, {"resourcesPerNode": {"limits": {"cpu": "x"}}}):
        job["spec"]["trainer"] |= broken
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(job, SCHEMA)
        for name in broken:
            del job["spec"]["trainer"][name]


def command_of(form: str, text: str) -> list[str]:
    if form == "slurm":
        words = text.splitlines()[-1].replace('"', "").split()
    else:
        job: Any = list(yaml.safe_load_all(text))[1]
        words = job["spec"]["trainer"]["command"]
    return list(words[words.index("torchrun") + 1 :])


@pytest.mark.parametrize("form", ["slurm", "kubernetes"])
def test_both_start_the_same_torchrun_which_knows_its_options(form: str) -> None:
    args = parse_args(command_of(form, printed(form, *OTHERS)))
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("1:2", "4", 3)
    assert args.rdzv_endpoint.endswith(":29400")
    assert [args.training_script, *args.training_script_args] == ["fit.py", "--fast"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_script_is_one_of_bash() -> None:
    text = printed("slurm", *OTHERS)
    subprocess.run(["bash", "-n"], input=text, check=True, text=True)  # noqa: S607 - see above
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert (asked["nodes"], asked["gpus-per-node"], asked["ntasks-per-node"]) == ("2", "4", "1")
