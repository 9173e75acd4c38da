"""Tells what a release of an engine would lose, by the sources of its published wheel.

``python tools/engine_digests.py vllm 0.34.0`` goes through the table of seams (``llm_comm/integrations/vllm/seams.py``)
and prints, for each release, the symbols that are gone, functions with other parameters, and definitions that were not
tested; then the features that are off there. It takes a download a release, of a few hundred MB that are not kept.

``--write`` adds these releases to the digests that are known, in ``digests.json`` beside the table. ``--accept SYMBOL``
(or ``all``) records a new definition as well. Accept one when the scenarios of its release have passed (``VERSIONS`` of
``tests/integrations``) or the difference was read. ``--show SYMBOL`` prints a definition in each release, for that.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from llm_comm.integrations.engine_sources import Sources
from llm_comm.integrations.seams import Table


class Wheel:
    """Sources in a wheel, for ``Sources``."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._names = set(self._archive.namelist())

    def read(self, module: str) -> tuple[str, bool] | None:
        path = module.replace(".", "/")
        for name, is_package in ((f"{path}/__init__.py", True), (f"{path}.py", False)):
            if name in self._names:
                return self._archive.read(name).decode(), is_package
        return None


def look_at(table: Table, version: str, sources: Sources) -> None:
    """Prints what ``version`` would lose."""
    table.sources, table.release = sources, f"{table.engine} {version}"
    print(f"{table.release}:")
    for row in table.rows:
        objection = table.objection(row)
        if objection is not None:
            print(f"  {row.feature}: {objection}")
    off = [feature for feature in dict.fromkeys(row.feature for row in table.rows) if table.why_not(feature)]
    print(f"  off: {', '.join(off) or 'nothing'}")


def record(
    table: Table, version: str, sources: Sources, tested: dict[str, dict[str, list[str]]], accepted: list[str]
) -> None:
    """Adds ``version`` to the digests in ``tested``, and new digests of symbols that are ``accepted``."""
    for row in table.rows:
        symbol = table.present(row)
        if not row.by_digest or symbol is None:
            continue
        known, digest = tested.setdefault(symbol, {}), sources.find(symbol).digest
        if digest in known or symbol in accepted or "all" in accepted:
            versions = known.setdefault(digest, [])
            versions[:] = sorted({*versions, version}, key=lambda text: [int(part) for part in text.split(".")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--write", action="store_true", help="add the releases to the digests that are known")
    parser.add_argument("--accept", metavar="SYMBOL", action="append", default=[], help="record a new definition too")
    parser.add_argument("--show", metavar="SYMBOL", help="print the definition of module:name in each release")
    given = parser.parse_args()
    table: Table = importlib.import_module(f"llm_comm.integrations.{given.engine}.seams").TABLE
    tested = json.loads(table.digests.read_text(encoding="utf-8")) if table.digests.exists() else {}
    for version in given.versions:
        with tempfile.TemporaryDirectory() as directory:
            pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*pip, "--dest", directory, f"{given.engine}=={version}"], check=True)
            (path,) = Path(directory).glob("*.whl")
            sources = Sources(Wheel(path))
            if given.show:
                print(f"# {version}\n" + "\n".join(map(ast.unparse, sources.nodes(given.show))))
                continue
            look_at(table, version, sources)
            if given.write:
                record(table, version, sources, tested, given.accept)
    if given.write:
        table.digests.write_text(json.dumps(tested, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
