"""config.json, model_index.json, tokenizer.json: what is not one of our models is refused in one sentence."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from damage import DEEP, one_sentence
from stand_in_hub import TINY
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kleinlite.models.checkpoint import open_checkpoint
from kleinlite.models.configs import RELEASED_CONFIGS, read_config
from kleinlite.position_ids import image_ids, rope_table, text_ids
from kleinlite.text_encoder import TextEncoderConfig
from kleinlite.transformer import TransformerConfig

CONFIGS = {
    "transformer": "transformer/config.json",
    "autoencoder": "vae/config.json",
    "text_encoder": "text_encoder/config.json",
}
CONFIGS |= {"index": "model_index.json"}
WORDS = {name: json.loads((TINY / file).read_text()) for name, file in CONFIGS.items()}


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    return folder if folder.exists() else Path(shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("base")))


@pytest.mark.parametrize(
    "file, words, told",
    [
        (
            "transformer",
            {"num_layers": 10**9},
            "num_layers is 1000000000, and it must be a whole number from 1 to 1,000",
        ),
        ("transformer", {"axes_dims_rope": None}, "axes_dims_rope is None, and it must be a list of 4"),
        ("transformer", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("transformer", {"mlp_ratio": "x"}, "mlp_ratio is 'x', and it must be a number"),
        ("autoencoder", {"norm_num_groups": 3.5}, "norm_num_groups is 3.5"),
        ("autoencoder", {"norm_num_groups": 5}, "8 channels are no whole number of 5 groups"),
        ("text_encoder", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("text_encoder", {"num_key_value_heads": 3}, "4 heads do not share 3"),
        ("text_encoder", {"head_dim": 7}, "head_dim is odd"),
        ("index", {"text_encoder_out_layers": []}, "text_encoder_out_layers is []"),
        ("index", {"_class_name": 5}, "model_index.json is a 5, and kleinlite runs"),
        ("index", {"scheduler": 0.5}, "class is 0.5, and kleinlite computes"),
        ("text_encoder", {"architectures": 5}, "config.json is a 5, and kleinlite runs"),
        ("text_encoder", {"architectures": [["x"]]}, "config.json is a ['x'], and kleinlite runs"),
        ("autoencoder", {"sample_size": "x"}, "sample_size is 'x', and it must be a whole number from 16"),
    ],
)
def test_sentences(model, file, words, told):
    (model / CONFIGS[file]).write_text(json.dumps(WORDS[file] | words))
    with pytest.raises(ValueError) as refusal:
        open_checkpoint(model, dtype=mx.float32)
    assert told in str(refusal.value) and one_sentence(refusal.value), refusal.value


@pytest.mark.parametrize("file", CONFIGS.values())
@pytest.mark.parametrize("text", [b'{"a":', "{}".encode("utf-16"), b"\xff", DEEP.encode()])
def test_text_that_is_no_json(model, file, text):
    (model / file).write_bytes(text)
    with pytest.raises(ValueError, match="not valid JSON") as refusal:
        open_checkpoint(model, dtype=mx.float32)
    assert one_sentence(refusal.value)


# ---------------------------------------------------------------- words beside the numbers

CONFIGS |= {"scheduler": "scheduler/scheduler_config.json"}
WORDS |= {"scheduler": json.loads((TINY / CONFIGS["scheduler"]).read_text())}
ROPES = [{"factor": 4.0, "rope_type": kind} for kind in ("yarn", "linear", "llama3", "dynamic", "longrope")]
ROPES += [{"factor": 4.0, "type": "yarn"}, {"rope_type": "default", "partial_rotary_factor": 0.5}]
ROPES = [{"rope_theta": 1e6} | rope for rope in ROPES]


@pytest.mark.parametrize(
    "file, words",
    [
        *(("text_encoder", {name: rope}) for name in ("rope_scaling", "rope_parameters") for rope in ROPES),
        ("text_encoder", {"partial_rotary_factor": 0.5}),
        ("text_encoder", {"hidden_act": "gelu"}),
        ("text_encoder", {"use_sliding_window": True}),
        ("text_encoder", {"attention_bias": True}),
        ("text_encoder", {"model_type": "qwen2"}),
        ("text_encoder", {"layer_types": ["full_attention"] * 30 + ["sliding_attention"]}),
        ("transformer", {"eps": 1e-5}),
        ("transformer", {"guidance_embeds": True}),
        ("transformer", {"patch_size": 2}),
        ("transformer", {"attention_head_dim": 64}),
        ("autoencoder", {"act_fn": "gelu"}),
        ("autoencoder", {"patch_size": [1, 1]}),
        ("autoencoder", {"mid_block_add_attention": False}),
        ("autoencoder", {"use_quant_conv": False}),
        ("autoencoder", {"up_block_types": ["AttnUpDecoderBlock2D"] * 4}),
        ("scheduler", {"num_train_timesteps": 500}),
        ("scheduler", {"shift_terminal": 0.1}),
        ("scheduler", {"time_shift_type": "linear"}),
        *(("scheduler", {f"use_{kind}_sigmas": True}) for kind in ("beta", "karras", "exponential", "flow")),
        ("scheduler", {"invert_sigmas": True}),
        ("scheduler", {"stochastic_sampling": True}),
        ("scheduler", {"shift": 0}),
    ],
)
def test_a_word_by_which_the_reference_computes_something_else(model, file, words):
    (model / CONFIGS[file]).write_text(json.dumps(WORDS[file] | words))
    with pytest.raises(ValueError) as refusal:
        open_checkpoint(model, dtype=mx.float32)
    [(word, value)] = words.items()
    inside = value if isinstance(value, dict) else {word: value}
    assert any(name in str(refusal.value) for name in inside) and one_sentence(refusal.value), refusal.value


@pytest.mark.parametrize("place", ["scheduler", "index"])
def test_another_scheduler(model, place):
    named = {"_class_name": "DDIMScheduler"} if place == "scheduler" else {"scheduler": ["diffusers", "DDIMScheduler"]}
    (model / CONFIGS[place]).write_text(json.dumps(WORDS[place] | named))
    with pytest.raises(ValueError, match="class is 'DDIMScheduler', and kleinlite computes 'FlowMatchEuler"):
        open_checkpoint(model, dtype=mx.float32)


def test_another_models_tokenizer(model):
    words = {"[UNK]": 0, "a": 1}
    Tokenizer(WordLevel(words, unk_token="[UNK]")).save(str(model / "tokenizer" / "tokenizer.json"))
    with pytest.raises(ValueError, match="tokenizer.json has no <.endoftext.> token.* it is not Qwen's"):
        open_checkpoint(model, dtype=mx.float32)


@pytest.mark.parametrize(
    "file, words",
    [
        ("text_encoder", {"hidden_act": "swish", "rope_scaling": None, "max_position_embeddings": 7}),
        ("text_encoder", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1]}}),
        ("transformer", {"eps": 9.999999974752427e-07, "out_channels": 128}),
        ("autoencoder", {"act_fn": "swish", "force_upcast": False}),
        ("scheduler", {"shift": 5.0, "max_shift": 9, "shift_terminal": 0, "_name": 1}),  # mu is the pipeline's own
    ],
)
def test_a_word_that_means_the_same(model, caplog, file, words):
    before = open_checkpoint(model, dtype=mx.float32)
    (model / CONFIGS[file]).write_text(json.dumps(WORDS[file] | words))
    after = open_checkpoint(model, dtype=mx.float32)
    assert after.configs == before.configs and after.info.family.schedule(4, 64) == before.info.family.schedule(4, 64)
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["tiny", "tiny/base", "z_image", "flux3", "flux3/base"])
def test_files_of_the_reference_have_no_unknown_words(name, caplog):
    open_checkpoint(TINY.parent / name, dtype=mx.float32)
    assert caplog.messages == []


@pytest.mark.parametrize("file", ["text_encoder", "transformer", "autoencoder", "scheduler"])
def test_a_word_that_nobody_knows_is_logged_once(model, caplog, file):
    (model / CONFIGS[file]).write_text(json.dumps(WORDS[file] | {"new_in_2027": 3}))
    for _ in range(2):
        open_checkpoint(model, dtype=mx.float32)
    [message] = caplog.messages
    assert "new_in_2027" in message and CONFIGS[file] in message


def test_the_base_of_the_rotation_inside_goes_before_the_one_outside(model):
    """As in transformers."""
    for name in ("rope_scaling", "rope_parameters"):
        (model / CONFIGS["text_encoder"]).write_text(
            json.dumps(WORDS["text_encoder"] | {"rope_theta": 5.0, name: {"rope_theta": 7.0}})
        )
        assert read_config("text_encoder", model / "text_encoder").theta == 7


@pytest.mark.parametrize("words, shift", [({"shift": 3.0}, 3.0), ({}, 1.0)])
def test_a_schedule_that_is_the_same_for_all_sizes(model, words, shift):
    """What a file leaves out is diffusers' own: a shift of 1, and none that depends on the size."""
    named = {"_class_name": "FlowMatchEulerDiscreteScheduler"} | words
    (model / CONFIGS["scheduler"]).write_text(json.dumps(named))
    schedule = open_checkpoint(model, dtype=mx.float32).info.family.schedule
    right = [shift * t / (1 + (shift - 1) * t) for t in (1, 0.75, 0.5, 0.25, 0)]
    assert schedule(4, 24) == pytest.approx(right) and schedule(4, 4096) == schedule(4, 24)


# ---------------------------------------------------------------- token ids beyond the embedding table


@pytest.mark.parametrize("added", [False, True])
def test_token_ids_stay_below_the_embedding_tables_rows(model, added):
    """As in a tokenizer of another model, or with a token that somebody has added."""
    path = model / "tokenizer/tokenizer.json"
    words = json.loads(path.read_text())
    if added:
        words["added_tokens"].append({**words["added_tokens"][0], "id": 100_000, "content": "<|far|>"})
    else:
        words["model"]["vocab"] = {k: i + 1000 if i > 20 else i for k, i in words["model"]["vocab"].items()}
    path.write_text(json.dumps(words))
    with pytest.raises(ValueError, match="tokens and the tokenizer .*: the parts in .* belong to different") as refusal:
        open_checkpoint(model, dtype=mx.float32)
    assert one_sentence(refusal.value)


def test_a_tokenizer_that_pads_by_itself(model):
    """Chapter 3 pads, with an id that the table has."""
    path = model / "tokenizer/tokenizer.json"
    padding = {"strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 10**6}
    padding |= {"pad_type_id": 0, "pad_token": "x"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"padding": padding}))
    assert max(open_checkpoint(model, dtype=mx.float32).load_tokenizer().encode("a").ids) < 10**6


# ---------------------------------------------------------------- the chapters' defaults


def test_the_defaults_of_the_chapters_are_the_released_4bs():
    """Every config.json overrides them, so that nothing else would notice."""
    assert RELEASED_CONFIGS["4b"].transformer == TransformerConfig()
    assert (TransformerConfig().theta, TransformerConfig().axes) == (2000, (32, 32, 32, 32))
    assert (TextEncoderConfig().theta, TextEncoderConfig().eps) == (1e6, 1e-6)
    assert RELEASED_CONFIGS["4b"].text_encoder == TextEncoderConfig()


def test_the_rotations_default_is_the_transformers():
    ids = mx.concatenate([text_ids(7), image_ids(3, 5)])
    cfg = TransformerConfig()
    for plain, explicit in zip(rope_table(ids), rope_table(ids, cfg.axes, cfg.theta)):
        assert mx.array_equal(plain, explicit)
