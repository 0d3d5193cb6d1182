"""Makes `examples.tally` importable without the project's root on the path.

The root holds kernels/ and jobs/, which other libraries must not find under these names.
"""

import sys
from pathlib import Path
from types import ModuleType

package = ModuleType("examples")
package.__path__ = [str(Path(__file__).resolve().parents[2] / "examples")]
sys.modules.setdefault("examples", package)
