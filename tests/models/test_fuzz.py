"""The fuzzer itself, for a moment: that it still runs, with every kind of damage. `make fuzz` takes longer."""

import re

from tools import fuzz


def test_every_kind_of_damage_is_tried(capsys):
    fuzz.main(0, 1)
    said = capsys.readouterr().out
    assert all(
        re.search(rf"{what} +{end} ", said) for what in ("weights", "adapter", "model") for end in ("read", "refused")
    )
