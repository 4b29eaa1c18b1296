"""Print Redis users for a pool, one for each role, each with no more than it needs.

The lines are an ACL file (or, with --setuser, commands for redis-cli); docs/security.md shows how
to use them. No password is printed, only its hash.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

from common.acl import BY_NAME, ROLES, Role, hashed, rules, user_of
from services.cli.terminal import Exit, fail, print_json
from services.pool.redis_server import FLOOR, parse_version

PASSWORD_BYTES = 32


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        default=os.environ.get("SLACKWATER_PREFIX") or "sw:",
        help="the pool's key prefix (SLACKWATER_PREFIX; default sw:)",
    )
    parser.add_argument(
        "--role", action="append", choices=sorted(BY_NAME), help="only this one; may be repeated"
    )
    parser.add_argument(
        "--passwords", type=Path, metavar="DIR",
        help="a file DIR/ROLE for each password, made if it is not there; without it the users "
        "have no password and cannot log in yet",
    )  # fmt: skip
    parser.add_argument(
        "--name", default="slackwater", help="users are called NAME-ROLE (default slackwater)"
    )
    parser.add_argument(
        "--setuser", action="store_true", help="print ACL SETUSER commands, not an ACL file"
    )
    parser.add_argument(
        "--server", default="7.0", metavar="VERSION",
        help="version of the server; before 7.0 reading and writing cannot be told apart",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, with what each role is")


def run(args: argparse.Namespace) -> int:
    version = parse_version(args.server)
    if version < FLOOR:
        fail(f"--server: {args.server}; {'.'.join(map(str, FLOOR))} or later is needed")
        return Exit.USAGE
    roles = [role for role in ROLES if not args.role or role.name in args.role]
    try:
        users = {user_of(role, args.name): rules(role, args.prefix, version) for role in roles}
    except ValueError as error:
        fail(f"--prefix: {error}")
        return Exit.USAGE
    words = {}
    for role, (user, said) in zip(roles, users.items(), strict=True):
        login = []
        if args.passwords:
            try:
                login = [hashed(password_of(args.passwords, role))]
            except (OSError, ValueError) as error:
                fail(f"--passwords: {error}")
                return Exit.USAGE
        words[user] = ["reset", "on", *login, *said]
    if args.json:
        print_json(
            [
                {"user": user, "role": role.name, "what": role.what, "rules": words[user]}
                for role, user in zip(roles, users, strict=True)
            ]
        )
        return Exit.OK
    for user, said in words.items():
        print("ACL SETUSER" if args.setuser else "user", user, " ".join(said))
    if not args.passwords:
        print(
            "these users have no password yet: give them one with --passwords DIR", file=sys.stderr
        )
    return Exit.OK


def password_of(folder: Path, role: Role) -> str:
    """What stands in the role's file, which only its owner can read; a new one if there is none.

    Raises OSError, ValueError for an empty file.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / role.name
    try:
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        password = path.read_text().strip()
        if not password:
            raise ValueError(f"{path} is empty; write a password into it, or remove it") from None
        return password
    with open(made, "w") as file:
        password = secrets.token_urlsafe(PASSWORD_BYTES)
        file.write(password + "\n")
    return password
