"""Tensor and sequence parallelism on two ranks equal one process, and so do the loss of a sharded vocabulary, FSDP2
and DDP.

The laws stand in `tensor_ranks.py`, `vocab_ranks.py` and `replica_laws.py`.
"""

from __future__ import annotations

import pytest
import replica_laws
import tensor_ranks
import torch
import vocab_ranks
from spawned import Ranks

import fuseops as fo
from fuseops import distributed

LAWS = [
    (module.__name__, name)
    for module in (tensor_ranks, vocab_ranks, replica_laws)
    for name in vars(module)
    if name.startswith("law_")
]


@pytest.mark.parametrize(("module", "law"), LAWS, ids=[law for _, law in LAWS])
def test_law(ranks: Ranks, module: str, law: str) -> None:
    ranks.run(module, law)


def test_a_whole_model_with_split_halves_computes_and_loads_what_it_did() -> None:
    model = fo.Sequential(fo.ops.Linear(4, 12), fo.ops.SwiGLU(), fo.ops.Linear(6, 4))
    x, state = torch.randn(3, 4), {k: t.clone() for k, t in model.state_dict().items()}
    expected = model(x)
    expected.sum().backward()
    grad = model[0].weight.grad
    distributed.split_halves(model)
    assert model[0].weight.shape == (2, 6, 4) and model[0].bias.shape == (2, 6)
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    assert torch.equal(model[0].weight.grad.view(12, 4), grad)
    split = {k: t.clone() for k, t in model.state_dict().items()}
    fresh = fo.Sequential(fo.ops.Linear(4, 12), fo.ops.SwiGLU(), fo.ops.Linear(6, 4))
    fresh.load_state_dict(split)
    model[0].reset_parameters()
    model.load_state_dict(state)
    assert torch.equal(fresh(x), expected) and torch.equal(model(x), expected)


def test_a_plan_over_token_shards_says_what_it_has_no_style_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mlp = fo.Sequential(fo.ops.Linear(4, 12), fo.ops.SwiGLU(), fo.ops.Linear(6, 4))
    whole = fo.Sequential(mlp, fo.ops.RMSNorm(4))
    assert [*distributed.tp_plan(whole, sequence_parallel=True)] == ["1", "0.0", "0.2"]
    model = torch.nn.Sequential(fo.ops.Linear(4, 4), whole)
    distributed.tp_plan(model)
    assert not caplog.records
    plan = distributed.tp_plan(model, sequence_parallel=True)
    (record,) = caplog.records
    assert "has no style for 0 (Linear):" in record.getMessage() and "0" not in plan
