"""A byte-level BPE tokenizer with 512 entries and a chat template, trained on a few sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
# DeepSeek's own marks: SGLang renders chat prompts with DeepSeek's reference encoder.
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"

# Enough words for 250 merges; the text itself has no meaning for the project.
_CORPUS = """
the cache keeps the rows of a prefix and the next request reads them again when the same words come back
a window slides over the last words and the ring forgets what lies before it so the old rows are written over
each page ends at a boundary where a tile is taken and the tree holds it until it is needed or pushed out
some answers are long and some are short but the same question must find the same answer every time it is asked
people wait for the first word and then for the next one and they like it when both come soon and are right
there is a morning and an evening and between them the machine works without rest and nobody has to watch it
when the night shift looks at the graphs one line should tell what happened why it happened and what to do now
numbers like one two three four five six seven eight nine ten appear here too because people count things often
water runs down the hill past the mill and under the bridge where children throw stones and look at the circles
an old map shows a road that leads through the forest to a house with a green door and a garden full of pears
she wrote a letter in the afternoon and he read it on the train while the rain was drawing lines on the window
"""

CHAT_TEMPLATE = (
    f"{BOS}{{% for message in messages %}}"
    f"{{{{ '{ASSISTANT}' if message['role'] == 'assistant' else '{USER}' }}}}{{{{ message['content'] }}}}"
    f"{{% if message['role'] == 'assistant' %}}{EOS}{{% endif %}}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


class TinyTokenizer(NamedTuple):
    """The tokenizer and what the model needs to know of it."""

    tokenizer: Tokenizer
    vocab_size: int
    bos_token_id: int
    eos_token_id: int
    text_token_ids: list[int]


def build_tokenizer() -> TinyTokenizer:
    """Train the tokenizer; the same corpus gives the same vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, USER, ASSISTANT, THINK, END_THINK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.strip().splitlines(), trainer)
    size = tokenizer.get_vocab_size()
    if size != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gave {size} tokens, expected {VOCAB_SIZE}: add sentences")
    return TinyTokenizer(
        tokenizer,
        size,
        tokenizer.encode(BOS).ids[0],
        tokenizer.encode(EOS).ids[0],
        [i for i in range(size) if _is_text(tokenizer, i)],
    )


def _is_text(tokenizer: Tokenizer, token_id: int) -> bool:
    """True for tokens that decode to printable ASCII on their own."""
    text = tokenizer.decode([token_id], skip_special_tokens=True)
    return bool(text) and text.isascii() and text.isprintable()


def write_tokenizer(tiny: TinyTokenizer, directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with the chat template."""
    tiny.tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
