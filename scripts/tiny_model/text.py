"""The training text: the King James Bible, fetched when it is needed and never kept in the repository.

It comes from the Debian packages `bible-kjv` (the command) and `bible-kjv-text` (the data); the text is in
the public domain. Knows where the text comes from and how it is cleaned; nothing of models. Standard library
only.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGES = ("bible-kjv", "bible-kjv-text")
ARGUMENTS = ("-l99999", "gen1:1-rev22:21")
CHAPTERS, VERSES = 1189, 31_102
"""How many the whole text has. A fetched text with another count is refused."""

_VERSE = re.compile(r"[ \t]+\d+[ \t]+(\S.*)")
_HEADING = re.compile(r"(?:[123] )?[A-Z][A-Za-z ]* \d+|Obadiah|Philemon|[23] John|Jude")
_FETCH_S, _PRINT_S = 300.0, 60.0


class TextError(Exception):
    """The text cannot be had or is not the one that is meant. The message says what to do."""


def parse_chapters(output: str) -> list[list[str]]:
    """The chapters, each a list of verses, in what `bible -l99999 RANGE` prints.

    A heading (`Genesis 2`, or `Jude`, a book of one chapter) begins a chapter; an indented number begins a
    verse, which is one line. Headings and numbers are dropped. Raises TextError at any other line.
    """
    chapters: list[list[str]] = []
    for number, line in enumerate(output.split("\n"), start=1):
        verse = _VERSE.fullmatch(line)
        if verse and chapters:
            chapters[-1].append(verse[1])
        elif _HEADING.fullmatch(line):
            chapters.append([])
        elif line.strip():
            raise TextError(
                f"line {number} is neither a chapter heading nor a numbered verse: {line[:60]!r}. "
                f"Expected is the output of: bible {' '.join(ARGUMENTS)}"
            )
    return chapters


def join_chapters(chapters: list[list[str]]) -> str:
    """The training text: one verse a line, a blank line between chapters, a newline at the end."""
    return "\n\n".join("\n".join(verses) for verses in chapters) + "\n"


def clean(output: str) -> str:
    """The training text in the output of the `bible` command. Raises TextError where it is not all there."""
    chapters = parse_chapters(output)
    found = len(chapters), sum(map(len, chapters))
    if found != (CHAPTERS, VERSES):
        raise TextError(
            f"the text has {found[0]} chapters and {found[1]} verses, not {CHAPTERS} and {VERSES}: it"
            f" must be the whole output of: bible {' '.join(ARGUMENTS)}"
        )
    return join_chapters(chapters)


def read_text(file: Path) -> str:
    """The training text from a file: the output of the `bible` command, or a text that is used as it is.

    Raises TextError where the file cannot be read as UTF-8 or is empty, or looks like the output of the
    command and is not the whole of it.
    """
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise TextError(f"cannot read the text {file}: {problem}. Name a UTF-8 text file.") from problem
    lines = [line for line in content.splitlines() if line.strip()][:2]
    if not lines:
        raise TextError(f"{file} is empty: name a file with the text.")
    printed = len(lines) == 2 and _HEADING.fullmatch(lines[0]) and _VERSE.fullmatch(lines[1])
    return clean(content) if printed else content


def fetch_text() -> str:
    """The training text from the `bible` command, or, without root, from its Debian packages.

    The packages are unpacked into a temporary folder that is gone afterwards. Raises TextError where neither
    way is open; the message names the third, a file.
    """
    installed = shutil.which("bible")
    if installed:
        return clean(_command([installed, *ARGUMENTS], _PRINT_S))
    missing = [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]
    if missing:
        raise TextError(
            f"there is no `bible` command here, and no {missing[0]} to fetch it with. {_OTHERWISE}"
        )
    with tempfile.TemporaryDirectory(prefix="kvasir-text-") as name:
        folder = Path(name)
        _command(["apt-get", "download", *PACKAGES], _FETCH_S, folder)
        for package in sorted(folder.glob("*.deb")):
            _command(["dpkg", "-x", str(package), str(folder / "root")], _FETCH_S)
        root = folder / "root" / "usr"
        return clean(_command([str(root / "bin/bible"), "-p", str(root / "lib"), *ARGUMENTS], _PRINT_S))


_OTHERWISE = (
    f"On another machine with Debian or Ubuntu run `apt install bible-kjv`, then "
    f"`bible {' '.join(ARGUMENTS)} > kjv.txt`, and give that file here with --text kjv.txt."
)


def _command(command: list[str], timeout_s: float, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, cwd=folder, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise TextError(f"`{' '.join(command)}` did not work: {problem}. {_OTHERWISE}") from problem
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-300:]
        raise TextError(
            f"`{' '.join(command)}` ended with status {done.returncode}: {said}. "
            f"Where apt-get knows no such package, run `apt-get update` first. {_OTHERWISE}"
        )
    return done.stdout.decode("utf-8")
