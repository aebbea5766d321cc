"""The embedded engine: a transformers causal LM on CPU, in its own process, over HTTP.

Importing this package loads neither torch nor transformers; the process started by
`EngineProcess` (`python -m stitch.engines.embedded`) does.
"""

from stitch.engines.embedded.adapter import EmbeddedEngine
from stitch.engines.embedded.process import EngineProcess

__all__ = ["EmbeddedEngine", "EngineProcess"]
