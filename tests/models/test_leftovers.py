"""What killed downloads leave in the cache is removed by the next download, once it is old."""

import hashlib
import os
import time

from stand_in_hub import released

from kleinlite.models.download import download_model
from kleinlite.models.registry import MODELS

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


def test_old_parts_of_our_own_files_go(hub):
    store = hub.cache / ("models--" + MODELS["4b"].repo.replace("/", "--")) / "blobs"
    store.mkdir(parents=True)
    sha256 = hashlib.sha256(released()[WEIGHTS]).hexdigest()
    names = {"ours and old": f"{sha256}.7b888f2e.incomplete", "ours and at work": f"{sha256}.aaaaaaaa.incomplete"}
    names["of another program"] = f"{'0' * 64}.7b888f2e.incomplete"
    for what, name in names.items():
        (store / name).write_bytes(b"half")
        age = time.time() - (10 if "at work" in what else 4000)
        os.utime(store / name, (age, age))
    download_model("4b")
    assert sorted(path.name for path in store.glob("*.incomplete")) == sorted(
        [names["ours and at work"], names["of another program"]]
    )
    os.utime(store / names["ours and at work"], (0, 0))
    download_model("4b")  # nothing is missing any more, and the rest goes all the same
    assert [path.name for path in store.glob("*.incomplete")] == [names["of another program"]]
