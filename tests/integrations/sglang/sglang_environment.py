"""What of SGLang the contract tests install: its distributed package and its plugins, and what those import."""

from engine_environment import Engine

# Imported by almost every module of SGLang; of its 200 MB no test uses any.
_ANYTHING = '''"""Stands in for a package that the modules at hand import and decorate with, but that no test calls."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Anything(ModuleType):
    """A module, decorator or constant, whatever it is taken for."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getitem__(self, _):
        return self

    def __mro_entries__(self, _):
        return ()


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, _Finder, is_package=True) if name.startswith(__name__ + ".") else None

    @staticmethod
    def create_module(spec):
        return _Anything(spec.name)

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.append(_Finder)
sys.modules[__name__].__class__ = _Anything
'''

#: The oldest and the newest supported.
VERSIONS = ("0.5.17", "0.5.23")
SGLANG = Engine(
    "sglang",
    needed=(
        "aiohttp", "apache-tvm-ffi", "ipython", "msgspec", "orjson", "pillow", "psutil", "pybase64", "pydantic",
        "pyzmq", "requests", "tqdm", "uvicorn", "fastapi",
    ),
    # SGLang's own code is as published.
    stand_ins={"triton/__init__.py": _ANYTHING, "torchvision/__init__.py": _ANYTHING},
    # Modules look for the directories of the kernels' sources when they are imported.
    sources=("*.py", "sglang/kernels/jit/csrc", "sglang/kernels/jit/include"),
)  # fmt: skip
