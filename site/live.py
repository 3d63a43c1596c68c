"""What the site's pages take to draw in a visitor's browser: scripts, and the models, sharded by what needs a weight.

A page shows one of two worlds, shapes or critters, and loads the model of that one alone. All are copied beside the
chapters when the site is built, each to a folder named after its content: a browser that keeps an old script never
meets new weights. Matrices travel as 8-bit numbers with a scale per row: half the bytes, and pictures that no eye can
tell from the others (a test measures them).

    python site/live.py [WORLD]    draws the runs that Draw and Look inside show before a visitor has loaded anything,
                                   and fits the matrices of the fast preview
"""

import gzip
import hashlib
import json
import re
import shutil
import struct
import sys
import textwrap
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import load, load_file, save

from kleinlite.nano import limits

SCRIPTS = Path(__file__).parent / "javascript"
PACKAGE = Path(__file__).parents[1] / "kleinlite"
NANO, CRITTERS = (PACKAGE / name / "weights" for name in ("nano", "critters"))
FOLDER = "live"  # beside the chapters; not in git
PICTURES = f"{FOLDER}/pictures"  # those of the notebooks, as files
WORKBOOK = f"{FOLDER}/workbook"  # the chapters with holes, to be downloaded
WORLDS = {"shapes": NANO, "critters": CRITTERS}
STORED = {  # the prompts whose runs, with seed 7, two pages show before a visitor has loaded anything, by world
    "shapes": {"draw": "a red house under a yellow sun", "inside": "a red circle above a blue square"},
    "critters": {
        "draw": "a blue critter with a crown and three eyes",
        "inside": "a yellow critter with one eye that laughs",
    },
}
ADAPTER = "one-look"  # with which the site's nano draws in one step (chapter 12)
PARTS = ("model_index.json", "scheduler", "text_encoder", "tokenizer", "transformer", "vae", "base")
FIRST, MODELS = 8_000_000, 28_400_000  # bytes: before the first picture of a world, and in all
EXPLORER = re.compile(r"\bwidgets\.((?:schedule|rope)_explorer|attention_viewer)\(")
CODE = re.compile(r"\{\{#js (\w+)\}\}")
# A page's place for a script. What stands before it on its line is for those who read the page elsewhere.
MARK = re.compile(r"^.*<!-- live (\w+)( compact)? -->", re.M)
PART = re.compile(r"^\{\{#part ([\w.]+) (\d+)\}\}$", re.M)


def split_shards(file: Path, later: str) -> dict[str, bytes]:
    """A safetensors file as one or two shards and their index, by file name: first what is needed at once."""
    tensors = load_file(file)
    parts = [[n for n in tensors if not re.match(later, n)], [n for n in tensors if re.match(later, n)]]
    parts = [names for names in parts if names]
    found, where = {}, {}
    for i, names in enumerate(parts, start=1):
        name = f"{file.stem}-{i:05}-of-{len(parts):05}.safetensors"
        found[name] = save({tensor: tensors[tensor] for tensor in names})
        where |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": sum(w.nbytes for w in tensors.values())}, "weight_map": where}
    return found | {f"{file.name}.index.json": json.dumps(index).encode()}


def pack_shard(content: bytes) -> bytes:
    """A safetensors file whose float16 matrices are 8-bit numbers, zipped.

    A matrix `name` becomes whole numbers from -127 to 127 (I8) and `name.scale` (F32), one for each of its rows, which
    for a convolution are its output channels: weight = number · scale.
    """
    packed = {}
    for name, w in load(content).items():
        if w.dtype == np.float16 and w.ndim > 1:
            rows = w.reshape(len(w), -1).astype(np.float32)
            scale = np.maximum(np.abs(rows).max(axis=1), 1e-12) / 127
            packed[f"{name}.scale"] = scale
            packed[name] = np.round(rows / scale[:, None]).astype(np.int8).reshape(w.shape)
        else:
            packed[name] = w
    return gzip.compress(save(packed), mtime=0)


def pack_model(files: dict[str, bytes]) -> dict[str, bytes]:
    """The model's files as the site serves them: shards packed, and .gz behind their names."""
    packed = {f"{path}.gz": pack_shard(content) for path, content in files.items() if path.endswith(".safetensors")}
    return packed | {path: content for path, content in files.items() if not path.endswith(".safetensors")}


def read_adapter(file: Path) -> bytes:
    """A LoRA file of bfloat16 in float16, as a script takes it: without words in its header, B times alpha / r."""
    tensors, words = mx.load(str(file), return_metadata=True)  # NumPy knows no bfloat16
    said = json.loads(words["lora_adapter_metadata"])
    scaling = said["transformer.lora_alpha"] / said["transformer.r"]
    scaled = {name: w * (scaling if ".lora_B." in name else 1) for name, w in tensors.items()}
    return save({name: np.array(w.astype(mx.float16)) for name, w in scaled.items()})


def read_model(model: Path = NANO) -> dict[str, bytes]:
    """The model's folder in shards, by path. What drawing does without has shards of its own."""
    config = json.loads((model / "text_encoder/config.json").read_text("utf-8"))
    out_layers = json.loads((model / "model_index.json").read_text("utf-8"))["text_encoder_out_layers"]
    above = "|".join(str(layer) for layer in range(max(out_layers), config["num_hidden_layers"]))
    later = {"vae": r"(encoder|quant_conv)\.", "text_encoder": rf"model\.(norm|layers\.({above}))\."}
    found = {}
    for file in sorted(f for f in model.rglob("*") if f.suffix in (".json", ".safetensors")):
        path = file.relative_to(model)
        if path.parts[0] not in PARTS:
            continue
        if file.suffix == ".json":
            found[path.as_posix()] = file.read_bytes()
        else:
            cut = split_shards(file, later.get(path.parts[0], r"$^"))
            found |= {(path.parent / name).as_posix(): content for name, content in cut.items()}
    if (adapter := model / f"loras/{ADAPTER}.safetensors").exists():
        found[f"loras/{ADAPTER}.safetensors"] = read_adapter(adapter)
    return found


def count_bytes(files: dict[str, bytes]) -> dict[str, int]:
    """Bytes that the browser loads: before the first picture, to edit, for the base model, and for the adapter."""
    sizes = {path: len(content) for path, content in files.items()}
    base = {path for path in sizes if path.startswith("base/")}
    later = {path for path in sizes if "-00002-of-" in path} - base
    encoder = {path for path in later if path.startswith("vae/")}
    adapter = {path for path in sizes if path.startswith("loras/")}
    unread = {path for path in sizes if path.startswith("scheduler/") or path.endswith("tokenizer_config.json")}
    first = sizes.keys() - base - later - adapter - unread
    kinds = {"first": first, "encoder": encoder, "base": base, ADAPTER: adapter}
    return {name: sum(sizes[path] for path in paths) for name, paths in kinds.items()}


def write_file(path: Path, content: bytes) -> None:
    """Write a file whose path follows from its content, once: written again, `mdbook serve` would build for ever."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def remove_others(folder: Path, names: set[str]) -> None:
    """What an earlier build left in a folder that is for these files alone."""
    for old in folder.glob("*"):
        if old.name not in names:
            old.unlink()


def write_folder(folder: Path, name: str, files: dict[str, bytes]) -> str:
    """Write files to folder/name-HASH, and remove what was there before under that name; returns name-HASH."""
    digest = hashlib.sha256()
    for path, content in files.items():
        digest.update(f"{path} {len(content)}\n".encode() + content)
    called = f"{name}-{digest.hexdigest()[:10]}"
    for old in folder.glob(f"{name}-*"):
        if old.name != called:
            shutil.rmtree(old)
    for path, content in files.items():
        write_file(folder / called / path, content)
    return called


def prepare(source: Path) -> tuple[str, list[str]]:
    """Write scripts and models beside the chapters; returns the scripts' folder as pages say it, and what is wrong."""
    worlds, total, problems = {}, 0, []
    for world, folder in WORLDS.items():
        files = pack_model(read_model(folder))
        worlds[world] = say_model(world, folder, files, write_folder(source / FOLDER, folder.parent.name, files))
        total += sum(map(len, files.values()))
        if (first := worlds[world]["BYTES"]["first"]) > FIRST:
            problems.append(
                f"The first of the {world} would load {first / 1e6:.0f} MB, it may load {FIRST / 1e6:.0f} MB"
            )
    if total > MODELS:
        problems.append(
            f"The models on the site would weigh {total / 1e6:.0f} MB, they may weigh {MODELS / 1e6:.0f} MB"
        )
    served = (".js", ".wasm", ".css", ".bin", ".json", ".jpg")
    scripts = {
        f.relative_to(SCRIPTS).as_posix(): f.read_bytes() for f in sorted(SCRIPTS.rglob("*")) if f.suffix in served
    }
    scripts["model.js"] = f"export const WORLDS = {json.dumps(worlds)};\n".encode()
    return f"{FOLDER}/{write_folder(source / FOLDER, 'scripts', scripts)}", problems


def say_model(world: str, folder: Path, files: dict[str, bytes], written: str) -> dict[str, Any]:
    """What the scripts know of a world's model, whose packed files were written to this folder."""
    adapter = folder / f"loras/{ADAPTER}.safetensors"
    return {
        "MODEL": folder.parent.name,
        "FOLDER": f"../{written}/",
        "BYTES": count_bytes(files),
        "SIZE": json.loads(files["vae/config.json"])["sample_size"],
        "FILES": {path: [len(content), hashlib.sha256(content).hexdigest()] for path, content in sorted(files.items())},
        "LIMITS": say_limits(folder.parent.name),
        "ADAPTER": say_adapter(adapter) if adapter.exists() else None,
        "STORED": STORED[world],
        "STILLS": stills(world),
        "SCORES": json.loads((SCRIPTS / "scores.json").read_text("utf-8")) if world == "shapes" else None,
    }


def stills(world: str) -> str:
    """How the names of its stored pictures begin."""
    return "images/" if world == "shapes" else f"images/{world}-"


def say_adapter(file: Path) -> dict[str, int | str]:
    """What a picture drawn with the adapter remembers of it, as `Loras.metadata` says it."""
    return {"file": ADAPTER, "scale": 1, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()[:16]}


def say_limits(model: str) -> dict[str, list[str] | int | str]:
    """What `limits.describe_limits` knows of a model, for the script that says the same, but for typos."""
    known = limits.LIMITS[model]._asdict()
    del known["meant"]
    return {name: value if isinstance(value, int | str) else sorted(value) for name, value in known.items()}


def render_script(name: str, scripts: str) -> str:
    """The HTML that brings a script and the looks of what it makes."""
    sheet, script = f'<link rel="stylesheet" href="{scripts}/live.css">', f"{scripts}/{name}.js"
    return f'{sheet}\n<script type="module" src="{script}"></script>'


def render_place(mark: re.Match, scripts: str) -> str:
    """The HTML of a page's living part; until its script runs it says why it does not, and shows a stored run."""
    name = mark[1]
    local = (
        "Browsers do not let a page opened from a file load scripts: run <code>make serve</code> and open its address."
    )
    place = f"live-{name}-compact" if mark[2] else f"live-{name}"
    world = "critters" if mark[2] else "shapes"  # as world.js says
    return "\n".join([
        f'<div id="{place}" class="live"><noscript>{render_stored(name, world)}</noscript></div>',
        f'<script>if (location.protocol === "file:") document.getElementById("{place}").innerHTML =',
        f'"{local}"</script>',
        render_script(name, scripts),
    ])  # fmt: skip


def render_stored(name: str, world: str) -> str:
    """What stands on a page that draws where no script runs."""
    said = 'This needs JavaScript. Without it, <a href="00_idea.html">chapter 0</a> shows stored pictures'
    if name not in STORED[world]:
        return f"<p>{said}.</p>"
    file = f"{stills(world)}{name}"
    pictures = "".join(
        f'<img src="{file}-{step}.png" width="96" height="96" alt="The picture expected after step {step}"> '
        for step in range(1, 5)
    )
    return f"<p>{said}, and here is “{STORED[world][name]}”, step by step:</p><p>{pictures}</p>"


def mark_still(output: str, explorer: str) -> str:
    """A stored output, marked as the still in whose place a script puts the explorer."""
    return output.replace('<div class="output">', f'<div class="output" data-explorer="{explorer}">', 1)


def render_excerpt(name: str) -> str:
    """A definition as it stands in klein.js, as a block of Markdown."""
    lines = (SCRIPTS / "klein.js").read_text("utf-8").split("\n")
    opens = re.compile(rf" *(export )?(async )?(function )?\*?{name}\(.*[{{}}]$")
    first = next((i for i, line in enumerate(lines) if opens.match(line)), None)
    if first is None:
        raise LookupError(f"there is no {name} to show")
    inside = re.match(" *", lines[first])[0]
    closed = lines[first].endswith("}")
    end = first if closed else next(i for i in range(first, len(lines)) if lines[i].startswith(f"{inside}}}"))
    while re.match(r" *(//|/\*\*| \* )", lines[first - 1]):
        first -= 1
    text = textwrap.dedent("\n".join(lines[first : end + 1]))
    return f"```javascript\n{text}\n```"


def render_part(file: Path, number: str) -> str:
    """The lines of a file from the one that begins `# ---- number.` to the next such line, as a block of Markdown."""
    source = file.read_text("utf-8") if file.exists() else ""
    found = re.search(rf"^# ---- {number}\..*?(?=^# ---- |\Z)", source, re.M | re.S)
    if not found:
        raise LookupError(f"there is no part {number} of {file.name} to show")
    return f"```python\n{found[0].strip()}\n```"


def draw_stored(world: str, folder: Path) -> None:
    """The pictures expected after each of the four steps of a world's stored runs, into notebooks/images."""
    from kleinlite import Klein

    for name, prompt in STORED[world].items():
        for step in Klein.from_pretrained(folder).stream(prompt, seed=7, progress=False):
            step.preview().save(PACKAGE.parent / f"notebooks/{stills(world)}{name}-{step.index + 1}.png", optimize=True)


def store_preview(folder: Path) -> None:
    """The matrix (129, 48) of a model's fast preview, float32 numbers row by row, beside the scripts."""
    from kleinlite import Klein
    from kleinlite.inference.fast_preview import fit_preview

    matrix = fit_preview(Klein.from_pretrained(folder).autoencoder)
    file = SCRIPTS / "fast_preview" / f"{folder.parent.name}.bin"
    file.write_bytes(struct.pack(f"<{matrix.size}f", *matrix.flatten().tolist()))


if __name__ == "__main__":
    for world in sys.argv[1:] or WORLDS:
        draw_stored(world, WORLDS[world])
        store_preview(WORLDS[world])
