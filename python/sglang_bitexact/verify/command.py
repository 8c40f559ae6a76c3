"""The command ``verify``: arguments, run, exit code."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_bitexact.errors import BitexactError
from sglang_bitexact.verify.answer import TIERS
from sglang_bitexact.verify.cases import parse_numbers
from sglang_bitexact.verify.client import Client, Facts
from sglang_bitexact.verify.engine import Engine, Settings
from sglang_bitexact.verify.plan import Outcome, Plan, execute
from sglang_bitexact.verify.record import Log
from sglang_bitexact.verify.report import ProgressBar, print_summary
from sglang_bitexact.verify.tally import Summary, summarize

DESCRIPTION = (
    "Compare cache hits of a running SGLang with DeepSeek-V4 with cold runs of the same prompts: tokens, log "
    "probabilities and the top 20, exactly. Exit codes: 0 no difference, 1 a difference, 2 not carried out or "
    "a tier without hits."
)
# Around the ends of pages (256) and of c128 blocks (128).
_LENGTHS = "257,258,383-385,511-513,600,767-769,1023-1025,1100"
_SUFFIXES = "1,3,4,5,127,128,129,256,300"
_OK, _DIFFERS, _NOT_DONE = 0, 1, 2


def add_arguments(sub: argparse.ArgumentParser) -> None:
    numbers = _argument(parse_numbers)
    sub.add_argument("--url", required=True, help="of the server, such as http://localhost:30000")
    sub.add_argument("--api-key", help="the server's, if it has one; emptying caches needs the admin key")
    sub.add_argument(
        "--tiers",
        type=_argument(_tiers),
        default=TIERS[:1],
        help="device, host, storage, separated by commas (default: device). host sends as much other traffic as the "
        "device tier holds; storage FLUSHES the caches of device and host: not on a server that others use",
    )
    sub.add_argument("--lengths", type=numbers, default=_LENGTHS, help=f"of prompts; or none (default: {_LENGTHS})")
    sub.add_argument("--depths", type=numbers, default="none", help="cached beforehand (default: pages, all of it)")
    sub.add_argument("--most-depths", type=int, default=6, metavar="N", help="per prompt (default: 6)")
    sub.add_argument("--random", type=int, default=0, metavar="N", help="prompts of random length (default: 0)")
    sub.add_argument("--max-length", type=int, default=2048, metavar="N", help="of random ones (default: 2048)")
    sub.add_argument("--suffixes", type=numbers, default=_SUFFIXES, help=f"behind a cached prompt ({_SUFFIXES})")
    sub.add_argument("--bases", type=numbers, default="512,700", help="lengths of these prompts (default: 512,700)")
    sub.add_argument("--chats", type=int, default=2, metavar="N", help="of several turns, on the device (default: 2)")
    sub.add_argument("--turns", type=int, default=4, metavar="N", help="per chat (default: 4)")
    sub.add_argument("--sampled", action="store_true", help="everything also at temperature 1 with a sampling seed")
    sub.add_argument("--concurrency", type=int, default=4, metavar="N", help="requests at a time (default: 4)")
    sub.add_argument("--new-tokens", type=int, default=8, metavar="N", help="per answer (default: 8)")
    sub.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    sub.add_argument("--vocab", type=int, help="token ids are below it (default: config.json of the server's model)")
    sub.add_argument("--settle", type=float, default=5.0, metavar="S", help="seconds until storage is written (5)")
    sub.add_argument("--state", type=Path, help="file of finished comparisons; named again, the run goes on")


def run(args: argparse.Namespace) -> int:
    """Raises BitexactError if the run could not be carried out."""
    client = Client(args.url, args.api_key)
    facts = client.facts()
    vocab = _vocab(args.vocab, facts)
    settings = Settings(
        vocab=vocab,
        page_size=facts.page_size,
        settle=partial(time.sleep, args.settle),
        new_tokens=args.new_tokens,
        concurrency=args.concurrency,
        device_tokens=facts.device_tokens,
        slots=facts.slots,
        longest=facts.longest,
    )
    names = ("lengths", "random", "max_length", "depths", "most_depths", "suffixes", "bases", "chats", "turns")
    plan = Plan(**{name: getattr(args, name) for name in (*names, "tiers", "sampled", "seed")})
    same = {"sglang": facts.version, "vocab": vocab, "new_tokens": args.new_tokens}
    log = Log(args.state, same)
    with ProgressBar(plan.comparisons(facts.page_size)) as bar:
        engine = Engine(client, settings, log, bar)
        try:
            outcome = execute(engine, plan, facts.deterministic)
        finally:
            engine.close()
    return _report(args, facts, plan, outcome, summarize(log.records))


def _report(args: argparse.Namespace, facts: Facts, plan: Plan, outcome: Outcome, summary: Summary) -> int:
    code, words = _verdict(plan, outcome, summary)
    if args.json:
        head = {"url": args.url, "sglang": facts.version, "exit_code": code, "verdict": words}
        print(json.dumps({**head, "sampled": outcome.sampled, **summary.as_json()}))
        return code
    console = Console(highlight=False)
    print_summary(console, summary, f"{args.url}, sglang {facts.version}: a cached prompt against its cold run")
    if outcome.sampled:
        console.print(f"sampled runs: not available, {outcome.sampled}")
    console.print(words)
    return code


def _verdict(plan: Plan, outcome: Outcome, summary: Summary) -> tuple[int, str]:
    """Exit code, and one sentence."""
    if not outcome.deterministic or summary.cold.differing_outputs:
        return _DIFFERS, (
            "The server is not deterministic to begin with: cold runs of one prompt differ, so differences of "
            "hits mean nothing."
        )
    hits = summary.of()
    if hits.differing_outputs:
        return _DIFFERS, f"{hits.differing_outputs} of {hits.comparisons} hits differ from their cold run."
    missing = summary.missing(plan.tiers)
    if missing:
        return _NOT_DONE, f"No hit in: {', '.join(missing)}. Nothing was compared there."
    return _OK, f"{hits.comparisons} hits, no difference."


def _vocab(asked: int | None, facts: Facts) -> int:
    """Raises BitexactError if it is not known: ids beyond it end SGLang's scheduler, so it is not guessed."""
    vocab = asked or facts.vocab
    if vocab is None:
        raise BitexactError(
            "the server does not say how large its vocabulary is, and its model's config.json is not on this "
            "machine. Give --vocab (the published DeepSeek-V4 checkpoints: 129280)."
        )
    return vocab


def _tiers(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not set(found) <= set(TIERS):
        raise ValueError(f"{text!r}: tiers are {', '.join(TIERS)}")
    return tuple(tier for tier in TIERS if tier in found)


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse`` with its message shown by argparse."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert
