"""Settings that must stand before MLX is imported."""

import os
import signal

# Newer GPUs (Apple's since the M5, NVIDIA's too) shorten float32 to 19 bits inside matrix products unless told not to.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

from browser import chromium, open_page  # noqa: F401, fixtures for several files
from built_site import home, site  # noqa: F401
from stand_in_hub import hub  # noqa: F401

# A run that a shell put in the background ignores Ctrl-C, and so would every program that a test starts and stops.
signal.signal(signal.SIGINT, signal.default_int_handler)
