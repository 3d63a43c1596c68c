"""The fuzzer itself, for three seconds: that it still runs, with every kind of damage. `make fuzz` takes longer."""

import subprocess
import sys
from pathlib import Path


def test_every_kind_of_damage_is_tried(tmp_path):
    fuzz = Path(__file__).with_name("fuzz.py")
    done = subprocess.run([sys.executable, str(fuzz), "3", "7"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
