"""Stage 2: the text encoder learns to read captions, before the transformer sees a word of them.

Trained from nothing through the transformer's loss alone, words had not bound to places and shapes
after five thousand steps. Reading is a far smaller task than drawing: here the states of the tokens
behind the prompt have to tell, linearly, what the scene is. That takes two minutes, and the encoder
then stays as it is.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration

from models.training import text, world

STEPS = 500
BATCH = 96
LEARNING_RATE = 2e-3
EMPTY_SHARE = 0.05
SUFFIX_TOKENS = (
    5  # <|im_end|> \n <|im_start|> assistant \n: behind every prompt, so they see all of it
)

_RELATIONS = ("above", "left of")
_QUESTIONS: tuple[tuple[str, ...], ...] = (
    *(
        tuple(options)
        for _ in range(2)
        for options in (world.PALETTE, world.SHAPES, world.DIAMETERS[1])
    ),
    (*world.PLACES, *_RELATIONS),
    tuple(world.PALETTE),
)  # colour, shape and size of the first and second thing, then the place, then the background


def answers(scene: world.Scene | None) -> list[int]:
    """What the scene is, one number a question; a question's last number means "there is none".

    Things are told in the picture's own order, left before right and top before bottom: so that
    "A below B" is understood, not repeated.
    """
    if scene is None:
        return [len(options) for options in _QUESTIONS]
    things, place = scene.things, scene.place
    if place in ("below", "right of"):
        things, place = things[::-1], {"below": "above", "right of": "left of"}[place]
    said: list[str | None] = []
    for index in range(2):
        thing = things[index] if index < len(things) else None
        said += [thing.colour, thing.shape, thing.size] if thing else [None] * 3
    said += [place, scene.background]
    return [
        len(options) if word is None else options.index(word)
        for options, word in zip(_QUESTIONS, said, strict=True)
    ]


def train(work: Path, seed: int, resume: bool) -> None:
    """Train the encoder; `work/text.pt` holds its weights."""
    if resume and (work / "text.pt").exists():
        return
    torch.manual_seed(seed)
    tokenizer = text.new_tokenizer()
    encoder = text.new_text_encoder(tokenizer)
    classes = [len(options) + 1 for options in _QUESTIONS]
    heads = nn.Linear(encoder.config.text_config.hidden_size, sum(classes))
    weights = [*encoder.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1
    )
    began, right = time.monotonic(), 0.0
    for step in range(STEPS):
        rng = random.Random(f"reading {seed} {step}")
        scenes = [
            world.random_scene(rng) if rng.random() > EMPTY_SHARE else None for _ in range(BATCH)
        ]
        prompts = [world.caption(s, rng) if s else rng.choice(("", " ")) for s in scenes]
        with torch.autocast("cpu", torch.bfloat16):
            states, mask = text.encode(tokenizer, encoder, prompts)
        last = mask.sum(1, keepdim=True) - torch.arange(1, SUFFIX_TOKENS + 1)
        behind = states.float().gather(1, last[..., None].expand(-1, -1, states.shape[-1]))
        told = heads(behind).split(classes, dim=-1)
        wanted = torch.tensor([answers(scene) for scene in scenes])[:, None].expand(
            -1, SUFFIX_TOKENS, -1
        )
        loss = sum(
            nn.functional.cross_entropy(logits.flatten(0, 1), wanted[..., i].flatten())
            for i, logits in enumerate(told)
        )
        assert isinstance(loss, torch.Tensor)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        hits = [logits.argmax(-1) == wanted[..., i] for i, logits in enumerate(told)]
        right = 0.95 * right + 0.05 * torch.stack(hits).all(0).float().mean().item()
        if (step + 1) % 100 == 0:
            pace = (time.monotonic() - began) / (step + 1)
            print(
                f"reading {step + 1}/{STEPS} loss {loss.item():.3f}, {right:.1%} of captions fully "
                f"understood, {pace:.3f} s a step",
                flush=True,
            )
    torch.save(encoder.state_dict(), work / "text.pt")


def load(work: Path, encoder: Qwen2_5_VLForConditionalGeneration) -> None:
    """Put the trained weights into an encoder and keep them there."""
    encoder.load_state_dict(torch.load(work / "text.pt", weights_only=True))
    encoder.requires_grad_(False)
