"""Whose a claim in the arena is: a job of one pool.

Pools with different prefixes may share a host's arena, each knowing its own jobs only. So an
owner names the pool too, and nobody judges another's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from common.arena import owner_name

# Stands in no job's id.
MARK = "|"
# Longer ones would be cut off with the job.
PREFIX_BYTES = 32


def owner_of(prefix: str, job: str) -> str:
    """The owner of what a job of the pool of `prefix` has in an arena."""
    return owner_name(f"{_pool(prefix)}{MARK}{job}")


def orphaned(prefix: str, active: Iterable[str]) -> Callable[[str], bool]:
    """Whether an owner is a job of the pool of `prefix` and not among its `active` ones."""
    pool, living = _pool(prefix), {owner_of(prefix, job) for job in active}
    return lambda owner: owner.rpartition(MARK)[0] == pool and owner not in living


def _pool(prefix: str) -> str:
    raw = prefix.encode()
    return prefix if len(raw) <= PREFIX_BYTES else hashlib.blake2b(raw, digest_size=16).hexdigest()
