"""Mutants of set-up, watchdog and errors."""

from __future__ import annotations

from mutant import Mutant, python

WATCHDOG = "llm_comm/runtime/watchdog.py"
FAILURES = "llm_comm/runtime/failures.py"
STATUS = "llm_comm/runtime/status.py"
COMPARISON = "llm_comm/runtime/comparison.py"
RANK_NAMES = "llm_comm/runtime/rank_names.py"
OPTIONS = "llm_comm/options.py"
TOPOLOGY = "llm_comm/nodes/topology.py"
RENDEZVOUS = "llm_comm/runtime/rendezvous.py"
DESCRIPTORS = "llm_comm/runtime/descriptors.py"
CORE_HANDLE = "llm_comm/runtime/core_handle.py"
HIERARCHY = "llm_comm/nodes/hierarchy.py"
WORKSPACES = "llm_comm/runtime/workspaces.py"

OF_FAILURES = "tests/unit/test_failures.py"
OF_STATUS = "tests/unit/test_status.py"
OF_EXITS = "tests/unit/test_exits.py"
OF_COMPARISON = "tests/unit/test_comparison.py"
OF_RENDEZVOUS = "tests/emulated/test_rendezvous.py"
OF_DESCRIPTORS = "tests/unit/test_descriptors.py"
OF_WATCHDOG = "tests/emulated/test_watchdog.py"
OF_FORKS = "tests/emulated/test_lifetime.py -k forked"
OF_TURNS = "tests/emulated/test_concurrent_use.py -k nodes"

RUNTIME: tuple[Mutant, ...] = (
    # ---- Whose error it is ----
    python(
        "an own time-out hides the error of another rank",
        FAILURES,
        "if error is not None and error.kind != timeout), timed_out)",
        "if error is not None and error.kind != timeout and own is None), timed_out)",
        OF_FAILURES,
    ),
    python(
        "an error of another rank hides this one's",
        FAILURES,
        "if own is not None and own.kind != timeout:\n        return own",
        "",
        OF_FAILURES,
    ),
    python(
        "another's time-out hides this one's",
        FAILURES,
        "timed_out = own or next(iter(others), None)",
        "timed_out = next(iter(others), None) or own",
        OF_FAILURES,
    ),
    python(
        "an error of another rank is told as this one's",
        FAILURES,
        "return first if first is own else replace(",
        "return first if first is not None else replace(",
        OF_FAILURES,
    ),
    # ---- What is said of the ranks ----
    python(
        "a silent rank is called alive",
        FAILURES,
        "elif status.age_s > LIFE_S:",
        "elif status.age_s > LIFE_S * 1000:",
        OF_FAILURES,
    ),
    python("a rank that has exited is called silent", FAILURES, "elif status.has_exited:", "elif False:", OF_FAILURES),
    python(
        "the last call of a silent rank is taken for its last",
        FAILURES,
        "is_late = not state.is_closed and (status.has_exited or status.age_s > LIFE_S)",
        "is_late = not state.is_closed and status.has_exited",
        OF_FAILURES,
    ),
    python(
        "a closed communicator is called silent",
        FAILURES,
        "if state.is_closed:\n        facts",
        "if False:\n        facts",
        OF_FAILURES,
    ),
    python(
        "the error of a rank is left out",
        FAILURES,
        "if state.error is not None:\n        facts",
        "if False:\n        facts",
        OF_FAILURES,
    ),
    python(
        "operations are counted from 0",
        FAILURES,
        "operation {error.sequence + 1} of",
        "operation {error.sequence} of",
        OF_FAILURES,
        "tests/emulated/test_mismatch.py",
    ),
    python(
        "the comparison of calls is called a phase",
        FAILURES,
        "if error.phase < 0 else",
        "if error.phase < -1 else",
        OF_FAILURES,
    ),
    python("rows are left out of a call", FAILURES, 'if call.row else ""', 'if False else ""', OF_FAILURES),
    python("an exit is told as a time-out", FAILURES, 'if error.cause == "peer exited":', "if False:", OF_FAILURES),
    python(
        "concurrent use is told as a time-out",
        FAILURES,
        'elif error.cause == "concurrent use":',
        "elif False:",
        OF_FAILURES,
    ),
    # ---- Exits ----
    python(
        "a later exit takes the place of the first",
        WATCHDOG,
        "if not status.is_closed and self._first_exit is None:",
        "if not status.is_closed:",
        OF_EXITS,
    ),
    python(
        "the exit of a rank that had closed is an error",
        WATCHDOG,
        "if not status.is_closed and self._first_exit is None:",
        "if self._first_exit is None:",
        OF_EXITS,
    ),
    python(
        "who asks for less about exits turns it off",
        WATCHDOG,
        "self._fails_on_exit |= exits",
        "self._fails_on_exit = exits",
        OF_EXITS,
    ),
    python(
        "exits are errors for everybody",
        WATCHDOG,
        "if not self._fails_on_exit or self._first_exit is None:",
        "if self._first_exit is None:",
        OF_EXITS,
    ),
    python(
        "exits are errors at once",
        WATCHDOG,
        "return time.monotonic() - self._first_exit[1] > _EXIT_GRACE_S",
        "return True",
        OF_EXITS,
    ),
    python("kernels hear of an exit again and again", WATCHDOG, "self._exited.add(rank)", "pass", OF_EXITS),
    python("kernels do not hear of exits", WATCHDOG, "self._core.peer_exited(rank)", "pass", OF_EXITS),
    python(
        "the log names a lost rank again and again",
        WATCHDOG,
        "if rank in self._lost or not",
        "if not",
        OF_EXITS,
        OF_WATCHDOG,
    ),
    python("the log says nothing of exits", WATCHDOG, "(status.has_exited or is_silent)", "is_silent", OF_EXITS),
    python(
        "a rank that gives no sign of life is not said to be lost",
        WATCHDOG,
        "is_silent = life_s is not None and",
        "is_silent = False and life_s is not None and",
        OF_WATCHDOG + " -k test_a_rank_of_which_no_more_is_known",
    ),
    # ---- The error ----
    python(
        "a second error takes the place of the first",
        WATCHDOG,
        "if self._error is not None:\n                return\n            self._error = error",
        "self._error = error",
        OF_EXITS,
    ),
    python("an error leaves the kernels waiting", WATCHDOG, "self._core.abort()  # after", "pass  # after", OF_EXITS),
    python(
        "a callback that raises keeps the others from being called",
        WATCHDOG,
        "except BaseException:  # also SystemExit",
        "except OSError:  #",
        OF_WATCHDOG + " -k test_callbacks",
    ),
    python(
        "a late callback is not called",
        WATCHDOG,
        "callback(as_exception(self._error))\n\n    def stop",
        "pass\n\n    def stop",
        OF_WATCHDOG + " -k test_callbacks",
    ),
    python(
        "errors are not logged",
        WATCHDOG,
        "if not callbacks:\n            logger",
        "if False:\n            logger",
        OF_WATCHDOG + " -k test_errors_are_logged",
    ),
    python(
        "an error that is learnt is dropped",
        WATCHDOG,
        "or any(s.state and s.state.error for s in statuses)",
        "",
        OF_WATCHDOG + " -k test_all_ranks_are_told_without",
    ),
    # ---- Pages ----
    python(
        "a page that is being written is read",
        STATUS,
        "if length > 0 and zlib.crc32(text) == checksum:",
        "if length > 0:",
        OF_STATUS,
    ),
    python(
        "long texts do not fit",
        STATUS,
        "while len(json.dumps(text)) > most:",
        "while len(text) > most:",
        OF_STATUS,
    ),
    python(
        "a state is taken for open",
        STATUS,
        "return self.state is not None and self.state.is_closed",
        "return False",
        OF_STATUS,
        OF_WATCHDOG + " -k test_nothing_is_said",
    ),
    # ---- Set-up ----
    python(
        "ranks may differ in machine",
        TOPOLOGY,
        'places[i] if each["node"] is None',
        '"here" if each["node"] is None',
        "tests/unit/test_topology.py",
    ),
    python(
        "domains of other sizes are nodes",
        TOPOLOGY,
        "len(set(sizes.values())) == 1",
        "True",
        "tests/unit/test_topology.py",
    ),
    python(
        "an error of the network is the exit of a peer",
        "llm_comm/runtime/linked_status.py",
        "True if isinstance(error, ConnectionResetError | BrokenPipeError) else None",
        "True",
        "tests/emulated/test_domain.py",
    ),
    *(
        python(f"ranks may differ in {what}", COMPARISON, f'other["{what}"] for other', "0 for other", OF_COMPARISON)
        for what in ("version", "device", "limits", "config")
    ),
    *(
        python(
            f"ranks may differ in option {option}", OPTIONS, f'Alike.YES, "{why}', f'Alike.NO, "{why}', OF_COMPARISON
        )
        for option, why in (
            ("max_blocks", "grids and tiles"),
            ("deterministic", "with ``sum`` any"),
            ("sleep", "a rank would release"),
        )
    ),
    python(
        "an error shows all options",
        COMPARISON,
        "if any(value[key] != found[0][key] for value in found)",
        "if True",
        OF_COMPARISON,
    ),
    python(
        "errors name ranks by their index", RANK_NAMES, "rank {self.rank} (", "rank {self.global_rank} (", OF_FAILURES
    ),
    python(
        "ranks do not know each other's processes",
        TOPOLOGY,
        "rendezvous.names = rendezvous.names.with_processes(said)",
        "pass",
        "tests/emulated/test_options.py",
    ),
    python(
        "only neighbours are compared",
        COMPARISON,
        "if all(value == values[0] for value in values):",
        "if values[-1] == values[0]:",
        OF_COMPARISON,
    ),
    python(
        "ranks may share a GPU",
        COMPARISON,
        "for gpu, ranks in users.items() if len(ranks) > 1",
        "for gpu, ranks in users.items() if len(ranks) > 2",
        OF_COMPARISON,
    ),
    python(
        "ranks at different steps go on",
        RENDEZVOUS,
        "if any(message.step != what for message in said):",
        "if False:",
        OF_RENDEZVOUS + " -k test_ranks_at_different_steps",
    ),
    python(
        "descriptors of strangers are taken",
        DESCRIPTORS,
        "is_ours = hmac.compare_digest(secret, own_secret.encode())",
        "is_ours = True",
        OF_DESCRIPTORS,
    ),
    python(
        "another user's connection is read",
        DESCRIPTORS,
        "if user != self._user:",
        "if False:",
        OF_DESCRIPTORS,
    ),
    python(
        "a descriptor goes to another user",
        DESCRIPTORS,
        "if owner != self._user:",
        "if False:",
        OF_DESCRIPTORS,
    ),
    python(
        "a connection that was cut off counts as answered",
        DESCRIPTORS,
        "if answer == _ANSWER:",
        "if True:",
        OF_DESCRIPTORS,
    ),
    python(
        "silent connections are kept without end",
        DESCRIPTORS,
        "if len(self._silent) == _MAX_SILENT:",
        "if False:",
        OF_DESCRIPTORS,
    ),
    python(
        "a full queue ends the exchange",
        DESCRIPTORS,
        "except (BlockingIOError, BrokenPipeError, ConnectionResetError):",
        "except (BrokenPipeError, ConnectionResetError):",
        OF_DESCRIPTORS,
    ),
    python(
        "a failed step of another rank is passed over",
        RENDEZVOUS,
        "for rank, message in enumerate(said) if message.failure is not None}",
        "for rank, message in enumerate(said) if message.failure is not None and rank == self.rank}",
        OF_RENDEZVOUS + " -k test_failure_of_one_rank",
    ),
    python(
        "a step that failed elsewhere is not undone",
        RENDEZVOUS,
        "if undo is not None and failure is None:",
        "if False:",
        OF_RENDEZVOUS + " -k test_failure_of_one_rank",
    ),
    python(
        "a closed communicator goes on",
        CORE_HANDLE,
        "if not self.is_open:",
        "if False:",
        "tests/emulated/test_lifetime.py",
    ),
    # ---- Threads and forks ----
    python(
        "a forked child may use its parent's communicator", CORE_HANDLE, "handle.leave_to_parent()", "pass", OF_FORKS
    ),
    python(
        "a forked child destroys its parent's connections",
        CORE_HANDLE,
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))",
        "pass",
        f"{OF_FORKS} -k gloo",
    ),
    python("threads mix the phases of their calls over nodes", HIERARCHY, "with self.call_lock:", "if True:", OF_TURNS),
    python(
        "a communicator over nodes is closed beside a call",
        "llm_comm/nodes/group.py",
        "with self._hierarchy.call_lock:",
        "if True:",
        OF_TURNS,
    ),
    python(
        "a call over nodes that is interrupted ends nothing",
        HIERARCHY,
        'self._handle.fail(f"{type(error).__name__} interrupted {operation}")',
        "pass",
        OF_TURNS,
    ),
    python("a call over nodes is made within another one", HIERARCHY, "if self._is_in_call:", "if False:", OF_TURNS),
    python(
        "metrics are open to other machines",
        "llm_comm/integrations/prometheus.py",
        "addr=host",
        'addr="0.0.0.0"',
        "tests/unit/test_engine_statistics.py",
    ),
)
