"""Files beside tokenizer.json: what transformers 5.24 makes other ids of is refused, all else is read the same.

Which of them make other ids, transformers has said: `apply_chat_template` and padding, as in Flux2KleinPipeline.
"""

import json
import shutil

import pytest
from damage import one_sentence
from stand_in_hub import TINY

from kleinlite.errors import UserError
from kleinlite.models.tokenizer import load_tokenizer
from kleinlite.z_image import PLAIN_TEMPLATE

FOLDER = TINY / "tokenizer"
CONFIG = json.loads((FOLDER / "tokenizer_config.json").read_text())
WORDS = json.loads((FOLDER / "tokenizer.json").read_text())
TEMPLATE = (FOLDER / "chat_template.jinja").read_text()
NO_THINK = TEMPLATE.replace("<think>\n\n</think>\n\n", "")
QWENS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
END = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
ADDED = {str(token["id"]): {**token} for token in WORDS["added_tokens"]}
for token in ADDED.values():
    del token["id"]
SPECIAL = {id: token for id, token in ADDED.items() if token["special"]}
RED = {"400": END | {"content": "red"}}
SPACED = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
FIXED = {"strategy": {"Fixed": 40}, "pad_to_multiple_of": None, "pad_id": 335, "pad_type_id": 0, "pad_token": "x"}


def config(**words):
    return {"tokenizer_config.json": json.dumps(CONFIG | words)}


def tokenizer(**words):
    return {"tokenizer.json": json.dumps(WORDS | words)}


def beside(**words):
    return {"special_tokens_map.json": json.dumps(words)}


def template(text):
    return {"chat_template.jinja": text}


def load(tmp_path, files, *options):
    folder = shutil.copytree(FOLDER, tmp_path / "tokenizer")
    for name, text in files.items():
        (folder / name).write_text(text) if text is not None else (folder / name).unlink()
    return load_tokenizer(tmp_path, *options)


OTHER_IDS = [
    (template(NO_THINK), "makes another text of a prompt"),
    (template("<|im_start|>system\nDraw.<|im_end|>\n" + TEMPLATE), "makes another text of a prompt"),
    (template(TEMPLATE.replace("m.content", "m.content | trim")), "makes another text of a prompt"),
    (template(TEMPLATE.replace("m.content", "m.content | lower")), "makes another text of a prompt"),
    (template("{{ bos_token }}" + TEMPLATE) | config(bos_token="<|im_end|>"), "makes another text of a prompt"),
    (template(None) | config(chat_template=NO_THINK), r"tokenizer_config.json makes another text of a prompt"),
    (template(None) | config(chat_template=[{"name": "default", "template": NO_THINK}]), "makes another text"),
    (template("{% for"), "has a chat template that fails"),
    (template("{{ 1 / 0 }}"), "has a chat template that fails"),
    (config(padding_side="left"), "padding_side is 'left'"),
    (tokenizer(padding=FIXED | {"direction": "Left"}), "padding_side is 'left'"),
    (config(pad_token="<|im_end|>"), r"pad_token is '<\|im_end\|>'"),
    (config(pad_token=END | {"__type": "AddedToken"}), r"pad_token is '<\|im_end\|>'"),
    (config(pad_token=None), "pad_token is None"),
    (config(pad_token="[PAD]"), r"not have the same tokens \(\[PAD\]\)"),
    (beside(pad_token="<|im_end|>"), r"pad_token is '<\|im_end\|>'"),
    (beside(pad_token=END), r"pad_token is '<\|im_end\|>'"),
    (config(add_prefix_space=True), "add_prefix_space is True"),
    (tokenizer(pre_tokenizer=SPACED), "is not Qwen's"),
    (tokenizer(normalizer={"type": "Lowercase"}), "is not Qwen's"),
    (config(split_special_tokens=True), "split_special_tokens is True"),
    (config(extra_special_tokens=["red"]), r"not have the same tokens \(red\)"),
    (config(extra_special_tokens={"image_token": "red"}), r"\(red\)"),
    (config(additional_special_tokens=["red"]), r"\(red\)"),
    (config(model_specific_special_tokens={"image_token": "red"}), r"\(red\)"),
    (config(eos_token="red"), r"\(red\)"),
    (config(added_tokens_decoder=ADDED | RED), r"\(red\)"),
    (config(added_tokens_decoder=SPECIAL), r"\(</think>, <think>\)"),
    (beside(additional_special_tokens=["red"]), r"\(red\)"),
    ({"added_tokens.json": '{"red": 400}'}, r"\(red\)"),
    ({"added_tokens.json": "[]"}, "not a list of names"),
]  # fmt: skip
SAME_IDS = [
    {},
    template(QWENS),
    template(None) | config(chat_template=QWENS),
    template(None) | config(chat_template=[{"name": "tools", "template": "x"}, {"name": "default", "template": QWENS}]),
    config(chat_template=NO_THINK),  # the file comes first
    config(padding_side="right", pad_token=END | {"content": "<|endoftext|>", "special": True}),
    config(padding_side="right") | tokenizer(padding=FIXED | {"direction": "Left"}),
    tokenizer(padding=FIXED | {"direction": "Right"}),
    tokenizer(truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}),
    config(added_tokens_decoder=ADDED),
    config(added_tokens_decoder=ADDED) | beside(pad_token="<|im_end|>"),  # transformers no longer reads that file
    beside(pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>", END]),
    {"added_tokens.json": json.dumps({token["content"]: int(id) for id, token in ADDED.items()})},
    config(model_max_length=10, add_bos_token=True, bos_token="<|im_start|>", clean_up_tokenization_spaces=True),
    config(add_prefix_space=False, split_special_tokens=False, errors="replace"),
    {"tokenizer_config.json": None},
]
TEXT = "<|im_start|>user\n unred  Stone <|im_end|>\n<think>\n\n</think>\n\n"
IDS = load_tokenizer(TINY).encode(TEXT).ids


@pytest.mark.parametrize("files, sentence", OTHER_IDS)
def test_what_would_make_other_ids_is_refused(tmp_path, files, sentence):
    with pytest.raises(UserError, match=sentence) as refusal:
        load(tmp_path, files)
    assert one_sentence(refusal.value)


@pytest.mark.parametrize("files", SAME_IDS)
def test_what_makes_the_same_ids_is_read(tmp_path, files, caplog):
    assert load(tmp_path, files).encode(TEXT).ids == IDS
    assert caplog.messages == []


def test_a_family_has_a_template_of_its_own(tmp_path):
    """Z-Image and FLUX 3 leave out the block of thoughts."""
    load(tmp_path, template(NO_THINK), PLAIN_TEMPLATE)
    with pytest.raises(UserError, match="makes another text"):
        load_tokenizer(TINY, PLAIN_TEMPLATE)


def test_a_model_without_a_template_is_read(tmp_path, caplog):
    """diffusers would refuse it; there is one template that it can have been trained with."""
    assert load(tmp_path, template(None)).encode(TEXT).ids == IDS
