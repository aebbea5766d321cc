"""Lets integration tests import their support modules, which lie beside them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
