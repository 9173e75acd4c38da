"""Files of code that the processes of a user share: whole, or not used; and never those of another user.

A file is written beside its place and renamed, and ends in a seal: the length and the digest of its content. A reader
notices a file that a full disk, a lost power supply or an interrupted copy has cut short.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import struct
import tempfile
from pathlib import Path

from llm_comm.errors import ConfigError

#: Mark, length and digest. Loaders of shared libraries ignore what follows the sections.
_SEAL = struct.Struct("<16sQ32s")
_MARK = b"llm_comm code 01"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def prepare(directory: Path) -> None:
    """Makes a directory for code, and all above it that are missing, for this user alone.

    A directory of this user that others may write to is closed to them: each file in it is looked at by itself.

    Raises:
        ConfigError: Other users could exchange what is in it: the directory or one above it belongs to another user, or
            everybody may write to it without its being sticky.
        OSError: It cannot be made.
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
        # Who lets a group write to a directory above this one trusts the group.
        lax = _OTHERS_WRITE if path == real else stat.S_IWOTH
        if not _is_own(status):
            raise _unsafe(directory, f"{path} belongs to user {status.st_uid}")
        if status.st_mode & lax and not status.st_mode & stat.S_ISVTX:
            raise _unsafe(directory, f"{path} has mode {stat.S_IMODE(status.st_mode):o}, so others may write to it")


def read(path: Path, key: str) -> bytes | None:
    """The content of a file that ``write`` has written with the same key; None where there is none that is whole.

    Raises:
        ConfigError: The file belongs to another user.
    """
    try:
        # A pipe does not block, and a link is not followed: neither is a file of `write`.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not _is_own(status):
            raise _unsafe(path.parent, f"{path.name} in it belongs to user {status.st_uid}")
        # What others may have changed is not used: it is made anew.
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
    """Puts a file in its place: others see the one before or all of this one.

    Raises:
        OSError: It cannot be written.
    """
    descriptor, beside = tempfile.mkstemp(prefix=f".{path.name[:60]}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content + _seal(content, key))
            os.fchmod(file.fileno(), 0o644)  # who opens the directory to readers means its files
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


def _unsafe(directory: Path, why: str) -> ConfigError:
    return ConfigError(
        f"compiled kernels are not loaded from {directory}: {why}. Code is loaded from files of this user (id "
        f"{os.geteuid()}) or root, which nobody else can write: set LLM_COMM_CACHE_DIR to another directory, or mend "
        "owner and mode of this one"
    )
