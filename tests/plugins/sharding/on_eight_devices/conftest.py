"""These tests need eight simulated devices, whose number is fixed when JAX begins:
`JAX_NUM_CPU_DEVICES=8 pytest tests/plugins/sharding/on_eight_devices`. Elsewhere
`test_eight_devices.py` runs them in a process of its own."""

import os
import sys
from pathlib import Path

collect_ignore_glob = [] if os.environ.get("JAX_NUM_CPU_DEVICES") == "8" else ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parent))  # for eight_devices.py
