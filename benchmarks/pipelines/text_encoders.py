"""Text encoders of the published classes and sizes with random weights, and tokenizers that need no files."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, processors, trainers

from pipelines import random_module

# With the ids 0 to 3, as T5 has the first two.
PAD, EOS, BOS, UNKNOWN = "<pad>", "</s>", "<s>", "<unk>"
ROLE, END_OF_ROLE = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{ROLE}{{{{ message.role }}}}\n{{{{ message.content }}}}{END_OF_ROLE}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ROLE}assistant\n{{% endif %}}"
)
LONGEST_VOCABULARY = 1024


def tokenizer(
    texts: Sequence[str], template: str = "$A", length: int = 4096
) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer that was trained on these texts: a token of theirs is about a word.

    Args:
        template: where special tokens go, as `TemplateProcessing` takes it.
        length: the most tokens of a text.
    """
    special = [PAD, EOS, BOS, UNKNOWN, ROLE, END_OF_ROLE]
    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=UNKNOWN))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LONGEST_VOCABULARY,
        min_frequency=1,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    model.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, special.index(token)) for token in special]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[ROLE, END_OF_ROLE],
        model_max_length=length,
        chat_template=CHAT_TEMPLATE,
    )


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder of transformers.

    Attributes:
        cls, config: the names of its class and of its configuration's class.
        text: the published configuration, of the language model where there is a vision tower.
        small: what a small encoder changes.
        vision: the configuration of a vision tower, which a prompt of text does not use and is small; None if
            there is none.
        distinct_layers: layers with weights of their own; the others share them in turns. None for all.
        template, length: as `tokenizer` takes them.
        bytes_as_tokens: whether a byte is a token, as ByT5 has it.
    """

    cls: str
    config: str
    text: Mapping[str, Any]
    small: Mapping[str, Any]
    vision: Mapping[str, Any] | None = None
    distinct_layers: int | None = None
    template: str = "$A"
    length: int = 4096
    bytes_as_tokens: bool = False

    def make(self, device: torch.device, dtype: torch.dtype, tiny: bool) -> torch.nn.Module:
        text = {**self.text, **(self.small if tiny else {})}
        layers = text.get("num_hidden_layers")
        if self.distinct_layers:
            text["num_hidden_layers"] = self.distinct_layers
        parts = text if self.vision is None else {"text_config": text, "vision_config": self.vision}
        config = getattr(transformers, self.config)(**parts)
        make = functools.partial(getattr(transformers, self.cls), config)
        encoder = random_module(make, str(device), dtype)
        for weight in encoder.parameters():
            weight.data = weight.data.to(dtype)  # transformers keeps none of them in float32
        if "d_kv" in text:
            scale_queries(encoder, text["d_kv"])
        if self.distinct_layers:
            repeat_layers(encoder.model.language_model, layers)
        return encoder

    def tokenizer(self, texts: Sequence[str]) -> transformers.PreTrainedTokenizerBase:
        if self.bytes_as_tokens:
            return transformers.ByT5Tokenizer()
        return tokenizer(texts, self.template, self.length)


def scale_queries(encoder: torch.nn.Module, head_size: int) -> None:
    """Makes T5's scores vary by about 1, as its published initialization does: T5 divides them by nothing.

    With scores that vary by 8, bfloat16 gives noise after 24 layers.
    """
    for name, weight in encoder.named_parameters():
        if name.endswith("SelfAttention.q.weight"):
            weight.data /= head_size**0.5


def repeat_layers(model: torch.nn.Module, count: int) -> None:
    """Makes a model run its layers in turns, until it ran as many as this.

    The time is that of layers with weights of their own, because a layer is larger than the L2 cache.
    """
    distinct = list(model.layers)
    model.layers = torch.nn.ModuleList(distinct[i % len(distinct)] for i in range(count))
    model.config.num_hidden_layers = count


# -- The published configurations ----------------------------------------------------------------

VOCABULARY = 2048  # of small encoders
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY}
GROUPED = {**HEADS, "num_key_value_heads": 1, "intermediate_size": 64}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16}


def clip(width: int, layers: int, activation: str, cls: str = "CLIPTextModel") -> TextEncoder:
    text = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
        "hidden_act": activation,
        "projection_dim": width,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    small = {**HEADS, "hidden_size": 32, "intermediate_size": 64}
    template = f"{BOS} $A {EOS}"
    return TextEncoder(cls, "CLIPTextConfig", text, small, template=template, length=77)


def t5(cls: str, config: str, vocabulary: int) -> TextEncoder:
    """Version 1.1 of size XXL."""
    text = {
        "vocab_size": vocabulary,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
    }
    small = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 32, "d_ff": 64}
    small |= {"num_layers": 2, "num_heads": 2}
    return TextEncoder(cls, config, text, small, template=f"$A {EOS}")


CLIP_L = clip(768, 12, "quick_gelu")
CLIP_G = clip(1280, 32, "gelu", "CLIPTextModelWithProjection")
T5_XXL = t5("T5EncoderModel", "T5Config", 32128)
UMT5_XXL = t5("UMT5EncoderModel", "UMT5Config", 256384)
BYT5 = TextEncoder(  # ByT5-small with more tokens, of colors and fonts
    "T5EncoderModel",
    "T5Config",
    {
        **T5_XXL.text,
        "vocab_size": 1510,
        "d_model": 1472,
        "d_ff": 3584,
        "num_layers": 12,
        "num_heads": 6,
    },
    {**T5_XXL.small, "d_model": 32},
    bytes_as_tokens=True,
)
_QWEN25 = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128000,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [16, 24, 24],
    },
}
_QWEN25_SMALL = {
    **GROUPED,
    "hidden_size": 64,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
}
QWEN25_VL = TextEncoder(
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2_5_VLConfig",
    _QWEN25,
    _QWEN25_SMALL,
    vision=QWEN_VISION,
)
QWEN25_VL_TEXT = TextEncoder("Qwen2_5_VLTextModel", "Qwen2_5_VLTextConfig", _QWEN25, _QWEN25_SMALL)
QWEN3_4B = TextEncoder(
    "Qwen3Model",
    "Qwen3Config",
    {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    {**GROUPED, "hidden_size": 64, "head_dim": 32},
)
QWEN3_VL_32B = TextEncoder(
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLConfig",
    {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    {**GROUPED, "hidden_size": 64, "num_hidden_layers": 52},
    vision={**QWEN_VISION, "deepstack_visual_indexes": [0]},
    distinct_layers=4,
)
GEMMA3_12B = TextEncoder(
    "Gemma3ForConditionalGeneration",
    "Gemma3Config",
    {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    },
    {**GROUPED, "hidden_size": 256, "head_dim": 32},
    vision={
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 16,
    },
    template=f"{BOS} $A",
)
