"""Stage 4: the transformer, by flow matching on encoded scenes and what the encoder read."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.training import assemble, latents, reading, text, world

MATRIX_RATE = 1e-3  # Muon's, for the matrices inside the blocks
LEARNING_RATE = 6e-4  # AdamW's, for all else
WARMUP = 300  # steps
COOLDOWN = 0.35  # the last share of the steps, in which the learning rate goes down
# How far the training sigmas lean towards noise, for a picture of 16 tokens. A background's colour
# is in every token at once: the more tokens, the nearer to pure noise it can still be seen, and the
# nearer to it the sampler decides it. So the shift grows with the root of their number, to 3 at
# 128 px.
SHIFT = 1.5
EMPTY_SHARE = 0.10  # prompts replaced by an empty one, which is what a negative prompt is for CFG
EMA_DECAY = 0.999
# (height, width): (batch, share of the steps). Batches shrink as tokens grow, to keep steps alike.
BATCHES: dict[tuple[int, int], tuple[int, float]] = {
    (128, 128): (32, 0.50),
    (64, 64): (48, 0.18),
    (96, 160): (32, 0.07),
    (160, 96): (32, 0.07),
    (192, 128): (20, 0.05),
    (128, 192): (20, 0.05),
    (256, 256): (10, 0.08),
}


def half_precision() -> torch.autocast:
    """bfloat16 matrix products: half the time on a CPU that has them, the same loss."""
    return torch.autocast("cpu", torch.bfloat16)


def use_half_precision(model: Model) -> None:
    """Run the transformer's blocks, and only them, in half precision.

    Autocast around the whole transformer would round the timestep to 8 bits before its sine
    embedding: the model would learn a few hundred phases and meet others when sampling.
    """
    for block in model.transformer.transformer_blocks:
        block.forward = half_precision()(block.forward)


class Model(nn.Module):
    """The transformer, and the text encoder as `reading` left it."""

    def __init__(self, work: Path) -> None:
        super().__init__()
        self.tokenizer = text.new_tokenizer()
        self.text_encoder = text.new_text_encoder(self.tokenizer)
        reading.load(work, self.text_encoder)
        self.transformer = assemble.new_transformer()

    def forward(
        self, tokens: torch.Tensor, sigma: torch.Tensor, prompts: list[str], grid: tuple[int, int]
    ) -> torch.Tensor:
        """Noisy (batch, tokens, 32) latents at (batch,) sigmas to their velocity, same shape."""
        with torch.no_grad():
            embeds, mask = text.encode(self.tokenizer, self.text_encoder, prompts)
        velocity: torch.Tensor = self.transformer(
            hidden_states=tokens,
            timestep=sigma,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *grid)]] * len(prompts),
            return_dict=False,
        )[0]
        return velocity


def draw_sigmas(count: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Noise levels in 0..1: half logit-normal, half even, shifted towards the noisy end.

    The even half is for the ends. Sampling starts at 1, and there a logit-normal has nothing.
    """
    middle = torch.sigmoid(torch.randn(count, generator=generator))
    even = torch.rand(count, generator=generator)
    sigma = torch.where(torch.rand(count, generator=generator) < 0.5, middle, even)
    shift = SHIFT * (tokens / 16) ** 0.5
    shifted: torch.Tensor = shift * sigma / (1 + (shift - 1) * sigma)
    return shifted


def draw_prompt(scene: world.Scene, rng: random.Random) -> str:
    """The scene in words, or sometimes the empty prompt in both the forms that people pass."""
    return rng.choice(("", " ")) if rng.random() < EMPTY_SHARE else world.caption(scene, rng)


def step_loss(
    model: Model, shards: dict[tuple[int, int], np.ndarray], seed: int, step: int
) -> torch.Tensor:
    """The flow loss of one batch, which the step's number alone decides."""
    rng = random.Random(f"flow {seed} {step}")
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    size = rng.choices(list(BATCHES), [share for _, share in BATCHES.values()])[0]
    shard = shards[size]
    chosen = rng.sample(range(len(shard)), BATCHES[size][0])
    prompts = [draw_prompt(latents.scene_and_rng(seed, *size, i)[0], rng) for i in chosen]
    clean = latents.pack(torch.from_numpy(shard[np.array(chosen)]).float())
    noise = torch.randn(clean.shape, generator=generator)
    sigma = draw_sigmas(len(chosen), clean.shape[1], generator)
    noisy = torch.lerp(clean, noise, sigma[:, None, None])
    velocity: torch.Tensor = model(noisy, sigma, prompts, (size[0] // 16, size[1] // 16))
    return (velocity - (noise - clean)).square().mean()


def new_optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for the rest.

    Muon: https://kellerjordan.github.io/posts/muon/. Measured from the same checkpoint on the same
    batches, a step takes a quarter longer than with AdamW alone and the loss falls about twice as
    fast.
    """
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            inside = "transformer_blocks" in name and weight.ndim == 2
            (matrices if inside else rest).append(weight)
    muon = torch.optim.Muon(
        matrices, lr=MATRIX_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        rest, lr=LEARNING_RATE, weight_decay=0.01, betas=(0.9, 0.99), fused=True
    )
    return [muon, adamw]


def rate_factor(step: int, steps: int) -> float:
    """The share of the full learning rates: warm up, stay, and go down over the last third.

    A function of the step alone, and flat for long: `steps` may be changed when a run is resumed.
    """
    return min(1.0, (step + 1) / WARMUP, max(0.01, (steps - step) / (COOLDOWN * steps)))


@torch.no_grad()
def update_average(average: Model, model: Model, step: int) -> None:
    """Move the averaged weights on; quickly at first, while the weights still travel far."""
    decay = min(EMA_DECAY, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


def train(
    work: Path,
    steps: int,
    seed: int,
    resume: bool,
    save: Callable[[Model], None],
    save_every: int = 1500,
) -> None:
    """Train for `steps` batches; `save` is given the averaged model now and then and at the end."""
    torch.manual_seed(seed)
    shards = {
        size: np.load(latents.encode_all(work, seed, size), mmap_mode="r") for size in BATCHES
    }
    model = Model(work)
    average = copy.deepcopy(model)
    optimizers = new_optimizers(model)
    full_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    first, state_file = 0, work / "flow.pt"
    if resume and state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
    use_half_precision(model)
    began, recent = time.monotonic(), 1.0
    for step in range(first, steps):
        # The plain attention: on CPU the fused one's backward takes as long as all else together.
        with sdpa_kernel(SDPBackend.MATH):
            loss = step_loss(model, shards, seed, step)
            model.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, full_rate in zip(optimizers, full_rates, strict=True):
            optimizer.param_groups[0]["lr"] = full_rate * rate_factor(step, steps)
            optimizer.step()
        update_average(average, model, step)
        recent = 0.98 * recent + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            pace = (time.monotonic() - began) / (step + 1 - first)
            print(f"flow {step + 1}/{steps} loss {recent:.4f} {pace:.3f} s a step", flush=True)
        if (step + 1) % 500 == 0 or step + 1 == steps:
            state = {"model": model.state_dict(), "average": average.state_dict()}
            state |= {"optimizers": [o.state_dict() for o in optimizers], "step": step + 1}
            torch.save(state, state_file.with_suffix(".part"))
            state_file.with_suffix(".part").rename(state_file)
        if (step + 1) % save_every == 0 or step + 1 == steps:
            save(average)
