"""Options: where they come from, which wins, and that a wrong one is named together with what is valid."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import pickle
import re
from pathlib import Path

import pytest

from llm_comm import Config, ConfigError
from llm_comm.config import MULTICAST_OFF_VARIABLES, EngineOptions
from llm_comm.options import OPTIONS, parse_size

# For every option: a value of its own for the file, the environment (as text and as a value) and Python.
VALUES: dict[str, tuple[object, str, object, object]] = {
    "enable": (False, "0", False, False),
    "multicast": ("0", "1", "1", "0"),
    "sum": ("any", "any", "any", "any"),
    "wire": ("fp8", "int8", "int8", "fp8"),
    "wire_min_bytes": (2 << 20, "64K", 64 << 10, 0),
    "timeout_s": (1.5, "2.5", 2.5, 3),
    "log": ("debug", "info", "info", "error"),
    "workspace_bytes": (1 << 20, str(2 << 20), 2 << 20, 3 << 20),
    "max_message_bytes": (1, "2", 2, 0),
    "max_blocks": (8, "16", 16, 65535),
    "algorithm": ("one_shot", "two_shot", "two_shot", "one_shot"),
    "pdl": (False, "off", False, False),
    "fuse": (False, "0", False, False),
    "fuse_linear": (True, "auto", "auto", False),
    "fuse_experts": (False, "1", True, "auto"),
    "tune_at_start": (5, "0", 0.0, 2.5),
    "all_gather": (False, "0", False, False),
    "reduce_scatter": (False, "no", False, False),
    "deterministic": (True, "1", True, True),
    "batch_invariant_norm": ("llm_comm", "llm_comm", "llm_comm", "llm_comm"),
    "batch_invariant_linear": ("llm_comm", "llm_comm", "llm_comm", "llm_comm"),
    "untested": (True, "1", True, True),
    "debug": (True, "off", False, True),
    "share_gpu": (True, "1", True, True),
    "sleep": (True, "on", True, True),
    "stats": (True, "9400", 9400, 65535),
    "stats_host": ("::1", "0.0.0.0", "0.0.0.0", "a-host"),
    "nvtx": (True, "on", True, True),
    "multi_node": (True, "1", True, True),
    "node": ("a", "b", "b", "node 3"),
    "node_transport": ("gloo", "ucx", "ucx", "nccl"),
    "table": ("a.yaml", "b.yaml", "b.yaml", "c.yaml"),
    "dsl": ("a.b:c", "a:b,c.d:e", "a:b,c.d:e", "f:g, h:i"),
    "dsl_max_bytes": (1, "2M", 2 << 20, 4 << 30),
}

INVALID: list[tuple[str, object, str]] = [
    ("enable", 1, "true or false"),
    ("enable", "yes", "true or false"),
    ("multicast", "2", "'auto' or '0' or '1'"),
    ("multicast", 0, "'auto' or '0' or '1'"),
    ("sum", "order", "'rank_order' or 'any'"),
    ("wire", "fp4", "'none' or 'fp8' or 'int8'"),
    ("wire", None, "'none' or 'fp8' or 'int8'"),
    ("wire", False, "'none' or 'fp8' or 'int8'"),
    ("wire_min_bytes", -1, "bytes >= 0 and below 8 EiB"),
    ("wire_min_bytes", True, "bytes >= 0 and below 8 EiB"),
    ("wire_min_bytes", None, "bytes >= 0 and below 8 EiB"),
    ("wire_min_bytes", 1 << 63, "bytes >= 0 and below 8 EiB"),
    ("timeout_s", 0, "a number of seconds above 0 and below 1000000"),
    ("timeout_s", -1.0, "a number of seconds above 0 and below 1000000"),
    ("timeout_s", float("nan"), "a number of seconds above 0 and below 1000000"),
    ("timeout_s", float("inf"), "a number of seconds above 0 and below 1000000"),
    ("timeout_s", 1e6, "a number of seconds above 0 and below 1000000"),
    ("timeout_s", True, "a number of seconds above 0 and below 1000000"),
    ("log", "loud", "'debug' or 'info' or 'warning' or 'error'"),
    ("workspace_bytes", (1 << 20) - 1, "1 MiB to 4 GiB"),
    ("workspace_bytes", (4 << 30) + 1, "1 MiB to 4 GiB"),
    ("workspace_bytes", 2e6, "1 MiB to 4 GiB"),
    ("max_message_bytes", -1, "bytes >= 0"),
    ("max_message_bytes", 1 << 63, "below 8 EiB"),
    ("max_message_bytes", True, "bytes >= 0"),
    ("max_blocks", 7, "8 to 65535"),
    ("max_blocks", 1 << 16, "8 to 65535"),
    ("max_blocks", True, "8 to 65535"),
    ("node_transport", "mpi", "'auto' or 'nccl' or 'gloo' or 'ucx'"),
    ("algorithm", "ring", "'auto' or 'one_shot' or 'two_shot'"),
    ("algorithm", None, "'auto' or 'one_shot' or 'two_shot'"),
    ("algorithm", "dsl:", "or dsl:NAME for a program of option dsl"),
    ("algorithm", "dsl:a b", "or dsl:NAME for a program of option dsl"),
    ("pdl", 0, "true or false"),
    ("fuse", None, "true or false"),
    ("fuse_linear", 1, "'auto', true or false"),
    ("fuse_experts", 1, "'auto', true or false"),
    ("tune_at_start", -1, "'auto', or seconds from 0 to 3600"),
    ("tune_at_start", True, "'auto', or seconds from 0 to 3600"),
    ("fuse_linear", "1", "'auto', true or false"),
    ("all_gather", "yes", "true or false"),
    ("reduce_scatter", 0, "true or false"),
    ("deterministic", 1, "true or false"),
    ("batch_invariant_norm", True, "'engine' or 'llm_comm'"),
    ("batch_invariant_norm", "vllm", "'engine' or 'llm_comm'"),
    ("batch_invariant_linear", False, "'engine' or 'llm_comm'"),
    ("debug", 1, "true or false"),
    ("share_gpu", 1, "true or false"),
    ("stats", 1, "true or false (environment: 1 or 0), or a port, 1024 to 65535"),
    ("stats", 65536, "or a port, 1024 to 65535"),
    ("stats_host", "", "an address or host name"),
    ("table", 7, "path of a tuning table"),
    ("dsl", "", "programs as MODULE:PROGRAM"),
    ("dsl", "a.b", "programs as MODULE:PROGRAM"),
    ("dsl", "a:b,", "programs as MODULE:PROGRAM"),
    ("dsl", "a:b c:d", "programs as MODULE:PROGRAM"),
    ("dsl", ["a:b"], "programs as MODULE:PROGRAM"),
    ("dsl_max_bytes", 0, "bytes, 1 to 4 GiB"),
    ("dsl_max_bytes", (4 << 30) + 1, "bytes, 1 to 4 GiB"),
    ("dsl_max_bytes", None, "bytes, 1 to 4 GiB"),
]

INVALID_TEXTS = [
    ("enable", "maybe", "true or false"),
    ("multicast", "on", "'auto' or '0' or '1'"),
    ("wire", "FP8", "'none' or 'fp8' or 'int8'"),
    ("wire_min_bytes", "1 MB/s", "bytes >= 0 and below 8 EiB"),
    ("timeout_s", "soon", "a number of seconds above 0 and below 1000000"),
    ("timeout_s", "-3", "a number of seconds above 0 and below 1000000"),
    ("log", "LOUD", "'debug' or 'info' or 'warning' or 'error'"),
    ("workspace_bytes", "1e9", "1 MiB to 4 GiB"),
    ("max_message_bytes", "8Q", "bytes >= 0"),
    ("max_message_bytes", "-1", "bytes >= 0"),
    ("max_blocks", "all", "8 to 65535"),
    ("algorithm", "ONE_SHOT", "'auto' or 'one_shot' or 'two_shot'"),
    ("pdl", "2", "true or false"),
    ("fuse", "sometimes", "true or false"),
    ("fuse_linear", "sometimes", "'auto', true or false"),
    ("tune_at_start", "long", "'auto', or seconds from 0 to 3600"),
    ("tune_at_start", "nan", "'auto', or seconds from 0 to 3600"),
    ("all_gather", "dp", "true or false"),
    ("reduce_scatter", "never", "true or false"),
    ("deterministic", "always", "true or false"),
    ("batch_invariant_norm", "1", "'engine' or 'llm_comm'"),
    ("debug", "verbose", "true or false"),
    ("share_gpu", "all", "true or false"),
    ("stats", "01", "or a port, 1024 to 65535"),
    ("stats", "443", "or a port, 1024 to 65535"),
    ("dsl", "a", "programs as MODULE:PROGRAM"),
    ("dsl_max_bytes", "0", "bytes, 1 to 4 GiB"),
]


REPOSITORY = Path(__file__).parents[2]


def variable(option: str) -> str:
    return f"LLM_COMM_{option.upper()}"


def file_environment(path: Path, text: str) -> dict[str, str]:
    path.write_text(text, encoding="utf-8")
    return {"LLM_COMM_CONFIG": str(path)}


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*map(variable, OPTIONS), "LLM_COMM_CONFIG", *MULTICAST_OFF_VARIABLES]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def test_every_option_is_tested_here() -> None:
    assert list(OPTIONS) == list(VALUES)
    for kind, of_engines in ((Config, {False}), (EngineOptions, {False, True})):
        fields = {field.name for field in dataclasses.fields(kind)} - {"origins"}
        assert fields == {name for name, option in OPTIONS.items() if option.of_engines in of_engines}


def test_defaults() -> None:
    assert Config.load(environ={}) == Config()
    assert Config.load(environ={}).origins == {}


@pytest.mark.parametrize("option", VALUES)
def test_file_then_environment_then_python(option: str, file: Path) -> None:
    in_file, text, in_environment, in_python = VALUES[option]
    assert in_file != getattr(EngineOptions(), option)
    environ = file_environment(file, f"{option}: {in_file!r}\n")
    loaded = EngineOptions.load(environ)
    assert (getattr(loaded, option), loaded.origins[option]) == (in_file, f"{file}:1")

    environ[variable(option)] = text
    loaded = EngineOptions.load(environ)
    assert (getattr(loaded, option), loaded.origins[option]) == (in_environment, variable(option))

    loaded = EngineOptions.load(environ, **{option: in_python})
    assert (getattr(loaded, option), loaded.origins[option]) == (in_python, "Python")


@pytest.mark.parametrize("option", VALUES)
def test_the_constructor_looks_in_all_four_places(option: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_file, text, in_environment, in_python = VALUES[option]

    def found(**given: object) -> tuple[object, str]:
        config = EngineOptions(**given)
        return getattr(config, option), config.origins[option]

    for name, value in file_environment(file, f"{option}: {in_file!r}\n").items():
        monkeypatch.setenv(name, value)
    assert found() == (in_file, f"{file}:1")
    monkeypatch.setenv(variable(option), text)
    assert found() == (in_environment, variable(option))
    assert found(**{option: in_python}) == (in_python, "Python")
    default = getattr(EngineOptions.load({}), option)
    assert found(**{option: default}) == (default, "Python"), "what is given wins, also if it equals the default"
    assert EngineOptions.load({}).origins == {}


def test_sources_are_merged(file: Path) -> None:
    environ = {**file_environment(file, "timeout_s: 5\npdl: false\n"), "LLM_COMM_LOG": "debug"}
    assert Config.load(environ, algorithm="one_shot") == Config(
        timeout_s=5, pdl=False, log="debug", algorithm="one_shot"
    )


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_COMM_TIMEOUT_S", "7")
    assert Config.load().timeout_s == Config(pdl=False).timeout_s == 7
    assert Config.load({}).timeout_s == 30


def test_copies_do_not_read_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(timeout_s=5)
    monkeypatch.setenv("LLM_COMM_ALGORITHM", "two_shot")
    monkeypatch.setenv("LLM_COMM_MISSPELT", "1")
    same = [
        config.replace(),
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        dataclasses.replace(config),
        eval(repr(config)),
    ]
    for other in same:
        assert (other, hash(other), other.origins) == (config, hash(config), {"timeout_s": "Python"})
    for other in (config.replace(pdl=False), dataclasses.replace(config, pdl=False)):
        assert (other.algorithm, other.origins) == ("auto", {"timeout_s": "Python", "pdl": "Python"})


def test_origins_are_not_compared() -> None:
    assert Config(log="debug") == Config.load({"LLM_COMM_LOG": "debug"})
    assert len({Config(log="debug"), Config.load({"LLM_COMM_LOG": "debug"}), Config()}) == 2


def test_the_signature_tells_options_and_defaults() -> None:
    parameters = inspect.signature(Config).parameters
    assert list(parameters) == [*(name for name, option in OPTIONS.items() if not option.of_engines), "origins"]
    assert parameters["timeout_s"].default == 30


def test_a_communicator_takes_no_options_of_engines(file: Path) -> None:
    """Those of the file and the environment, which engines on the same machine read, are left out."""
    for make in (Config, lambda **options: Config.load({}, **options), Config().replace):
        with pytest.raises(
            ConfigError, match=r"only engine integrations read option fuse: .* set LLM_COMM_FUSE for the"
        ):
            make(fuse=False)
    environ = {**file_environment(file, "sleep: true\ntimeout_s: 5"), "LLM_COMM_FUSE": "0"}
    assert Config.load(environ) == Config(timeout_s=5)
    assert Config.load(environ).origins.keys() == {"timeout_s"}
    assert EngineOptions.load(environ) == EngineOptions(timeout_s=5, sleep=True, fuse=False)
    assert isinstance(EngineOptions.load(environ).replace(pdl=False), EngineOptions)


def test_options_are_given_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Config takes options by name, as timeout_s=5; found 5 without"):
        Config(5)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"takes a mapping of variables, .* found 'a\.yaml'"):
        Config.load("a.yaml")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["32M", "32m", "32MB", "32MiB", "32 MiB", "32768K", "33554432"])
@pytest.mark.parametrize("option", ["workspace_bytes", "max_message_bytes", "wire_min_bytes"])
def test_sizes(option: str, text: str, file: Path) -> None:
    for environ in ({variable(option): text}, file_environment(file, f"{option}: {text}")):
        assert getattr(Config.load(environ), option) == 32 << 20


@pytest.mark.parametrize("text", ["", "1e9", "64Q", "1.5M", "-1", "-64M", "M"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: write 512, 64K or 8M"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1e9", "64Q", "1.5M", "-1", "M"])
def test_a_size_in_a_file_that_is_none(text: str, file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        Config.load(file_environment(file, f"workspace_bytes: '{text}'"))
    assert f"config.yaml:1: workspace_bytes: '{text}' is not allowed; valid: bytes, 1 MiB to 4 GiB" in str(error.value)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("on", True), ("YES", True), ("False", False), ("no", False)])
def test_spellings_of_booleans(text: str, value: bool) -> None:
    assert EngineOptions.load({"LLM_COMM_ENABLE": text}).enable is value


@pytest.mark.parametrize("value", ["0", "1"])
def test_multicast_in_a_file_may_be_a_number(value: str, file: Path) -> None:
    assert Config.load(file_environment(file, f"multicast: {value}")).multicast == value


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("none", "none"),
        ("fp8", "fp8"),
        ("no", "option wire is False"),
        ("8", "option wire is 8 "),
        ("", "option wire is None"),
        ("fp16", "option wire is 'fp16'"),
    ],
)
def test_what_yaml_makes_of_wire(content: str, found: str, file: Path) -> None:
    environ = file_environment(file, f"wire: {content}\n")
    if "is" not in found:
        assert Config.load(environ).wire == found
        return
    with pytest.raises(ConfigError, match=rf"{found}.*config\.yaml:1\); valid: 'none' or 'fp8' or 'int8'"):
        Config.load(environ)


def test_quantized_sums_are_not_deterministic(file: Path) -> None:
    environ = {**file_environment(file, "deterministic: true\n"), "LLM_COMM_WIRE": "fp8"}
    with pytest.raises(ConfigError) as error:
        Config.load(environ)
    assert str(error.value) == (
        f"option wire is 'fp8' (LLM_COMM_WIRE), and deterministic is on ({file}:1): quantized sums of a token depend "
        "on its batch. Set wire to 'none', or deterministic to false"
    )
    assert Config.load(environ, deterministic=False).wire == "fp8"
    with pytest.raises(ConfigError, match=r"option wire is 'int8' \(Python\), and deterministic is on \(Python\)"):
        Config.load({}, wire="int8").replace(deterministic=True)


@pytest.mark.parametrize("content", ["", "# nothing\n"])
def test_empty_file(content: str, file: Path) -> None:
    assert Config.load(file_environment(file, content)) == Config()


@pytest.mark.parametrize(("option", "value", "valid"), INVALID)
def test_invalid_value_in_python(option: str, value: object, valid: str) -> None:
    for make in (EngineOptions, lambda **options: EngineOptions.load({}, **options), EngineOptions().replace):
        with pytest.raises(ConfigError) as error:
            make(**{option: value})
        assert f"option {option} is {value!r} (Python); valid: " in str(error.value)
        assert valid in str(error.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("timeout_s", 1e-9),
        ("timeout_s", 999_999.0),
        ("workspace_bytes", 1 << 20),
        ("workspace_bytes", 4 << 30),
        ("max_message_bytes", 0),
        ("max_message_bytes", (1 << 63) - 1),
    ],
)
def test_the_ends_of_what_is_valid(option: str, value: object) -> None:
    assert getattr(Config.load({}, **{option: value}), option) == value


def test_the_longest_names_of_programs() -> None:
    name, listed = "dsl:" + "a" * 196, "a:" + "b" * 998
    config = Config.load({}, algorithm=name, dsl=listed)
    assert (config.algorithm, config.dsl) == (name, listed)
    with pytest.raises(ConfigError, match="or dsl:NAME for a program of option dsl"):
        Config.load({}, algorithm=name + "a")
    with pytest.raises(ConfigError, match="up to 1000 characters"):
        Config.load({}, dsl=listed + "b")


def test_the_longest_path() -> None:
    assert Config.load({}, table="x" * 4096).table == "x" * 4096
    with pytest.raises(ConfigError, match="path of a tuning table"):
        Config.load({}, table="x" * 4097)


@pytest.mark.parametrize(("option", "text", "valid"), INVALID_TEXTS)
def test_invalid_value_in_the_environment(option: str, text: str, valid: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.load({variable(option): text})
    assert variable(option) in str(error.value)
    assert text in str(error.value)
    assert valid in str(error.value)


def test_invalid_value_in_a_file(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"timeout_s is 'soon' .*config\.yaml:1\); valid: a number"):
        Config.load(file_environment(file, "timeout_s: soon"))


def test_unknown_option(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'timeout'.*config\.yaml.*valid: enable, .*timeout_s"):
        Config.load(file_environment(file, "timeout: 3"))
    for make in (Config, lambda **options: Config.load({}, **options), Config().replace):
        with pytest.raises(ConfigError, match=r"unknown option 'timeout' \(Python\) \(did you mean timeout_s\?\); "):
            make(timeout=3)


def test_unknown_option_is_guessed(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'algoritm' .*config\.yaml:1\) \(did you mean algorithm\?\)"):
        Config.load(file_environment(file, "algoritm: two_shot"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("LLM_COMM_WORKSPACE", "LLM_COMM_WORKSPACE_BYTES"),
        ("LLM_COMM_ALGORITM", "LLM_COMM_ALGORITHM"),
        ("LLM_COMM_timeout_s", "LLM_COMM_TIMEOUT_S"),
        ("LLM_COMM_CONFIGS", "LLM_COMM_CONFIG"),
    ],
)
def test_unknown_variable(name: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.load({"LLM_COMM_LOG": "info", name: "1"})
    assert f"unknown variable {name} (did you mean {meant}?): unset it; valid: LLM_COMM_ENABLE, " in str(error.value)
    assert all(variable(option) in str(error.value) for option in (*OPTIONS, "config"))


def test_unknown_variable_that_resembles_none() -> None:
    with pytest.raises(ConfigError, match="unknown variable LLM_COMM_XYZ: unset it; valid: "):
        Config.load({"LLM_COMM_XYZ": "1"})


@pytest.mark.parametrize(
    "name",
    [
        "LLM_COMM_CUDA",
        "LLM_COMM_NCCL_DEBUG",
        "LLM_COMM_NCCL_LIBRARY",
        "LLM_COMM_VERSION",
        "LLM_COMM_CACHE_DIR",
        "LLM_COMM_TABLE_DIR",
        "LLM_COMM_TEST_ANYTHING",
        "LLM_COMM_BENCH_ANYTHING",
        # Kubernetes, for a Service "llm-comm" and for "llm-comm-web"
        "LLM_COMM_SERVICE_HOST",
        "LLM_COMM_SERVICE_PORT_HTTP",
        "LLM_COMM_PORT",
        "LLM_COMM_PORT_8000_TCP_ADDR",
        "LLM_COMM_WEB_SERVICE_PORT",
        "LLM_COMM_WEB_PORT_8000_TCP",
        # other projects
        "LLM_COMMUNITY",
        "MY_LLM_COMM_SETTING",
    ],
)
def test_variables_that_are_no_options(name: str) -> None:
    assert Config.load({name: "8"}) == Config()


def test_variables_of_this_project_are_known() -> None:
    """What a source of this repository names can be set without ending the start of whoever sets it."""
    names = {
        node.value
        for directory in ("llm_comm", "bench_serving", "tests/gpu", "tests/integrations", "tests/deterministic")
        for path in (REPOSITORY / directory).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    # The scenarios of engines misspell one on purpose.
    names = {name for name in names if re.fullmatch(r"LLM_COMM_[A-Z_]*[A-Z]", name)} - {"LLM_COMM_ALGORITM"}
    cmake = (REPOSITORY / "CMakeLists.txt").read_text(encoding="utf-8")
    build = set(re.findall(r"^(?:option\(|set\((?=\w+ \w+ CACHE))(LLM_COMM_\w+)", cmake, flags=re.MULTILINE))
    assert names >= {"LLM_COMM_ENABLE", "LLM_COMM_TEST_MEETING_POINT"}
    assert build >= {"LLM_COMM_CUDA", "LLM_COMM_WERROR"}
    assert [name for name in names | build if "unknown variable" in complaint({name: "1"})] == []


def complaint(environ: dict[str, str]) -> str:
    try:
        Config.load(environ)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [*map(variable, VALUES), "LLM_COMM_CONFIG", "LLM_COMM_MISSPELT"])
def test_empty_variable_is_not_set(name: str, file: Path) -> None:
    loaded = Config.load({**file_environment(file, "timeout_s: 5\ntable: a.yaml"), name: ""})
    expected = Config() if name == "LLM_COMM_CONFIG" else Config(timeout_s=5, table="a.yaml")
    assert (loaded, len(loaded.origins)) == (expected, len(expected.origins))


def test_what_the_constructor_is_given_was_chosen() -> None:
    assert Config(log="debug", table="a.yaml").origins == {"log": "Python", "table": "Python"}


@pytest.mark.parametrize(
    ("content", "found"),
    [(b"- a\n- b\n", "found list"), (b"word", "found str"), (b"a: [", "cannot read"), (b"log: \xff", "cannot read")],
)
def test_unusable_file(content: bytes, found: str, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=found) as error:
        Config.load({"LLM_COMM_CONFIG": str(file)})
    assert str(file) in str(error.value)


def test_missing_file(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot read the configuration: FileNotFoundError: No such"):
        Config.load({"LLM_COMM_CONFIG": str(file)})


def test_replace_leaves_the_original() -> None:
    config = Config.load({"LLM_COMM_TIMEOUT_S": "7"})
    changed = config.replace(timeout_s=8.0)
    assert (config.timeout_s, changed.timeout_s) == (7, 8)
    assert (config.origins["timeout_s"], changed.origins["timeout_s"]) == ("LLM_COMM_TIMEOUT_S", "Python")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.timeout_s = 9.0  # type: ignore[misc]
