#!/usr/bin/env python3
"""Write the tables of docs/developing.md anew: which edits anchor in the releases that they name.

Downloads a release's wheel if it is not there yet. With releases as arguments, of these instead.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sglang_bitexact.check import check
from sglang_bitexact.compatibility import markdown
from sglang_bitexact.series import Series
from sglang_bitexact.upstream import download

PAGE = Path(__file__).resolve().parent.parent / "docs/developing.md"
_BEGIN, _END = "<!-- compatibility -->\n", "\n<!-- end of compatibility -->"


def main(arguments: list[str]) -> int:
    text = PAGE.read_text()
    before, rest = text.split(_BEGIN)
    tables, after = rest.split(_END)
    versions = arguments or re.findall(r"^\| (\S+) \| \d+ of", tables, re.MULTILINE)
    series = Series.default()
    found = markdown({version: check(series, download(version)) for version in versions})
    PAGE.write_text(before + _BEGIN + found + "\n" + _END + after)
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
