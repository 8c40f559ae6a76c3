"""What the documentation says that can be checked: blocks, links, headings, code in the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmark/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
)
_SHELL = ("sh", "bash", "shell", "console")
# What an indented block is that nobody named.
_COMMAND = re.compile(r"(\$ )?([A-Z_]+=\S+ )*(make|pip|git|python3?|sglang-bitexact|sglang|curl|docker|cd) ")


class Block(NamedTuple):
    """A block of code. line: of the document, from 1. before: the HTML comment in front of it, or ""."""

    document: str
    line: int
    language: str
    text: str
    before: str

    @property
    def is_shell(self) -> bool:
        return self.language in _SHELL or (not self.language and _COMMAND.match(self.text) is not None)

    @property
    def commands(self) -> list[list[str]]:
        """Its commands as words, without comments and variables in front.

        Example: "A=1 \\\\\\n python -m x  # why\\nmake a && make b" -> [["python", "-m", "x"], ["make", "a"],
        ["make", "b"]]
        """
        found: list[list[str]] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            reader = shlex.shlex(line, posix=True, punctuation_chars="&|;")
            reader.whitespace_split = True
            found.append([])
            for word in reader:
                if set(word) <= set("&|;"):
                    found.append([])
                elif found[-1] or not re.match(r"[A-Za-z_]+=", word):
                    found[-1].append(word)
        return [words for words in found if words]


class Page(NamedTuple):
    """links: as written. spans: code in the text. anchors: what a link may name behind ``#``."""

    blocks: tuple[Block, ...]
    links: tuple[str, ...]
    spans: tuple[str, ...]
    anchors: frozenset[str]


def read(path: Path) -> Page:
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text())
    inline = [child for token in tokens if token.type == "inline" for child in token.children or ()]
    links = [str(child.attrs.get("href") or child.attrs.get("src") or "") for child in inline]
    document = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    return Page(
        blocks=tuple(_blocks(document, tokens)),
        links=tuple(link for link in links if link),
        spans=tuple(child.content for child in inline if child.type == "code_inline"),
        anchors=frozenset(_anchors(tokens)),
    )


def _blocks(document: str, tokens: list[Token]) -> Iterator[Block]:
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            comment = before.content.strip() if before is not None and before.type == "html_block" else ""
            yield Block(document, token.map[0] + 1, token.info.strip(), token.content, comment)


def _anchors(tokens: list[Token]) -> Iterator[str]:
    """As code hosts make them from headings; a second one of the same name is not looked for."""
    for heading, content in pairwise(tokens):
        if heading.type == "heading_open":
            text = "".join(child.content for child in content.children or ())
            yield re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
