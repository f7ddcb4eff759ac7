"""Models with frozen weights and adapters, by peft."""

from typing import Any

from tests.zoo import Built, in_zoo
from tests.zoo.decoders import _GROUPED, _OLD
from tests.zoo.text import _SHAPE, hugging_face


def _adapted(built: Built, config: Any) -> Built:
    import peft

    model, args, kwargs = built
    return peft.get_peft_model(model, config), args, kwargs


def _llama() -> Built:
    return hugging_face("LlamaForCausalLM", "LlamaConfig", use_cache=False, **_GROUPED)


@in_zoo
def peft_lora_llama() -> Built:
    import peft

    return _adapted(_llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


@in_zoo
def peft_dora_llama() -> Built:
    import peft

    return _adapted(_llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True))


@in_zoo
def peft_ia3_llama() -> Built:
    import peft

    config = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    return _adapted(_llama(), config)


@in_zoo
def peft_lora_bert() -> Built:
    import peft

    built = hugging_face("BertForSequenceClassification", "BertConfig", "classes", **_SHAPE)
    return _adapted(built, peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]))


@in_zoo
def peft_prompt_gpt2() -> Built:
    import peft

    built = hugging_face("GPT2LMHeadModel", "GPT2Config", use_cache=False, **_OLD)
    return _adapted(built, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


@in_zoo
def peft_loha_llama() -> Built:
    import peft

    return _adapted(_llama(), peft.LoHaConfig(r=4, target_modules=["q_proj", "v_proj"]))
