"""The tables in the documentation say what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from sglang.srt.environ import Envs
from sglang.srt.server_args import ServerArgs

from sglang_bitexact import cli
from sglang_bitexact.check import Finding
from sglang_bitexact.compatibility import markdown
from sglang_cpu_ref import aten, hooks, platform

_ROOT = Path(__file__).resolve().parents[1]


def _rows(document: str, mark: str) -> list[list[str]]:
    """Cells of the table behind ``<!-- mark -->``, without its two head rows."""
    text = (_ROOT / document).read_text().split(f"<!-- {mark} -->\n")[1]
    table = text.split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_every_leaf_kernel_is_listed_with_its_replacement_and_its_test():
    expected = {(f"`{h.target}`", _name(h.replacement)) for h in hooks.LEAF_KERNELS}
    expected |= {(f"`sgl_kernel.kvcacheio.{f.__name__}`", _name(f)) for f in hooks.PROVIDED}
    rows = _rows("docs/cpu-platform.md", "leaf-kernels")
    assert {(target, ours) for target, ours, _ in rows} == expected
    assert len(rows) == len(hooks.LEAF_KERNELS) + len(hooks.PROVIDED)
    for _, ours, verified in rows:
        file = re.match(r"`(test_\w+)`: \w", verified)
        assert file, verified
        (path,) = (_ROOT / "test").rglob(f"{file[1]}.py")
        # A kernel test names the function; a server test exercises it.
        assert path.parent.name == "server" or ours.strip("`").split(".")[-1] in path.read_text()


def _name(function) -> str:
    return f"`{function.__module__.removeprefix('sglang_cpu_ref.')}.{function.__name__}`"


def test_every_replaced_operator_is_listed():
    assert [row[0] for row in _rows("docs/cpu-platform.md", "aten")] == [f"`aten::{name}`" for name in aten.OVERRIDES]


def test_every_path_selection_is_listed():
    listed = [row[0] for row in _rows("docs/cpu-platform.md", "path-selection")]
    assert listed == [f"`{hook.target}`" for hook in hooks.PATH_SELECTION]


def test_switches_are_documented_with_their_defaults():
    text = (_ROOT / "docs/reference.md").read_text()
    variables = re.findall(r"<code>(SGLANG_\w+)</code></td><td>(.*?)</td><td><code>(\w+)</code>", text)
    source = " ".join((_ROOT / "python/sglang/srt/environ.edits.yaml").read_text().replace("# ", "").split())
    assert len(variables) == source.count("= EnvBool(False)")
    for name, words, default in variables:
        assert Envs.__dict__[name].default is False and default == "false"
        assert words in source
    arguments = [line for line in text.splitlines() if line.startswith("| `--hicache-swa")]
    fields = (_ROOT / "python/sglang/srt/arg_groups/fields/memory.edits.yaml").read_text()
    assert len(arguments) == fields.count("hicache_swa_")
    for argument in arguments:
        flag, description, default, kind = (cell.strip() for cell in argument.strip("|").split("|"))
        value = getattr(ServerArgs(model_path="dummy"), flag.strip("`").removeprefix("--").replace("-", "_"))
        assert (default, kind) == (f"`{value}`", f"Type: {type(value).__name__}")
        assert description in fields


def test_defaults_of_the_platform_are_those_of_its_page():
    text = " ".join((_ROOT / "docs/cpu-platform.md").read_text().split())
    values = {"max_total_tokens": platform._MAX_TOTAL_TOKENS, "max_running_requests": platform._MAX_RUNNING_REQUESTS}
    values |= {name: ours for name, (_, ours) in platform._TILE_FRACTIONS.items()}
    assert len(values) == 4
    for name, value in values.items():
        assert f"`--{name.replace('_', '-')} {value}`" in text


def test_every_command_is_documented():
    text = (_ROOT / "docs/reference.md").read_text()
    commands = set(cli._parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]
    assert {name for name in commands if f"`{name}" not in text} == set()


def test_every_module_of_the_feature_has_a_role_on_the_developers_page():
    text = (_ROOT / "docs/developing.md").read_text()
    named = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    modules = {path.stem for path in (_ROOT / "python/sglang/srt/mem_cache/swa_bitexact").glob("*.py")} - {"__init__"}
    assert modules - named == set()


def test_the_compatibility_tables_are_what_check_prints(capsys):
    """Both heads, every row's form, and the row of the pinned release as it is today."""
    text = (_ROOT / "docs/developing.md").read_text().split("<!-- compatibility -->\n")[1]
    first, second = text.split("\n\n")[:2]
    assert cli.main(["check", "--markdown"]) == 0
    head, line, pinned = capsys.readouterr().out.splitlines()
    rows = first.splitlines()
    assert rows[:2] == [head, line]
    assert rows[-1] == pinned, "docs/developing.md: run `make compatibility`"
    edits = re.findall(r"of (\d+)", pinned)
    for row in rows[2:]:
        assert re.findall(r"of (\d+)", row) == edits, row
    # A release that does not have all of them is in the second table, an edit a row.
    missing = {row.split()[1]: _missing(row) for row in rows[2:] if _missing(row)}
    listed = [cells[0] for cells in _cells_of(second)]
    assert {version: listed.count(version) for version in set(listed)} == missing
    gone = Finding("sglang/a.py", 1, 1, "class 'A'", "gone", "", "")
    assert second.splitlines()[:2] == markdown({"0.5.22": [gone]}).split("\n\n")[1].splitlines()[:2]
    for _, part, file, anchor, state, where in _cells_of(second):
        assert re.fullmatch(r"[1-5]", part) and re.fullmatch(r"`sglang/[\w/]+\.py`", file)
        assert re.fullmatch(r"`(class|function|pattern) '.*'`", anchor)
        assert state in ("moved", "ambiguous", "gone") and (where == "-") == (state == "gone")


def _cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def _missing(row: str) -> int:
    """Example: "| 0.5.22 | 83 of 86 | .." -> 3."""
    anchor, every = map(int, re.findall(r"\d+", row.split("|")[2]))
    return every - anchor
