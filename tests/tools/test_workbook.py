"""The workbook: each hole, filled with the book's body, is green; left empty or with a plausible mistake, it is red."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache

import mlx.core as mx
import nbformat
import pytest
from nbclient import NotebookClient
from waiting import HANGS

from kleinlite.klein import Klein
from tools import promote, workbook, workbook_check as checks
from tools.holes import HOLES

NOTEBOOKS = [json.loads(path.read_text("utf-8")) for path in sorted(workbook.ROOT.glob("notebooks/[0-9]*.ipynb"))]

# What is easily got wrong: a piece of the body and what stands there instead. Many are those of the atlas.
MISTAKES = {
    "book.ladder.to_patches": ("transpose(0, 1, 3, 2, 4, 5)", "transpose(0, 3, 1, 2, 4, 5)"),
    "book.ladder.to_pictures": ("transpose(0, 1, 3, 2, 4, 5)", "transpose(0, 1, 4, 2, 3, 5)"),
    "book.ladder.noised": ("(1 - t) * x0 + t * eps", "t * x0 + (1 - t) * eps"),
    "book.ladder.Block.__call__": ("self.norm2(x)", "x"),
    "book.ladder.PlainKlein.__call__": ("rows[:, words.shape[1] :]", "rows[:, : x.shape[1]]"),
    "book.ladder.flow_loss": ("(eps - x0)", "(x0 - eps)"),
    "book.ladder.walk": ("(t_next - t)", "(t - t_next)"),
    "book.ladder.even_times": ("range(steps + 1)", "range(steps)"),
    "autoencoder.GroupNorm.group_mean": ("self.groups, -1)", "-1, self.groups).swapaxes(1, 2)"),  # MLX's group order
    "autoencoder.GroupNorm.__call__": ("1e-6", "1e-3"),
    "autoencoder.ResBlock.__call__": ("nn.silu(self.norm2(h))", "self.norm2(nn.silu(h))"),
    "autoencoder.AttnBlock.__call__": ("c**-0.5", "c**-1.0"),
    "autoencoder.Downsample.__call__": ("(0, 1), (0, 1)", "(1, 0), (1, 0)"),  # padding left and top
    "autoencoder.patchify": ("0, 1, 3, 5, 2, 4", "0, 1, 3, 5, 4, 2"),  # row and column swapped
    "autoencoder.LatentBatchNorm.normalize": ("mx.sqrt(self.running_var + self.eps)", "self.running_var"),
    "autoencoder.Autoencoder.encode": ("self.bn.normalize(patchify(mean))", "patchify(mean)"),  # statistics left out
    "position_ids.text_ids": ("[zero, zero, zero, l]", "[l, zero, zero, zero]"),
    "position_ids.image_ids": ("zero + t, h, w, zero", "zero + t, w, h, zero"),  # h and w swapped
    "position_ids.reference_ids": ("10 + 10 * k", "10 * k"),
    "position_ids.rope_table": ("theta ** (-mx", "theta ** (mx"),
    "position_ids.apply_rope": ("even * cos - odd * sin", "even * cos + odd * sin"),
    "text_encoder.tokenize": ("[*row, *[pad] * missing]", "[*[pad] * missing, *row]"),
    "text_encoder.attention_mask": ("mx.tri(m, dtype=mx.bool_) & mask", "mx.tri(m, dtype=mx.bool_) | mask"),
    "text_encoder.Attention.__call__": ("traditional=False", "traditional=True"),
    "text_encoder.MLP.__call__": (
        "nn.silu(self.gate_proj(x)) * self.up_proj(x)",
        "self.gate_proj(x) * nn.silu(self.up_proj(x))",
    ),
    "text_encoder.Layer.__call__": ("self.mlp(self.post_attention_layernorm(x))", "self.mlp(x)"),
    "text_encoder.TextEncoder.hidden_states": ("self.layers[:last]", "self.layers[1:last]"),
    "text_encoder.TextEncoder.__call__": ("states[k] for", "states[k - 1] for"),  # out_layers one too low
    "text_encoder.next_token_logits": ("encoder.norm(encoder", "(encoder"),
    "sampling.shift_time": ("(1 - t + shift * t)", "(1 + shift * t)"),
    "sampling.noised": ("(1 - t) * clean + t * eps", "t * clean + (1 - t) * eps"),
    "sampling.schedule": ("shift_time(t, shift) for", "t for"),  # linear
    "sampling.euler": ("(t_next - t) * v", "(t - t_next) * v"),
    "sampling.classifier_free_guidance": ("uncond + guidance", "cond + guidance"),
    "sampling.noise": ("mx.random.key(seed)", "mx.random.key(0)"),
    "transformer.time_features": ("[mx.cos(angles), mx.sin(angles)]", "[mx.sin(angles), mx.cos(angles)]"),
    "transformer.modulate": ("(1 + scale)", "scale"),
    "transformer.split_heads": (
        "count, heads, -1).transpose(2, 0, 3, 1, 4)",
        "heads, count, -1).transpose(3, 0, 2, 1, 4)",
    ),
    "transformer.roped_attention": ("    k = apply_rope(k, rope)\n", ""),
    "transformer.SwiGLU.__call__": ("nn.silu(gate) * up", "gate * nn.silu(up)"),  # halves swapped
    "transformer.DoubleBlock.__call__": ("zip(txt_qkv, img_qkv)", "zip(img_qkv, txt_qkv)"),  # picture first
    "transformer.SingleBlock.__call__": ("[y, self.act(gate_up)]", "[self.act(gate_up), y]"),
    "transformer.Transformer.__call__": ("x[:, txt.shape[1] :]", "x[:, : img.shape[1]]"),  # read from the front
    "pipeline.to_pixels": ("2 * (values.astype(mx.float32) / 255) - 1", "values.astype(mx.float32) / 255"),
    "pipeline.to_images": (
        "mx.clip(pixels.astype(mx.float32) / 2 + 0.5, 0, 1)",
        "(pixels.astype(mx.float32) / 2 + 0.5)",
    ),
    "pipeline.prepare_reference": ("left = w % 16 // 2", "left = 0"),
    "pipeline.encode_references": ("b, axis=0", "b, axis=1"),
    "pipeline.velocity_field": ("[:, :n]", "[:, -n:]"),
    "pipeline.guided_field": ("with_prompt, without = fields", "without, with_prompt = fields"),
    "pipeline.generate": ("guided_field(fields, guidance)", "fields[0]"),
    "pipeline.masked_field": ("mask * (velocity", "(1 - mask) * (velocity"),
    "quantization.QuantSpec.bits_per_weight": ("32 if", "16 if"),
    "quantization.QuantizedMatrix.shape": ("columns * 32 // self.spec.bits", "columns * self.spec.bits"),
    "quantization.QuantizedMatrix.decode": ('w * self.tensors.get("global_scale", 1.0)', "w"),
    "quantization.quantize_matrix": ("w.astype(mx.float32) / largest", "w.astype(mx.float32)"),
    "quantization.quantized_product": ("y * row_scale[:, 0]", "y"),
    "quantization.QuantizedLinear.__call__": ('y + self.bias if "bias" in self else y', "y"),
    "checkpoints.read_header": ('    header.pop("__metadata__", None)\n', ""),
    "checkpoints.rename": (
        "for target in rule.targets for name in names",
        "for target in rule.targets[:1] for name in names",
    ),
    "checkpoints.swap_halves": ("[w[half:], w[:half]]", "[w[:half], w[half:]]"),
    "checkpoints.find_conversion": ("rule.convert for rule", "None for rule"),
    "checkpoints.to_mlx": ("0, 2, 3, 1", "0, 3, 2, 1"),
    "checkpoints.convert_present": ("len(tensors) == len(names)", "tensors"),
    "checkpoints.find_problems": ("set(arrays) - set(expected)", "set(expected) - set(arrays)"),
    "memory.Work.total": ("self.matrices + self.attention", "self.matrices"),
    "memory.count_step": ("4 * blocks * s**2", "2 * blocks * s**2"),
    "memory.count_prompt": ("max(cfg.out_layers)", "cfg.layers"),
    "memory.stage_bytes": ("2 * ACTIVATIONS * tokens", "2 * ACTIVATIONS * m"),
    "memory.peak_bytes": ("return max(", "return sum("),
    "kv_cache.image_stream": ("x + mod1.gate *", "x +"),
    "kv_cache.recording_attention": (
        "        k = apply_rope(k, rope)\n        cache",
        "        cache",
    ),  # keys that were not turned
    "kv_cache.extract_kv": ("mx.zeros((len(references),))", "mx.ones((len(references),))"),  # the time of the noise
    "kv_cache.cached_attention": ("[v_all, v]", "[v, v_all]"),
    "kv_cache.cached_velocity": ("cache[len(transformer.double_blocks) :]", "cache"),  # the first block's entry again
    "kv_cache.cached_velocity_field": ("txt.dtype), ids)", "txt.dtype), 0 * ids)"),
    "training.shifted_times": (
        "shift_time(mx.random.uniform(shape=(b,), key=key), shift)",
        "mx.random.uniform(shape=(b,), key=key)",
    ),
    "training.velocity_loss": ("(eps - clean)", "(clean - eps)"),
    "training.flow_loss": ("k_noise, k_time = mx", "k_time, k_noise = mx"),
    "training.initialize": ("inputs**-0.5", "inputs**-1.0"),
    "training.learning_rate": ("peak / 100, peak, warmup", "0.0, peak, warmup"),
    "training.training_step": ("        grads, _ = optim.clip_grad_norm(grads, 1.0)\n", ""),
    "distillation.guided_velocity": ("(cond, uncond, guidance)", "(uncond, cond, guidance)"),
    "distillation.guided_mean_velocity": ("(x - start) / (s - t)", "(x - start) / (t - s)"),
    "distillation.distill_loss": ("batch.txt, t, rope", "batch.txt, s, rope"),
    "distillation.own_path": ("(s - t)", "(t - s)"),
    "measuring.wilson_interval": ("middle - half", "middle - 2 * half"),
    "measuring.bootstrap_error": ("rng.choices(cases, k=len(cases))", "rng.sample(cases, len(cases))"),
    "measuring.mean_and_error": ("stdev(values) / math", "pstdev(values) / math"),
    "measuring.paired_difference": ("b - a for", "a - b for"),
    "measuring.sign_test": ("2 * sum", "sum"),
    "measuring.frechet_distance": ("- 2 * cross", "- cross"),
    "reward.optimality": ("0.5 + 0.5 *", "0.5 - 0.5 *"),
    "reward.clean_error": (" - clean", " + clean"),
    "reward.mirrored": ("2 * old - velocity", "2 * velocity - old"),
    "reward.nft_loss": ("(1 - r) * worse", "(1 + r) * worse"),
    "sharding.find_cuts": ("[d_out, d_in - d_out]", "[d_in - d_out, d_out]"),
    "sharding.head_counts": ('("heads", "kv_heads")', '("kv_heads",)'),
    "sharding.common_divisor": ("math.gcd", "math.lcm"),
    "sharding.held_share": ("(1 - 1 / size)", "(1 / size)"),
    "sharding.divide": ("accumulate(segments[:-1])", "accumulate(segments[1:])"),
    "lora.LoRA.__call__": ("self.scaling * (", "("),
    "lora.LoRA.delta": ("self.scaling * (", "("),
    "lora.AdaptedLinear.__call__": ("total = total +", "total ="),
    "lora.attach": ("mx.array(scale)", "mx.array(1.0)"),
    "lora.detach": (
        "        del layer.deltas[name]\n        del layer._scales[name]\n",
        "        layer.deltas.clear()\n",
    ),
    "lora.new_deltas": ("d_in**-0.5 *", "rank**-0.5 *"),
    "z_image.patches": ("-1, 4).swapaxes(-1, -2)", "-1, 4)"),  # klein's order of channels
    "z_image.caption_ids": ("mx.arange(1, m + 1)", "mx.arange(m)"),
    "z_image.picture_ids": ("t=m + 1", "t=0"),
    "z_image.pad_to_multiple": ("-s % 32", "s % 32"),
    "z_image.SandwichBlock.modulation": (
        "scale1, mx.tanh(gate1), scale2, mx.tanh(gate2)",
        "scale1, gate1, scale2, gate2",
    ),
    "z_image.SandwichBlock.__call__": ("self.attention_norm2(", "("),
    "z_image.ZImageTransformer.__call__": ("[x, caption]", "[caption, x]"),
    "z_image.static_schedule": ("shift_time(1 - i / steps, shift)", "1 - i / steps"),
}


# Functions without which there is no picture.
DRAWS = {
    "autoencoder": "GroupNorm.__call__",
    "transformer": "SwiGLU.__call__",
    "pipeline": "to_images",
}


@cache
def chapter_of(module: str) -> tuple[str, dict]:
    """A chapter's name and its notebook; of the ladder, chapter 0."""
    for path in sorted((workbook.ROOT / "notebooks").glob("[0-9]*.ipynb")):
        notebook = json.loads(path.read_text("utf-8"))
        if (workbook.module_of(notebook) or "book.ladder") == module:
            return path.stem, notebook
    raise LookupError(module)


def sources(notebook: dict, kind: str = "code") -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def exported(notebook: dict) -> list[str]:
    """What goes into the chapter's own module; of chapter 0, into the one that it begins."""
    marks = [(workbook.EXPORT.search(source), source) for source in sources(notebook)]
    own = bool(workbook.module_of(notebook))
    return [source for mark, source in marks if mark and own == (mark[1] is None)]


def run_cells(cells: list[str]) -> dict:
    """What a reader has who ran these."""
    names: dict = {"__name__": "__main__"}
    for source in cells:
        exec(source, names)
    return names


@cache
def names_of(module: str) -> dict:
    """What a reader has who ran every promoted cell."""
    return run_cells(exported(chapter_of(module)[1]))


def say(hole: str, names: dict) -> str:
    """What the check cell prints, without its color."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(f'from tools.workbook_check import check\ncheck("{hole}", globals())', names)
    return re.sub(r"\033\[\d+m", "", printed.getvalue()).rstrip("\n")


def cell_with(module: str, hole: str) -> str:
    """The promoted cell in which a hole's function stands."""
    return next(s for s in exported(chapter_of(module)[1]) if workbook.find_definition(workbook.ast.parse(s), hole))


@pytest.mark.parametrize("module", HOLES)
def test_filled_with_the_real_bodies_all_are_green(module):
    """By the generated notebook's own check cells, each behind the cell that it checks."""
    name, notebook = chapter_of(module)
    made = sources(workbook.make_workbook(notebook, name))
    found = []
    for before, source in zip(made, made[1:]):
        if source.startswith("check("):
            assert workbook.EXPORT.search(before)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(f"from tools.workbook_check import check\n{source}", dict(names_of(module)))
            assert "✗" not in printed.getvalue(), printed.getvalue()
            found += re.findall(r"✓ (.+): right", printed.getvalue())
    assert sorted(found) == sorted(HOLES[module]), "every hole has its check"


@pytest.mark.parametrize("module", HOLES)
def test_left_empty_all_are_red(module):
    """Every function still waits, by name, although the rest of its chapter does as well."""
    name, notebook = chapter_of(module)
    names = run_cells(exported(workbook.make_workbook(notebook, name)))
    for hole in HOLES[module]:
        assert say(f"{module}.{hole}", names) == (
            f"✗ {hole}: still empty. Write its body in the cell above, run that cell, then this one."
        )


@pytest.mark.parametrize("module", HOLES)
def test_a_plausible_mistake_turns_its_own_light_red(module):
    cells = exported(chapter_of(module)[1])
    for hole in HOLES[module]:
        right, wrong = MISTAKES[f"{module}.{hole}"]
        source = cell_with(module, hole)
        lines = source.split("\n")
        start, end = workbook.body_lines(workbook.find_definition(workbook.ast.parse(source), hole))
        body = "\n".join(lines[start:end]) + "\n"
        assert right in body, f"{hole} has no {right!r}"
        mistaken = "\n".join(lines[:start]) + "\n" + body.replace(right, wrong) + "\n".join(lines[end:])
        names = run_cells([mistaken if cell == source else cell for cell in cells])
        said = say(f"{module}.{hole}", names)
        assert said.startswith(f"✗ {hole}: ") and "\n" not in said, said
        for other in HOLES[module]:
            assert other == hole or say(f"{module}.{other}", names).startswith("✓"), f"{hole} turned {other} red"


def test_what_a_red_light_says():
    names = dict(names_of("sampling"))
    shift = "def shift_time(t, shift):\n    return {}"
    noised = "def noised(clean, eps, t):\n    return {}"
    for code, hole, sentence in (
        (shift.format("None"), "shift_time", "it returns None, expected 0 (part 0 of the answer)."),
        (shift.format("t"), "shift_time", "it returns 0.3, expected 0.5625 (part 3 of the answer)."),
        (
            noised.format("None"),
            "noised",
            "it returns None, expected an array of shape (2, 3, 4) (part 0 of the answer).",
        ),
        (noised.format("clean[0]"), "noised", "the shape is (3, 4), expected (2, 3, 4) (part 0 of the answer)."),
        (
            noised.format("clean.astype(mx.float16)"),
            "noised",
            "the numbers are float16, expected float32 (part 0 of the answer).",
        ),
        (noised.format("clean + unknown"), "noised", "it stops, with NameError: name 'unknown' is not defined"),
        ("noised = 3", "noised", "there is no such function yet: run the cell above first."),
        (noised.format("exit()"), "noised", "it stops, with SystemExit: None"),
        ("def noise(seed, n, channels=64):\n    pass", "noise", "the default of channels is 64, expected 128."),
        ("def noise(seed, n, channels):\n    pass", "noise", "the default of channels is none, expected 128."),
    ):
        exec(code, names)
        assert say(f"sampling.{hole}", names) == f"✗ {hole}: {sentence}"
    assert checks.find_difference([("", mx.array(2.5))], [("", mx.array(3.0))]) == "it returns 2.5, expected 3."
    assert checks.find_difference([("", None)], [("0", 1), ("1", 2)]) == "it returns nothing. Is `return` missing?"
    exec("def noised(clean, eps, t):\n    return clean", names)
    said = say("sampling.noised", names)
    assert "the shape (2, 3, 4) is right, but 24 of 24 entries differ: [0, 0, 0] is " in said


def test_a_reader_may_have_helpers_and_the_book_runs_on_his_body():
    from kleinlite import sampling

    names = dict(names_of("sampling"))
    exec("def mix(a, b, t):\n    return (1 - t) * a + t * b\n", names)
    exec("def classifier_free_guidance(cond, uncond, guidance):\n    return mix(uncond, cond, guidance)\n", names)
    before = sampling.classifier_free_guidance.__code__
    assert say("sampling.classifier_free_guidance", names) == "✓ classifier_free_guidance: right"
    exec("def noise(seed, n, channels=128):\n    return mx.zeros((1, n, channels))\n", names)
    with checks.installed("sampling", names):
        assert sampling.noise(7, 2).sum().item() == 0
    assert sampling.noise(7, 2).sum().item() != 0
    assert sampling.classifier_free_guidance.__code__ is before and not hasattr(sampling, "mix")


EMPTY = "def shift_time(t, shift):\n    raise NotImplementedError\n\n"
SCHEDULE = """def schedule(steps, n{}):
    shift = math.exp(empirical_mu(n, steps))
    return [shift_time(1 - i / steps, shift) for i in range(steps)] + [0.0]
"""
IN_OTHER_WORDS = {
    "an argument more": SCHEDULE.format(", dtype=None"),
    "cached": f"from functools import cache\n\n@cache\n{SCHEDULE.format('')}",
    "decorated": f"""
from functools import wraps

def timed(f):
    @wraps(f)
    def g(*args, **options):
        return f(*args, **options)
    return g

@timed
{SCHEDULE.format("")}""",
    "made by a function": """
def make(one):
    def schedule(steps, n):
        shift = math.exp(empirical_mu(n, steps))
        return [shift_time(one - i / steps, shift) for i in range(steps)] + [0.0]
    return schedule

schedule = make(1)
""",
}


@pytest.mark.parametrize("words", IN_OTHER_WORDS)
def test_a_right_body_in_other_words_is_green(words):
    """Although another hole that it calls is empty."""
    names = dict(names_of("sampling"))
    exec(EMPTY + IN_OTHER_WORDS[words], names)
    assert say("sampling.schedule", names) == "✓ schedule: right"


HALF = {  # bodies that are right in float32, and not in bfloat16
    "position_ids.apply_rope": (".astype(x.dtype)", ""),
    "sampling.euler": (
        "(x.astype(mx.float32) + (t_next - t) * v.astype(mx.float32)).astype(x.dtype)",
        "x + (t_next - t) * v",
    ),
    "sampling.noised": (".astype(clean.dtype)", ""),
    "transformer.Transformer.__call__": (".astype(img.dtype)", ""),
    "kv_cache.extract_kv": (".astype(references.dtype)", ""),
    "kv_cache.cached_velocity": (".astype(img.dtype)", ""),
    "pipeline.velocity_field": ("img.astype(txt.dtype)", "img"),
    "training.velocity_loss": (".astype(mx.float32)", ""),
    "z_image.ZImageTransformer.__call__": (".astype(img.dtype)", ""),
}


@pytest.mark.parametrize("hole", HALF)
def test_a_light_tries_bfloat16_too(hole):
    """As the book's tests do."""
    module, _, name = hole.partition(".")
    right, wrong = HALF[hole]
    source = cell_with(module, name)
    assert right in source
    names = dict(names_of(module))
    exec(source.replace(right, wrong), names)
    assert say(hole, names).startswith(f"✗ {name}: in bfloat16, ")


HELPED = """
def apply_rope(x):
    return mx.fast.layer_norm(x, None, None, 1e-6)

def split_heads(x, count, heads):
    raise NotImplementedError

def modulate(x, shift, scale):
    return apply_rope(x) * (1 + scale) + shift
"""


def test_a_helper_may_have_a_name_of_the_books():
    """The reader's body calls it, the book's functions call their own; other holes are the book's, empty or not."""
    names = dict(names_of("transformer"))
    exec(HELPED, names)
    assert say("transformer.modulate", names) == "✓ modulate: right"
    assert say("transformer.SingleBlock.__call__", names) == "✓ SingleBlock.__call__: right"


@pytest.mark.parametrize("module", ["autoencoder", "transformer", "pipeline"])
def test_the_last_cell_draws_by_what_the_reader_wrote(module):
    name, notebook = chapter_of(module)
    (source,) = [s for s in sources(workbook.make_workbook(notebook, name)) if "import installed" in s]
    names = dict(names_of(module))
    exec(source, names)
    finished = Klein.from_pretrained()("a red house under a yellow sun", seed=7, progress=False)
    assert names["picture"].tobytes() == finished.tobytes()
    last = workbook.empty(cell_with(module, DRAWS[module]), [DRAWS[module]])
    exec(last, names)
    with pytest.raises(NotImplementedError, match=f"Your turn: {DRAWS[module]}"):
        exec(source, names)


def fill(made: dict, chapter: dict) -> dict:
    """A workbook, as it was written, in whose holes the chapter's own bodies stand."""
    right = {cell["id"]: cell["source"] for cell in chapter["cells"]}
    cells = [
        {**cell, "source": right[cell["id"]]} if workbook.WAITING in "".join(cell["source"]) else cell
        for cell in made["cells"]
    ]
    return {**made, "cells": cells}


def run_notebook(notebook: dict) -> list[dict]:
    """A notebook's code cells after a run from top to bottom that no error stops; what needs a network is left out."""
    made = nbformat.reads(json.dumps(notebook), as_version=4)
    made.cells = [cell for cell in made.cells if "nbval-skip" not in cell.metadata.get("tags", [])]
    folder = {"metadata": {"path": str(workbook.ROOT / "notebooks")}}
    NotebookClient(made, allow_errors=True, resources=folder).execute()
    return [cell for cell in made.cells if cell.cell_type == "code"]


@pytest.mark.slow
def test_a_workbook_runs_from_top_to_bottom():
    """Filled by a reader who is right about everything: all lights are green, and what the chapter shows appears.
    As it was written: nothing but what stands on an empty body fails, and says whose turn it is."""
    name, notebook = chapter_of("checkpoints")
    made = workbook.make_workbook(notebook, name)
    cells = run_notebook(fill(made, notebook))
    lights = [text for cell in cells if cell.source.startswith("check(") for text in said_by(cell)]
    assert len(lights) == len(HOLES["checkpoints"]) and all("✓" in text for text in lights), lights
    assert not [error.evalue for cell in cells for error in cell.outputs if error.output_type == "error"]
    cells = run_notebook(made)
    lights = [text for cell in cells if cell.source.startswith("check(") for text in said_by(cell)]
    assert len(lights) == len(HOLES["checkpoints"]) and all("still empty" in text for text in lights), lights
    errors = [error for cell in cells for error in cell.outputs if error.output_type == "error"]
    assert errors[0].ename == "NotImplementedError" and errors[0].evalue.startswith(workbook.WAITING)


def said_by(cell: dict) -> list[str]:
    """The lines that a cell has printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream").splitlines()


def test_signature_docstring_and_shapes_stay():
    name, notebook = chapter_of("transformer")
    made = "\n".join(exported(workbook.make_workbook(notebook, name)))
    assert (
        '''def split_heads(x: mx.array, count: int, heads: int) -> list[mx.array]:
    """(b, s, count·heads·head_dim) → `count` arrays (b, heads, s, head_dim)"""
    # x: (count, b, heads, s, head_dim)
    raise NotImplementedError("Your turn: split_heads")'''
        in made
    )
    assert "mx.fast.layer_norm" not in made and "class DoubleBlock" in made


def test_every_hole_has_its_mistake_and_every_chapter_its_holes():
    assert MISTAKES.keys() == {f"{module}.{hole}" for module, holes in HOLES.items() for hole in holes}
    assert set(HOLES) == {workbook.module_of(notebook) or "book.ladder" for notebook in NOTEBOOKS}
    made = workbook.make_all()
    assert len(made) == len(HOLES) and "git checkout" not in made["00_idea.ipynb"]  # of the chapter
    assert all(4 <= len(holes) <= 8 for holes in HOLES.values())


def test_every_module_has_tests_of_its_own():
    """`make check-mine` runs them; with none, pytest selects nothing and right bodies would not pass."""
    blocks = (workbook.ROOT / "tests" / "test_parity_blocks.py").read_text("utf-8")
    for module in HOLES.keys() - {"book.ladder"}:
        files = [*(workbook.ROOT / "tests").glob(f"test_{module}*.py")]
        assert files or f"def test_{module}" in blocks, module


def test_hints():
    prose = "## Title\n\nPlain words.\n\nSo `x = y`.\n\n$$a = b$$\n\nMore words."
    assert workbook.fold_hints(prose) == (
        "## Title\n\nPlain words.\n\n"
        "<details>\n<summary>Hint</summary>\n\nSo `x = y`.\n\n$$a = b$$\n\n</details>\n\nMore words."
    )
    kept = "<details>\n<summary>Why</summary>\n\n$$a = b$$\n\n</details>"
    assert workbook.fold_hints(kept) == kept


@pytest.fixture(name="clone")
def clone_with_sampling(tmp_path):
    """A repository with one chapter, whose workbook was written; and the chapter's own cells."""
    for name in ("pyproject.toml", "tests", "tools", "kleinlite", "Makefile", "README.md"):
        (tmp_path / name).symlink_to(workbook.ROOT / name)
    (tmp_path / "notebooks").mkdir()
    shutil.copyfile(workbook.ROOT / "notebooks" / "04_sampling.ipynb", tmp_path / "notebooks" / "04_sampling.ipynb")
    workbook.write(tmp_path)
    return tmp_path


def test_a_readers_file_is_never_touched(clone, capsys):
    path = clone / "workbook" / "04_sampling.ipynb"
    text = path.read_text("utf-8")
    assert json.loads(text)["nbformat"] == 4 and "](05_" not in text
    path.write_text("mine")
    workbook.write(clone)
    assert path.read_text() == "mine" and "is there already and stays as it is" in capsys.readouterr().out


def test_check_mine(clone, capfd):
    """The book's tests, on the module that the reader's notebook writes."""
    with pytest.raises(SystemExit, match=r"04_sampling\.ipynb still waits for shift_time, noised, schedule, euler"):
        workbook.check_mine("4", clone)
    path = clone / "workbook" / "04_sampling.ipynb"
    written, chapter = (
        json.loads((clone / place / path.name).read_text("utf-8")) for place in ("workbook", "notebooks")
    )
    filled = json.dumps(fill(written, chapter))
    path.write_text(filled)
    assert workbook.check_mine("04", clone) == 0
    assert "Your sampling, from workbook/04_sampling.ipynb, passes the book's tests." in capfd.readouterr().out
    right, wrong = MISTAKES["sampling.euler"]
    path.write_text(filled.replace(right, wrong))
    assert workbook.check_mine("04_sampling", clone) == 1
    said = capfd.readouterr().out
    assert "does not yet pass the book's tests" in said and "/tests/" not in said and "tests/test_sampling.py:" in said
    with pytest.raises(SystemExit, match=r"There is no workbook of chapter 99: there are 04\."):
        workbook.check_mine("99", clone)


@pytest.mark.slow
@pytest.mark.parametrize("chapter", ["09_memory", "17_z_image"])
def test_check_mine_where_tests_read_much_of_the_repository(chapter, tmp_path):
    for path in workbook.ROOT.iterdir():
        if path.name != "workbook":
            (tmp_path / path.name).symlink_to(path)
    workbook.write(tmp_path)
    places = (tmp_path / place / f"{chapter}.ipynb" for place in ("workbook", "notebooks"))
    written, finished = (json.loads(path.read_text("utf-8")) for path in places)
    (tmp_path / "workbook" / f"{chapter}.ipynb").write_text(json.dumps(fill(written, finished)))
    assert workbook.check_mine(chapter, tmp_path) == 0


@pytest.mark.parametrize("module", HOLES)
def test_a_filled_workbook_writes_the_chapters_module(module, tmp_path):
    name, notebook = chapter_of(module)
    written = []
    for folder, content in (
        ("notebooks", notebook),
        ("workbook", fill(workbook.make_workbook(notebook, name), notebook)),
    ):
        path = tmp_path / folder / f"{name}.ipynb"
        path.parent.mkdir()
        path.write_text(json.dumps(content))
        written.append(promote.build_modules([path]))
    assert written[0] and [m.text for m in written[0]] == [m.text for m in written[1]]


def test_a_list_that_is_cut_short_ends_quietly(clone):
    """`make workbook | head -0`"""
    write = "import sys; from pathlib import Path; from tools import workbook; "
    write += "write = workbook.write; workbook.write = lambda: write(Path(sys.argv[1])); workbook.main(['write'])"
    command = [sys.executable, "-c", write, str(clone)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=workbook.ROOT, timeout=HANGS)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
