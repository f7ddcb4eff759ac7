"""Encoders, and encoders with decoders, of Hugging Face transformers."""

import types
from typing import Any

import torch

from tests.zoo import Built, in_zoo, in_zoo_as, words

_VOCABULARY, _WIDTH = 256, 64
_SHAPE = {
    "vocab_size": _VOCABULARY,
    "hidden_size": _WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def hugging_face(model: str, config: str, inputs: str = "language", **settings: Any) -> Built:
    """A model of transformers with inputs for language modelling, classification or neither."""
    import transformers

    module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    tokens = words(vocabulary=settings.get("vocab_size", _VOCABULARY))
    call: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if inputs == "language":
        call["labels"] = tokens.clone()
    elif inputs == "classes":
        call["labels"] = torch.randint(0, 2, (len(tokens),))
    elif inputs == "tokens":
        call["labels"] = torch.randint(0, 2, tokens.shape)
    return module, (), call


def _encoder(name: str, model: str, config: str, inputs: str = "language", **more: Any) -> None:
    def build() -> Built:
        return hugging_face(model, config, inputs, **{**_SHAPE, **more})

    in_zoo_as(name, build)


_encoder("hf_bert", "BertForMaskedLM", "BertConfig")
_encoder("hf_bert_eager_attention", "BertForMaskedLM", "BertConfig", attn_implementation="eager")
_encoder("hf_roberta", "RobertaForSequenceClassification", "RobertaConfig", "classes")
_encoder("hf_xlm_roberta", "XLMRobertaForTokenClassification", "XLMRobertaConfig", "tokens")
_encoder("hf_electra", "ElectraForPreTraining", "ElectraConfig", "tokens", embedding_size=32)
_encoder("hf_albert", "AlbertForMaskedLM", "AlbertConfig", embedding_size=32)
_encoder("hf_camembert", "CamembertForMaskedLM", "CamembertConfig")
_encoder("hf_mpnet", "MPNetForMaskedLM", "MPNetConfig")
_encoder("hf_convbert", "ConvBertForMaskedLM", "ConvBertConfig", embedding_size=32)
_encoder(
    "hf_squeezebert",
    "SqueezeBertForMaskedLM",
    "SqueezeBertConfig",
    embedding_size=64,
    q_groups=2,
    k_groups=2,
    v_groups=2,
    post_attention_groups=1,
    intermediate_groups=2,
    output_groups=2,
)
_encoder("hf_megatron_bert", "MegatronBertForMaskedLM", "MegatronBertConfig")
_encoder(
    "hf_nystromformer",
    "NystromformerForMaskedLM",
    "NystromformerConfig",
    num_landmarks=8,
    segment_means_seq_len=32,
)
_encoder("hf_fnet", "FNetForMaskedLM", "FNetConfig")
_encoder("hf_roformer", "RoFormerForMaskedLM", "RoFormerConfig", embedding_size=64)
_encoder("hf_layoutlm", "LayoutLMForMaskedLM", "LayoutLMConfig")
_encoder(
    "hf_deberta", "DebertaForMaskedLM", "DebertaConfig", relative_attention=True, pos_att_type=["c2p", "p2c"]
)
_encoder(
    "hf_deberta_v2",
    "DebertaV2ForMaskedLM",
    "DebertaV2Config",
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    position_buckets=16,
)
_encoder(
    "hf_modernbert", "ModernBertForMaskedLM", "ModernBertConfig", cls_token_id=1, sep_token_id=2, **_SPECIAL
)
_encoder("hf_longformer", "LongformerForMaskedLM", "LongformerConfig", attention_window=8)
_encoder("hf_ernie", "ErnieForMaskedLM", "ErnieConfig")
_encoder("hf_data2vec_text", "Data2VecTextForMaskedLM", "Data2VecTextConfig")


@in_zoo
def hf_bert_checkpointed() -> Built:
    model, args, kwargs = hugging_face("BertForMaskedLM", "BertConfig", **_SHAPE)
    model.gradient_checkpointing_enable()
    return model, args, kwargs


@in_zoo
def hf_distilbert() -> Built:
    return hugging_face(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        vocab_size=_VOCABULARY,
        dim=_WIDTH,
        n_layers=3,
        n_heads=4,
        hidden_dim=128,
        max_position_embeddings=64,
    )


@in_zoo
def hf_funnel() -> Built:
    return hugging_face(
        "FunnelForMaskedLM",
        "FunnelConfig",
        vocab_size=_VOCABULARY,
        d_model=_WIDTH,
        block_sizes=[1, 1],
        n_head=4,
        d_head=16,
        d_inner=128,
        num_decoder_layers=1,
    )


@in_zoo
def hf_xlnet() -> Built:
    return hugging_face(
        "XLNetLMHeadModel",
        "XLNetConfig",
        vocab_size=_VOCABULARY,
        d_model=_WIDTH,
        n_layer=3,
        n_head=4,
        d_inner=128,
    )


@in_zoo
def hf_reformer() -> Built:
    built = hugging_face(
        "ReformerModelWithLMHead",
        "ReformerConfig",
        vocab_size=_VOCABULARY,
        hidden_size=_WIDTH,
        num_attention_heads=2,
        attention_head_size=32,
        attn_layers=["local", "lsh"],
        feed_forward_size=128,
        axial_pos_shape=(4, 8),
        axial_pos_embds_dim=(32, 32),
        max_position_embeddings=32,
        lsh_attn_chunk_length=8,
        local_attn_chunk_length=8,
        num_buckets=4,
        is_decoder=True,
    )
    for part in built[0].modules():
        if type(part).__name__ == "ReformerLayer":
            part._init_attention_seed = types.MethodType(_seed_attention, part)  # type: ignore[assignment]
            part._init_feed_forward_seed = types.MethodType(_seed_feed_forward, part)  # type: ignore[assignment]
    return built


# Reformer seeds PyTorch from the operating system in each step, and no two of its steps are the same. Here it
# draws its seeds from PyTorch's generator.
def _seed_attention(layer: Any) -> None:
    layer.attention_seed = int(torch.randint(2**31, ()).item())
    torch.manual_seed(layer.attention_seed)


def _seed_feed_forward(layer: Any) -> None:
    layer.feed_forward_seed = int(torch.randint(2**31, ()).item())
    torch.manual_seed(layer.feed_forward_seed)


# ---- encoder and decoder -----------------------------------------------------------------------------


def _translator(model: str, config: str, **settings: Any) -> Built:
    import transformers

    module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return module, (), {"input_ids": words(), "labels": words(length=16)}


_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": _WIDTH,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": _VOCABULARY,
    "d_model": _WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    **_SPECIAL,
}


def _translators() -> None:
    def add(name: str, model: str, config: str, settings: dict[str, Any]) -> None:
        in_zoo_as(name, lambda: _translator(model, config, **settings))

    add("hf_t5", "T5ForConditionalGeneration", "T5Config", _T5)
    add("hf_mt5", "MT5ForConditionalGeneration", "MT5Config", {**_T5, "feed_forward_proj": "gated-gelu"})
    add("hf_bart", "BartForConditionalGeneration", "BartConfig", _BART)
    add("hf_mbart", "MBartForConditionalGeneration", "MBartConfig", _BART)
    add("hf_pegasus", "PegasusForConditionalGeneration", "PegasusConfig", _BART)
    add(
        "hf_marian",
        "MarianMTModel",
        "MarianConfig",
        {**_BART, "decoder_start_token_id": 0, "forced_eos_token_id": 2},
    )
    add("hf_blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", _BART)
    add(
        "hf_prophetnet",
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": _WIDTH,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "decoder_start_token_id": 0,
            **_SPECIAL,
        },
    )
    add(
        "hf_switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            **_T5,
            "num_experts": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
        },
    )


_translators()
