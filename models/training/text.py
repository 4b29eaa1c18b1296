"""The words: a tokenizer in which each word of the world is one token, and a small text encoder.

The Qwen pipelines cut the first 34 tokens off every prompt: their fixed template, counted in
Qwen's own vocabulary. A tokenizer for which the template is longer would leave pieces of it in
front of the prompt, a shorter one would lose the prompt's first words. Here every template word is
one token, which makes 34 again. Any other text falls back to bytes.
"""

from __future__ import annotations

import json

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from models.training import world

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)  # diffusers' own, QwenImagePipeline.prompt_template_encode
TEMPLATE_TOKENS = 34  # cut off by the pipelines before the transformer sees the prompt

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_HEADS = ("system", "Describe", "user", "assistant")  # template words that no space precedes
_SPACED = (
    "the image by detailing color shape size texture quantity text spatial relationships of "
    "objects and background"
)


def new_tokenizer() -> Qwen2Tokenizer:
    """A Qwen2 tokenizer of 256 bytes, the words and their pieces, and the special tokens."""
    caption_words = world.caption_words()
    spaced = [" " + word for word in sorted(caption_words | set(_SPACED.split()))]
    # A prompt's first word has no space before it, and may have a capital.
    openers = sorted({*world.opening_words(), *(w.capitalize() for w in world.opening_words())})
    corpus = [*spaced, *openers, *_HEADS]
    # Merges are learned from the words, each on its own, until each is a single token: a table put
    # together by hand lets one word's merges ("an") take letters out of another ("orange").
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=4096, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    model = json.loads(bpe.to_str())["model"]
    # The special tokens come last, as in Qwen's own vocabulary.
    vocab = model["vocab"]
    vocab |= {token: len(vocab) + index for index, token in enumerate(_SPECIAL)}
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=[tuple(merge) for merge in model["merges"]],
        additional_special_tokens=list(_SPECIAL[1:]),
        padding_side="right",
        model_max_length=2048,
    )


def new_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained Qwen2.5-VL of two layers, with a vision tower because the class has one."""

    def token(name: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(name))

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
            "pad_token_id": token("<|endoftext|>"),
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [0],
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def encode(
    tokenizer: Qwen2Tokenizer, encoder: Qwen2_5_VLForConditionalGeneration, prompts: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts to (batch, tokens, 128) embeddings and a (batch, tokens) mask, as the pipeline does.

    The same cut and the same zero padding as `QwenImagePipeline.encode_prompt`, with a gradient.
    """
    tokens = tokenizer([TEMPLATE.format(p) for p in prompts], padding=True, return_tensors="pt")
    hidden = encoder(
        input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, output_hidden_states=True
    ).hidden_states[-1]
    mask = tokens.attention_mask[:, TEMPLATE_TOKENS:]
    return hidden[:, TEMPLATE_TOKENS:] * mask[..., None], mask
