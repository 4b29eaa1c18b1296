"""What README.md and docs/ tell people to do works: every command is run here, or at least tried as
far as this machine can; every link leads somewhere, every setting named is one."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.settings import Settings, table
from services.cli.main import COMMANDS
from services.pool.redis_server import find_server
from tests import doc_pages
from tests.doc_pages import PAGES, ROOT, Block, blocks
from tests.servers import free_port

# Programs that cannot run here, or that would run this very test again.
NOT_HERE = {"docker", "docker-compose", "kubectl", "helm", "pip", "make", ".", "celery", "promtool"}
# Those that go on for ever, take minutes, end the pool or want a job that failed: the flags that
# they are given must be ones that they have.
PARSED = re.compile(
    r"slackwater (up|down|profile|simulate|dead (show|retry))\b|slackwater .*--(follow|for)\b"
)
# What stands for something of the reader's own.
NAMES = {"STAGE": "denoise", "N": "1", "PATH": "out", "URL": "redis://127.0.0.1:1/0"}
# Pages whose examples are pictures; the others are as true of stages that only wait.
WITH_MODEL = ("README.md", "quickstart.md", "http.md")
# Their programs want a server of the reader's own: their parts have tests with one.
ELSEWHERE = ("celery.md", "webhooks.md")
RUN_S = 400
pytestmark = pytest.mark.timeout(900)
JOB = "an-example"


@dataclass(frozen=True, slots=True)
class Place:
    """A pool as `slackwater up` starts it, and a folder in which a reader types."""

    folder: Path
    environment: dict[str, str]
    redis: str
    http: str
    metrics: str

    def run(self, text: str, kind: str = "sh") -> subprocess.CompletedProcess[str]:
        """A script, as a reader would run it who has this pool on the usual ports."""
        for usual, ours in (
            ("127.0.0.1:6379", self.redis),
            ("127.0.0.1:8000", self.http),
            ("127.0.0.1:9464", self.metrics),
        ):
            text = text.replace(usual, ours)
        command = ["bash", "-ec", text]
        if kind == "python":
            (self.folder / "program.py").write_text(text)
            command = ["python", "program.py"]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, timeout=RUN_S, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def worker(self) -> str:
        """Name of a denoiser that is there."""
        said = self.run("slackwater ps --workers --json")
        names = [each["name"] for each in json.loads(said.stdout) if each["stage"] == "denoise"]
        return str(names[0])


@pytest.fixture
def model_pool(tmp_path: Path) -> Iterator[Place]:
    """Two denoisers of the bundled model."""
    yield from _up(tmp_path)


@pytest.fixture
def noop_pool(tmp_path: Path) -> Iterator[Place]:
    """Two denoisers without a model: workers come and go in a second."""
    yield from _up(tmp_path, "--noop", "step_ms=5")


def _up(folder: Path, *flags: str) -> Iterator[Place]:
    redis, http, metrics = free_port(), free_port(), free_port()
    programs = folder / "programs"
    programs.mkdir()
    redis_cli = shutil.which("redis-cli") or str(Path(find_server()).parent / "redis-cli")
    # On the pool's port, as if it were the usual one; curl fails where the server says no.
    curl = shutil.which("curl")
    no_curl = "echo 'curl is not installed, and the pages use it' >&2; exit 1"
    for name, script in {
        "redis-cli": f'exec {redis_cli} -p {redis} "$@"',
        "curl": f'case "$*" in *-sSf*) ;; *) set -- --fail-with-body "$@";; esac; exec {curl} "$@"'
        if curl
        else no_curl,
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLACKWATER_STATE_DIR": str(folder / "state"),
        "SLACKWATER_HOST": folder.name,
        "SLACKWATER_METRICS_PORT": str(metrics),
        "HF_HUB_OFFLINE": "1",
    }
    command = ["slackwater", "up", "--denoisers", "2", "--port", str(redis), "--http", str(http)]
    up = subprocess.Popen(
        [str(Path(sys.executable).parent / command[0]), *command[1:], *flags, "--json"],
        cwd=folder, env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert up.stdout is not None
        said = up.stdout.readline()
        assert json.loads(said)["redis_url"].endswith(f":{redis}/0"), said
        addresses = [f"127.0.0.1:{port}" for port in (redis, http, metrics)]
        place = Place(folder, environment, *addresses)
        for job in (f"{JOB}-1", f"{JOB}-2", JOB):  # three: from then on their time is known
            made = place.run(f'slackwater submit "a red circle" --id {job} --wait')
            assert made.returncode == 0, made.stdout
        yield place
    finally:
        up.terminate()
        up.communicate(timeout=60)


# -- commands and programs -------------------------------------------------------------------

OURS = [page for page in PAGES if page.name not in ELSEWHERE]


def _is_run(block: Block) -> bool:
    words = block.text.split()
    return block.kind == "python" or not (
        words[0] in NOT_HERE
        or re.fullmatch(r"[A-Z_]+=\S*", words[0])
        or words[:2] == ["python", "-m"]
        or PARSED.match(block.text)
        or "[" in block.text  # what may be left out
    )


def test_what_pages_tell_to_run_makes_pictures(model_pool: Place) -> None:
    """A reader who types the README and the quick starts from top to bottom gets what they show."""
    for page in PAGES:
        if page.name in WITH_MODEL:
            _run(page, model_pool)


def test_what_the_other_pages_tell_to_run_runs(noop_pool: Place) -> None:
    """Page by page, in one folder, on one pool; what a page shows as output comes out."""
    for page in OURS:
        if page.name not in WITH_MODEL:
            _run(page, noop_pool)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_cannot_run_here_is_there(page: Path) -> None:
    """Programs, subcommands and flags of commands that would go on for ever or need another
    machine."""
    for block in blocks(page):
        if not block.marked and not _is_run(block):
            _try(block)


def _run(page: Path, place: Place) -> None:
    status = 0
    for block in blocks(page):
        if block.marked or not _is_run(block):
            continue
        text = block.text if block.kind == "python" else _with_names(block.text, place)
        if text == "echo $?":
            text = f"echo {status}"
        said = place.run(text, block.kind)
        status = said.returncode
        if block.output:
            assert _masked(said.stdout) == _masked("\n".join(block.output)), block
        else:
            assert status == 0, f"{block}\nexits with {status}:\n{said.stdout}"


def _try(block: Block) -> None:
    """What is not run: the program, its subcommand and its flags must be there."""
    words = shlex.split(block.text, comments=True)
    while re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
        words = words[1:]
    if words[0] == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert set(words[1:]) <= targets, block
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None, block
        source = Path(importlib.util.find_spec(words[2]).origin or "").read_text()  # type: ignore[union-attr]
        for flag in (word for word in words[3:] if word.startswith("--")):
            assert f'"{flag}"' in source, f"{block}\n{words[2]} has no {flag}"
    elif words[0] == "slackwater":
        _parse(block, [_name(word) for word in words[1:]])


def _parse(block: Block, words: list[str]) -> None:
    assert words[0] in COMMANDS, block
    command = importlib.import_module(COMMANDS[words[0]][0])
    parser = argparse.ArgumentParser(f"slackwater {words[0]}", allow_abbrev=False)
    command.configure(parser)
    given = command.prepare(words[1:]) if hasattr(command, "prepare") else words[1:]
    try:
        parser.parse_args(given)
    except SystemExit:
        pytest.fail(f"{block}\nis not a command that is understood")


def _name(word: str) -> str:
    bare = word.strip("[]…")
    return NAMES.get(bare, JOB if bare in ("ID", "NAME", "WORKER") else bare)


def _with_names(text: str, place: Place) -> str:
    """A page's placeholders filled in; `XADD …` is what one says to redis-cli."""
    if text.startswith("XADD "):
        text = "redis-cli " + text.replace(" * ", " '*' ").replace("{id}", JOB)
    text = re.sub(r"\bID\b…?", JOB, text)
    if re.search(r"\b(NAME|WORKER)\b", text):
        text = re.sub(r"\b(NAME|WORKER)\b…?", place.worker(), text)
    if text.startswith("slackwater scale "):
        text += " --wait 300"  # a model loads for minutes on a machine that is busy
    return text


def _masked(text: str) -> str:
    """Without ids and times, which differ from run to run."""
    text = re.sub(r"[0-9a-f]{32}", "ID", text.strip())
    return re.sub(r"\d+(\.\d+)? (ms|s)\b", "N s", text)


def test_every_benchmark_says_what_it_does() -> None:
    """`python -m benchmarks.NAME --help`, for each that there is and each that a page names."""
    there = {  # some are processes that others start, and take no flags
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if "ArgumentParser" in path.read_text()
    }
    named = {
        name
        for page in PAGES
        for name in re.findall(r"python -m benchmarks\.(\w+)", page.read_text())
    }
    assert named <= there
    # All in one process: most of their time is imports that they share.
    ask = (
        "import runpy, sys\n"
        "for name in sys.argv[1:]:\n"
        "    sys.argv = [name, '--help']\n"
        "    try:\n"
        "        runpy.run_module('benchmarks.' + name, run_name='__main__')\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, name\n"
        "    else:\n"
        "        raise SystemExit(name + ' takes no --help')\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", ask, *sorted(there)], cwd=ROOT, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("usage:") == len(there)


# -- links and names -------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file of the project, and where it names a heading, to one that is there."""
    for link in doc_pages.links(page):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in doc_pages.anchors(file), f"{page.name}: {link}"


def test_every_page_is_reached_from_the_readme() -> None:
    """A page that nothing links to is read by nobody."""
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in doc_pages.links(page)
    }
    assert set(PAGES[1:]) <= linked


def test_every_variable_named_is_a_setting() -> None:
    """Of the settings' class, of Compose, or of `slackwater up` itself."""
    composed = "".join(path.read_text() for path in ROOT.glob("docker-compose*.yml"))
    known = {f"SLACKWATER_{name.upper()}" for name in Settings.model_fields}
    known |= set(re.findall(r"\$\{(SLACKWATER_\w+)", composed)) | {"SLACKWATER_STATE_DIR"}
    for page in [*PAGES, *(ROOT / "deploy").rglob("*.*")]:
        unknown = doc_pages.variables(page.read_text()) - known
        assert not unknown, f"{page.relative_to(ROOT)} names {unknown}"


def test_compose_hands_every_setting_on() -> None:
    """A container sees only the variables that docker-compose.yml names."""
    handed_on = doc_pages.variables((ROOT / "docker-compose.yml").read_text())
    assert {f"SLACKWATER_{name.upper()}" for name in Settings.model_fields} <= handed_on


def test_the_table_of_settings_is_that_of_the_code() -> None:
    """docs/settings.md ends in what `python -m common.settings` prints."""
    assert (ROOT / "docs" / "settings.md").read_text().rstrip().endswith(table())


def test_every_command_has_its_place_in_the_docs() -> None:
    """docs/cli.md has a row for each command of `slackwater`, and for no other."""
    page = (ROOT / "docs" / "cli.md").read_text()
    commands = page.partition("## ")[0]
    assert set(re.findall(r"^\| `([a-z]+)", commands, re.MULTILINE)) == set(COMMANDS)
