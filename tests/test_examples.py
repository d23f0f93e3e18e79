"""Every example runs, as a user would run it, and stays short."""

import os
from pathlib import Path

import fresh
import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EXPECTED = {
    "prenorm_block": "1.0.tap, 1.0.norm, 1.0.qkv                    NormLinear  rule norm_linear (joint)",
    "custom_kernel": "main::softcap_fwd(Tensor x, float cap) -> Tensor",
    "custom_op": "Swish",
    "custom_rule": "the width 9 is odd",
    "hf_qwen3_moe": "equal the stock model's",
    "moe_layer": "learnt",
    "offload_any_model": "offload   58.0 MiB leave",
    "pretrain": "step 6 loss",
}


def test_there_are_examples() -> None:
    assert EXPECTED.keys() <= {example.stem for example in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    ran = fresh.run(str(example), env=env, strict=True)
    assert ran.returncode == 0, ran.stderr
    assert EXPECTED.get(example.stem, "") in ran.stdout
    if example.stem == "quickstart":
        losses = [float(line.split()[-1]) for line in ran.stdout.splitlines() if "loss" in line]
        assert len(losses) == 2 and losses[1] < losses[0]


@pytest.mark.parametrize(
    "name, limit",
    [
        ("custom_kernel", 95),
        ("custom_op", 60),
        ("custom_rule", 60),
        ("hf_qwen3_moe", 90),
        ("moe_layer", 80),
        ("offload_any_model", 40),
        ("pretrain", 370),
        ("quickstart", 41),
    ],
)
def test_an_example_is_short(name: str, limit: int) -> None:
    lines = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < limit
