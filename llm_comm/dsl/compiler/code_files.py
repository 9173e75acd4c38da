"""Files of compiled code that all processes of a user share. Damaged files are ignored, files of other users rejected.

A file is written under a temporary name and renamed. It ends in a seal: a mark, the length and a digest of its content.
A reader thereby detects files truncated by a full disk, a power failure or an interrupted copy.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import struct
import tempfile
from pathlib import Path

from llm_comm.errors import ConfigError

#: Mark, length and digest. The loader of shared libraries ignores bytes after the sections.
_SEAL = struct.Struct("<16sQ32s")
_MARK = b"llm_comm code 01"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def prepare(directory: Path) -> None:
    """Create a directory for compiled code, and its missing parents, with mode 700.

    If other users may write to an existing directory of this user, that permission is removed. The owner of each file
    is checked by ``read``.

    Raises:
        ConfigError: Another user could replace files of the directory: it or a parent belongs to another user, or is
            writable for everybody without the sticky bit.
        OSError: The directory cannot be created.
    """
    for missing in reversed([path for path in (directory, *directory.parents) if not path.exists()]):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=0o700)
    real = directory.resolve()
    status = real.stat()
    if status.st_uid == os.geteuid() and status.st_mode & _OTHERS_WRITE:
        real.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
    for path in (real, *real.parents):
        status = path.stat()
        # Parents may be group-writable: their owner trusts the group (umask 002 is common).
        lax = _OTHERS_WRITE if path == real else stat.S_IWOTH
        if not _is_own(status) and (path == real or status.st_uid != _unmapped_user()):
            raise _unsafe(directory, f"{path} belongs to user {status.st_uid}")
        if status.st_mode & lax and not status.st_mode & stat.S_ISVTX:
            raise _unsafe(directory, f"{path} has mode {stat.S_IMODE(status.st_mode):o}, so others may write to it")


def read(path: Path, key: str) -> bytes | None:
    """Return the content of a file that ``write`` wrote with this key. Return None if it is missing or damaged.

    Raises:
        ConfigError: The file belongs to another user.
    """
    try:
        # O_NONBLOCK: opening a pipe would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not _is_own(status):
            raise _unsafe(path.parent, f"{path.name} in it belongs to user {status.st_uid}")
        # Other users may have changed a file that they can write. The caller writes a new one.
        if not stat.S_ISREG(status.st_mode) or status.st_mode & _OTHERS_WRITE:
            return None
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read()
    except OSError:
        return None
    finally:
        os.close(descriptor)
    content = data[: -_SEAL.size]
    return content if data[len(content) :] == _seal(content, key) else None


def write(path: Path, key: str, content: bytes) -> None:
    """Write a file atomically. Readers see the old or the complete new file.

    Raises:
        OSError: The file cannot be written. The old file is unchanged.
    """
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name[:60]}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content + _seal(content, key))
            os.fchmod(file.fileno(), 0o644)  # readable for users to whom the owner opens the directory
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _seal(content: bytes, key: str) -> bytes:
    digest = hashlib.sha256(hashlib.sha256(key.encode()).digest() + content).digest()
    return _SEAL.pack(_MARK, len(content), digest)


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


@functools.cache
def _unmapped_user() -> int | None:
    """Return the user id that represents the host's root in a user namespace without it (Apptainer), or None.

    Such a namespace typically shows this id as the owner of "/home".
    """
    try:
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if mapped == ["0", "0", str((1 << 32) - 1)] else overflow


def _unsafe(directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"compiled kernels are not loaded from {directory}: {why}. Code is loaded from files of this user (id "
        f"{os.geteuid()}) or root, which nobody else can write: set LLM_COMM_CACHE_DIR to another directory, or mend "
        "owner and mode of this one"
    )
