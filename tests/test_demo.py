"""The main job on a few steps: it ends well, says so in JSON, and its checks can fail."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseops as fo
from fuseops.cli import main
from fuseops.demo import checks, data, train
from fuseops.demo.model import ByteModel, Config
from fuseops.ops import Combine, GroupedLinear, Permute, ScaledSwiGLU
from fuseops.rules.fused.routed_mlp import RoutedMLP

SMALL = Config(dim=16, heads=2, layers=2, ffn=32, experts=4, expert_ffn=16, context=32)


def run(*options: object) -> int:
    return main(["demo", *map(str, options)])


def text_of(size: int = 4, length: int = 33) -> Tensor:
    return torch.randint(256, (size, length), generator=torch.Generator().manual_seed(1))


class Page(HTMLParser):
    """What a page is made of; raises on tags that are not closed in order."""

    VOID = {"wbr", "meta", "br", "img", "path", "rect", "line", "polyline", "circle", "use", "stop"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert run("--steps", 3, "--device", "cpu", "--out", tmp_path, "--json") == 0
    assert torch.get_num_threads() == threads
    printed = capsys.readouterr()
    result = json.loads(printed.out)  # the JSON object is all of stdout
    assert "not enforced" in printed.err
    assert result["schema_version"] == 1
    assert result["passed"] and not result["failures"]
    assert len(result["loss"]["train"]) == 3 and not result["loss"]["bar_enforced"]
    assert result["fused_spans"] > 0 and result["offloaded_bytes"] > 0
    saved = result["saved_bytes"]
    assert saved["unfused"] > saved["fused"] > saved["fused_and_offloaded"] > 0
    assert result["loss"]["bar"] == pytest.approx(result["loss"]["bigram"] - 0.15)
    page = Page(Path(result["report"]).read_text(encoding="utf-8"))
    assert "svg" in page.seen and "script" not in page.seen
    fetched = [a for a in page.addresses if not a.startswith(("#", "data:"))]
    assert not fetched, "the report needs the network"


def test_a_full_run_that_learns_nothing_fails_and_names_its_report_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuseops.demo.outcome.DEFAULT_STEPS", 2)
    assert run("--steps", 2, "--device", "cpu", "--out", tmp_path) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str((tmp_path / "report.html").resolve())
    for said in (
        *("by routed_mlp", "by norm_mlp", "sample", "not fused  add_norm at 4:6"),
        "FAILED  loss",
    ):
        assert said in printed


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--steps", 1, "--device", "cuda:99") == 2
    assert run("--steps", 1, "--device", "abacus") == 2
    assert "abacus" in capsys.readouterr().err
    assert run("--steps", 0) == 2


# --- the bigram model


def test_bigrams_are_counted_exactly() -> None:
    # after "a": b, b, c; after "b": a, a; after "c": nothing
    table = data.bigram_log_probs(data.as_tensor(b"ababac"), smoothing=0.5).exp()
    a, b, c = b"abc"
    assert table[a, b].item() == pytest.approx(2.5 / (3 + 128))
    assert table[a, c].item() == pytest.approx(1.5 / (3 + 128))
    assert table[b, a].item() == pytest.approx(2.5 / (2 + 128))
    assert table[c, a].item() == pytest.approx(1 / 256)
    assert torch.allclose(table.sum(1), torch.ones(256, dtype=torch.float64))


def test_bigrams_are_judged_on_what_the_model_predicts() -> None:
    table = data.bigram_log_probs(data.as_tensor(b"ababac"), smoothing=0.5)
    judged = data.windows(data.as_tensor(b"abacaba"), 2)  # "aba", "cab": b, a and a, b
    expected = [2.5 / 131, 2.5 / 130, 1 / 256, 2.5 / 131]
    assert data.bigram_loss(table, judged) == pytest.approx(-sum(map(math.log, expected)) / 4)


def test_the_text_is_split_by_file_in_one_order(tmp_path: Path) -> None:
    for k in range(64):
        (tmp_path / f"m{k}.py").write_bytes(bytes([k]) * 2000)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_m.py").write_bytes(b"\xff" * 2000)
    corpus = data.read_corpus(root=tmp_path)
    train_files, held_files = set(corpus.train.tolist()), set(corpus.held_out.tolist())
    assert not train_files & held_files
    assert train_files | held_files == set(range(64))
    assert corpus.files == 64
    again = data.read_corpus(limit=8000, root=tmp_path)
    assert torch.equal(again.train, corpus.train[:8000])
    assert torch.equal(again.held_out, corpus.held_out)


# --- training


def test_the_same_seed_gives_the_same_losses() -> None:
    text = data.as_tensor(bytes(range(256)) * 8)

    def losses(seed: int) -> tuple[list[float], bytes]:
        torch.manual_seed(seed)
        model = ByteModel(SMALL)
        schedule = train.LearningRate(steps=3, batch=2)
        history = train.train(
            model, text, data.windows(text, 32)[:2], schedule, seed, lambda *_: None
        )
        return history.train, train.sample(model, b"x", 5, seed)

    first, second, other = losses(0), losses(0), losses(1)
    assert first == second
    assert first[0] != other[0]


def test_no_position_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model, text = ByteModel(SMALL), text_of()[:1, :-1]
    changed = text.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 256
    before, after = model(text).logits, model(changed).logits
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-6)
    assert not torch.allclose(before[:, 20], after[:, 20], atol=1e-3)


def test_experts_get_their_tokens_and_no_others() -> None:
    from fuseops.demo.model import Experts

    torch.manual_seed(0)
    experts, x = Experts(SMALL), torch.randn(2, 3, SMALL.dim)
    y, routed = experts(x)
    assert routed.share.sum().item() == pytest.approx(1)
    h, moe = experts.norm(x).flatten(0, 1), experts.moe
    chances = (h @ moe["router"].weight.t()).softmax(-1)
    fc1, fc2 = moe["fc1"].weight, moe["fc2"].weight
    for token, chosen in enumerate(routed.chosen.long()):
        weights = chances[token, chosen] / chances[token, chosen].sum()
        expected = x.flatten(0, 1)[token].clone()
        for e, w in zip(chosen, weights, strict=True):
            gate, up = (fc1[e] @ h[token]).chunk(2)
            expected = expected + fc2[e] @ (torch.nn.functional.silu(gate) * up * w)
        assert torch.allclose(y.flatten(0, 1)[token], expected, atol=1e-5)


# --- the checks can fail


def failures(found: checks.Checked) -> list[str]:
    return [sentence.partition(":")[0] for passed, sentence in found.verdicts() if not passed]


def test_the_checks_pass_on_a_correct_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MIN_BYTES", 2048)
    torch.manual_seed(0)
    found = checks.check(ByteModel(SMALL), text_of())
    assert all(passed for passed, _ in found.verdicts())
    assert 0 < found.saved_offloaded < found.saved_fused < found.saved_unfused


class WrongRoutedMLP(RoutedMLP):
    def bwd(self, *args: Any) -> tuple[fo.Grads, ...]:
        permute, first, act, last, combine = super().bwd(*args)
        weight = last.params["weight"]  # type: ignore[index]
        return permute, first, act, fo.Grads(params={"weight": weight * 1.001}), combine


def test_a_wrong_fusion_is_found() -> None:
    torch.manual_seed(0)
    pattern = (Permute, GroupedLinear, ScaledSwiGLU, GroupedLinear, Combine)
    with fo.rules(fo.Rule("wrong", pattern, WrongRoutedMLP, "joint")):
        found = checks.check(ByteModel(SMALL), text_of())
    assert "fc2" in found.fusion.where
    assert failures(found) == ["fused equals unfused"]


def test_nothing_fused_and_nothing_offloaded_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MIN_BYTES", 1 << 40)
    with fo.fusion(False):
        found = checks.check(ByteModel(SMALL), text_of())
    assert failures(found) == ["0 spans fused", "0 B (0 bytes) offloaded"]


def test_differences_see_every_tensor_and_nan() -> None:
    ones = {"a": torch.ones(3), "b": 4 * torch.ones(3)}
    wrong = {"a": torch.ones(3), "b": torch.tensor([4.0, 4.0, 5.0])}
    assert checks.difference(wrong, ones) == ("b", 0.25)
    assert checks.unequal(wrong, ones) == ("b",)
    assert checks.difference(ones, ones).relative == 0
    lost = {"a": torch.full((3,), torch.nan), "b": wrong["b"]}
    assert math.isnan(checks.difference(lost, ones).relative)
