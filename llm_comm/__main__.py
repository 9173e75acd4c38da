"""Entry point of ``python -m llm_comm``, the command ``llm-comm``."""

from __future__ import annotations

import sys

from llm_comm.cli.commands import main

sys.exit(main())
