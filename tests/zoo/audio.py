"""Speech models and models of time series, of Hugging Face transformers."""

from typing import Any

import torch

from tests.zoo import Built, in_zoo

_SPEECH = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "pad_token_id": 0,
    "ctc_loss_reduction": "mean",
}
_PLAIN = {"apply_spec_augment": False, "layerdrop": 0.0}


def _speech(family: str, **settings: Any) -> Built:
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**_SPEECH, **settings})
    model = getattr(transformers, f"{family}ForCTC")(config)
    return model, (), {"input_values": torch.randn(2, 2000), "labels": torch.randint(1, 32, (2, 6))}


@in_zoo
def hf_wav2vec2_augmented() -> Built:
    return _speech("Wav2Vec2", mask_time_length=2)


@in_zoo
def hf_wav2vec2() -> Built:
    return _speech("Wav2Vec2", **_PLAIN)


@in_zoo
def hf_hubert() -> Built:
    return _speech("Hubert", **_PLAIN)


@in_zoo
def hf_wavlm() -> Built:
    return _speech("WavLM", **_PLAIN)


@in_zoo
def hf_whisper() -> Built:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=256,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=64,
        max_target_positions=32,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return model, (), {"input_features": torch.randn(2, 16, 128), "labels": torch.randint(3, 256, (2, 16))}


@in_zoo
def hf_audio_spectrogram() -> Built:
    import transformers

    config = transformers.ASTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        patch_size=8,
        frequency_stride=8,
        time_stride=8,
        max_length=64,
        num_mel_bins=32,
        num_labels=5,
    )
    model = transformers.ASTForAudioClassification(config)
    return model, (), {"input_values": torch.randn(4, 64, 32), "labels": torch.randint(0, 5, (4,))}


@in_zoo
def hf_patchtst() -> Built:
    import transformers

    config = transformers.PatchTSTConfig(
        num_input_channels=4,
        context_length=64,
        patch_length=4,
        patch_stride=4,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        prediction_length=16,
        loss="mse",
    )
    model = transformers.PatchTSTForPrediction(config)
    return model, (), {"past_values": torch.randn(8, 64, 4), "future_values": torch.randn(8, 16, 4)}


@in_zoo
def hf_patchtsmixer() -> Built:
    import transformers

    config = transformers.PatchTSMixerConfig(
        num_input_channels=4,
        context_length=64,
        patch_length=4,
        patch_stride=4,
        d_model=32,
        num_layers=2,
        prediction_length=16,
    )
    model = transformers.PatchTSMixerForPrediction(config)
    return model, (), {"past_values": torch.randn(8, 64, 4), "future_values": torch.randn(8, 16, 4)}


@in_zoo
def hf_time_series_transformer() -> Built:
    import transformers

    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=8,
        context_length=24,
        input_size=1,
        lags_sequence=[1, 2, 3],
        num_time_features=2,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        scaling="mean",
    )
    model = transformers.TimeSeriesTransformerForPrediction(config)
    past, future = 27, 8
    inputs = {
        "past_values": torch.rand(16, past) + 1.0,
        "past_time_features": torch.randn(16, past, 2),
        "past_observed_mask": torch.ones(16, past),
        "future_values": torch.rand(16, future) + 1.0,
        "future_time_features": torch.randn(16, future, 2),
    }
    return model, (), inputs


@in_zoo
def hf_vits() -> Built:
    """Flows, which split what they are given and hand both halves on."""
    import transformers

    config = transformers.VitsConfig(
        vocab_size=38,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=32,
        flow_size=32,
        spectrogram_bins=9,
        upsample_initial_channel=32,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        prior_encoder_num_flows=2,
        posterior_encoder_num_wavenet_layers=2,
        duration_predictor_num_flows=2,
    )
    return transformers.VitsModel(config), (), {"input_ids": torch.randint(3, 30, (1, 12))}


@in_zoo
def hf_encodec() -> Built:
    """Convolutions, an LSTM, and codebooks one after the other."""
    import transformers

    config = transformers.EncodecConfig(
        num_filters=4,
        codebook_size=32,
        codebook_dim=16,
        hidden_size=16,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
        chunk_length_s=None,
        normalize=False,
    )
    return transformers.EncodecModel(config), (), {"input_values": torch.randn(2, 1, 1600)}


@in_zoo
def hf_dac() -> Built:
    import transformers

    config = transformers.DacConfig(
        encoder_hidden_size=8,
        decoder_hidden_size=32,
        downsampling_ratios=[2, 4],
        upsampling_ratios=[4, 2],
        codebook_size=32,
        codebook_dim=4,
        n_codebooks=3,
        hidden_size=32,
    )
    return transformers.DacModel(config), (), {"input_values": torch.randn(2, 1, 512)}


@in_zoo
def hf_autoformer() -> Built:
    """Attention by autocorrelation, through Fourier transforms, at delays that data decide."""
    import transformers

    config = transformers.AutoformerConfig(
        prediction_length=8,
        context_length=24,
        lags_sequence=[1, 2, 3],
        num_time_features=2,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        scaling="mean",
        label_length=8,
        moving_average=5,
        autocorrelation_factor=2,
    )
    inputs = {
        "past_values": torch.rand(4, 27) + 1,
        "past_time_features": torch.randn(4, 27, 2),
        "past_observed_mask": torch.ones(4, 27),
        "future_values": torch.rand(4, 8) + 1,
        "future_time_features": torch.randn(4, 8, 2),
    }
    return transformers.AutoformerForPrediction(config), (), inputs
