"""Links, commands and names in the documentation are those that there are."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang.srt.environ import Envs
from sglang.srt.server_args import ServerArgs

from kit.markdown import DOCUMENTS, ROOT, Block, read
from sglang_bitexact import cli

PAGES = {path.relative_to(ROOT).as_posix(): read(path) for path in DOCUMENTS}
BLOCKS = [block for page in PAGES.values() for block in page.blocks]
SHELL = [block for block in BLOCKS if block.is_shell]
# Pages that changes under way bring; a link to them may be ahead of them.
_COMING: tuple[str, ...] = ()
# Programs whose arguments are not ours to know.
_FOREIGN = ("docker", "git", "pip", "curl", "cd")


def _name(block: Block) -> str:
    return f"{block.document}:{block.line}"


@pytest.mark.parametrize("document", PAGES)
def test_links_lead_somewhere(document):
    for link in PAGES[document].links:
        assert not link.startswith("http://"), link
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / document).parent / name if name else ROOT / document
        if not target.exists() and target.resolve().relative_to(ROOT).as_posix() in _COMING:
            continue
        assert target.exists(), f"{document} links to {link}"
        if anchor:
            anchors = read(target.resolve()).anchors
            assert anchor in anchors, f"{document} links to {link}; there is {', '.join(sorted(anchors))}"


@pytest.mark.parametrize("block", SHELL, ids=_name)
def test_every_shell_block_says_whether_it_is_run(block):
    mark = block.before
    assert mark == "<!-- run -->" or re.fullmatch(r"<!-- not run: \w.* -->", mark), (
        f"{_name(block)}: put <!-- run --> or <!-- not run: REASON --> in front of the block; found {mark!r}"
    )


RUN = [block for block in SHELL if block.before == "<!-- run -->"]


@pytest.mark.parametrize("block", RUN, ids=_name)
def test_what_is_marked_to_run_runs(block):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_some_blocks_are_run():
    assert len(RUN) >= 2


def _ours() -> Iterator[tuple[str, list[str]]]:
    for block in SHELL:
        yield from ((_name(block), words[1:]) for words in block.commands if words[0] == "sglang-bitexact")


def test_command_lines_of_the_tool_are_accepted_by_it(capsys):
    lines = list(_ours())
    assert len(lines) >= 10
    for where, arguments in lines:
        try:
            cli._parser().parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{where}: sglang-bitexact {' '.join(arguments)}: {capsys.readouterr().err}")


def _subcommands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def test_commands_of_the_tool_in_the_text_have_these_options():
    commands = _subcommands()
    found = 0
    for document, page in PAGES.items():
        for span in page.spans:
            if not span.startswith("sglang-bitexact "):
                continue
            found += 1
            name = span.split()[1]
            assert name in commands, f"{document}: {span}"
            for option in re.findall(r"--[a-z-]+", span):
                assert option in commands[name]._option_string_actions, f"{document}: {span}"
    assert found >= 10


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[-1] if words[1] == "-s" else words[1]: _name(b) for b in SHELL for words in b.commands if _is(words)}
    for document, page in PAGES.items():
        spans = (re.fullmatch(r"make (?:-s )?([a-z-]+).*", span) for span in page.spans)
        named |= {match[1]: document for match in spans if match}
    assert len(named) >= 10
    assert {target: where for target, where in named.items() if target not in targets} == {}


def _is(words: list[str]) -> bool:
    return words[0] == "make" and len(words) > 1


def _options_known() -> set[str]:
    server = argparse.ArgumentParser()
    ServerArgs.add_cli_args(server)
    known = set(server._option_string_actions)
    for parser in (cli._parser(), *_subcommands().values()):
        known |= set(parser._option_string_actions)
    for folder in ("tools", "benchmark", "python/sglang_cpu_ref", "python/sglang_bitexact/verify"):
        for file in (ROOT / folder).glob("*.py"):
            known |= set(re.findall(r'"(--[a-z][a-z-]+)"', file.read_text()))
    return known


def _code() -> Iterator[tuple[str, str]]:
    """Every command and every piece of code in the text."""
    for block in SHELL:
        yield from ((_name(block), " ".join(words)) for words in block.commands if words[0] not in _FOREIGN)
    for document, page in PAGES.items():
        yield from ((document, span) for span in page.spans if span.split(" ")[0] not in _FOREIGN)


def test_options_exist():
    known = _options_known()
    named: dict[str, str] = {}
    for where, code in _code():
        # `--hicache-*` stands for all that begin so.
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*\*?", code):
            if option.endswith("*"):
                assert any(each.startswith(option[:-1]) for each in known), f"{where}: {option}"
            else:
                named[option] = where
    assert len(named) >= 40
    unknown = {option: where for option, where in named.items() if option not in known}
    # A script of ours that builds its options is asked itself.
    for words in (words for block in SHELL if unknown for words in block.commands):
        if words[0] == "python" and words[1].endswith(".py") and unknown.keys() & set(words):
            usage = subprocess.run([sys.executable, ROOT / words[1], "--help"], capture_output=True, text=True).stdout
            unknown = {option: where for option, where in unknown.items() if f" {option} " not in usage}
    assert unknown == {}


def test_environment_variables_exist():
    ours = "\n".join(file.read_text() for file in sorted((ROOT / "python").rglob("*.py")))
    named = {
        name: path.name for path in DOCUMENTS for name in re.findall(r"\bSGLANG_[A-Z0-9_]+[A-Z0-9]\b", path.read_text())
    }
    assert len(named) >= 8
    assert {n: where for n, where in named.items() if not hasattr(Envs, n) and f'"{n}"' not in ours} == {}


def test_the_reader_sees_what_is_there(tmp_path):
    """The checks above are worth what it finds."""
    (tmp_path / "page.md").write_text(_SAMPLE)
    page = read(tmp_path / "page.md")
    first, second, third, fourth = page.blocks
    assert (first.language, first.before, first.is_shell) == ("sh", "<!-- run -->", True)
    assert first.commands == [["python", "-m", "x", "--a"], ["make", "b"], ["sglang-bitexact", "check"]]
    assert (second.before, second.is_shell) == ("", True)
    assert (third.language, third.is_shell) == ("json", False)
    assert (fourth.before, fourth.is_shell) == ("<!-- not run: why -->", True)
    assert page.links == ("a.md#b", "c.png", "d.md")
    assert page.spans == ("doctor --prune", "--x")
    assert page.anchors == {"what-doctor---prune-removes", "a-b-c"}


_SAMPLE = """\
# What `doctor --prune` removes

[x](a.md#b), ![y](c.png), `--x`

<!-- run -->
```sh
A=1 B="2 3" \\
  python -m x --a   # make not
make b && sglang-bitexact check
```

## A, b (c)

    make something

| cell |
|---|
| [z](d.md) |

```json
make {}
```

- in a list:

  <!-- not run: why -->
  ```sh
  make d
  ```
"""
