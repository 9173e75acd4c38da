"""Mutants of code that is compiled at run time: its names, its files, and what ranks compare before they load it."""

from __future__ import annotations

from mutant import Mutant, cpp_edits, python

FILES = "llm_comm/dsl/compiler/code_files.py"
CACHE = "llm_comm/dsl/compiler/cache.py"
TEXT = "llm_comm/dsl/compiler/text.py"
SOURCE = "llm_comm/dsl/compiler/source.py"
KERNEL = "llm_comm/dsl/kernel.py"
EMULATED = "llm_comm/emulated.py"
REGISTRY = "llm_comm/registry.py"
COMPARISON = "llm_comm/runtime/comparison.py"
RENDEZVOUS = "llm_comm/runtime/rendezvous.py"
CHANNELS = "llm_comm/runtime/channels.py"

OF_CACHE = "tests/unit/test_dsl_cache.py"
OF_SOURCE = "tests/unit/test_dsl_source.py -k comments"
OF_KERNELS = "tests/emulated/test_dsl.py -k compile_the_same"

CODE: tuple[Mutant, ...] = (
    # ---- Files ----
    python(
        "a file that is not whole is loaded",
        FILES,
        "return content if data[len(content) :] == _seal(content, key) else None",
        "return content",
        f"{OF_CACHE} -k whole",
    ),
    python(
        "the seal is that of any kernel",
        FILES,
        "hashlib.sha256(key.encode()).digest() + content",
        "content",
        f"{OF_CACHE} -k whole",
    ),
    python(
        "files that others may write are loaded",
        FILES,
        "if not stat.S_ISREG(status.st_mode) or status.st_mode & _OTHERS_WRITE:",
        "if not stat.S_ISREG(status.st_mode):",
        f"{OF_CACHE} -k whole",
    ),
    python(
        "files of other users are loaded",
        FILES,
        'raise _unsafe(path.parent, f"{path.name} in it',
        'print(path.parent, f"{path.name} in it',
        f"{OF_CACHE} -k another_user",
    ),
    python(
        "directories of other users are taken",
        FILES,
        'raise _unsafe(directory, f"{path} belongs to',
        'print(directory, f"{path} belongs to',
        f"{OF_CACHE} -k another_user",
    ),
    python(
        "everybody may write above the kernels",
        FILES,
        "lax = _OTHERS_WRITE if path == real else stat.S_IWOTH",
        "lax = _OTHERS_WRITE if path == real else 0",
        f"{OF_CACHE} -k nobody_else",
    ),
    python("directories are made for all", FILES, "missing.mkdir(mode=0o700)", "missing.mkdir()", OF_CACHE),
    python(
        "a kernel that cannot be kept is lost",
        CACHE,
        "_warn_once(file.parent, str(error))\n            return made, None",
        "raise",
        f"{OF_CACHE} -k cannot_be_written",
    ),
    python("CXX is one word", EMULATED, "return shlex.split(chosen)", "return [chosen]", f"{OF_CACHE} -k command"),
    # ---- Names ----
    python(
        "a text of two lines is code",
        TEXT,
        "{text.encode('unicode_escape').decode()}",
        "{text}",
        OF_SOURCE,
    ),
    python("a comment ends with a backslash", TEXT, '.rstrip("\\\\ ")', "", OF_SOURCE),
    python(
        "names of kernels are not of ASCII", SOURCE, ", flags=re.ASCII)", ")", "tests/unit/test_dsl_source.py -k names"
    ),
    python("names of two lines are taken", REGISTRY, "and name.isprintable()", "", "tests/unit/test_dsl_builder.py"),
    # ---- What ranks compare ----
    *(
        python(f"ranks may differ in {what} of a kernel", KERNEL, f'"{what}": ', f'"{what}": None and ', OF_KERNELS)
        for what in ("program", "dtype", "max_bytes", "blocks", "threads", "digest")
    ),
    python(
        "a rank loads alone",
        KERNEL,
        'rendezvous.attempt(f"loading of program {self.program.name}", self._load)',
        "self._load()",
        OF_KERNELS,
        "tests/unit/test_collective_steps.py",
    ),
    python(
        "a rank has one error and others another",
        RENDEZVOUS,
        "and len(failures) == self.world_size and",
        "and",
        OF_KERNELS,
    ),
    python(
        "ranks may have different kernels for channels",
        CHANNELS,
        'check_alike(rendezvous.names, "pass different kernel code for channels",',
        'check_alike(rendezvous.names, "pass different kernel code for channels", [0]) if 1 else check_alike("",',
        "tests/emulated/test_channels.py -k different",
    ),
    python(
        "ranks may have different algorithms",
        COMPARISON,
        '[other["algorithms"] for other in everyone]',
        "[0]",
        "tests/unit/test_comparison.py",
    ),
    cpp_edits(
        "a load that fails takes no number",
        [
            (
                "csrc/host/programs.h",
                "const uint32_t number = take_number(title);",
                "if (WITHOUT) load();\n    const uint32_t number = take_number(title);",
            )
        ],
        OF_KERNELS,
    ),
)
