from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_tspipe import (
    CheckpointError,
    ConfigurationError,
    load_pretrained,
    pretrained,
    weight_files,
)
from lightning_tspipe.cli.exporting import Options
from lightning_tspipe.cli.exporting import run as export
from lightning_tspipe.language.pretrained import save_pretrained
from lightning_tspipe.runtime.weights.construction import Construction

transformers = pytest.importorskip("transformers")


def config(**others: Any) -> Any:
    return transformers.LlamaConfig(**{
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, **others,
    })  # fmt: skip


def written(folder: Path, *, size: str = "5GB", dtype: Any = torch.float32, **others: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config(**others)).to(dtype)
    model.save_pretrained(folder, max_shard_size=size)
    return model


@pytest.mark.parametrize("size", ["5GB", "3KB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_that_transformers_writes(
    tmp_path: Path, size: str, tied: bool, dtype: torch.dtype
) -> None:
    written(tmp_path, size=size, dtype=dtype, tie_word_embeddings=tied)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (size == "3KB")
    automatic = transformers.AutoModelForCausalLM
    state = torch.get_rng_state()
    found = pretrained(automatic, tmp_path)
    assert torch.equal(state, torch.get_rng_state())  # nothing is drawn
    assert found.dtype == dtype
    assert not found.training
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    same(found, automatic.from_pretrained(tmp_path))
    same(pretrained(transformers.LlamaForCausalLM, tmp_path), found)
    wide = pretrained(automatic, tmp_path, dtype=torch.float64)
    assert {p.dtype for p in wide.parameters()} == {torch.float64}
    same(wide, automatic.from_pretrained(tmp_path, dtype=torch.float64))


def same(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0)
    buffers = dict(expected.named_buffers())  # some of them no state dict has
    torch.testing.assert_close(dict(found.named_buffers()), buffers, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_without_values_they_are_read_for_what_is_kept(tmp_path: Path, tied: bool) -> None:
    model = written(tmp_path, size="3KB", tie_word_embeddings=tied)
    construction = Construction()
    with construction.record():
        found = pretrained(transformers.AutoModelForCausalLM, tmp_path)
    assert all(p.is_meta for p in found.parameters())
    for file in tmp_path.glob("*.safetensors"):  # what isn't kept, isn't read
        if not has(file, "model.layers.1.mlp.up_proj.weight"):
            file.unlink()
    own = found.model.layers[1].mlp.up_proj.weight
    torch.testing.assert_close(
        *construction.values([own]), model.model.layers[1].mlp.up_proj.weight
    )
    (table,) = construction.values([found.model.rotary_emb.inv_freq])
    assert torch.equal(table, model.model.rotary_emb.inv_freq)


def has(file: Path, name: str) -> bool:
    return name.encode() in file.read_bytes()


def test_models_without_values_are_initialized_as_elsewhere() -> None:
    """By transformers' own rules, not by those of torch's layers."""
    torch.manual_seed(0)
    expected = transformers.AutoModelForCausalLM.from_config(config())
    construction = Construction()
    torch.manual_seed(0)
    with construction.record():
        found = transformers.AutoModelForCausalLM.from_config(config())
    for name, value in expected.state_dict(keep_vars=True).items():
        made = construction.values([found.get_parameter(name)])[0]
        torch.testing.assert_close(made, value.detach(), rtol=0, atol=0)


def test_what_is_written_over_needs_nothing_of_before() -> None:
    construction = Construction()
    with construction.record():
        weight, other = torch.empty(3), torch.ones(6)
        weight.normal_()
        weight.copy_(torch.arange(3.0))
        weight.mul_(2)
        other[:3].copy_(torch.zeros(3))
        other.add_(weight[0])
    first, second = construction.values([weight, other])
    assert first.tolist() == [0, 2, 4]
    assert second.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_bare_model_takes_the_weights_of_one_with_a_head(tmp_path: Path) -> None:
    model = written(tmp_path)
    same(pretrained(transformers.AutoModel, tmp_path), model.model)
    model.model.save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigurationError, match=r"no weights for lm_head\.weight"):
        pretrained(transformers.LlamaForCausalLM, tmp_path / "bare")


def test_other_weights(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(ConfigurationError, match="of another configuration"):
        load_pretrained(transformers.LlamaForCausalLM(config(intermediate_size=20)), tmp_path)
    with pytest.raises(ConfigurationError, match=r"model\.layers\.2\.\S+ and \d+ more"):
        load_pretrained(transformers.LlamaForCausalLM(config(num_hidden_layers=3)), tmp_path)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="save_pretrained"):
        load_pretrained(nn.Linear(1, 1), tmp_path)
    model = written(tmp_path, size="3KB")
    first = min(tmp_path.glob("*.safetensors"))
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=f"{first.name} is damaged"):
        load_pretrained(model, tmp_path)
    first.unlink()
    with pytest.raises(CheckpointError, match=f"{first.name} is missing"):
        load_pretrained(model, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        load_pretrained(model, tmp_path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("most", [10**9, 3000])
def test_an_export_is_loaded_again(
    tmp_path: Path, tied: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_FILE_BYTES", most)
    model = written(tmp_path / "base", tie_word_embeddings=tied)
    (tmp_path / "base/tokenizer.json").write_text("{}", encoding="utf-8")
    trained = {f"student.{n}": t.to(torch.bfloat16) + 1 for n, t in model.state_dict().items()}
    torch.save({"state_dict": {**trained, "head.weight": torch.ones(2)}}, tmp_path / "run.ckpt")
    out = tmp_path / "out"
    model.save_pretrained(out)  # what lies there from before is not read instead
    (out / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    base = tmp_path / "base"
    export(Options([tmp_path / "run.ckpt"], ["student"], out, pretrained=str(base)))
    found = transformers.AutoModelForCausalLM.from_pretrained(out)
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, trained[f"student.{name}"])
    same(pretrained(transformers.AutoModelForCausalLM, out), found)
    assert (out / "tokenizer.json").is_file()
    files = {file.name for file in out.glob("model*")}
    assert (files == {"model.safetensors"}) == (most == 10**9)
    assert not any(file.name.endswith(".part") for file in out.iterdir())


def test_an_export_of_other_weights(tmp_path: Path) -> None:
    state = written(tmp_path / "base").state_dict()
    one = "model.norm.weight"
    for weights, message in (
        ({name: t for name, t in state.items() if name != one}, f"no weight {one}"),
        ({**state, "other": torch.ones(1)}, "has other, which is not in the LlamaForCausalLM"),
        ({**state, one: torch.ones(3)}, f"has {one} in another shape"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            save_pretrained(weights, tmp_path / "base", tmp_path / "out")
    with pytest.raises(ConfigurationError, match="no configuration"):
        save_pretrained(state, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
