"""Let the tests of this folder import `reportkit`, in whatever way pytest imports the tests themselves."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
