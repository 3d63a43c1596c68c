"""Two tiers: `make test` leaves out what is marked slow, `make test-all` leaves out nothing."""

import pytest


def slow(*cases: object) -> list:
    """Cases of a test that only `make test-all` runs."""
    return [pytest.param(*case, marks=pytest.mark.slow) if isinstance(case, tuple) else
            pytest.param(case, marks=pytest.mark.slow) for case in cases]  # fmt: skip
