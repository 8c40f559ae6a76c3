"""The settings of a local server under which hits are compared, and the prompts for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from sglang_bitexact.demo.server import hicache_arguments
from sglang_bitexact.series import SWITCH
from sglang_bitexact.verify.answer import TIERS
from sglang_bitexact.verify.cases import parse_numbers
from sglang_bitexact.verify.pairwise import all_pairs
from sglang_bitexact.verify.plan import Plan

Mode = Literal["stock", "off", "on"]

FACTORS: dict[str, tuple[Any, ...]] = {
    "stride": (1, 0, 2, 7, 32),
    "chunk": (512, 256, 2048),
    "concurrency": (4, 1, 16),
    "cache": ("page_first_direct", "layer_first", "none"),
    "pressure": ("none", "retract", "abort"),
    "exact_fill": (False, True),
    "overlap": (True, False),
    "mixed": (False, True),
    "core": ("rust", "python"),
    "poison": (True, False),
    "restart": (False, True),
}


@dataclass(frozen=True)
class Configuration:
    """One server.

    stride: --hicache-swa-offload-page-stride. chunk: --chunked-prefill-size. cache: HiCache's
    memory layout, or none for no HiCache. pressure: requests are retracted in the middle, or
    clients hang up. exact_fill: SGLANG_EXACT_CHUNK_FILL. core: of the radix tree. poison: what
    is free is garbage. restart: between writing storage and reading it, the server is killed.
    sampled: temperature 1 with a fixed seed as well, which SGLang repeats in its deterministic mode.
    """

    name: str
    mode: Mode
    stride: int = 1
    chunk: int = 2048
    concurrency: int = 4
    cache: str = "page_first_direct"
    pressure: str = "none"
    exact_fill: bool = False
    overlap: bool = True
    mixed: bool = False
    core: str = "rust"
    poison: bool = False
    restart: bool = False
    sampled: bool = False
    device_tokens: int = 8192

    @property
    def tiers(self) -> tuple[str, ...]:
        return TIERS[:1] if self.cache == "none" else TIERS

    def arguments(self, storage: str) -> list[str]:
        """Server arguments. A stock server has no stride."""
        out = ["--max-total-tokens", str(self.device_tokens), "--chunked-prefill-size", str(self.chunk)]
        # Stock evicts cached pages when its request slots run short: a few more than are needed.
        out += ["--max-running-requests", str(self.concurrency + 4)]
        out += ["--disable-overlap-schedule"] if not self.overlap else []
        out += ["--enable-mixed-chunk"] if self.mixed else []
        out += ["--enable-deterministic-inference"] if self.sampled else []
        out += ["--hicache-swa-offload-page-stride", str(self.stride)] if self.mode != "stock" else []
        if self.cache != "none":
            out += [*hicache_arguments(self.cache), "--file-storage-path", storage]
        return out

    def environment(self) -> dict[str, str]:
        out = {
            # Servers of several configurations share the cores; threads that wait for each other starve.
            "OMP_NUM_THREADS": "1",
            SWITCH: str(int(self.mode == "on")),
            "SGLANG_EXACT_CHUNK_FILL": str(int(self.exact_fill)),
            "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": self.core,
            "SGLANG_CPU_REF_POISON": str(int(self.poison)),
        }
        if self.pressure == "retract":
            out |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
        return out


def long_configurations() -> list[Configuration]:
    """Every two settings met at least once with the switch on, most of them twice; then off and stock."""
    backwards = {name: tuple(reversed(values)) for name, values in FACTORS.items()}
    rows = [*all_pairs(FACTORS, can_show), *all_pairs(backwards, can_show)[:10]]
    on = [Configuration(f"on-{number:02}", "on", **row) for number, row in enumerate(rows)]
    calm = [configuration for configuration in on if configuration.pressure != "retract"]
    # Stock resumes a retracted request from stale windows: its cold runs would differ too.
    stock = [replace(c, name=f"stock-{number:02}", mode="stock") for number, c in enumerate(calm[:3])]
    sampled = replace(calm[0], name="on-sampled", sampled=True, stride=32)
    return [*on, sampled, replace(calm[0], name="off-00", mode="off"), *stock]


def can_show(row: Mapping[str, Any]) -> bool:
    """False where no request would be retracted.

    A mixed chunk gives a place to each running request: of 256 no whole page is left to prefill,
    so requests run one by one, and the only running one is never retracted.
    """
    return (row.get("pressure"), row.get("mixed"), row.get("chunk")) != ("retract", True, 256)


def short_configurations() -> list[Configuration]:
    """A few of the above, that together start a server at most eight times."""
    on = {configuration.name: configuration for configuration in long_configurations() if configuration.mode == "on"}
    chosen = [on[name] for name in ("on-00", "on-01", "on-02", "on-03", "on-06", "on-sampled")]
    stock = replace(chosen[0], name="stock", mode="stock")
    smaller = [replace(c, concurrency=8, device_tokens=4096) for c in (stock, *chosen)]
    # A prompt of 6,000 tokens needs the larger one.
    return [replace(c, device_tokens=8192) if c.name == "on-03" else c for c in smaller]


def long_plans(configuration: Configuration, number: int) -> list[Plan]:
    """Lengths around every boundary class, random ones, suffixes, chats; ``number`` varies the seed."""
    if configuration.sampled:
        return [_sampled_plan(configuration)]
    seed = 1000 * (number % 3)
    short = Plan(
        lengths=parse_numbers("1-4,127-130,255-257,383-385,511-513"),
        suffixes=parse_numbers("1,3,4,5,127,128,129,256,300"),
        bases=(256, 300, 512, 513, 700),
        chats=4,
        turns=8,
        tiers=configuration.tiers,
        seed=seed,
    )
    # Long prompts cost most: two depths of each.
    long = Plan(
        lengths=parse_numbers("1023-1025,2047-2049"),
        random=2,
        max_length=6000,
        most_depths=2,
        tiers=configuration.tiers,
        seed=seed + 500,
        cold_checks=2,
    )
    return [short, long]


def _sampled_plan(configuration: Configuration) -> Plan:
    """Every comparison twice: greedy, and with a seed."""
    lengths, suffixes = (257, 513, 700, 1025), parse_numbers("1,4,128,300")
    return Plan(lengths=lengths, suffixes=suffixes, bases=(300,), tiers=configuration.tiers, sampled=True, seed=300)


def short_plans(configuration: Configuration) -> list[Plan]:
    """About 80 comparisons on the device, and 10 in each other tier; few on stock, where differences abound."""
    if configuration.sampled:
        return [_sampled_plan(configuration)]
    stock = configuration.mode == "stock"
    device = Plan(
        lengths=(385, 700) if stock else (257, 385, 513, 1025),
        random=0 if stock else 2,
        max_length=1100,
        most_depths=2,
        # Short ones cost next to nothing.
        suffixes=parse_numbers("129,300" if stock else "1-8,16,64,127-129,256,300"),
        bases=(512,) if stock else (256, 300, 384, 512),
        chats=1 if stock else 3,
        cold_checks=3,
    )
    plans = [device]
    if configuration.device_tokens > 6000:
        plans.append(Plan(lengths=(2049, 6000), most_depths=1, seed=100, cold_checks=0))
    if configuration.cache != "none":
        upper = Plan(
            lengths=(257, 513, 1025),
            most_depths=2,
            suffixes=(1, 4, 128, 300),
            bases=(256,),
            tiers=TIERS[1:],
            seed=200,
            cold_checks=0,
        )
        plans.append(upper)
    return plans
