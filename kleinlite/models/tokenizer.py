"""A model's tokenizer. How a prompt becomes ids its files say as the chapters compute it, or they are refused."""

import itertools
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import UserError, clip, first_few, printable
from ..text_encoder import PAD, TEMPLATE
from .files import ModelFolder, check_file, read_json
from .part_format import Values, check_words

PACKAGE = Path(__file__).parents[1]
PROBE = " A Prompt\nof two <lines>. "  # neither trimmed nor in small letters
COMPUTED = {
    "pad_token": PAD, "padding_side": "right", "add_prefix_space": (False, None), "split_special_tokens": (False, None),
}  # fmt: skip
READ = {  # or without effect: transformers makes the same ids, whatever they say
    "add_bos_token", "add_eos_token", "backend", "chat_template", "clean_up_tokenization_spaces", "errors", "is_local",
    "local_files_only", "max_length", "model_max_length", "pad_to_multiple_of", "pad_token_type_id", "processor_class",
    "stride", "tokenizer_class", "truncation_side", "truncation_strategy",
}  # fmt: skip


def load_tokenizer(folder: ModelFolder | Path, template: str = TEMPLATE) -> Tokenizer:
    """The tokenizer of a model's folder. template: of the chat, into which the prompt goes.

    Raises MissingFileError or UserError.
    """
    if isinstance(folder, Path):
        folder = ModelFolder(folder, {})
    path = folder.part("tokenizer") / "tokenizer.json"
    check_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library has no error of its own
        raise UserError(f"{path} is not a tokenizer ({printable(str(e))[:100]}): download it again.") from None
    if tokenizer.token_to_id(PAD) is None:
        raise UserError(f"{path} has no {PAD} token, with which prompts are filled up: it is not Qwen's.")
    side = tokenizer.padding["direction"] if tokenizer.padding else "right"
    tokenizer.no_padding()  # chapter 3 pads and counts
    tokenizer.no_truncation()
    if PACKAGE not in path.parents:  # nano's is right, and the template's language takes a tenth of a second
        words = {"padding_side": side} | read_words(path.parent)
        check_tokens(path, tokenizer, words)
        check_template(path.parent, words, template)
    return tokenizer


def read_words(folder: Path) -> Values:
    """What the files beside tokenizer.json say, put together as transformers does it."""
    words, older, added = (
        read_json(folder / name) if (folder / name).exists() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    return words if "added_tokens_decoder" in words else words | older | {"added_tokens": [*added]}


def check_tokens(path: Path, tokenizer: Tokenizer, words: Values) -> None:
    """Refuse another padding, and tokens or changes of the text of which transformers makes other ids."""
    tokens = {word: contents(value) for word, value in words.items() if word.endswith(("token", "tokens", "decoder"))}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    named = set(itertools.chain(*tokens.values()))
    if foreign := named - known or ("added_tokens_decoder" in words and known - named):
        names = first_few(map(clip, sorted(foreign)))
        raise UserError(f"{path} and the files beside it do not have the same tokens ({names}): download them again.")
    plain = {word: tokens[word][0] if tokens.get(word) else value for word, value in words.items()}
    check_words(path.parent, plain, COMPUTED, READ | (tokens.keys() - COMPUTED))
    prompt = TEMPLATE.format(PROBE)
    text = tokenizer.decode(tokenizer.encode(prompt, add_special_tokens=False).ids, skip_special_tokens=False)
    if text != prompt:
        raise UserError(f"{path} reads {clip(repr(prompt))} as {clip(repr(text))}: it is not Qwen's.")


def contents(value: Any) -> list[str]:
    """The tokens in what a file says of one or of many: texts, or dictionaries with a content."""
    if isinstance(value, dict):
        value = [value["content"]] if "content" in value else [*value.values()]
    if isinstance(value, list):
        return [token for item in value for token in contents(item)]
    return [value] if isinstance(value, str) else []


def check_template(folder: Path, words: Values, template: str) -> None:
    """Refuse a chat template that makes another text of a prompt than `template`. Raises UserError."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    path = folder / "tokenizer_config.json"
    own = words.get("chat_template")
    asked = {word: value for word, value in words.items() if value}
    asked |= {"messages": [{"role": "user", "content": PROBE}], "add_generation_prompt": True}
    try:
        if isinstance(own, list):
            own = next((one["template"] for one in own if one["name"] == "default"), None)
        if (folder / "chat_template.jinja").exists():  # it comes first
            path = folder / "chat_template.jinja"
            own = path.read_text("utf-8")
        if own is None:
            return
        language = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        text = language.from_string(own).render(asked, enable_thinking="<think>" not in template)
    except Exception as e:  # it is anybody's program
        raise UserError(f"{path} has a chat template that fails ({clip(str(e))}): download it again.") from None
    if text != template.format(PROBE):
        other = clip(repr(text), 160)
        raise UserError(f"The chat template in {path} makes another text of a prompt ({other}): take another model.")
