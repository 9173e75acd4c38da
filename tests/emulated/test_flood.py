"""Processes that are no ranks flood the sockets of set-up: communicators are made all the same, and nothing is left.

Abstract sockets belong to a network namespace, so each test has one of its own: others on the machine are not flooded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("flooded_ranks.py")
NOBODY = 65534


def why_no_namespace() -> str:
    """Why this process cannot have network namespaces of its own, or ""."""
    try:
        done = subprocess.run(["unshare", "--net", *AS_ROOT, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "no unshare"
    return done.stderr.strip()


# Who is not root has to become root of a user namespace.
AS_ROOT = [] if os.geteuid() == 0 else ["--map-root-user"]
WHY_NOT = why_no_namespace()

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"network namespaces: {WHY_NOT}")


def run(kind: str, user: int, world: int) -> None:
    options = ["--kind", kind, "--user", str(user), "--world", str(world)]
    done = subprocess.run(
        ["unshare", "--net", *AS_ROOT, sys.executable, str(RANKS), *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "flooded" in done.stdout, done.stdout


@pytest.mark.parametrize(("kind", "world"), [("silent", 2), ("silent", 3), ("hello", 2), ("bytes", 3), ("hang-up", 2)])
def test_a_flood_by_the_same_user(kind: str, world: int) -> None:
    run(kind, os.geteuid(), world)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_flood_by_another_user() -> None:
    run("silent", NOBODY, 2)
