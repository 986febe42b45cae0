"""Architectures of transformers, with tiny configurations and random weights; nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.networks.checking import Call, Entry

_WORDS, _LENGTH = 64, 8
_CORE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
_TEXT: dict[str, Any] = _CORE | {
    "vocab_size": _WORDS,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER: dict[str, Any] = _TEXT | _TOKENS | {"num_key_value_heads": 2}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_PATCHES: dict[str, Any] = _CORE | {"intermediate_size": 64, "image_size": 32, "patch_size": 8}

_DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "Gemma3": {"head_dim": 8},
    "Mistral": {},
    "Phi3": {},
    "SmolLM3": {},
    "Granite": {},
    "Olmo2": {},
    "GPTNeoX": {},
    "Mixtral": _EXPERTS,
    "Qwen3Moe": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "experts_implementation": "eager",  # the other one refuses float64
    },
    "GptOss": _EXPERTS | {"head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "qk_nope_head_dim": 4, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "num_key_value_heads": 4,
    },
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Falcon": {},
    "Cohere": {},
    "StableLm": {},
    "Starcoder2": {},
    "Mamba": {"state_size": 4},
}  # fmt: skip
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}
_ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {"pad_token_id": 0},
    "ModernBert": _TOKENS | {"cls_token_id": 1, "sep_token_id": 2},
    "DistilBert": {"dim": 32, "n_layers": 4, "n_heads": 4, "hidden_dim": 64},
    "Electra": {"embedding_size": 16},
    "DebertaV2": {},
    "MPNet": {"pad_token_id": 0},
    "Albert": {"embedding_size": 16},
}
_IMAGES: dict[str, dict[str, Any]] = {
    "ViT": _PATCHES,
    "DeiT": _PATCHES,
    "IJepa": _PATCHES,
    "Dinov2": _PATCHES,
    "Dinov2WithRegisters": _PATCHES,
    "DINOv3ViT": _PATCHES,
    "CLIPVision": _PATCHES,
    "SiglipVision": _PATCHES,
    "Swin": {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2],
        "window_size": 4,
    },
    "Swinv2": {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2],
        "window_size": 4,
    },
    "ConvNext": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1]},
    "DINOv3ConvNext": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1]},
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1]},
    "Segformer": {
        "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1],
        "num_attention_heads": [1, 2, 2, 2],
    },
}  # fmt: skip


def _made(name: str, config: str, options: dict[str, Any]) -> nn.Module:
    made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
    return made


def _ids(samples: int) -> torch.Tensor:
    return torch.randint(3, _WORDS, (samples, _LENGTH))


def _mask(samples: int) -> torch.Tensor:
    """Of sentences of different lengths."""
    return (torch.arange(_LENGTH) < _LENGTH - torch.arange(samples)[:, None]).long()


def _decoded(samples: int) -> Call:
    return (_ids(samples),), {"attention_mask": _mask(samples), "use_cache": False}


def _encoded(samples: int) -> Call:
    return (_ids(samples),), {"attention_mask": _mask(samples)}


def _pictures(samples: int) -> Call:
    return (torch.randn(samples, 3, 32, 32),), {}


def _translated(samples: int) -> Call:
    words = {"input_ids": _ids(samples), "decoder_input_ids": _ids(samples)[:, :5]}
    return (), words | {"attention_mask": _mask(samples), "use_cache": False}


def _heard(samples: int) -> Call:
    return (torch.randn(samples, 8, 40),), {}


def _pairs(samples: int) -> Call:
    words = {"input_ids": _ids(samples), "attention_mask": _mask(samples)}
    return (), words | {"pixel_values": torch.randn(samples, 3, 32, 32)}


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=4, encoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=64, num_mel_bins=8,
        max_source_positions=20, vocab_size=_WORDS, **_TOKENS,
    )  # fmt: skip
    encoder: nn.Module = transformers.WhisperModel(config).encoder
    return encoder


def entries() -> dict[str, Entry]:
    """All of them, by name."""
    found = {
        name: Entry(
            partial(_made, f"{name}ForCausalLM", _CONFIGS.get(name, f"{name}Config"),
                    _DECODER | {"tie_word_embeddings": False} | options),
            _decoded,
        )
        for name, options in _DECODERS.items()
    }  # fmt: skip
    small = {"vocab_size": _WORDS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    found["GPT2"] = Entry(partial(_made, "GPT2LMHeadModel", "GPT2Config", small), _decoded)
    for name, options in _ENCODERS.items():
        build = partial(_made, f"{name}Model", f"{name}Config", _TEXT | options)
        found[name] = Entry(build, _encoded)
    for name, options in _IMAGES.items():
        found[name] = Entry(partial(_made, f"{name}Model", f"{name}Config", options), _pictures)
    found["WhisperEncoder"] = Entry(_whisper, _heard)
    others: dict[str, tuple[str, dict[str, Any], Callable[[int], Call]]] = {
        "T5": (
            "T5ForConditionalGeneration",
            {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4},
            _translated,
        ),
        "Bart": (
            "BartForConditionalGeneration",
            {"d_model": 32, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 64,
             "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
             "max_position_embeddings": 64},
            _translated,
        ),
        "CLIP": (
            "CLIPModel",
            {"text_config": _TEXT | _TOKENS, "vision_config": _PATCHES, "projection_dim": 16},
            _pairs,
        ),
        "Siglip": (
            "SiglipModel",
            {"text_config": _TEXT | _TOKENS | {"projection_size": 32}, "vision_config": _PATCHES},
            _pairs,
        ),
    }  # fmt: skip
    for name, (kind, options, call) in others.items():
        words = {} if "text_config" in options else {"vocab_size": _WORDS}
        found[name] = Entry(partial(_made, kind, f"{name}Config", options | words), call)
    return found
