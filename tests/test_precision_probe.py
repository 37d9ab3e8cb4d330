"""What a child process says about bfloat16, what is remembered of it, and the probe that it runs."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedpop import files, precision, precision_probe
from fedpop.precision import ProbeVerdict, probed  # as it is before the tests' own fixture replaces it
from tests.helpers import generator

CPU = torch.device("cpu")
GOOD = 'print(\'{"agrees": true, "error": 0.003, "times_faster": 2.5}\')'


class Children:
    """Stands in for the probe, and counts how often it is started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = 0
        self.script = folder / "probe.py"
        ask = precision.ask_child

        def counted() -> ProbeVerdict | None:
            self.started += 1
            return ask()

        monkeypatch.setattr(precision, "probed", probed)
        monkeypatch.setattr(precision, "ask_child", counted)
        monkeypatch.setattr(precision, "PROBE", self.script)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        self.say(GOOD)

    def say(self, code: str) -> None:
        self.script.write_text(code)

    def files(self) -> list[Path]:
        return sorted((self.script.parent / "cache" / "fedpop").iterdir())


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(tmp_path, monkeypatch)


def another_process() -> None:
    """Forget what this process remembers by itself."""
    precision._known.cache_clear()


# --- what the probe says ------------------------------------------------------------------------------


def said(agrees: Any, times: Any) -> str:
    return f"import json; print(json.dumps({{'agrees': {agrees}, 'times_faster': {times}}}))"


@pytest.mark.parametrize(
    ("code", "answer", "why"),
    [
        (GOOD, "bfloat16", "agrees with float32 and is 2.5 times as fast"),
        (said(True, 1.3), "bfloat16", "1.3 times"),
        ("import os; os.abort()", "float32", "died"),
        ("import sys; sys.exit(3)", "float32", "exit status 3"),
        (GOOD + "; import os; os.abort()", "float32", "died"),
        (said(False, 2.5), "float32", "does not agree"),
        (said(None, 2.5), "float32", "does not agree"),
        (said("'yes'", 2.5), "float32", "does not agree"),
        (said(True, 1.29), "float32", "not 1.3"),
        (said(None, 0.06), "float32", "0.06 times"),
        (said(True, "float('nan')"), "float32", "nan times"),
        ("", "float32", "nothing that can be read"),
        ("print('Welcome!')", "float32", "nothing that can be read"),
        ("print('[1, 2]')", "float32", "nothing that can be read"),
        ("print('{\"agrees\": true}')", "float32", "nothing that can be read"),
        (said(True, 10**400), "float32", "nothing that can be read"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\x00')", "float32", "nothing that can be read"),
    ],
)
def test_only_a_child_that_agrees_and_is_clearly_faster_means_bfloat16(
    children: Children, code: str, answer: str, why: str
) -> None:
    children.say(code)
    assert precision.choose("auto", CPU, worth=True) == answer
    assert why in probed().why
    another_process()
    assert precision.choose("auto", CPU, worth=True) == answer
    assert children.started == 1  # a death is remembered too


def test_silence_means_float32(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    children.say("import time; time.sleep(600)")
    monkeypatch.setattr(precision, "LONGEST_PROBE", 0.2)
    assert precision.choose("auto", CPU, worth=True) == "float32"
    assert "said nothing in 0.2 seconds" in probed().why


def test_a_child_has_no_input_to_wait_for_and_sees_no_module_of_the_package(children: Children) -> None:
    (children.script.parent / "keys.py").write_text("")
    checks = "import sys, importlib.util as u; assert sys.stdin.read() == '' and not u.find_spec('keys'); "
    children.say(checks + GOOD)
    assert precision.choose("auto", CPU, worth=True) == "bfloat16"


@pytest.mark.parametrize("executable", ["", "/nowhere/python"])
def test_no_interpreter_means_float32_for_now(
    children: Children, monkeypatch: pytest.MonkeyPatch, executable: str
) -> None:
    """That says nothing of the processor, so it is not remembered."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", executable)
        assert precision.choose("auto", CPU, worth=True) == "float32"
    another_process()
    assert precision.choose("auto", CPU, worth=True) == "bfloat16"


def test_an_application_is_not_started_again_by_itself(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert precision.choose("auto", CPU, worth=True) == "float32"


def test_a_probe_that_is_not_there_means_float32(children: Children) -> None:
    children.script.unlink()
    assert precision.choose("auto", CPU, worth=True) == "float32"
    assert children.started == 0


# --- what is remembered -------------------------------------------------------------------------------


def test_a_verdict_is_remembered(children: Children) -> None:
    for _ in range(3):
        assert precision.choose("auto", CPU, worth=True) == "bfloat16"
        another_process()
    assert children.started == 1
    (file,) = children.files()
    saved = json.loads(file.read_text())
    assert saved["bfloat16"] is True
    assert saved["machine"]["torch"] == torch.__version__


@pytest.mark.parametrize("change", ["host", "torch", "processor", "probe", *precision.VARIABLES])
def test_another_machine_is_asked_by_itself(
    children: Children, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    assert precision.choose("auto", CPU, worth=True) == "bfloat16"
    with monkeypatch.context() as patch:
        if change == "host":
            patch.setattr("platform.node", lambda: "elsewhere")
        elif change == "torch":
            patch.setattr(torch, "__version__", "2.99")
        elif change == "processor":
            patch.setattr(precision, "processor", lambda: "another one")
        elif change == "probe":
            children.say(GOOD + "  # and something new")
        else:
            patch.setenv(change, "SSE41")
        assert precision.choose("auto", CPU, worth=True) == "bfloat16"
        assert children.started == 2
    children.say(GOOD)
    another_process()
    assert precision.choose("auto", CPU, worth=True) == "bfloat16"
    assert children.started == 2  # the first answer is still there
    assert len(children.files()) == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"null", b"[]", b'{"bfloat16": 1}', b'{"why": "?"}', b"\xff\xfe"]
)
def test_a_corrupt_file_is_written_anew(children: Children, content: bytes) -> None:
    assert precision.choose("auto", CPU, worth=True) == "bfloat16"
    (file,) = children.files()
    file.write_bytes(content)
    for _ in range(2):
        another_process()
        assert precision.choose("auto", CPU, worth=True) == "bfloat16"
    assert children.started == 2


def test_where_nothing_can_be_written_one_child_per_process_is_enough(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(3):
        assert precision.choose("auto", CPU, worth=True) == "bfloat16"
    assert children.started == 1


def test_a_folder_where_the_file_should_be_is_no_error(children: Children) -> None:
    folder = files.cache_folder()
    assert folder is not None
    precision.Machine.here().file(folder).mkdir(parents=True)
    assert precision.choose("auto", CPU, worth=True) == "bfloat16"


def test_no_home_is_no_error(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/do/not/count")
    monkeypatch.setattr(Path, "home", homeless)
    for _ in range(2):
        assert precision.choose("auto", CPU, worth=True) == "bfloat16"
    assert children.started == 1


@pytest.mark.parametrize(
    ("system", "ending"),
    [("linux", ".cache/fedpop"), ("darwin", "Library/Caches/fedpop"), ("win32", "AppData/Local/fedpop")],
)
def test_the_folder_follows_the_system(monkeypatch: pytest.MonkeyPatch, system: str, ending: str) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(sys, "platform", system)
    assert files.cache_folder() == Path.home() / ending


def test_two_that_write_at_once_leave_one_whole_file(children: Children, tmp_path: Path) -> None:
    machine, folder = precision.Machine.here(), tmp_path / "cache" / "fedpop"
    with ThreadPoolExecutor(8) as pool:
        for done in [
            pool.submit(precision._remember, machine, folder, ProbeVerdict(True, "x" * (1 + i % 5 * 1000)))
            for i in range(64)
        ]:
            done.result()
    assert children.files() == [machine.file(folder)]
    found = precision._recall(machine, folder)
    assert found is not None
    assert found.bfloat16 is True


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name\t: AMD EPYC 7B13\nflags : fpu\n", "AMD EPYC 7B13"),
        ("processor : 0\nFeatures : fp asimd bf16\n", "what platform says"),
        (None, "what platform says"),
    ],
)
def test_the_processor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, name: str
) -> None:
    monkeypatch.setattr("platform.processor", lambda: "what platform says")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    assert precision.processor(tmp_path / "cpuinfo") == name


# --- the probe itself ---------------------------------------------------------------------------------


def test_the_real_probe_gives_a_verdict_and_this_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "probed", probed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    verdict = probed()
    assert precision.choose("auto", CPU, worth=True) == ("bfloat16" if verdict.bfloat16 else "float32")
    assert len(list((tmp_path / "fedpop").iterdir())) == 1
    assert "said nothing" not in verdict.why  # it answers in time, or dies


@pytest.mark.parametrize(("error", "agrees"), [(0.01, True), (0.02, False), (float("nan"), False)])
def test_the_probe_compares_every_layer_with_float32(
    monkeypatch: pytest.MonkeyPatch, error: float, agrees: bool
) -> None:
    """One gradient of one layer that is off is enough."""
    count = len(list(precision_probe.layers()))
    kinds: list[str] = []

    def passed(layer: precision_probe.Layer, kind: str) -> list[Tensor]:
        kinds.append(kind)
        off = len(kinds) == 3 * count  # the last of all
        return [torch.ones(9), torch.ones(9) * (1 + error if off else 1.0)]

    monkeypatch.setattr(precision_probe, "passed", passed)
    monkeypatch.setattr(precision_probe, "gain", lambda layer, repeats: 2.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    found = precision_probe.main()
    assert found["agrees"] is agrees
    assert found["times_faster"] == 2.0
    assert kinds == ["float32", "autocast", "bfloat16"] * count


def test_the_probes_numbers_are_as_good_as_random() -> None:
    """Else products of them might vanish, and errors relative to them mean nothing."""
    x, w = precision_probe.scrambled(300, 200), precision_probe.scrambled(200, 300, inputs=200, seed=1)
    for values in (x, w * 200**0.5, x @ w):
        assert abs(float(values.mean())) < 0.02
        assert abs(float(values.var()) - 1) < 0.05


def test_the_probe_passes_forward_and_backward_in_float32() -> None:
    """By hand: y = x w' + b and the three gradients of a weighted sum of it."""
    x, w, b = (torch.randn(s, generator=generator(i)) for i, s in enumerate(((5, 4), (3, 4), (3,))))
    out, *grads = precision_probe.passed((nn.functional.linear, [x, w, b]), "float32")
    c = precision_probe.scrambled(5, 3, seed=2)
    torch.testing.assert_close(out, x @ w.mT + b)
    for one, other in zip(grads, (c @ w, c.mT @ x, c.sum(0)), strict=True):
        torch.testing.assert_close(one, other)


def test_the_probe_reports_the_network_that_gains_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time by a clock that only passes move; float32 takes 3 units in the first network, 8 in the second."""
    now, costs = 0.0, {2: (3.0, 1.0), 4: (8.0, 4.0)}

    def passed(layer: precision_probe.Layer, kind: str) -> list[Tensor]:
        nonlocal now
        exact, rounded = costs[layer[1][0].dim()]
        now += exact if kind == "float32" else rounded
        return [torch.ones(1)]

    monkeypatch.setattr(precision_probe, "passed", passed)
    monkeypatch.setattr(precision_probe.time, "process_time", lambda: now)
    monkeypatch.setattr(precision_probe, "largest_error", lambda: 0.003)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    gains = [precision_probe.gain(layer, repeats) for layer, repeats in precision_probe.networks()]
    assert gains == [3.0, 2.0]
    assert precision_probe.main() == {"agrees": True, "error": 0.003, "times_faster": 2.0}
    costs[4] = (8.0, 10.0)
    assert precision_probe.main() == {"agrees": None, "error": None, "times_faster": 0.8}
