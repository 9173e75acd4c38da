"""Redirect imports from an unbuilt checkout, in whose root Python was started, to an installed llm_comm."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_HERE = Path(__file__).parent


def give_way() -> None:
    """Replace these sources in ``sys.modules`` by the installed llm_comm, unless they are built. Warn that this
    happened.

    Raises:
        ImportError: The sources are not built, and no other llm_comm is installed.
    """
    if importlib.util.find_spec("llm_comm._core") is not None:
        return
    for entry in sys.path:
        found = Path(entry, "llm_comm")
        is_built = any((found / f"_core{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
        if is_built and (found / "__init__.py").is_file():
            break
    else:
        raise ImportError(
            f"llm_comm in {_HERE} is not built, and no other one is installed: run `pip install .` in {_HERE.parent} "
            "(or `make demo`, which makes an environment of its own)"
        )
    warnings.warn(f"llm_comm in {_HERE} is not built: the installed one in {found} is used", stacklevel=3)
    for name in [name for name in sys.modules if name == "llm_comm" or name.startswith("llm_comm.")]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        "llm_comm", found / "__init__.py", submodule_search_locations=[str(found)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["llm_comm"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
