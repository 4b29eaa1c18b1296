"""Rows of several sizes in one forward pass of a Qwen-Image transformer.

Around the transformer tensors are padded to the longest row (joint.py). Inside, by `Form`:

    packed   the tokens of all rows one after another, no padding; attention row by row
    padded   the rows as they came, and a mask over the keys

Either way a token attends to its own row's tokens only, and each row has the rope of its own
size: Qwen's text positions begin where the picture's end.

The forward and all weights are the model's own. `MixedSizes` is a view of the transformer that
shares them and in which other modules stand for three of its kind: the rope, the attention
processors and, where packed, the modulations, whose output is one row a picture and is
wanted once a token. Packed tokens stand on the batch axis, each a sequence of one, so that all that
is done to tokens one by one needs no change.
"""

from __future__ import annotations

import copy
from typing import Any, Literal, Protocol

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

Form = Literal["packed", "padded"]
Shapes = list[tuple[int, int, int]]  # of one row: frames, height, width in tokens
# Dtypes that torch's varlen attention takes; others go row by row on CUDA too.
VARLEN_DTYPES = (torch.bfloat16, torch.float16)


def usable(transformer: Any) -> bool:
    """Whether rows of several sizes can pass through this transformer.

    Not with a second modulation (zero_cond_t) or layered rope: these look at shapes of their
    own. Nor where something has put itself in place of a forward, as diffusers' hooks do (context
    parallelism, offloading): a view would go around it.
    """
    if not isinstance(transformer, QwenImageTransformer2DModel):
        return False
    config: Any = transformer.config
    if config.zero_cond_t or config.use_layer3d_rope or config.guidance_embeds:
        return False
    return not any("forward" in vars(m) for m in (transformer, *transformer.transformer_blocks))


class MixedSizes:
    """Stands in for the transformer in a batch whose rows have the token shapes `shapes`.

    Called as the transformer is, with tensors padded along axis 1 and prompts masked; returns
    predictions padded with zeros. What it works out of the first call's prompts holds for all:
    they do not change from step to step.
    """

    def __init__(self, transformer: Any, shapes: list[Shapes], form: Form) -> None:
        self._transformer, self.shapes, self._form = transformer, shapes, form
        self._view: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transformer, name)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None,
        img_shapes: Any = None,  # of the first job only; see `shapes`
        **more: Any,
    ) -> tuple[torch.Tensor]:
        if self._view is None:
            self._open(hidden_states, encoder_hidden_states, encoder_hidden_states_mask)
        prediction = self._view(
            hidden_states=self._layout.images_in(hidden_states),
            encoder_hidden_states=self._layout.texts_in(encoder_hidden_states),
            **more,
        )[0]
        return (self._layout.images_out(prediction),)

    def _open(
        self, images: torch.Tensor, texts: torch.Tensor, text_mask: torch.Tensor | None
    ) -> None:
        lengths = torch.tensor([_tokens(row) for row in self.shapes], device=images.device)
        places = torch.arange(images.shape[1], device=images.device)
        image_mask = places < lengths[:, None]
        if text_mask is None:
            text_mask = torch.ones(texts.shape[:2], device=texts.device)
        layout = _Packed if self._form == "packed" else _Padded
        self._layout: _Layout = layout(image_mask, text_mask.bool())
        self._view = self._view_of(_rope(self._transformer, self.shapes, images, texts))

    def _view_of(self, rope: tuple[torch.Tensor, torch.Tensor]) -> Any:
        layout = self._layout
        view = _shallow(self._transformer)
        view.pos_embed = _Given(layout.images_in(rope[0]), layout.texts_in(rope[1]))
        blocks = []
        for block in self._transformer.transformer_blocks:
            block = _shallow(block)
            block.attn = _shallow(block.attn)
            block.attn.processor = _Attention(block.attn.processor, layout)
            if isinstance(layout, _Packed):
                block.img_mod = torch.nn.Sequential(block.img_mod, _Take(layout.image_rows))
                block.txt_mod = torch.nn.Sequential(block.txt_mod, _Take(layout.text_rows))
            blocks.append(block)
        view.transformer_blocks = torch.nn.ModuleList(blocks)
        if isinstance(layout, _Packed):
            view.norm_out = _shallow(view.norm_out)
            view.norm_out.linear = torch.nn.Sequential(
                view.norm_out.linear, _Take(layout.image_rows)
            )
        return view


def _tokens(shapes: Shapes) -> int:
    return sum(frames * height * width for frames, height, width in shapes)


def _rope(
    transformer: Any, shapes: list[Shapes], images: torch.Tensor, texts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies of every row's picture and text, padded: rows × tokens × half a head."""
    of_images = []
    of_texts = []
    for row in shapes:
        image, text = transformer.pos_embed(
            [row], max_txt_seq_len=texts.shape[1], device=images.device
        )
        of_images.append(torch.nn.functional.pad(image, (0, 0, 0, images.shape[1] - len(image))))
        of_texts.append(text)
    return torch.stack(of_images), torch.stack(of_texts)


class _Layout(Protocol):
    """Between rows padded to one length and tokens as the blocks see them."""

    def images_in(self, padded: torch.Tensor) -> torch.Tensor: ...
    def texts_in(self, padded: torch.Tensor) -> torch.Tensor: ...
    def images_out(self, tokens: torch.Tensor) -> torch.Tensor: ...
    def attend(
        self,
        images: list[torch.Tensor],
        texts: list[torch.Tensor],
        backend: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over query, key and value, each tokens × heads × features.

        Returns picture tokens and text tokens of the same shape.
        """
        ...


class _Padded:
    """Rows × longest × features throughout; a mask keeps everyone off the padding."""

    def __init__(self, images: torch.Tensor, texts: torch.Tensor) -> None:
        self._images, self._rows = images, images.shape[0]
        self._lengths = [texts.shape[1], images.shape[1]]
        self._mask = torch.cat([texts, images], dim=1)[:, None, None]

    def images_in(self, padded: torch.Tensor) -> torch.Tensor:
        return padded

    def texts_in(self, padded: torch.Tensor) -> torch.Tensor:
        return padded

    def images_out(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.masked_fill(~self._images[:, :, None], 0)

    def attend(
        self, images: list[torch.Tensor], texts: list[torch.Tensor], backend: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def rows(tokens: torch.Tensor) -> torch.Tensor:
            return tokens.view(self._rows, -1, *tokens.shape[1:])

        query, key, value = (
            torch.cat([rows(t), rows(i)], dim=1) for i, t in zip(images, texts, strict=True)
        )
        # Not the backend that was set: flash attention takes no mask.
        out = dispatch_attention_fn(query, key, value, attn_mask=self._mask, backend="native")
        text, image = torch.split(out, self._lengths, dim=1)
        return image.flatten(0, 1), text.flatten(0, 1)


class _Packed:
    """Tokens × 1 × features, of all rows one after another."""

    def __init__(self, images: torch.Tensor, texts: torch.Tensor) -> None:
        self._padded = images.shape
        self._image_at = images.flatten().nonzero().squeeze(1)
        self._text_at = texts.flatten().nonzero().squeeze(1)
        # By token, its row.
        self.image_rows = self._image_at // images.shape[1]
        self.text_rows = self._text_at // texts.shape[1]
        # By row, its tokens.
        self._images: list[int] = images.sum(1).tolist()
        self._texts: list[int] = texts.sum(1).tolist()
        self._lengths = [t + i for t, i in zip(self._texts, self._images, strict=True)]
        self._ends = torch.tensor([0, *self._lengths], device=images.device).cumsum(0).int()

    def images_in(self, padded: torch.Tensor) -> torch.Tensor:
        return padded.flatten(0, 1).index_select(0, self._image_at).unsqueeze(1)

    def texts_in(self, padded: torch.Tensor) -> torch.Tensor:
        return padded.flatten(0, 1).index_select(0, self._text_at).unsqueeze(1)

    def images_out(self, tokens: torch.Tensor) -> torch.Tensor:
        out = tokens.new_zeros(self._padded.numel(), tokens.shape[-1])
        out.index_copy_(0, self._image_at, tokens.squeeze(1))
        return out.view(*self._padded, -1)

    def attend(
        self, images: list[torch.Tensor], texts: list[torch.Tensor], backend: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (self._side_by_side(t, i) for i, t in zip(images, texts, strict=True))
        if query.is_cuda and query.dtype in VARLEN_DTYPES:
            rows = torch.split(self._varlen(query, key, value), self._lengths)
        else:
            each = zip(*(torch.split(x, self._lengths) for x in (query, key, value)), strict=True)
            rows = tuple(
                dispatch_attention_fn(q[None], k[None], v[None], backend=backend)[0]
                for q, k, v in each
            )
        by_row = list(zip(rows, self._texts, strict=True))
        return torch.cat([row[t:] for row, t in by_row]), torch.cat([row[:t] for row, t in by_row])

    def _side_by_side(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Row after row its text and its picture, from all texts and all pictures."""
        rows = zip(torch.split(text, self._texts), torch.split(image, self._images), strict=True)
        return torch.cat([part for row in rows for part in row])

    def _varlen(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """All rows in one kernel. Written after torch's documentation; not yet run on a GPU."""
        from torch.nn.attention.varlen import varlen_attn

        ends, longest = self._ends, max(self._lengths)
        # One split, or a row's sums would be ordered by the longest row beside it.
        out = varlen_attn(query, key, value, ends, ends, longest, longest, num_splits=1)
        assert isinstance(out, torch.Tensor)
        return out


class _Attention:
    """Qwen-Image's joint attention (text before picture), with rows kept apart by a layout."""

    def __init__(self, plain: Any, layout: _Layout) -> None:
        self._backend, self._layout = plain._attention_backend, layout

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        image_rope, text_rope = (freqs.flatten(0, 1) for freqs in image_rotary_emb)
        image = hidden_states.flatten(0, 1)
        text = encoder_hidden_states.flatten(0, 1)

        def heads(tokens: torch.Tensor, project: Any, norm: Any, rope: Any) -> torch.Tensor:
            out: torch.Tensor = project(tokens).unflatten(-1, (attn.heads, -1))
            if norm is not None:
                out = norm(out)
            if rope is not None:
                out = apply_rotary_emb_qwen(out[None], rope, use_real=False)[0]  # type: ignore[assignment]
            return out

        images = [
            heads(image, attn.to_q, attn.norm_q, image_rope),
            heads(image, attn.to_k, attn.norm_k, image_rope),
            heads(image, attn.to_v, None, None),
        ]
        texts = [
            heads(text, attn.add_q_proj, attn.norm_added_q, text_rope),
            heads(text, attn.add_k_proj, attn.norm_added_k, text_rope),
            heads(text, attn.add_v_proj, None, None),
        ]
        image, text = (x.flatten(1) for x in self._layout.attend(images, texts, self._backend))
        for layer in attn.to_out:
            image = layer(image)
        text = attn.to_add_out(text)
        return image.view_as(hidden_states), text.view_as(encoder_hidden_states)


class _Given(torch.nn.Module):
    """A rope that is worked out already."""

    def __init__(self, images: torch.Tensor, texts: torch.Tensor) -> None:
        super().__init__()
        self._freqs = images, texts

    def forward(self, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self._freqs


class _Take(torch.nn.Module):
    """Of one row a picture, a copy for each of its tokens."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self._rows = rows

    def forward(self, of_rows: torch.Tensor) -> torch.Tensor:
        return of_rows.index_select(0, self._rows)


def _shallow(module: Any) -> Any:
    """The module with its children, parameters and all; other children can be put in."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view
