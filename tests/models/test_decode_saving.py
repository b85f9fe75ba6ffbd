"""A patched model is saved as the unpatched one: every writer, every weight, and what is loaded again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import onepass

pytest.importorskip("transformers")

import huggingface_hub
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

from tests.helpers.models import close, fresh, logits, small, tokens

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # checkpoints of one process
IDS = tokens(2, 4)
dcp: Any = checkpoint
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def original() -> State:
    return {name: tensor.clone() for name, tensor in fresh("Qwen2").state_dict().items()}


@pytest.fixture(scope="module")
def patched() -> Iterator[Any]:
    """Qwen2 has biases, which are merged too."""
    model = fresh("Qwen2")
    with onepass.patch(model, decode=True):
        yield model


def by_safetensors(model: Any, folder: Path) -> State:
    save_model(model, str(folder / "model"))
    return load_file(folder / "model")


def by_safetensors_state_dict(model: Any, folder: Path) -> State:
    save_file(model.state_dict(), folder / "model")
    return load_file(folder / "model")


def by_hub(model: Any, folder: Path) -> State:
    huggingface_hub.save_torch_model(model, folder)
    return load_file(folder / "model.safetensors")


def by_hub_state_dict(model: Any, folder: Path) -> State:
    huggingface_hub.save_torch_state_dict(model.state_dict(), folder)
    return load_file(folder / "model.safetensors")


def by_accelerate(model: Any, folder: Path) -> State:
    accelerate = pytest.importorskip("accelerate")  # other versions of transformers are run without it
    accelerate.Accelerator(cpu=True).save_model(model, folder)
    return load_file(folder / "model.safetensors")


def by_transformers(model: Any, folder: Path) -> State:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def by_torch(model: Any, folder: Path) -> State:
    torch.save(model.state_dict(), folder / "model")
    loaded: State = torch.load(folder / "model")
    return loaded


def by_dcp(model: Any, folder: Path) -> State:
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    loaded: State = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load({"model": loaded}, checkpoint_id=folder, no_dist=True)
    return loaded


WRITERS: list[Callable[[Any, Path], State]] = [
    by_safetensors,
    by_safetensors_state_dict,
    by_hub,
    by_hub_state_dict,
    by_accelerate,
    by_transformers,
    by_torch,
    by_dcp,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda writer: writer.__name__)
def test_every_weight_is_saved(
    write: Callable[[Any, Path], State], patched: Any, original: State, tmp_path: Path
) -> None:
    saved = write(patched, tmp_path)
    assert saved.keys() == original.keys()
    other = copy.deepcopy(small("Qwen2", torch.float32, seed=1))
    other.load_state_dict(saved)
    assert all(torch.equal(tensor, original[name]) for name, tensor in other.state_dict().items())


def test_files_are_as_large_as_the_weights(patched: Any, tmp_path: Path) -> None:
    """A parameter is saved with its own rows, not with what is merged with it."""
    layer = patched.model.layers[0].self_attn.k_proj
    torch.save(layer.state_dict(), tmp_path / "layer")
    assert (tmp_path / "layer").stat().st_size < 3000 + layer.weight.nbytes + layer.bias.nbytes


def test_what_is_loaded_in_place_reaches_the_merged_memory(tmp_path: Path) -> None:
    model, other = fresh("Qwen2"), small("Qwen2", torch.float32, seed=1)
    save_model(other, str(tmp_path / "model"))
    dcp.save({"model": other.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with onepass.patch(model, decode=True):
        load_model(model, str(tmp_path / "model"))
        close(logits(model, IDS), logits(other, IDS))
        model.load_state_dict(own)
        dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        close(logits(model, IDS), logits(other, IDS))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("version", ["flat", "original", "fully_shard"])
@pytest.mark.usefixtures("group")
def test_sharded_models_have_all_weights_and_run(version: str, patched: Any, original: State) -> None:
    model, state = copy.deepcopy(patched), cast(Any, None)
    if version == "fully_shard":
        fully_shard(model)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    else:
        device = torch.device("cpu")
        model = FullyShardedDataParallel(model, use_orig_params=version == "original", device_id=device)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            state = model.state_dict()
    assert state.keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in state.items())
    with torch.no_grad():
        close(model(input_ids=IDS).logits, logits(patched, IDS))
