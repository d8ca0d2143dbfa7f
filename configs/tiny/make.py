"""Make the tiny tokenizer and the tiny text that the debug configs train on.

    python configs/tiny/make.py            # writes configs/tiny/tokenizer and configs/tiny/text
    python configs/tiny/make.py OTHER_DIR  # the same bytes somewhere else

The text follows a small grammar, so that a debug model finds something to learn within 20 steps; the
tokenizer is a byte-level BPE trained on that text. Both come from one fixed seed: a second run writes the same
bytes. Needs the ``tokenizers`` package (torchtitan brings it) and no network.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20240607
DOCUMENTS = 600
VOCABULARY = 512  # far below the 2048 rows of the debug models' embeddings
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"

ACTORS = ("a miller", "the ferry pilot", "one beekeeper", "the night baker", "a clockmaker", "the old gardener")
PLACES = ("by the river", "under the bridge", "near the harbour", "behind the orchard", "at the north gate")
DEEDS = ("counts", "carries", "mends", "paints", "trades", "waters", "hides", "measures")
THINGS = ("seven lanterns", "a crate of pears", "the broken oars", "two copper bells", "a ladder", "the spare sails")
TIMES = ("at dawn", "before noon", "every other day", "until it rains", "after the market", "all winter")


def _sentence(rng: random.Random) -> str:
    words = (rng.choice(ACTORS), rng.choice(DEEDS), rng.choice(THINGS), rng.choice(PLACES), rng.choice(TIMES))
    return " ".join(words).capitalize() + "."


def documents() -> list[str]:
    """The whole text, one string a document, always the same."""
    rng = random.Random(SEED)
    return [" ".join(_sentence(rng) for _ in range(rng.randint(5, 16))) for _ in range(DOCUMENTS)]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of at most ``VOCABULARY`` tokens, begin and end of text first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main(out: Path) -> None:
    """Write ``out/text/data.json`` (one JSON object a line) and ``out/tokenizer/``."""
    texts = documents()
    text_dir, tokenizer_dir = out / "text", out / "tokenizer"
    for folder in (text_dir, tokenizer_dir):
        folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (text_dir / "data.json").write_text(lines, encoding="utf-8", newline="\n")
    train_tokenizer(texts).save(str(tokenizer_dir / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (tokenizer_dir / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1) + "\n", encoding="utf-8", newline="\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
