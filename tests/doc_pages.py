"""What stands in README.md and docs/ to be run or followed: commands, programs, links, names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Above a block: why the tests do not run it.
MARK = re.compile(r"<!-- not run: .+ -->")
FIRST_WORDS = {
    "$", ".", "slackwater", "make", "redis-cli", "curl", "python", "XADD", "until", "celery",
    "docker", "docker-compose", "kubectl", "helm", "pip", "promtool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Block:
    """Commands or a program of a page. `output`: what the page says that it prints, if it does."""

    page: Path
    line: int
    kind: str  # sh, python
    text: str
    marked: bool = False
    output: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"


def blocks(page: Path) -> Iterator[Block]:
    """Fenced `sh` and `python` as a whole; of other blocks each line that is a command."""
    lines = page.read_text().splitlines()
    at, marked = 0, False
    while at < len(lines):
        line = lines[at]
        if line.startswith("```"):
            end = next(n for n in range(at + 1, len(lines)) if lines[n].startswith("```"))
            kind, inside = line[3:].strip(), lines[at + 1 : end]
            if kind in ("sh", "python"):
                yield Block(page, at + 1, kind, "\n".join(inside), marked)
            elif kind == "":
                yield from _commands(page, at + 2, inside, marked)
            at, marked = end + 1, False
        elif line.startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            inside = [each[4:] for each in lines[at:end]]
            yield from _commands(page, at + 1, inside, marked)
            at, marked = end, False
        else:
            if line.strip():
                marked = bool(MARK.fullmatch(line.strip()))
            at += 1


def _is_open(text: str) -> bool:
    """Whether a command goes on behind this line, inside of quotes."""
    return text.split(" ")[0] in FIRST_WORDS and text.count("'") % 2 == 1


def _commands(page: Path, first: int, lines: list[str], marked: bool) -> Iterator[Block]:
    at = 0
    while at < len(lines):
        start, text = at, lines[at]
        while text.endswith("\\") or (_is_open(text) and at + 1 < len(lines)):
            at += 1
            text = text.removesuffix("\\").rstrip() + " " + lines[at].strip()
        at += 1
        words = text.split()
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if not words or words[0] not in FIRST_WORDS:
            continue
        output: list[str] = []
        if words[0] == "$":
            while at < len(lines) and lines[at].strip() and not lines[at].startswith("$ "):
                output.append(lines[at].rstrip())
                at += 1
            text = text.removeprefix("$ ")
        else:
            text = re.split(r"\s{2,}", text.strip())[0]  # behind it stands what it does
        yield Block(page, first + start, "sh", text, marked, tuple(output))


# -- links -----------------------------------------------------------------------------------


def links(page: Path) -> Iterator[str]:
    """Targets of links and pictures inside the project."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text())):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as a link's `#name` has them."""
    found = re.findall(r"^#+ (.+)$", _without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in found}


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def variables(text: str) -> set[str]:
    """Every SLACKWATER_ variable that is named."""
    return set(re.findall(r"\bSLACKWATER_[A-Z_]*[A-Z]\b", text))
