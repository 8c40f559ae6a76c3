"""Which prompts are compared, and how much of each is in the cache beforehand."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Lower ids of the tiny vocabulary are marks and controls.
_FIRST_TOKEN = 16


def stream(seed: int | str, length: int, vocab: int) -> list[int]:
    """``length`` random token ids, the same for the same seed; a longer stream begins with a shorter one."""
    source = random.Random(seed)
    return [source.randrange(_FIRST_TOKEN, vocab) for _ in range(length)]


class Case(NamedTuple):
    """A prompt of ``base`` tokens of the stream ``seed``, then ``suffix`` tokens of a stream of their own.

    depth: its first tokens that are in the cache when it is asked. sampled: temperature 1.
    """

    kind: str
    seed: int
    base: int
    suffix: int
    depth: int
    sampled: bool = False

    @property
    def length(self) -> int:
        return self.base + self.suffix

    def prompt(self, vocab: int) -> list[int]:
        return stream(self.seed, self.base, vocab) + stream(f"{self.seed}+{self.suffix}", self.suffix, vocab)

    def nominal_tokens(self, page_size: int) -> int:
        return nominal_tokens(self.depth, self.length, page_size)

    @property
    def prompt_key(self) -> str:
        """Names the prompt and how it is sampled, whatever is cached of it."""
        return f"{self.seed}.{self.base}.{self.suffix}{' sampled' if self.sampled else ''}"

    @property
    def shared(self) -> str:
        """Cases of the same name may find what one request put into the cache."""
        return f"{self.seed}.{self.base}" if self.suffix else f"{self.seed}.{self.base}.{self.depth}"

    def repeat(self) -> str:
        """Arguments that run this case again."""
        if self.suffix:
            text = f"--lengths none --suffixes {self.suffix} --bases {self.base} --seed {self.seed}"
        else:
            text = f"--lengths {self.length} --depths {self.depth} --suffixes none --seed {self.seed}"
        return text + (" --sampled" if self.sampled else "")


def nominal_tokens(held: int, length: int, page_size: int) -> int:
    """What compressed rows alone would allow to reuse: whole pages of what is held, less the last token.

    Examples, pages of 256: held 700 of 1,100 -> 512; held 768 of 768 -> 512, because one
    token must be computed.
    """
    return min(held, length - 1) // page_size * page_size


def depths(length: int, page_size: int, most: int) -> tuple[int, ...]:
    """Ends of pages inside a prompt, and the whole prompt; at most ``most``, the ends evenly spread.

    Examples, pages of 256: length 700, most 6 -> (256, 512, 700); length 6,000, most 4 ->
    (256, 3072, 5888, 6000); length 200 -> (200,); length 512, most 1 -> (512,)
    """
    pages = range(page_size, length, page_size)
    wanted = min(most - 1, len(pages))
    step = (len(pages) - 1) / max(wanted - 1, 1)
    # From the last one down: one alone is the last.
    chosen = [pages[round(len(pages) - 1 - i * step)] for i in range(wanted)]
    return (*reversed(chosen), length)


def length_cases(
    kind: str, lengths: Iterable[int], seed: int, page_size: int, *, only: Sequence[int] = (), most: int = 6
) -> list[Case]:
    """Every depth of a prompt of each length; ``only`` names depths. Prompt number i has seed ``seed`` + i."""
    cases = []
    for number, length in enumerate(lengths):
        chosen = tuple(d for d in only if d <= length) or depths(length, page_size, most)
        cases += [Case(kind, seed + number, length, 0, depth) for depth in chosen]
    return cases


def suffix_cases(bases: Iterable[int], suffixes: Sequence[int], seed: int) -> list[Case]:
    """Prompts that extend a cached one: every suffix of each base."""
    return [Case("suffix", seed + i, base, suffix, base) for i, base in enumerate(bases) for suffix in suffixes]


def random_lengths(count: int, longest: int, seed: int) -> list[int]:
    """``count`` lengths from 1 to ``longest``."""
    source = random.Random(f"lengths {seed}")
    return [source.randint(1, longest) for _ in range(count)]


def parse_numbers(text: str) -> list[int]:
    """``1-4,127,255-257`` -> [1, 2, 3, 4, 127, 255, 256, 257]; ``none`` -> [].

    Raises:
        ValueError: something else, a number below 1, or a range that ends before it begins.
    """
    numbers: list[int] = []
    for part in () if text == "none" else text.split(","):
        first, _, last = part.partition("-")
        found = range(int(first), int(last or first) + 1)
        if not found or found[0] < 1:
            raise ValueError(f"{part!r} is no number or range of numbers from 1 on")
        numbers += found
    return numbers
