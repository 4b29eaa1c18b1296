"""Prompts of several jobs through the encode blocks at once, and their embeddings apart again."""

from __future__ import annotations

from typing import Any

import torch

# Inputs of the encode blocks that may be lists, one prompt a job.
PROMPTS = ("prompt", "negative_prompt")
TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")


def split(values: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The outputs of one run over `count` prompts, by prompt.

    Tensors and lists have one entry a prompt, anything else is the same for all. Raises
    ValueError where a tensor or list has another number of entries.
    """
    apart: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in values.items():
        many = isinstance(value, torch.Tensor | list)
        if many and len(value) != count:
            raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
        for i, own in enumerate(apart):
            if isinstance(value, torch.Tensor):
                own[name] = value[i : i + 1].clone()
            else:
                own[name] = value[i : i + 1] if many else value
    return apart
