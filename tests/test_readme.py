"""The README is true: links lead somewhere, its table is the committed one, its options exist."""

import re
import shlex
from pathlib import Path

import pytest
import tyro

from grid import PRESETS, VARIANTS
from training.config import TrainConfig, settled

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)", TEXT)
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_named_files_exist():
    layout = TEXT.split("## What is where")[1].split("##")[0]
    names = re.findall(r"`([\w/]+(?:\.py|/))`", layout)
    growth = {path.name for path in (ROOT / "growth").glob("*.py")}
    assert names and [n for n in names if not (ROOT / n).exists() and n not in growth] == []


def test_table_is_the_committed_one():
    shown = TEXT.split("<!-- table: results/tiny-main/table.md -->")[1].split("![")[0]
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    committed = (ROOT / "results/tiny-main/table.md").read_text().splitlines()
    assert len(lines) >= 10 and [line for line in lines if line not in committed] == []


def test_presets_and_variants_exist():
    for name in re.findall(r"--preset ([\w-]+)", TEXT):
        assert name in PRESETS
    for names in re.findall(r"--only (\S+)", TEXT):
        assert {name.split("@")[0] for name in names.split(",")} <= VARIANTS.keys()
    for preset in PRESETS:
        assert f"`{preset}`" in TEXT


@pytest.mark.parametrize("steps", [40, 400, 5000])
def test_recipe_by_hand_allows_other_step_counts(steps):
    commands = re.findall(r"^python train.py ((?:.*\\\n)*.*)$", TEXT, re.MULTILINE)
    assert len(commands) >= 2
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))
        words[words.index("--steps") + 1] = str(steps)
        cfg = settled(tyro.cli(TrainConfig, args=words))
        assert "--warmup-steps" in words or cfg.warmup_steps == min(100, steps // 10)


def test_every_pinned_package_has_its_reason():
    reasons = TEXT.split("## Dependencies")[1]
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            assert line.split("==")[0] in reasons, line
