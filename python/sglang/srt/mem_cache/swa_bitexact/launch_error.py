"""A launch that is refused ends with one message, which says what to change."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class LaunchError(ValueError):
    """What was found, what is needed, and what to change: where it was raised says nothing more."""


def end_without_traceback() -> None:
    """If a refusal ends this process, print its message alone; anything else as before.

    Changes ``sys.excepthook``. Call before a refusal is raised in the process that was launched.
    """
    others = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, LaunchError):
            print(error, file=sys.stderr)
        else:
            others(kind, error, trace)

    sys.excepthook = hook
