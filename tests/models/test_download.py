"""The download from a stand-in hub: what is fetched, said and refused. What arrives half, the hub's library resumes."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from stand_in_hub import CHUNK, COMMIT, DECOYS, TINY, Repository, large, released
from waiting import HANGS

from kleinlite import Klein
from kleinlite.errors import say_once
from kleinlite.models.checkpoint import resolve_replacement
from kleinlite.models.download import (
    Access,
    Repository as Needed,
    download,
    fetch_model,
    fetch_parts,
    find_cached,
    plan_download,
    required_repositories,
    without_transformer,
)
from kleinlite.models.registry import DECODERS, MODELS, SMALL_DECODER, TAEF2, TAEF2_FILE

REPO = MODELS["4b"].repo
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
FILES = {name: data for name, data in released().items() if name not in DECOYS}
OFFLINE = Access(local_files_only=True)
PAGE = b"<!DOCTYPE html><html><title>Hotel Wi-Fi</title>Please log in." + b" " * 500


@pytest.fixture
def said():
    """said(call, …): the sentence with which it is refused."""

    def call(function, *args, **kwargs) -> str:
        with pytest.raises((ValueError, OSError)) as refusal:
            function(*args, **kwargs)
        told = str(refusal.value)
        assert len(told.splitlines()) == 1 and told.endswith((".", "?")) and 40 < len(told) < 600, told
        assert refusal.traceback[-1].path.name in ("download.py", "files.py")  # ours, and not some library's
        return told

    return call


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def blobs(hub, repo: str = REPO) -> list[Path]:
    """What lies in the cache's store."""
    return sorted((hub.cache / ("models--" + repo.replace("/", "--")) / "blobs").glob("*"))


def in_a_process(hub, *argv, **environment) -> subprocess.Popen:
    """`kleinlite download` with the hub and the cache of the environment."""
    code = f"from huggingface_hub import constants\nconstants.DOWNLOAD_CHUNK_SIZE = {CHUNK}\n" * (not environment)
    code += "import sys\nfrom kleinlite.__main__ import main\nsys.exit(main())"
    names = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(hub.cache), "KLEINLITE_CPU": "off"} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, "download", *argv], env=os.environ | names, **pipes)


# ---------------------------------------------------------------- what is fetched


def test_only_what_is_needed_is_fetched(hub):
    folder = fetch_model("4b")
    assert content(folder) == FILES
    assert not [r.path for r in hub.requests if any(name in r.path for name in DECOYS)]
    assert all(len(hub.asked(name)) == 1 for name in FILES if large(name))


def test_size_and_license_are_told_before_the_first_byte(hub, caplog):
    sent = []
    caplog.handler.addFilter(lambda record: sent.append(hub.sent) or True)
    fetch_model("4b")
    table = caplog.text.splitlines()
    total = sum(len(data) for data in FILES.values()) / 1e6
    terms = f"{REPO}: license Apache-2.0, not run by kleinlite's authors"
    assert table[0].endswith(f"{terms}; 11 files of {total:.1f} MB, of which {total:.1f} MB go into {hub.cache}")
    assert len(table) == 1 and sent == [0]


def test_the_plan_of_a_download(hub, said):
    [repository] = required_repositories("4b")
    plan = plan_download(repository)
    assert plan.missing == sum(map(len, FILES.values())) and set(plan.files) == set(FILES) and hub.sent == 0
    folder = fetch_model("4b")
    assert plan_download(repository).missing == 0
    (folder / WEIGHTS).unlink()
    assert plan_download(repository).missing == len(FILES[WEIGHTS])


def test_what_is_here_is_used_without_asking(hub, caplog):
    folder = fetch_model("4b")
    caplog.clear()
    hub.requests.clear()
    assert fetch_model("4b") == fetch_model("4B") == find_cached("4b") == folder
    assert hub.requests == [] and not caplog.records


def test_only_what_is_missing_is_fetched(hub, caplog):
    folder = fetch_model("4b")
    (folder / "vae" / "config.json").unlink()
    (folder / WEIGHTS).unlink()  # the name; the content lies elsewhere in the cache
    assert find_cached("4b") is None
    hub.requests.clear()
    assert content(fetch_model("4b")) == FILES and not hub.asked("")


def test_download_asks_for_what_is_newer(hub):
    folder = fetch_model("4b")
    assert download(required_repositories("4b")) == folder and hub.requests
    repo = hub.repositories[REPO]
    repo.commit, repo.files["vae/config.json"] = "1" * 40, FILES["vae/config.json"] + b"\n"
    hub.requests.clear()
    assert fetch_model("4b") == folder and hub.requests == []
    newer = download(required_repositories("4b"))
    assert newer != folder and content(newer) == FILES | {"vae/config.json": repo.files["vae/config.json"]}
    assert fetch_model("4b") == newer and not hub.asked("")  # nothing large has changed


def test_a_model_in_one_file(hub, caplog):
    one = Repository({MODELS["4b-fp8"].file: FILES[WEIGHTS], "README.md": b"x", "other.safetensors": b"x"})
    hub.repositories[MODELS["4b-fp8"].repo] = one
    path = fetch_model("4b-fp8")
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
        assert content(fetch_parts(name)) == parts and content(fetch_parts(name, OFFLINE)) == parts
    assert not hub.asked(WEIGHTS) and "or not all of it" in said(fetch_model, "4b", OFFLINE)


def test_the_small_decoder(hub):
    files = {
        "config.json": b"{}",
        "diffusion_pytorch_model.safetensors": FILES["vae/diffusion_pytorch_model.safetensors"],
    }
    hub.repositories[DECODERS[SMALL_DECODER][0]] = Repository(files | {"full_encoder_small_decoder.safetensors": b"x"})
    assert content(fetch_model(SMALL_DECODER)) == files


def test_taef2(hub):
    """Of its repository one file, which both halves are in."""
    file = {TAEF2_FILE: FILES["vae/diffusion_pytorch_model.safetensors"]}
    hub.repositories[DECODERS[TAEF2][0]] = Repository(file | {"taef2_sample.png": b"x"})
    assert resolve_replacement("autoencoder", TAEF2).name == TAEF2_FILE
    assert fetch_model(TAEF2).name == TAEF2_FILE and content(fetch_model(TAEF2).parent) == file


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


def test_a_repository_of_somebodys(hub, caplog):
    hub.repositories["some-body/my.klein_4bit"] = Repository(shard(FILES), licence="mit\x1b[2J" + "y" * 1000)
    assert content(fetch_model("some-body/my.klein_4bit")) == shard(FILES)
    [first, *_] = caplog.text.splitlines()
    assert "some-body/my.klein_4bit: license mit\\x1b[2Jyyy" in first and len(first) < 400


# ---------------------------------------------------------------- a call's own words


def test_a_revision_is_another_model(hub, said):
    main = fetch_model("4b")
    assert fetch_model("4b", Access(revision=COMMIT)) == main
    assert f"{REPO} has no revision 'v2': name a branch" in said(fetch_model, "4b", Access(revision="v2"))
    hub.repositories[REPO].commit = "1" * 40
    other = fetch_model("4b", Access(revision="1" * 40))
    assert other != main and fetch_model("4b") == main


def test_a_call_may_name_cache_token_and_revision(hub, tmp_path):
    hub.repositories[REPO].gated = True
    elsewhere = {"cache_dir": tmp_path / "elsewhere"}
    with pytest.raises(ValueError, match="is gated"):
        Klein.from_pretrained("4b", **elsewhere)
    klein = Klein.from_pretrained("4b", **elsewhere, token=hub.token, revision=COMMIT)
    assert klein.info.name == "4b" and not hub.cache.exists()
    hub.requests.clear()
    Klein.from_pretrained("4b", **elsewhere, revision=COMMIT, local_files_only=True)
    with pytest.raises(FileNotFoundError, match="is not on this machine"):
        Klein.from_pretrained("4b", local_files_only=True)
    assert hub.requests == []


# ---------------------------------------------------------------- files that are not whole


def test_a_file_shorter_than_its_header_says(hub, said, caplog):
    repo, data = hub.repositories[REPO], FILES[WEIGHTS]
    repo.files[WEIGHTS] = data[:-7]  # so it lies on the hub, length and SHA-256 agree
    told = said(fetch_model, "4b")
    assert f"{REPO} on the hub is not whole (" in told and "transformer" in told
    assert f"({len(data) - 7:,} bytes) is not a whole safetensors file" in caplog.text
    assert find_cached("4b") is None and not list(hub.cache.rglob(f"snapshots/*/{WEIGHTS}"))
    hub.requests.clear()
    repo.files[WEIGHTS], repo.commit = data, "1" * 40
    assert content(fetch_model("4b")) == FILES and len(hub.asked(WEIGHTS)) == 1


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: d[:4], lambda d: b"", lambda d: b"?" * 100])
def test_a_damaged_file_in_the_cache_is_named_and_fetched_again(hub, damage, caplog):
    folder = fetch_model("4b")
    path = (folder / WEIGHTS).resolve()
    path.write_bytes(damage(FILES[WEIGHTS]))
    hub.requests.clear()
    caplog.clear()
    assert find_cached("4b") is None and content(fetch_model("4b")) == FILES
    assert hub.asked("") == hub.asked(WEIGHTS) and f"{folder / WEIGHTS}" in caplog.text and "removed" in caplog.text


def test_a_file_whose_content_was_deleted_from_the_cache_is_fetched_again(hub):
    folder = fetch_model("4b")
    (folder / WEIGHTS).resolve().unlink()
    assert content(fetch_model("4b")) == FILES


def test_a_shard_that_is_missing(hub, said):
    files = shard(FILES)
    gone = next(name for name in files if "00002-of" in name)
    hub.repositories["some/body"] = Repository({name: data for name, data in files.items() if name != gone})
    told = said(fetch_model, "some/body")
    assert "some/body on the hub is not whole" in told and gone in told
    hub.repositories["some/body"] = Repository(files, commit="1" * 40)
    folder = fetch_model("some/body")
    (folder / gone).unlink()
    assert "or not all of it" in said(fetch_model, "some/body", OFFLINE)


# ---------------------------------------------------------------- offline


def test_offline_with_the_files(hub):
    folder = fetch_model("4b")
    hub.requests.clear()
    assert fetch_model("4b", OFFLINE) == folder and hub.requests == []


@pytest.mark.parametrize("damage", ["no branches", "a line's end", "a newer one that is not whole"])
def test_offline_another_revision_is_taken_if_it_is_whole(hub, said, damage, caplog):
    say_once.cache_clear()
    folder = fetch_model("4b")
    branch = folder.parents[1] / "refs" / "main"
    if damage == "no branches":
        branch.unlink()
    elif damage == "a line's end":
        branch.write_text(f"{folder.name}\n")
    else:
        branch.write_text("f" * 40)
        newer = folder.with_name("f" * 40)
        newer.mkdir()
        shutil.copy(folder / "model_index.json", newer)
    assert fetch_model("4b", OFFLINE) == folder and folder.name in caplog.text
    assert "not on this machine" in said(fetch_model, "4b", Access(revision="other", local_files_only=True))


@pytest.mark.parametrize("environment", [False, True])
def test_offline_without_the_files(hub, said, environment, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", environment)
    told = said(fetch_model, "4b", Access(local_files_only=not environment))
    assert f"{REPO} is not on this machine" in told and "nano" in told
    assert ("unset HF_HUB_OFFLINE" if environment else "without the offline switch") in told
    assert hub.requests == [] and not hub.cache.exists()


def test_offline_with_a_part_of_the_files(hub, said):
    path = (fetch_model("4b") / WEIGHTS).resolve()
    path.write_bytes(FILES[WEIGHTS][:-1])
    hub.requests.clear()
    assert "not all of it" in said(fetch_model, "4b", OFFLINE) and hub.requests == []
    assert path.exists()  # it may be somebody else's


@pytest.mark.parametrize(
    "names, words",
    [
        ({"HF_HUB_OFFLINE": "1"}, "could not be fetched"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "HF_ENDPOINT"),
        ({"ALL_PROXY": "socks5://127.0.0.1:9", "HF_ENDPOINT": "http://hub"}, "ALL_PROXY"),
        ({"HTTP_PROXY": "socks4://127.0.0.1:9", "HF_ENDPOINT": "http://hub"}, "HTTP_PROXY"),
        ({"HTTP_PROXY": "http://127.0.0.1:9", "HF_ENDPOINT": "http://hub"}, "HTTP_PROXY"),
        ({"HF_HUB_ETAG_TIMEOUT": ""}, "HF_HUB_ETAG_TIMEOUT"),
        ({"HF_HUB_DOWNLOAD_TIMEOUT": "30s"}, "HF_HUB_DOWNLOAD_TIMEOUT"),
    ],
)
def test_what_the_environment_says_of_the_network_ends_in_a_sentence(hub, names, words):
    out, err = in_a_process(hub, "4b", **names).communicate(timeout=HANGS)
    last = err.splitlines()[-1]
    assert last.startswith(f"kleinlite: {REPO} ") and words in last and "Traceback" not in err
    assert str(hub.cache) not in out
    assert hub.requests == []


# ---------------------------------------------------------------- what the hub refuses


def test_a_gated_repository(hub, said, monkeypatch, caplog):
    hub.repositories[MODELS["9b"].repo] = Repository(released(), licence="other", gated=True)
    told = said(fetch_model, "9b")
    assert f"{MODELS['9b'].repo} is gated: accept its license at https://huggingface.co/{MODELS['9b'].repo}" in told
    assert "`hf auth login`" in told and find_cached("9b") is None
    assert f"{MODELS['9b'].repo}: license FLUX Non-Commercial, gated, " in caplog.text
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    assert "is gated" in said(fetch_model, "9b")
    assert content(fetch_model("9b", Access(token=hub.token))) == FILES
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
        ("klein-4b", "did you mean 4b?"),
        ("FLUX.2-klein-base-9B", "did you mean base-9b?"),
        ("cat", "name one of nano, nano-base, critters, 4b,"),
        ("", "9b-kv-fp8"),
        ("no/such/folder", "does not exist: name one that does, or a model of `kleinlite models`."),
        ("a b/c", "does not exist: name one"),
        ("https://huggingface.co/a/b", "does not exist: name one"),
    ],
)
def test_what_is_no_name(hub, said, name, words):
    told = said(fetch_model, name)
    assert repr(name) in told and words in told and hub.requests == []


def test_no_network(hub, said):
    hub.shutdown()
    hub.server_close()
    told = said(fetch_model, "4b")
    assert f"{REPO} could not be fetched from the hub (" in told and "check the network" in told
    assert "nano" in told and not hub.cache.exists()


def test_a_hub_that_is_down(hub, said):
    hub.down = True
    told = said(fetch_model, "4b")
    assert "could not be fetched" in told and "503" in told


def test_a_login_page_is_a_sentence(hub, said):
    def page(request):
        request.extra = {"Content-Type": "text/html"}
        request.say(PAGE)
        return True

    hub.interfere = page
    assert "could not be fetched" in said(fetch_model, "4b")
    hub.interfere = None
    assert content(fetch_model("4b")) == FILES  # on a good network


@pytest.mark.parametrize(
    "gone, words",
    [
        ("transformer/", "has no transformer/:"),
        ("text_encoder/", "has no text_encoder/:"),
        ("model_index.json", "has no model_index.json:"),
        ("", "has no model_index.json and no transformer/ and no text_encoder/ and no vae/:"),
    ],
)
def test_a_repository_that_holds_no_model(gone, words, hub, said):
    files = {name: data for name, data in released().items() if not name.startswith(gone) or name in DECOYS}
    hub.repositories["some/body"] = Repository({"README.md": b"x"} if gone == "" else files)
    told = said(fetch_model, "some/body")
    assert hub.sent == 0 and not hub.cache.exists() and words in told and "released layout" in told


def test_a_disk_that_is_too_small(hub, said, monkeypatch):
    total = sum(len(data) for data in FILES.values())

    def disk(free):
        return monkeypatch.setattr("kleinlite.files.shutil.disk_usage", lambda path: SimpleNamespace(free=free))

    disk(total - 1)
    assert re.search(rf"{re.escape(str(hub.cache))} will take .* make room there\.$", said(fetch_model, "4b"))
    assert hub.sent == 0 and not hub.cache.exists()


def test_what_is_taken_of_a_repository():
    whole = Needed("a/b")
    parts = without_transformer("a/b")
    assert all(whole.takes(name) == (name not in DECOYS) for name in released())
    index = "transformer/diffusion_pytorch_model.safetensors.index.json"
    assert whole.takes(index) and not parts.takes(WEIGHTS)
    assert parts.takes("transformer/config.json") and parts.takes("text_encoder/model.safetensors")


def test_a_program_that_logs_nothing_hears_of_it(hub):
    """Python writes warnings to stderr where nobody has said where they go."""
    assert logging.getLogger("kleinlite").getEffectiveLevel() <= logging.WARNING
    code = "import sys\nfrom kleinlite.models.download import fetch_model\nprint(fetch_model(sys.argv[1]))"
    names = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(hub.cache), "KLEINLITE_CPU": "off"}
    done = subprocess.run(
        [sys.executable, "-c", code, "4b"], env=os.environ | names, capture_output=True, text=True, timeout=HANGS
    )
    assert content(Path(done.stdout.strip())) == FILES
    assert done.stderr.startswith(f"{REPO}: license Apache-2.0, "), done.stderr
