"""`tools.bench.models` and `tools.bench.agreement` on the CPU with small models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import onepass
from onepass.models.forwards import norm
from tools.bench import agreement, common, generating, models, steps
from tools.bench.ways import NAMES, WAYS, Models, Way, chosen

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


def tiny(name: str, **more: Any) -> Any:
    _, config, sizes = common.sized(name, 2)
    return common.build(config, {**common.tiny(sizes), **more}, "cpu")


def test_sizes() -> None:
    for name in common.MODELS:
        title, _, sizes = common.sized(name, 4)
        layers = sizes["num_hidden_layers"]
        assert layers == (3 if name == "DeepSeek-V3" else 4) and f", {layers} " in title
        assert len(sizes.get("layer_types", [0] * layers)) == layers


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama-3.2-1B", 1_235_814_400),
        ("Qwen3-0.6B", 596_049_920),
        ("OLMo-2-1B", 1_484_916_736),
        ("Gemma-3-1B", 999_885_952),
    ],
)
def test_whole_models_have_as_many_parameters_as_the_published_ones(name: str, parameters: int) -> None:
    title, config, sizes = common.sized(name, 8)
    model = common.build(config, sizes, "meta")
    assert title == f"{name}, whole" and sum(p.numel() for p in model.parameters()) == parameters


def test_whole_models_are_measured_with_a_long_context_too() -> None:
    assert models.sizes_of("Qwen3 8B", (1, 4), None) == [(1, 128), (4, 128)]
    assert models.sizes_of("Qwen3-0.6B", (1, 4, 8), None) == [(1, 128), (4, 128), (8, 128), (1, 4096), (8, 4096)]
    assert models.sizes_of("Qwen3-0.6B", (4,), (64, 4096)) == [(4, 64), (4, 4096)]


def test_a_long_context_is_full_behind_the_step() -> None:
    """Its row is another one than that of the usual context, and its floor has the cache."""
    with torch.no_grad():
        model = tiny("Qwen3 8B", **HEADS)
        row = steps.measure(Models(model), steps.Size(2, 200), "cpu", 1, ways("decode"))
        step = steps.Step(model, 2, "cpu", context=200)
    assert row["context"] == 200 and set(row["us"]) == {"unpatched", "decode"} and steps.agrees(row, NAMES)
    assert bool(step.mask.all()) and int(step.positions[0]) == step.used == 199
    rows = [row_of(2, unpatched=5.0)]
    models.add(rows, {**row_of(2, decode=3.0), "context": 200})
    assert [entry["us"] for entry in rows] == [{"unpatched": 5.0}, {"decode": 3.0}]
    found = steps.floors(model, 400)
    assert found["cache"] == pytest.approx(400 * 2 * 2 * 4 * 128 * 2 / 4.55e6), (
        "400 entries of 2 layers, 4 heads of 128"
    )
    assert steps.floor_of({"floor": found}, "decode") == pytest.approx(found[""] + found["cache"])
    assert steps.floor_of({"floor": found}, "decode, fp8") == pytest.approx(found["fp8"] + found["cache"])
    assert steps.floor_of({"floor": {"": 2.0, "fp8": 1.0}}, "decode") == 2.0 and steps.floor_of({}, "decode") is None


def ways(*names: str) -> tuple[Way, ...]:
    return tuple(WAYS[name] for name in ("eager", *names))


def measure(model: Any, batch: int, *names: str) -> dict[str, Any]:
    return steps.measure(Models(model), steps.Size(batch), "cpu", 1, ways(*names), only_trace=True)


def test_decode_step_with_a_static_cache() -> None:
    """The step that a CUDA graph captures, run eagerly; the comparison detects a wrong step."""
    with torch.no_grad():
        model = tiny("Qwen3 8B", **HEADS)
        before = model.state_dict()
        row = measure(model, 2, "patched", "once")
        step = steps.Step(model, 2, "cpu")
        one, moved = step(), int(step.cache.layers[0].cumulative_length)
        step.reset()
        assert moved == int(step.cache.layers[0].cumulative_length) + 1
        assert torch.equal(step(), one)
    assert set(row["us"]) == {"unpatched", "patched", "patched, once"} and not row["failed"]
    assert all(len(pair) == 2 and min(pair) <= row["us"][name] <= max(pair) for name, pair in row["medians"].items())
    assert row["agreement"]["unpatched"]["equal"] == 1 and row["agreement"]["patched"]["equal"] > 0.5
    assert all(a["same_token"] and a["largest_logit"] > 0.5 for a in row["agreement"].values())
    assert "qk_norm_rope_cache" in str(row["replaced"]["patched"])
    assert not any("forward" in module.__dict__ for module in model.modules()), "copies are patched"
    assert all(tensor.data_ptr() == model.state_dict()[key].data_ptr() for key, tensor in before.items())
    assert steps.agrees(row, NAMES)
    row["agreement"]["patched"]["max_difference"] = row["agreement"]["patched"]["largest_logit"]
    assert not steps.agrees(row, NAMES)


def test_contenders() -> None:
    names = [way.name for way in chosen(None, latent=False)]
    assert names[0] == "unpatched" and {"patched", "torch.compile", "decode", "decode, fp8"} <= set(names)
    assert not any("max-autotune" in name or "MlaCache" in name for name in names)
    assert [way.name for way in chosen(["fp8", "latent"], latent=True)] == [
        "unpatched",
        "patched, once, MlaCache",
        "decode, fp8",
    ]
    assert len(NAMES) == len(WAYS)


def test_models_are_chosen_by_parts_of_their_names() -> None:
    assert common.chosen(["qwen3-8b"]) == ["Qwen3 8B"] and common.chosen(["llama", "OLMo"]) == [
        "Llama 3 8B",
        "OLMo-2 7B",
    ]
    assert common.chosen(None, common.CPU_MODELS) == ["Llama 1024"] and len(common.chosen(None)) == len(common.MODELS)
    with pytest.raises(SystemExit, match="no model has a name like bert"):
        common.chosen(["bert"])


def test_floor_counts_the_weights_that_a_step_reads() -> None:
    """All but the embedding, unless it is the output projection too; fp8 halves the bytes of a layer's projections."""
    model = tiny("Llama 3 8B", **HEADS)
    found = steps.floors(model)
    head = model.lm_head.weight.numel()
    body = sum(p.numel() for p in model.model.layers.parameters()) + model.model.norm.weight.numel()
    assert found[""] == pytest.approx(2 * (body + head) / 4.55e6)
    norms = sum(p.numel() for name, p in model.model.named_parameters() if "norm" in name)
    assert found["fp8"] == pytest.approx((body - norms + 2 * (head + norms)) / 4.55e6)
    model.lm_head.weight = model.model.embed_tokens.weight
    assert steps.floors(model) == pytest.approx(found)


def test_copies_share_weights_unless_they_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph reads weights where they were: no way may move those of another."""
    handed: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(onepass, "patch", lambda model, **options: handed.append((model, options)))
    model = tiny("Llama 3 8B", **HEADS)
    made = Models(model)
    assert made.of(WAYS["eager"]) == (model, None)
    patched, decode, fp8 = (made.of(WAYS[name])[0] for name in ("patched", "decode", "fp8"))
    assert made.of(WAYS["compile-patched"])[0] is patched, "the same options"
    assert patched.lm_head.weight is model.lm_head.weight
    assert fp8.lm_head.weight is model.lm_head.weight, "codes are new, and nothing is moved"
    assert decode.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()
    assert [options for _, options in handed] == [
        {"rounding": "hf"},
        {"decode": True},
        {"decode": True, "weights": "fp8"},
    ]


@pytest.mark.full  # the uncompiled steps stay
def test_compiled_steps_are_compiled_with_and_without_onepass(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph each; only the patched one contains onepass's ops."""
    graphs: list[int] = []
    lookup = torch._dynamo.lookup_backend

    def counting(name: str) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(sum("onepass" in str(node.target) for node in graph.graph.nodes))
            return lookup(name)(graph, inputs)

        return backend

    monkeypatch.setattr(torch._dynamo, "lookup_backend", counting)
    compiled = ("compile", "compile-patched")
    with torch.no_grad():
        row = measure(tiny("Llama 3 8B", **HEADS), 1, "patched", *compiled)
    torch._dynamo.reset()
    assert not row["failed"] and steps.agrees(row, NAMES)
    assert list(row["us"]) == [way.name for way in ways("patched", *compiled)]
    assert graphs == [0, 5]  # two layers with two norms each, one of them with its addition, and the last norm
    assert [row["compiled"][WAYS[name].name]["graphs"] for name in compiled] == [1, 1]
    assert row["agreement"]["torch.compile"]["same_token"]


def test_failures_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line of its error is stored and the other ways continue; a failure of ours is a disagreement."""

    def broken(self: Any, mode: str, only_trace: bool) -> None:
        raise RuntimeError("no compiler here\nand a long trace")

    def refused(*_: Any, **__: Any) -> Any:
        raise onepass.Unsupported("rms_norm: not here")

    monkeypatch.setattr(steps.Step, "compile", broken)
    with torch.no_grad():
        model = tiny("Llama 3 8B", **HEADS)
        row = measure(model, 1, "patched", "once", "compile", "compile-patched")
        assert row["failed"] == dict.fromkeys(
            ("torch.compile", "torch.compile, patched"), "RuntimeError: no compiler here"
        )
        assert set(row["us"]) == {"unpatched", "patched", "patched, once"} and steps.agrees(row, NAMES)
        monkeypatch.setattr(norm, "rms_norm", refused)
        row = measure(model, 1, "patched", "once")
    assert row["failed"] == dict.fromkeys(("patched", "patched, once"), "Unsupported: rms_norm: not here")
    assert list(row["us"]) == ["unpatched"] and not steps.agrees(row, NAMES)


def test_generating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each form generates the same tokens; one that fails is recorded, and the others continue."""
    names = ("dynamic-patched", "static", "captured")
    with torch.no_grad():
        model = tiny("Llama 3 8B", **HEADS)
        row = generating.generating(Models(model), 2, "cpu", repeats=1, new_tokens=3, names=names)
        titles = [generating.FORMS[name][0] for name in ("dynamic", *names)]
        assert list(row["us_per_token"]) == titles and not row["failed"]
        assert row["same_tokens"] == dict.fromkeys(titles, 1.0) and row["new_tokens"] == 3

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("not here\nand a long trace")

        monkeypatch.setattr(onepass, "patch", broken)
        row = generating.generating(Models(model), 1, "cpu", 1, 3, ("dynamic-patched", "captured", "captured-fp8"))
    assert list(row["us_per_token"]) == ["unpatched", "captured"]
    assert row["failed"] == dict.fromkeys(("patched", "captured, decode, fp8"), "RuntimeError: not here")


def row_of(batch: int, model: str = "Qwen3 8B, 2 layers", **us: float) -> dict[str, Any]:
    return {"model": model, "batch": batch, "us": us, "agreement": {}, "failed": {}, "compiled": {}, "replaced": {}}


def test_results_are_written_after_each_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is interrupted keeps its results. Another run with the same file adds to them."""
    file = tmp_path / "models.json"
    measured: list[int] = []

    def measure(models: Any, size: steps.Size, *_: Any) -> dict[str, Any]:
        batch = size.batch
        if measured:
            assert [row["batch"] for row in json.loads(file.read_text())["rows"]] == measured
        measured.append(batch)
        if batch == 5:
            raise KeyboardInterrupt
        return row_of(batch, eager=1.0)

    monkeypatch.setattr(models, "measure", measure)
    monkeypatch.setattr(common, "build", lambda *_: None)
    line = ["models", "--device", "cpu", "--tiny", "--model", "qwen3-8b", "olmo-2-7b", "--json", str(file), "--batch"]
    monkeypatch.setattr(sys, "argv", [*line, "1", "3", "5"])
    with pytest.raises(KeyboardInterrupt):
        models.main()
    report = json.loads(file.read_text())
    assert [row["model"] for row in report["rows"]] == ["Qwen3 8B, 2 layers"] * 2
    assert "transformers' own code, not compiled" in report["baseline"]
    measured.clear()
    monkeypatch.setattr(models, "measure", lambda models, size, *_: row_of(size.batch, fp8=2.0))
    monkeypatch.setattr(sys, "argv", [*line, "3", "7"])
    with pytest.raises(SystemExit):
        models.main()
    rows = json.loads(file.read_text())["rows"]
    assert [(row["batch"], row["us"]) for row in rows if "Qwen" in row["model"]] == [
        (1, {"eager": 1.0}),
        (3, {"eager": 1.0, "fp8": 2.0}),
        (7, {"fp8": 2.0}),
    ]


def test_rows_are_merged() -> None:
    """What was measured again replaces what was there, also if it failed this time or failed before."""
    rows = [row_of(1, eager=3.0, patched=2.0, decode=1.0), row_of(8, eager=3.0)]
    rows[0]["failed"] = {"fp8": "no"}
    new = row_of(1, eager=4.0, fp8=1.0)
    new["failed"] = {"decode": "broken"}
    models.add(rows, new)
    assert len(rows) == 2 and rows[0]["us"] == {"eager": 4.0, "patched": 2.0, "fp8": 1.0}
    assert rows[0]["failed"] == {"decode": "broken"} and rows[1]["us"] == {"eager": 3.0}
    models.add(rows, row_of(1, model="Llama", eager=1.0))
    assert len(rows) == 3


def test_results_of_another_machine_are_not_merged(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"machine": "NVIDIA H200", "rows": []}))
    with pytest.raises(SystemExit, match="was measured on NVIDIA H200"):
        models.merged({"machine": "cpu", "rows": []}, file)


def test_tables_name_what_failed() -> None:
    row = row_of(1, unpatched=30.0, decode=10.0)
    row |= {"failed": {"decode, fp8": "TypeError: no"}, "floor": {"": 5.0, "fp8": 3.0}}
    text = models.shown(row)
    assert "floor 5, with fp8 weights 3" in text and "3.00x" in text and "failed: TypeError: no" in text


@pytest.mark.parametrize("name", ["Llama 3 8B", "Gemma 3 12B"])
def test_agreement_counts_identical_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm with another mean of squares agrees less often, and the comparison of single norms shows why."""
    with torch.inference_mode():
        model = tiny(name, **HEADS)
        row = agreement.agreement(model, 8, 2, "cpu")
        assert row["equal_logits"] > 0.3 and row["equal_argmax"] > 0.9 and row["prompts"] == 2
        norms = agreement.causes(model, 8, 2, "cpu")
        assert norms["own_code_differs"] == 0 and norms["differ_given_the_mean"] == 0
        assert norms["differ"] < 1e-3 * norms["values"] and norms["rows"] > 50
        right = onepass.rms_norm

        def off(x: Any, gamma: Any, eps: float, **options: Any) -> Any:
            return right(x * 1.01, gamma, eps + 0.01, **options)

        monkeypatch.setattr(onepass, "rms_norm", off)
        monkeypatch.setattr(norm, "rms_norm", off)
        wrong = agreement.agreement(model, 8, 2, "cpu")
        assert wrong["equal_prompts"] == 0 and wrong["equal_logits"] < 0.3
        assert agreement.causes(model, 8, 2, "cpu")["differ"] > 0.01 * norms["values"]


def test_zeros_of_different_sign_differ() -> None:
    zeros = torch.zeros(2, dtype=torch.bfloat16)
    assert agreement.same_bytes(zeros, torch.tensor([0.0, -0.0], dtype=torch.bfloat16)).tolist() == [True, False]
