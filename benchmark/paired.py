"""Times of calls that take turns, and their ratio."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def alternate(
    calls: Mapping[str, Callable[[int], object]],
    rounds: int,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, list[float]]:
    """Seconds of each call in each round; a call is given the round's number.

    The order turns around with every round, so that nobody always finds the caches as the same other
    left them. The clock is this thread's processor time: what others do on the machine meanwhile
    delays a call, and does not count. One round before the first is not kept.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-1, rounds):
        for name in list(calls) if number % 2 else reversed(list(calls)):
            begin = clock()
            calls[name](number)
            seconds = clock() - begin
            if number >= 0:
                times[name].append(seconds)
    return times


def ratio(times: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """The median of the paired ratios, the middle half of the pairs, and both medians in seconds.

    Example: [2, 6, 3], [1, 2, 2] -> pairs 2, 3, 1.5: ratio 2.0, q1 1.5, q3 3.0, seconds 3, base_seconds 2
    """
    pairs = sorted(a / b for a, b in zip(times, base, strict=True))
    return {
        "ratio": statistics.median(pairs),
        "q1": pairs[len(pairs) // 4],
        "q3": pairs[3 * len(pairs) // 4],
        "seconds": statistics.median(times),
        "base_seconds": statistics.median(base),
    }


def peak_memory() -> int:
    """Bytes of memory that this process took at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def text(figure: Mapping[str, Any]) -> str:
    """A ratio for people: 1.08 (middle half 1.05 to 1.12)."""
    return f"{figure['ratio']:.3f} (middle half of the pairs {figure['q1']:.3f} to {figure['q3']:.3f})"


def script(
    about: str | None,
    measure: Callable[..., dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    *,
    rounds: int | None = None,
) -> None:
    """The command line of one benchmark: measure, then print the figures as JSON or by ``show``.

    about: the script's docstring. rounds: the default of --rounds, which ``measure`` is given; None without.
    """
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure() if rounds is None else measure(args.rounds)
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
