"""The registry, and the download from a stand-in hub: what is fetched, said, kept, refused and left behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from stand_in_hub import CHUNK, DECOYS, TINY, Repository, large, released
from waiting import HANGS, wait_until

from kleinlite.models.download import (
    Repository as Needed,
    download_model,
    fetch_model,
    fetch_parts,
    find_cached,
    plan_offline,
)
from kleinlite.models.registry import MODELS, SMALL_DECODER, SMALL_DECODER_REPO

REPO = MODELS["4b"].repo
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
FILES = {name: data for name, data in released().items() if name not in DECOYS}


@pytest.fixture
def said():
    """said(call, …): the sentence with which it is refused."""

    def call(function, *args, **kwargs) -> str:
        with pytest.raises((ValueError, OSError)) as refusal:
            function(*args, **kwargs)
        told = str(refusal.value)
        assert len(told.splitlines()) == 1 and told.endswith((".", "?")) and 40 < len(told) < 600, told
        assert refusal.traceback[-1].path.name in ("download.py", "hub.py")  # ours, and not some library's
        return told

    return call


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def blobs(hub, repo: str = REPO) -> list[Path]:
    """What lies in the cache's store."""
    return sorted((hub.cache / ("models--" + repo.replace("/", "--")) / "blobs").glob("*"))


def in_a_process(hub, *argv, **environment) -> subprocess.Popen:
    """`kleinlite.models.download.fetch_model(…)` with the hub and the cache of the environment."""
    code = f"import sys\nfrom huggingface_hub import constants\nconstants.DOWNLOAD_CHUNK_SIZE = {CHUNK}\n"
    code += "from kleinlite.models.download import fetch_model\nprint(fetch_model(sys.argv[1]))"
    names = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(hub.cache), "KLEINLITE_CPU": "off"} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *argv], env=os.environ | names, **pipes)


# ---------------------------------------------------------------- what is fetched


def test_only_what_is_needed_is_fetched(hub):
    folder = fetch_model("4b")
    assert content(folder) == FILES
    assert not [r.path for r in hub.requests if any(name in r.path for name in DECOYS)]
    assert hub.sent - sum(len(data) for data in FILES.values()) < 100 * len(FILES)  # and the words of redirections
    assert all(len(hub.asked(name)) == 1 for name in FILES if large(name))


def test_it_is_told_before_the_first_byte(hub, monkeypatch):
    told, sent = [], []

    def write(text):
        return (told.append(text), sent.append(hub.sent))

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None, isatty=lambda: False))
    fetch_model("4b")
    table = "".join(told).splitlines()
    total = sum(len(data) for data in FILES.values())
    assert table[0] == "4b: licence Apache-2.0; kleinlite's authors have not run it yet" and set(sent) == {0}
    assert table[1] == f"{REPO} → {hub.cache / 'models--black-forest-labs--FLUX.2-klein-4B'}"
    rows = {line.split()[0]: line.split()[1:] for line in table[2:]}
    assert list(rows) == ["transformer/", "text_encoder/", "vae/", "tokenizer/", "scheduler/", "model_index.json", "in"]
    assert rows["tokenizer/"] == ["3", "files", "9.0", "kB"] and rows["scheduler/"] == ["1", "file", "481", "bytes"]
    assert rows["in"] == ["all", "11", "files", f"{total / 1000:.1f}", "kB"]


def test_the_plan_is_known_without_a_network(hub, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=93 * 10**9))
    table = plan_offline("4b").splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in table[2:]}
    assert rows["transformer/"] == ["1", "file", "7.75", "GB"] and rows["in"] == ["all", "11", "files", "15.98", "GB"]
    assert str(hub.cache) in table[1] and table[-1] == "93.00 GB are free on that disk"
    single = plan_offline("4b-fp8")
    assert single.count(" → ") == 2 and re.search(r"4b-fp8\.safetensors +1 file +4\.07 GB", single)
    assert re.search(r"transformer/ +\? files +11\.10 GB", plan_offline("flux3"))  # its shards were not seen
    with pytest.raises(ValueError, match="Only the hub knows what 'some/body' takes: plans are for the models"):
        plan_offline("some/body")
    assert hub.requests == []
    folder = fetch_model("4b")
    assert re.search(r"in all +11 files +15\.98 GB, of which 15\.98 GB here already", plan_offline("4b"))
    (folder / WEIGHTS).unlink()
    assert re.search(r"in all +11 files +15\.98 GB, of which 179\.6 MB here already", plan_offline("4b"))


def test_what_is_here_is_used_without_asking(hub, capsys):
    folder = fetch_model("4b")
    capsys.readouterr()
    hub.requests.clear()
    assert fetch_model("4b") == fetch_model("4B") == find_cached("4b") == folder
    assert hub.requests == [] and capsys.readouterr() == ("", "")


def test_bars_show_progress(hub, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fetch_model("4b")
    bars = capsys.readouterr().err
    assert WEIGHTS[-40:] in bars and "143k/143k" in bars


def test_only_what_is_missing_is_fetched(hub, capsys):
    folder = fetch_model("4b")
    (folder / "vae" / "config.json").unlink()
    (folder / WEIGHTS).unlink()  # the name; the content lies elsewhere in the cache
    assert find_cached("4b") is None
    hub.requests.clear()
    capsys.readouterr()
    assert content(fetch_model("4b")) == FILES
    assert hub.sent == 0 and re.search(r"in all +11 files +277\.6 kB, of which 133\.9 kB here", capsys.readouterr().err)


def test_download_asks_for_what_is_newer(hub, capsys):
    folder = fetch_model("4b")
    assert download_model("4b") == [folder] and hub.requests
    repo = hub.repositories[REPO]
    repo.commit, repo.files["vae/config.json"] = "1" * 40, FILES["vae/config.json"] + b"\n"
    hub.requests.clear()
    assert fetch_model("4b") == folder and hub.requests == []
    [newer] = download_model("4b")
    assert newer != folder and content(newer) == FILES | {"vae/config.json": repo.files["vae/config.json"]}
    assert fetch_model("4b") == newer and not hub.asked("")  # nothing large has changed


def test_an_update_that_fails_leaves_what_was_here(hub, said):
    folder, repo = fetch_model("4b"), hub.repositories[REPO]
    repo.commit, repo.files["vae/config.json"] = "1" * 40, FILES["vae/config.json"] + b"\n"
    hub.cut["vae/config.json"], hub.falls = [3], True
    assert "could not be fetched" in said(download_model, "4b")
    assert fetch_model("4b") == folder and content(folder) == FILES


def test_a_model_in_one_file(hub, capsys):
    one = Repository({MODELS["4b-fp8"].file: FILES[WEIGHTS], "README.md": b"x", "other.safetensors": b"x"})
    hub.repositories[MODELS["4b-fp8"].repo] = one
    path = fetch_model("4b-fp8")
    table = capsys.readouterr().err
    assert "in all             11 files" in table and table.count(" → ") == 2
    assert path.name == "flux-2-klein-4b-fp8.safetensors" and path.read_bytes() == FILES[WEIGHTS]
    parts = fetch_parts("4b-fp8")
    assert content(parts) == {name: data for name, data in FILES.items() if name != WEIGHTS}
    assert not hub.asked(WEIGHTS) and find_cached("4b-fp8") == path and find_cached("4b") is None
    hub.requests.clear()
    assert fetch_model("4b") == parts and content(parts) == FILES  # now with the plain transformer
    assert hub.asked("") == hub.asked(WEIGHTS) and fetch_parts("4b-fp8") == parts


def test_the_parts_alone(hub, said):
    hub.repositories["some/body"] = Repository(FILES)
    parts = {name: data for name, data in FILES.items() if name != WEIGHTS}
    for name in ("4b", "some/body"):
        assert content(fetch_parts(name)) == parts and content(fetch_parts(name, offline=True)) == parts
    assert not hub.asked(WEIGHTS) and "lacks transformer/*.safetensors" in said(fetch_model, "4b", offline=True)


def test_the_small_decoder(hub):
    files = {
        "config.json": b"{}",
        "diffusion_pytorch_model.safetensors": FILES["vae/diffusion_pytorch_model.safetensors"],
    }
    hub.repositories[SMALL_DECODER_REPO] = Repository(files | {"full_encoder_small_decoder.safetensors": b"x"})
    assert content(fetch_model(SMALL_DECODER)) == files


def shard(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same model with a text encoder in two files, as the released ones have it."""
    arrays, files = mx.load(str(TINY / "text_encoder/model.safetensors")), dict(files)
    del files["text_encoder/model.safetensors"]
    names, where = sorted(arrays), {}
    for i in (0, 1):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        part = {name: arrays[name].astype(mx.float32) for name in names[i::2]}
        where |= dict.fromkeys(part, file)
        header, data = {}, b""
        for name, w in part.items():
            header[name] = {"dtype": "F32", "shape": list(w.shape), "data_offsets": [len(data), len(data) + w.nbytes]}
            data += bytes(memoryview(w))
        text = json.dumps(header).encode()
        files[f"text_encoder/{file}"] = len(text).to_bytes(8, "little") + text + data
    return files | {"text_encoder/model.safetensors.index.json": json.dumps({"weight_map": where}).encode()}


def test_a_repository_of_somebodys(hub, capsys):
    hub.repositories["some-body/my.klein_4bit"] = Repository(shard(FILES), licence="mit")
    assert content(fetch_model("some-body/my.klein_4bit")) == shard(FILES)
    assert "some-body/my.klein_4bit: licence mit\n" in capsys.readouterr().err


# ---------------------------------------------------------------- a download that is cut


def test_a_short_break_is_bridged(hub):
    hub.cut[WEIGHTS] = [50_000]
    with contextlib.suppress(ConnectionError):  # older versions of the library give up
        fetch_model("4b")
    assert content(fetch_model("4b")) == FILES
    assert [r.range for r in hub.asked(WEIGHTS)] == [None, "bytes=50000-"]


def test_a_cut_download_keeps_the_whole_files(hub, said):
    hub.cut[WEIGHTS], hub.falls = [100_000], True
    told = said(fetch_model, "4b")
    assert REPO in told and "503" in told and "try again" in told
    assert find_cached("4b") is None
    hub.down = hub.falls = False
    assert content(fetch_model("4b")) == FILES
    assert not [blob for blob in blobs(hub) if "incomplete" in blob.name]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_program_leaves_nothing_that_looks_whole(hub, how):
    hub.hang[WEIGHTS] = len(FILES[WEIGHTS]) - 1  # one byte short
    program = in_a_process(hub, "4b")
    assert hub.hanging.wait(HANGS)
    wait_until(lambda: any(blob.stat().st_size > 130_000 for blob in blobs(hub)), "a file arrives")
    program.send_signal(how)
    assert program.wait(HANGS) != 0
    program.communicate()
    hub.release.set()
    assert find_cached("4b") is None
    assert not list(hub.cache.rglob("snapshots/*/transformer/*.safetensors"))
    assert content(fetch_model("4b")) == FILES


def test_the_files_before_the_cut_are_kept(hub, said, capsys):
    second = "vae/diffusion_pytorch_model.safetensors"
    hub.cut[second], hub.falls = [10_000], True
    said(fetch_model, "4b")
    hub.down = hub.falls = False
    hub.requests.clear()
    capsys.readouterr()
    assert content(fetch_model("4b")) == FILES and not hub.asked(WEIGHTS) and hub.asked(second)
    assert re.search(r"transformer/ +2 files +143\.4 kB, of which 143\.4 kB here", capsys.readouterr().err)


def test_a_file_that_arrives_changed(hub, said):
    """As long as announced, a valid safetensors file, and still not the one that is on the hub."""
    spoilt = FILES[WEIGHTS][:-1] + bytes([FILES[WEIGHTS][-1] ^ 1])
    hub.bodies[WEIGHTS] = spoilt
    told = said(fetch_model, "4b")
    assert WEIGHTS in told and "did not arrive" in told and "removed" in told
    assert find_cached("4b") is None and spoilt not in [blob.read_bytes() for blob in blobs(hub)]
    del hub.bodies[WEIGHTS]
    assert content(fetch_model("4b")) == FILES


def test_two_programs_at_once(hub):
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(fetch_model, ["4b"] * 3))
    assert len(set(found)) == 1 and content(found[0]) == FILES
    assert all(len(hub.asked(name)) == 1 for name in FILES if large(name))


# ---------------------------------------------------------------- files that are not whole


def test_a_file_shorter_than_its_header_says(hub, said):
    repo, data = hub.repositories[REPO], FILES[WEIGHTS]
    repo.files[WEIGHTS] = data[:-7]  # so it lies on the hub, length and SHA-256 agree
    told = said(fetch_model, "4b")
    assert told.startswith(f"{WEIGHTS} came damaged from {REPO} and was removed: ")
    assert f"{len(data) - 7:,} of {len(data):,} bytes" in told
    assert find_cached("4b") is None and not list(hub.cache.rglob(f"snapshots/*/{WEIGHTS}"))
    assert not [blob for blob in blobs(hub) if blob.stat().st_size == len(data) - 7]
    hub.requests.clear()
    repo.files[WEIGHTS] = data
    assert content(fetch_model("4b")) == FILES and len(hub.asked(WEIGHTS)) == 1


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:4], lambda d: b"", lambda d: b"?" * 100])
def test_a_damaged_file_in_the_cache_is_fetched_again(hub, damage):
    folder = fetch_model("4b")
    path = (folder / WEIGHTS).resolve()
    path.write_bytes(damage(FILES[WEIGHTS]))
    hub.requests.clear()
    assert find_cached("4b") is None and content(fetch_model("4b")) == FILES
    assert hub.asked("") == hub.asked(WEIGHTS)


def test_a_shard_that_is_missing(hub, said):
    files = shard(FILES)
    gone = next(name for name in files if "00002-of" in name)
    hub.repositories["some/body"] = Repository({name: data for name, data in files.items() if name != gone})
    told = said(fetch_model, "some/body")
    assert "some/body on the hub is not complete" in told and gone in told
    hub.repositories["some/body"] = Repository(files, commit="1" * 40)
    folder = fetch_model("some/body")
    (folder / gone).unlink()
    assert gone in said(fetch_model, "some/body", offline=True)


# ---------------------------------------------------------------- offline


def test_offline_with_the_files(hub):
    folder = fetch_model("4b")
    hub.requests.clear()
    assert fetch_model("4b", offline=True) == folder and hub.requests == []


@pytest.mark.parametrize("environment", [False, True])
def test_offline_without_the_files(hub, said, environment, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", environment)
    told = said(fetch_model, "4b", offline=not environment)
    assert f"{REPO} is not on this machine" in told and "nano" in told
    assert ("unset HF_HUB_OFFLINE" if environment else "without the offline switch") in told
    assert hub.requests == [] and not hub.cache.exists()


def test_offline_with_a_part_of_the_files(hub, said):
    folder = fetch_model("4b")
    path = (folder / WEIGHTS).resolve()
    path.write_bytes(FILES[WEIGHTS][:-1])
    (folder / "vae" / "config.json").unlink()
    hub.requests.clear()
    told = said(fetch_model, "4b", offline=True)
    assert "vae/config.json" in told and WEIGHTS in told and hub.requests == []
    assert path.exists()  # it may be somebody else's


def test_the_environment_is_obeyed(hub):
    for names, words in (
        ({"HF_HUB_OFFLINE": "1"}, "unset HF_HUB_OFFLINE"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, ":9 ("),
    ):
        program = in_a_process(hub, "4b", **names)
        out, err = program.communicate(timeout=HANGS)
        assert out == "" and words in err.splitlines()[-1] and hub.requests == []
    program = in_a_process(hub, "4b")
    out, err = program.communicate(timeout=HANGS)
    assert content(Path(out.strip())) == FILES and err.startswith("4b: licence Apache-2.0"), err
    assert Path(out.strip()).is_relative_to(hub.cache)


# ---------------------------------------------------------------- what the hub refuses


def test_a_gated_repository(hub, said, monkeypatch, capsys):
    hub.repositories[MODELS["9b"].repo] = Repository(released(), licence="other", gated=True)
    told = said(fetch_model, "9b")
    assert f"{MODELS['9b'].repo} is gated: accept its licence at https://huggingface.co/{MODELS['9b'].repo}" in told
    assert "`hf auth login`" in told and find_cached("9b") is None
    assert capsys.readouterr().err.startswith("9b: licence FLUX Non-Commercial, gated; ")
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    assert "is gated" in said(fetch_model, "9b")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert content(fetch_model("9b")) == FILES
    assert {r.token for r in hub.asked("")} == {None}  # the hub's token is nobody else's business


def test_no_such_repository(hub, said):
    told = said(fetch_model, "some/body")
    assert "no folder or file some/body" in told and "hub shows no repository" in told and "hf auth login" in told
    assert "hub shows no repository" in said(fetch_model, "some/bo--dy")  # not even a possible name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flux", "did you mean flux3?"),
        ("4b-fp9", "did you mean 4b-fp8?"),
        ("cat", "Known models: nano, nano-base, 4b,"),
        ("", "9b-kv-fp8"),
        ("no/such/folder", "does not exist: name one that does, or a model of `kleinlite models`."),
        ("./x/y", "does not exist: name one"),
        ("a b/c", "does not exist: name one"),
        ("./klein4B", "does not exist: there is klein4b."),
        ("./sub/klein-nine-b", "does not exist: there is sub/klein-9b."),
        ("https://huggingface.co/a/b", "does not exist: name one"),
    ],
)
def test_what_is_no_name(hub, said, name, words, tmp_path, monkeypatch):
    (tmp_path / "klein4b").mkdir()
    (tmp_path / "sub" / "klein-9b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    told = said(fetch_model, name)
    assert repr(name) in told and words in told and hub.requests == []


def test_no_network(hub, said):
    hub.shutdown()
    hub.server_close()
    told = said(fetch_model, "4b")
    assert f"{REPO} could not be fetched from the hub at {hub.url} (" in told and "check the network" in told
    assert "nano" in told and not hub.cache.exists()


def test_a_hub_that_is_down(hub, said):
    hub.down = True
    told = said(fetch_model, "4b")
    assert "could not be fetched" in told and "503" in told


@pytest.mark.parametrize(
    "gone, words",
    [
        ("transformer/", "has no transformer/:"),
        ("text_encoder/", "has no text_encoder/:"),
        ("tokenizer/tokenizer.json", "has no tokenizer/tokenizer.json:"),
        (WEIGHTS, "has no transformer/*.safetensors:"),
        ("model_index.json", "has no model_index.json:"),
        ("", "has no model_index.json and no transformer/ and no text_encoder/ and no vae/ and no tokenizer/:"),
    ],
)
def test_a_repository_that_holds_no_model(gone, words, hub, said):
    files = {name: data for name, data in released().items() if not name.startswith(gone) or name in DECOYS}
    hub.repositories["some/body"] = Repository(files)
    told = said(fetch_model, "some/body")
    assert words in told and "released layout" in told and hub.sent == 0 and not hub.cache.exists()


def test_a_disk_that_is_too_small(hub, said, monkeypatch):
    total = sum(len(data) for data in FILES.values())

    def disk(free):
        return monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))

    disk(total - 1)
    told = said(fetch_model, "4b")
    assert re.search(
        rf"{re.escape(str(hub.cache))}\b.* make room there, or set HF_HOME to a folder on another disk\.$", told
    )
    assert hub.sent == 0 and not hub.cache.exists()
    disk(total)
    assert content(fetch_model("4b")) == FILES


def test_a_disk_that_fills_up(hub, said, monkeypatch):
    def full(url, file, **_):
        file.write(b"x" * 1000)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    told = said(fetch_model, "4b")
    assert f"The disk of {hub.cache} is full" in told and "HF_HOME" in told
    assert find_cached("4b") is None


def test_what_is_taken_of_a_repository():
    whole, parts = Needed("a/b"), Needed("a/b", transformer=False)
    assert all(whole.needs(name) == (name not in DECOYS) for name in released())
    index = "transformer/diffusion_pytorch_model.safetensors.index.json"
    assert whole.needs(index) and not parts.needs(index) and not parts.needs(WEIGHTS)
    assert parts.needs("transformer/config.json") and parts.needs("text_encoder/model.safetensors")
