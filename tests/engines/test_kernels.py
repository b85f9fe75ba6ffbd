"""Models compute the same with Hugging Face kernels: with the installed layer, and with the kernel assembled for the Hub."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, use_kernel_mapping
from kernels._rust import Build, Digest, DigestAlgorithm, Metadata
from safetensors import safe_open
from torch import Tensor, nn
from transformers import KernelConfig, LlamaForCausalLM, conversion_mapping
from transformers.integrations.hub_kernels import register_kernel_replacements_and_fusions
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.monkey_patching import clear_patch_mapping

from onepass.engines import layers
from onepass.engines.kernels import mapping
from onepass.testing.tensors import same_bytes
from tests.engines.small_models import VOCABULARY, made, saved
from tools import hf_kernel
from tools.vllm_bytes import normed_once, normed_twice, roots, rows_that_differ

NORMS = (LlamaRMSNorm, Qwen3RMSNorm, MixtralRMSNorm, Olmo2RMSNorm, GptOssRMSNorm)
MODES = (Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("hub") / "onepass"
    hf_kernel.assemble(folder)
    return folder


def kernelized(model: nn.Module, mode: Mode = Mode.INFERENCE, repository: Path | None = None) -> Any:
    """A copy of the model with the installed layer, or with that of a repository."""
    mapped = mapping()
    if repository is not None:
        layer = LocalLayerRepository(repository, layer_name="RMSNorm")
        mapped = {"RMSNorm": {"cpu": {Mode.INFERENCE: layer, Mode.INFERENCE | Mode.TORCH_COMPILE: layer}}}
    with use_kernel_mapping(mapped, inherit_mapping=False):
        return kernelize(copy.deepcopy(model), mode=mode, device="cpu")


def is_ours(norm: Any) -> bool:
    return norm.forward.__func__ is layers.RMSNorm.forward


def norm_of(cls: Any, dtype: torch.dtype, columns: int = 256) -> Any:
    torch.manual_seed(3)
    norm = cls(columns, 1e-5).to(dtype)
    norm.weight.data = (1 + 0.4 * torch.randn(columns)).to(dtype)
    return norm.requires_grad_(False)


def rows_with_exact_sums(dtype: torch.dtype, rows: int = 64, columns: int = 256) -> Tensor:
    """Small integers over powers of two: any order of summation gives the same sum of squares."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-12, 13, (rows, columns), generator=generator).float()
    return (x * 2.0 ** torch.randint(-3, 3, (rows, 1), generator=generator)).to(dtype)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cls", NORMS)
def test_bytes_are_those_of_the_models_norm(cls: type, dtype: torch.dtype, mode: Mode) -> None:
    own = norm_of(cls, dtype)
    ours = kernelized(nn.Sequential(own), mode)[0]
    assert is_ours(ours)
    x = rows_with_exact_sums(dtype)
    expected, got = own(x), ours(x)
    assert (expected == got).float().mean() > (0.995 if dtype.itemsize == 2 else 0.4)
    # torch's rsqrt differs from ours in the last bit of some rows: both are the class's formula, for some root
    form = layers.form_of(cls)
    assert form is not None
    formula = normed_twice if form[0] == "hf" else normed_once
    for result in (expected, got):
        made = ([formula(x.float(), rs, own.weight).to(dtype)] for rs in roots(x, own.variance_epsilon))
        assert rows_that_differ([result], made) == []
    assert got.abs().amax() > 1


def test_roundings_of_classes_differ() -> None:
    """One layer serves both: Llama's norm rounds twice, OLMo-2's once."""
    x = torch.randn(512, 256).bfloat16()
    assert not same_bytes(norm_of(LlamaRMSNorm, x.dtype)(x), norm_of(Olmo2RMSNorm, x.dtype)(x))
    rounds = {cls: form[0] for cls in NORMS if (form := layers.form_of(cls)) is not None}
    assert rounds[LlamaRMSNorm] == "hf" and rounds[Olmo2RMSNorm] == "once"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_models_generate_the_same_tokens(family: str) -> None:
    model = made(family)
    ours = kernelized(model)
    norms = [module for name, module in ours.named_modules() if name.endswith("norm")]
    assert len(norms) > 6 and all(map(is_ours, norms))
    prompt = torch.randint(2, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected, got = (m.generate(prompt, max_new_tokens=24, do_sample=False) for m in (model, ours))
    assert torch.equal(expected, got)


def calls_when_compiled(model: Any, tokens: Tensor, op: str) -> int:
    """The calls of an op in a model that compiles to one graph, and computes the same so."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.inference_mode():
        compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
        got = compiled(tokens, use_cache=False).logits
        assert torch.equal(got, model(tokens, use_cache=False).logits)
    assert len(graphs) == 1
    return sum(op in str(node.target) for node in graphs[0].graph.nodes)


def test_compiled_model_is_one_graph() -> None:
    model: Any = kernelized(made("llama"), Mode.INFERENCE | Mode.TORCH_COMPILE)
    tokens = torch.randint(2, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(4))
    assert calls_when_compiled(model, tokens, "onepass.rms_norm") == 7


def test_training_mode_keeps_the_modules() -> None:
    """`kernelize` is not given our layer for training, so gradients are the module's own."""
    own = norm_of(LlamaRMSNorm, torch.float32).requires_grad_(True)
    ours = kernelized(nn.Sequential(own), Mode.TRAINING)[0]
    assert not is_ours(ours)
    ours(torch.randn(2, 256)).sum().backward()
    assert ours.weight.grad is not None


def test_calls_that_differ_run_the_modules_own_forward() -> None:
    """A float32 weight makes a float32 result in transformers; a class of unknown code computes what it computes."""
    x = torch.randn(4, 256).bfloat16()
    own = norm_of(LlamaRMSNorm, torch.float32)
    got = kernelized(nn.Sequential(own))[0](x)
    assert got.dtype == torch.float32 and same_bytes(got, own(x))

    class Doubled(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            result: Tensor = 2 * super().forward(hidden_states)
            return result

    doubled = norm_of(Doubled, torch.bfloat16)
    ours = kernelized(nn.Sequential(doubled))[0]
    assert is_ours(ours) and layers.form_of(Doubled) is None and same_bytes(ours(x), doubled(x))
    recorded = norm_of(LlamaRMSNorm, torch.float32).requires_grad_(True)
    again = kernelized(nn.Sequential(recorded))[0]
    again(torch.randn(2, 256)).sum().backward()
    assert again.weight.grad is not None


def test_repository_is_one_that_kernels_reads(repository: Path) -> None:
    assert {str(backend).lower() for backend in Build.open(repository).general.backends} == {"cpu", "cuda"}
    for variant in (repository / "build").iterdir():
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert (str(metadata.name), metadata.license, metadata.python_depends) == ("onepass", "Apache-2.0", [])
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    kernel = get_local_kernel(repository)
    assert kernel.__name__ == Metadata.read_from_file(repository / "build/torch-cpu/metadata.json").id
    assert hasattr(getattr(torch.ops, kernel.__name__), "rms_norm")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_repository_computes_what_the_installed_layer_does(repository: Path, family: str) -> None:
    model = made(family)
    installed, copied = kernelized(model), kernelized(model, repository=repository)
    norms = [module for name, module in copied.named_modules() if name.endswith("norm")]
    (name,) = {norm.forward.__func__.__module__ for norm in norms}
    assert name == get_local_kernel(repository).__name__ + ".engines.layers"
    tokens = torch.randint(2, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(2))
    module: Any = sys.modules[name]
    with torch.inference_mode(), patch.object(module, "rms_norm", wraps=module.rms_norm) as op:
        got = copied(tokens, use_cache=False).logits
        assert op.call_count == len(norms) and torch.equal(got, installed(tokens, use_cache=False).logits)
        expected, tokens = (m.generate(tokens, max_new_tokens=24, do_sample=False) for m in (model, copied))
    assert torch.equal(expected, tokens)


def test_compiled_model_calls_the_ops_of_the_repository(repository: Path) -> None:
    model = kernelized(made("llama"), Mode.INFERENCE | Mode.TORCH_COMPILE, repository)
    tokens = torch.randint(2, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(4))
    assert calls_when_compiled(model, tokens, f"{get_local_kernel(repository).__name__}.rms_norm") == 7


@pytest.fixture
def fusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets transformers patch its classes, and forget it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and getattr(module, "__file__", "") is None:
            monkeypatch.delitem(
                sys.modules, name
            )  # an old name of a module; transformers lists all, and some need torchvision
    yield
    clear_patch_mapping()
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", None)


@pytest.mark.usefixtures("fusing")
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_norm_and_mlp_are_fused_when_a_model_is_loaded(repository: Path, tmp_path: Path, mode: Mode) -> None:
    """By transformers' n-to-1 form of KernelConfig, except its last step, which refuses CPUs."""
    path = saved("llama", tmp_path)
    own = LlamaForCausalLM.from_pretrained(path).eval()
    pair = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))
    config = KernelConfig({pair: f"{repository}:RMSNormMLP"}, use_local_kernel=True)
    register_kernel_replacements_and_fusions(LlamaForCausalLM, own.config, config)
    model, loading = LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(loading.values())
    tokens = torch.randint(2, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(2))
    layer = LocalLayerRepository(repository, layer_name="RMSNormMLP")
    with torch.inference_mode():
        expected = own(tokens, use_cache=False).logits
        assert torch.equal(model(tokens, use_cache=False).logits, expected)
        with use_kernel_mapping({"RMSNormMLP": {"cpu": {mode: layer}}}, inherit_mapping=False):
            kernelize(model, mode=mode, device="cpu")
        got = model(tokens, use_cache=False).logits
        assert not torch.equal(got, expected) and (got - expected).abs().max() < 2**-5 * expected.abs().max()
        if Mode.TORCH_COMPILE in mode:
            assert calls_when_compiled(model, tokens, f"{get_local_kernel(repository).__name__}.linear") == 6
        texts = [m.generate(tokens, max_new_tokens=24, do_sample=False) for m in (own, model)]
    assert torch.equal(*texts)
    model.save_pretrained(tmp_path / "again")
    with (
        safe_open(path / "model.safetensors", "pt") as before,
        safe_open(tmp_path / "again/model.safetensors", "pt") as after,
    ):
        assert sorted(before.keys()) == sorted(after.keys())
    with pytest.raises(ValueError, match="got: cpu"):
        config.create_compatible_mapping(model)


def test_cuda_build_keeps_the_forward_of_a_model_on_a_cpu(repository: Path) -> None:
    """It loads without a GPU, where it has no kernels."""
    own = norm_of(LlamaRMSNorm, torch.bfloat16)
    ours = kernelized(nn.Sequential(own), repository=repository / "build/torch-cuda")[0]
    assert ours.forward.__func__.__module__.startswith("_onepass_cuda_")
    x = torch.randn(8, 256).bfloat16()
    assert same_bytes(ours(x), own(x))
