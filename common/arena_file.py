"""The arena's file: where its tables lie, how it is made and how it is mapped.

See `common/arena.py` for what the tables mean. Sizes and offsets are bytes.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
import struct
from enum import IntEnum

log = logging.getLogger("common.arena")

DEFAULT_SIZE_BYTES = 1 << 30  # or half of the free tmpfs, where that is less
HEADER_BYTES = 4096
MAGIC = b"SWARENA2"  # the digit is the layout's version
SLOT = struct.Struct("<IIQd96s")  # first block, blocks, bytes asked for, born (monotonic s), owner
_STEP = 64 << 20  # fallocate in steps: tmpfs undoes the whole of an interrupted one


class Word(IntEnum):
    """The header's 8-byte words; word 0 is the magic."""

    BLOCK = 1
    BLOCKS = 2
    SLOTS = 3
    DATA = 4
    ID = 5
    NEXT_GEN = 6
    DIRTY = 7
    USED = 8
    HIGH = 9
    ALLOCS = 10
    REFUSED = 11


class ArenaError(Exception):
    """The arena cannot be opened or was used wrongly; the message names the remedy."""


class Layout:
    """Where each table starts, in bytes from the start of the file."""

    def __init__(self, blocks: int, slots: int, block_bytes: int) -> None:
        self.gens = HEADER_BYTES
        self.info = self.gens + 8 * slots
        self.used = self.info + SLOT.size * slots
        self.taken = self.used + blocks
        self.data = -(-(self.taken + slots) // block_bytes) * block_bytes
        self.total = self.data + blocks * block_bytes


def open_file(path: str) -> int:
    """A descriptor of the arena's file, made empty where there is none."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)  # latents are nobody else's business
    except OSError as err:
        raise ArenaError(
            f"the arena {path} cannot be opened: {err.strerror}; it has to be a file that all "
            "services of this host may write, so run them as one user on one tmpfs"
        ) from err


def is_arena(path: str) -> bool:
    """Whether an arena of this version is there; unlike opening it, this makes none."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def lay_out(path: str, fd: int, size_bytes: int | None, block_bytes: int) -> None:
    """Allocate and format the file; the caller holds its lock. The magic comes last."""
    if block_bytes < 4096 or block_bytes & (block_bytes - 1):
        raise ArenaError(f"block_bytes {block_bytes} must be a power of two of at least 4096")
    if any(os.pread(fd, 8, 0)):
        raise not_ours(path)
    os.ftruncate(fd, 0)  # a creator that died half-way may have left pages here
    disk = os.fstatvfs(fd)
    room = disk.f_bavail * disk.f_frsize
    size = size_bytes if size_bytes is not None else min(DEFAULT_SIZE_BYTES, room // 2)
    per_block = block_bytes + 8 + SLOT.size + 1 + 1  # with its share of the tables
    blocks = size // per_block
    while blocks > 0 and Layout(blocks, blocks, block_bytes).total > size:
        blocks -= 1
    if blocks < 1:
        raise ArenaError(
            f"an arena of {human(size)} at {path} holds no block of {human(block_bytes)}; "
            f"ask for at least {human(4 * block_bytes)}"
        )
    lay = Layout(blocks, blocks, block_bytes)
    try:
        if disk.f_blocks and lay.total > room:  # do not take everybody's memory to find out
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for at in range(0, lay.total, _STEP):
            os.posix_fallocate(fd, at, min(_STEP, lay.total - at))
    except OSError as err:
        os.ftruncate(fd, 0)  # give the pages back, and leave "no arena" for the next opener
        if err.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise
        where = os.path.dirname(os.path.abspath(path))
        raise ArenaError(
            f"the arena {path} wants {human(lay.total)}, but {where} has {human(room)} free; "
            f"enlarge it (docker run --shm-size={human(2 * lay.total, '')}, or size= of the tmpfs "
            "volume that the services share), or ask for a smaller arena"
        ) from err
    head = [0] * (Word.REFUSED + 1)
    head[Word.BLOCK], head[Word.BLOCKS] = block_bytes, blocks
    head[Word.SLOTS], head[Word.DATA] = blocks, lay.data
    head[Word.ID], head[Word.NEXT_GEN] = secrets.randbits(64), 1
    os.pwrite(fd, struct.pack(f"<{Word.REFUSED}Q", *head[1:]), 8)
    os.pwrite(fd, MAGIC, 0)
    log.info("arena %s: %s in %d blocks", path, human(lay.total), blocks)


def map_file(path: str, lock_fd: int) -> mmap.mmap:
    """The whole file, with every page present in our page table.

    Through an open file of its own: mmap keeps a duplicate of its descriptor, and a duplicate
    of the lock's would carry the lock into forked children.
    """
    fd = os.open(f"/proc/self/fd/{lock_fd}", os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        if size < HEADER_BYTES:
            raise not_ours(path)
        block_bytes, blocks, slots = struct.unpack("<3Q", os.pread(fd, 24, 8))
        if Layout(blocks, slots, max(1, block_bytes)).total != size:
            raise not_ours(path)
        return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)


def not_ours(path: str) -> ArenaError:
    """The error for a file that is something else, or an arena of another version."""
    return ArenaError(
        f"{path} is not an arena of this version; stop the workers of this host, remove the file "
        "if it is an old arena, and start them again"
    )


def still_at(path: str, fd: int) -> bool:
    """Whether `path` still names the open file `fd`."""
    try:
        there, ours = os.stat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def human(nbytes: int, space: str = " ") -> str:
    """`nbytes` for people; with `space=""` in docker's units, rounded up, to be asked for."""
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= size:
            if not space:
                return f"{-(-nbytes // size)}{unit.lower()}"
            return f"{nbytes / size:.1f} {unit}iB"
    return f"{nbytes}{space}B" if space else f"{nbytes}b"
