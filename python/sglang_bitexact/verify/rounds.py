"""How many cases are primed before the first of them is asked again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from sglang_bitexact.errors import BitexactError
from sglang_bitexact.verify.cases import Case

# With less than the first share of the device tier asked for, everything is still there; what as
# much as the second share followed is not.
_STAYS, _PUSHED_OUT = 0.6, 1.1
# Cases that are primed before storage is emptied once.
_STORAGE_CASES = 64


def rounds(
    tier: str, cases: Sequence[Case], concurrency: int, device_tokens: int | None, page_size: int
) -> Iterator[list[Case]]:
    """``cases`` in parts, in order; cases that share what is cached stay together.

    device: few enough to stay in a device tier of ``device_tokens``. host: so many that they
    push each other out of it. storage: up to 64, because each part flushes the caches.

    Raises:
        BitexactError: tier is host and ``device_tokens`` is not known.
    """
    if tier == "host" and device_tokens is None:
        raise BitexactError("the server does not say max_total_num_tokens: hits in the host tier cannot be provoked.")
    part: list[Case] = []
    for _, members in groupby(cases, key=lambda case: case.shared):
        group = list(members)
        if tier == "host":
            complete = _pushed(part, page_size) >= _PUSHED_OUT * (device_tokens or 0)
        elif tier == "storage":
            complete = len(part) + len(group) > _STORAGE_CASES
        else:
            stays = device_tokens is None or _tokens([*part, *group]) <= _STAYS * device_tokens
            complete = len(part) + len(group) > 4 * concurrency or not stays
        if part and complete:
            yield part
            part = []
        part += group
    if part:
        yield part


def _tokens(cases: Sequence[Case]) -> int:
    """What priming and asking ``cases`` puts into the cache."""
    primed = {case.shared: case.depth for case in cases}
    return sum(primed.values()) + sum(case.length - case.depth for case in cases)


def _pushed(cases: Sequence[Case], page_size: int) -> int:
    """At least so many cached tokens come between priming any of ``cases`` and asking it again.

    Priming those behind it, then the hits of those before it: whole pages of all but itself.
    """
    whole = [case.depth // page_size * page_size for case in cases]
    return sum(whole) - max(whole, default=0)


def filler_lengths(cases: Sequence[Case], device_tokens: int, page_size: int, longest: int | None = None) -> list[int]:
    """Lengths of further requests that push each of ``cases`` out of the device tier.

    longest: what the server takes; None: not known.

    Example, pages of 256: a device of 4,096 tokens, primed 1,024, 700 and 900 (512 + 768 are
    sure to come between): 1.1 x 4,096 - 1,280 = 3,225 -> [1024, 1024, 1024, 256]
    """
    missing = int(_PUSHED_OUT * device_tokens) - _pushed(cases, page_size)
    pages = -(-max(missing, 0) // page_size)
    size = max(min(device_tokens // 4, longest or device_tokens) // page_size, 1)
    return [min(size, pages - start) * page_size for start in range(0, pages, size)]
