"""More language models of Hugging Face transformers that predict the next word, by the types of their
configurations: each with two layers, and every size that its configuration has a usual name for made small.
Types of several parts, with images or sound, and those that are not small with that are left out.
"""

import inspect
import re
from pathlib import Path
from typing import Any

from tests.zoo import Built, in_zoo_as, words

_SIZES: dict[str, int | float | bool] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 256),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "lru_width"), 64),
    **dict.fromkeys(("attention_hidden_size", "hidden_size_per_layer_input"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "index_n_heads", "indexer_n_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "n_inner", "mlp_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dense_intermediate_size"), 128),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 64
    ),
    "moe_shared_expert_intermediate_size": 64,
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "attention_head_dim", "kv_lora_rank"), 16),
    **dict.fromkeys(("index_head_dim", "linear_key_head_dim", "linear_value_head_dim", "block_size"), 16),
    **dict.fromkeys(("mamba_d_state", "mamba_head_dim", "mamba_d_head", "mamba_chunk_size"), 16),
    **dict.fromkeys(("chunk_size", "ssm_state_size", "state_size"), 16),
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups", "first_k_dense_replace"), 1),
    **dict.fromkeys(("zero_expert_num", "num_mem_blocks"), 1),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers"), 0),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "sliding_window", "index_topk"), 8),
    **dict.fromkeys(("attention_chunk_size", "attention_window_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    "conv_L_cache": 3,
    "mamba_expand": 2,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DROPPED = re.compile("(^|_)(dropout|drop|pdrop)($|_)")

_LATENT = (
    *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
    *("longcat_flash", "minicpm3", "sarvam_mla", "youtu"),
)
_ROTATES = {"head_dim": 8, "num_key_value_heads": 4}  # the head of latent attention is the part that rotates
_TYPES = Path(__file__).with_suffix(".txt").read_text().split()
_WITH: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_LATENT, _ROTATES),
    "diffllama": {"attention_dropout": 0.0},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "inkling2_text": {"unpadded_vocab_size": 256},
    "inkling2_loop_text": {"unpadded_vocab_size": 256},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [4, 6],
        "axial_pos_embds_dim": [16, 48],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
    },
    "roc_bert": {
        **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), 32),
        **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), 64),
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Types that need more than that, and what."""


def small(kind: str, **settings: Any) -> Any:
    """The configuration of a type, made small, with dropout."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]
    usual = config()
    names = {*inspect.signature(config.__init__).parameters, *vars(usual), *config.attribute_map}
    dropped = [n for n in names if _DROPPED.search(n) and isinstance(getattr(usual, n, None), float)]
    sizes = {name: size for name, size in _SIZES.items() if name in names}
    return config(**{**sizes, **dict.fromkeys(dropped, 0.1), **settings})


def _build(kind: str, **settings: Any) -> Built:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = small(kind, **settings)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    ids = words(2, 24)
    return model, (), {"input_ids": ids, "labels": ids.clone()}


def _in_zoo(kind: str) -> None:
    in_zoo_as(f"causal_{kind.replace('-', '_')}", lambda: _build(kind, **_WITH.get(kind, {})))


for _kind in (*_TYPES, *_WITH):
    _in_zoo(_kind)
