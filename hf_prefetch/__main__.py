"""python -m hf_prefetch is the command hf-prefetch."""

import sys

from .cli import main

sys.exit(main())
