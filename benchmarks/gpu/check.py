"""All that needs a GPU to be known, in one command: `python benchmarks/gpu/check.py [--out FILE]`; under 8 minutes.

A line for each check as it ends, PASS, FAIL or SKIP with its reason, then a table of what was measured, beside targets
where there are some. The exit status is 1 if a check failed. FlashInfer compiles its modules when they are first used,
which takes minutes; with the bundle of `build_flashinfer_bundle.py` on PYTHONPATH there is nothing to compile.

    python benchmarks/gpu/check.py --device cpu --small

tries the checks themselves, on tiny models, with what stands in for FlashInfer and plain calls in the place of graphs.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
    from checks import main

    sys.exit(main((__doc__ or "").splitlines()[0]))
