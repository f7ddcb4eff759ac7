"""Language models of Hugging Face transformers that predict the next word."""

from typing import Any

from tests.zoo import Built, in_zoo, in_zoo_as
from tests.zoo.text import _SHAPE, _SPECIAL, hugging_face

_GROUPED = {**_SHAPE, "num_key_value_heads": 2, **_SPECIAL}
_OLD = {"vocab_size": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}


def _decoder(name: str, family: str, kind: str = "ForCausalLM", **settings: Any) -> None:
    in_zoo_as(name, lambda: hugging_face(f"{family}{kind}", f"{family}Config", **settings))


_decoder("hf_gpt2", "GPT2", "LMHeadModel", **_OLD)
_decoder("hf_gpt2_without_cache", "GPT2", "LMHeadModel", use_cache=False, **_OLD)
_decoder("hf_gptj", "GPTJ", **_OLD, rotary_dim=8)
_decoder("hf_codegen", "CodeGen", **_OLD, rotary_dim=8)
_decoder(
    "hf_gpt_neo",
    "GPTNeo",
    vocab_size=256,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    attention_types=[[["global", "local"], 1]],
    max_position_embeddings=64,
    window_size=8,
)
_decoder("hf_gpt_neox", "GPTNeoX", **_SHAPE)
_decoder("hf_gpt_bigcode", "GPTBigCode", **_OLD)
_decoder("hf_bloom", "Bloom", vocab_size=256, hidden_size=64, n_layer=3, n_head=4)
_decoder("hf_falcon", "Falcon", vocab_size=256, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
_decoder(
    "hf_opt",
    "OPT",
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=3,
    ffn_dim=128,
    num_attention_heads=4,
    max_position_embeddings=64,
    word_embed_proj_dim=64,
    layerdrop=0.1,
)
_decoder(
    "hf_xglm",
    "XGLM",
    vocab_size=256,
    d_model=64,
    num_layers=3,
    ffn_dim=128,
    attention_heads=4,
    max_position_embeddings=64,
)
_decoder("hf_mpt", "Mpt", vocab_size=256, d_model=64, n_layers=3, n_heads=4, max_seq_len=64)
_decoder("hf_phi", "Phi", **_GROUPED)
_decoder("hf_phi3", "Phi3", **_GROUPED)
_decoder("hf_llama", "Llama", **_GROUPED)
_decoder("hf_llama_without_cache", "Llama", use_cache=False, **_GROUPED)
_decoder("hf_mistral", "Mistral", **_GROUPED, sliding_window=8)
_decoder("hf_mixtral", "Mixtral", **_GROUPED, num_local_experts=4, output_router_logits=True)
_decoder(
    "hf_mixtral_loop_over_experts", "Mixtral", **_GROUPED, num_local_experts=4, experts_implementation="eager"
)
_decoder("hf_qwen2", "Qwen2", **_GROUPED, tie_word_embeddings=True)
_decoder("hf_qwen3", "Qwen3", **_GROUPED, head_dim=16)
_decoder(
    "hf_qwen2_moe",
    "Qwen2Moe",
    **_GROUPED,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)
_decoder("hf_gemma", "Gemma", **_GROUPED, head_dim=16)
_decoder("hf_gemma2", "Gemma2", **_GROUPED, head_dim=16, sliding_window=8, query_pre_attn_scalar=16)
_decoder(
    "hf_gpt_oss",
    "GptOss",
    **_GROUPED,
    num_local_experts=4,
    num_experts_per_tok=2,
    head_dim=16,
    sliding_window=8,
)
_decoder("hf_olmo2", "Olmo2", **_GROUPED)
_decoder("hf_stablelm", "StableLm", **_GROUPED)
_decoder("hf_starcoder2", "Starcoder2", **_GROUPED)
_decoder("hf_cohere", "Cohere", **_GROUPED)
_decoder("hf_granite", "Granite", **_GROUPED)
_decoder("hf_nemotron", "Nemotron", **_GROUPED)
_decoder("hf_biogpt", "BioGpt", **_SHAPE)
_decoder("hf_persimmon", "Persimmon", **_SHAPE)
_decoder("hf_mamba", "Mamba", vocab_size=256, hidden_size=64, num_hidden_layers=2, state_size=8)
_decoder(
    "hf_mamba2",
    "Mamba2",
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    state_size=8,
    num_heads=8,
    head_dim=16,
    n_groups=1,
    chunk_size=8,
)
_decoder(
    "hf_rwkv",
    "Rwkv",
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    attention_hidden_size=64,
    intermediate_size=128,
    context_length=64,
)


@in_zoo
def hf_llama_checkpointed() -> Built:
    model, args, kwargs = hugging_face("LlamaForCausalLM", "LlamaConfig", use_cache=False, **_GROUPED)
    model.gradient_checkpointing_enable()
    return model, args, kwargs


@in_zoo
def hf_gemma3() -> Built:
    settings = {**_GROUPED, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    return hugging_face("Gemma3ForCausalLM", "Gemma3TextConfig", **settings)


_MIXERS = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 8}
_decoder("hf_bamba", "Bamba", **_GROUPED, **_MIXERS, mamba_n_groups=1, attn_layer_indices=[1])
_decoder("hf_falcon_h1", "FalconH1", **_GROUPED, **_MIXERS, mamba_n_groups=1, mamba_d_ssm=128)
