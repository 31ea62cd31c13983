"""Put the demo's target, SmolLM2-135M-Instruct, into a folder: `python tools/get_target.py [DIR]`.

Returns at once when it is there already.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from mtp_train.core.errors import UserError
from mtp_train.models.gguf_target import DEFAULT_DESTINATION, unpack_gguf_target

CHECKOUT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "destination", type=Path, nargs="?", default=CHECKOUT / DEFAULT_DESTINATION, metavar="DIR"
    )
    try:
        unpack_gguf_target(parser.parse_args().destination, say=partial(print, flush=True))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
