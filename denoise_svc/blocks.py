"""The device's memory for states: one pool of equal blocks, and a table of blocks for each state.

Fixed in size, so that states never grow into what a forward pass needs, and cut into blocks, so
that states of all sizes come and go without leaving holes. A state is scattered over whatever
blocks are free and gathered back into one piece. The pool knows nothing of jobs: who is on the
device, and who has to go, is in residents.py.

Source: paged attention's block tables (vLLM), for latents as the RFC on chunked scheduling has it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

# Latents of a small picture are about as large; of a video, hundreds of these.
BLOCK_BYTES = 64 * 2**10

Kind = Literal["latents", "embeds", "cache_state"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one tensor lies within a gathered state, and what it looks like. Offsets in bytes."""

    offset: int
    span: int  # elements of its memory from the first to the last
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class BlockTable:
    """The blocks of one state, in order. It owns them until it is freed."""

    kind: Kind
    nbytes: int
    blocks: list[int]
    pieces: list[Piece] = field(default_factory=list)
    freed: bool = False


class BlockPool:
    """Blocks of `device` memory within a budget. Not thread-safe: residents.py locks.

    `used_bytes` has, by kind, what its blocks hold in whole blocks.
    """

    def __init__(
        self, device: torch.device, budget_bytes: int, block_bytes: int = BLOCK_BYTES
    ) -> None:
        """As many whole blocks as fit in `budget_bytes`; on CPUs their pages are claimed only
        once they are written."""
        if block_bytes % 512:
            raise ValueError(f"block_bytes must be a multiple of 512, got {block_bytes}")
        self.device, self.block_bytes = device, block_bytes
        self.blocks = budget_bytes // block_bytes
        self.used_bytes: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self._storage = torch.empty((self.blocks, block_bytes), dtype=torch.uint8, device=device)
        self._free = list(range(self.blocks))  # a heap: low ones first, so that few pages are used
        # Kernels choose by address: tensors come back at the alignment that they had.
        self._align = 512 if device.type == "cuda" else 64

    @property
    def nbytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def blocks_of(self, nbytes: int) -> int:
        """How many blocks a state of so many bytes takes."""
        return -(-nbytes // self.block_bytes)

    def lay_out(self, tensors: list[torch.Tensor]) -> tuple[list[Piece], int]:
        """Where each tensor will lie, and the bytes of all together."""
        pieces, at = [], 0
        for t in tensors:
            span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            span = span if t.numel() else 0
            at = -(-at // self._align) * self._align
            if self.device.type == "cpu" and span:
                at += t.data_ptr() % self._align
            pieces.append(Piece(at, span, t.dtype, t.shape, t.stride()))
            at += span * t.dtype.itemsize
        return pieces, at

    def alloc(self, kind: Kind, nbytes: int) -> BlockTable | None:
        """Blocks for `nbytes`, or None if there are too few."""
        count = self.blocks_of(nbytes)
        if count > len(self._free):
            return None
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        self.used_bytes[kind] += count * self.block_bytes
        return BlockTable(kind, nbytes, blocks)

    def free(self, table: BlockTable) -> None:
        """Its blocks back to the pool; once."""
        self._check(table)
        table.freed = True
        for block in table.blocks:
            heapq.heappush(self._free, block)
        self.used_bytes[table.kind] -= len(table.blocks) * self.block_bytes
        table.blocks = []

    def scatter(self, table: BlockTable, tensors: list[torch.Tensor], pieces: list[Piece]) -> None:
        """Copy `tensors`, laid out as `pieces`, into the table's blocks."""
        self._check(table)
        flat = torch.empty(
            len(table.blocks) * self.block_bytes, dtype=torch.uint8, device=self.device
        )
        for tensor, piece in zip(tensors, pieces, strict=True):
            if piece.span:
                whole = tensor.as_strided((piece.span,), (1,)).view(torch.uint8)
                flat[piece.offset : piece.offset + piece.nbytes].copy_(whole)
        table.pieces = pieces
        if table.blocks:
            rows = flat.view(len(table.blocks), self.block_bytes)
            self._storage.index_copy_(0, self._index(table), rows)

    def gather(self, table: BlockTable) -> list[torch.Tensor]:
        """The tensors as they were scattered: bits, shapes, strides and alignment. They share one
        fresh piece of memory and none with the pool."""
        self._check(table)
        flat = self._storage.index_select(0, self._index(table)).view(-1)
        out = []
        for piece in table.pieces:
            own = flat[piece.offset : piece.offset + piece.nbytes]
            if not piece.span:  # an empty slice has an offset that view() may refuse
                own = torch.empty(0, dtype=torch.uint8, device=self.device)
            typed = own.view(piece.dtype)
            out.append(typed.as_strided(piece.shape, piece.stride, typed.storage_offset()))
        return out

    def _index(self, table: BlockTable) -> torch.Tensor:
        return torch.tensor(table.blocks, dtype=torch.long, device=self.device)

    def _check(self, table: BlockTable) -> None:
        if table.freed:
            raise ValueError(f"these blocks of {table.kind} were freed before")
