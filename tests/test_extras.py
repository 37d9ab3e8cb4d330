"""Without the optional packages: fitting and predicting work, and what needs one says how to get it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {missing} else found(name, *rest)
import torch
one = torch.ones(1, requires_grad=True)
torch.autograd.grad((one * one).sum(), one)
torch.func.vmap(torch.sin)(torch.nn.Linear(1, 1, device="cpu").weight.detach())
torch.nn.Linear(1, 1, device="meta")
PLAIN = set(sys.modules)  # what torch itself imports for as much: older ones take their compiler along
import fedpop as fp
from fedpop.errors import ExtraError
"""
FIT = """
x = torch.ones(4, 2)
model = fp.Composition(None, torch.nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
clients = {"anna": fp.Client(x, x[:, 0], test=(x, x[:, 0])), "ben": (x, -x[:, 0])}
split = fp.Composition(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1), fp.likelihoods.Normal(1.0))
sampled = fp.FedSOUL(split, engine="sampled")
for method in (sampled, fp.FedAvg(split), fp.FedRep(split), fp.SCAFFOLD(split), fp.Ditto(split)):
    method.fit(clients, rounds=1).save(sys.argv[1] + "/" + method.name)
    fp.load(sys.argv[1] + "/" + method.name)
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules) - PLAIN))
population = fp.FedSOUL(model).fit(clients, rounds=2, out=sys.argv[1] + "/run")
fp.evaluate(population)
again = fp.load(population.save(sys.argv[1] + "/saved"))
print(again.predict("anna", x).mean.shape, again.new_client().predict(x).interval(0.9)[0].shape)
print("torch._dynamo" in set(sys.modules) - PLAIN)
"""
EXTRAS = {
    "matplotlib", "jinja2", "pyarrow", "PIL", "pandas", "formulae", "flwr", "cryptography", "dp_accounting",
    "tensorboard", "mlflow",
}  # fmt: skip
NEEDS = {
    "a report": ("from fedpop.report.run import run_report\nrun_report(Path(sys.argv[1]) / 'run')", "report"),
    "a comparison": ("from fedpop.cli import main\nmain(['compare', 'none.toml'])", "report"),
    "a demo": ("from fedpop.cli import main\nmain(['demo', '--out', 'demo'])", "report"),
    "a formula": ("fp.mixed_model('y ~ x + (1 | g)', {'y': [1.0], 'x': [1.0], 'g': ['a']})", "formula"),
    "a command's formula": (
        "from fedpop.cli import main\nmain(['fit', 'none.csv', 'y ~ (1 | g)'])",
        "formula",
    ),
    "a budget": (
        "privacy = fp.privacy.Gaussian(epsilon=1.0, delta=0.1)\n"
        "fp.FedAvg(split).fit(clients, rounds=1, participation=0.5, privacy=privacy)",
        "privacy",
    ),
    "a server": ("from fedpop.cli import main\nmain(['server', 'init', 'there'])", "flower"),
    "a site": ("from fedpop.cli import main\nmain(['site', 'check', 'there'])", "flower"),
    "TensorBoard": (
        "fp.FedAvg(split).fit(clients, rounds=1, out='logs', callbacks=[fp.callbacks.TensorBoard('boards')])",
        "tensorboard",
    ),
    "MLflow": ("fp.FedAvg(split).fit(clients, rounds=1, callbacks=[fp.callbacks.MLflow()])", "mlflow"),
    "images": ("from fedpop.federation.reading import read_image\nread_image(Path(__file__), 3)", "data"),
    "parquet": ("from fedpop.data.formats.parquet import read_parquet\nread_parquet(Path(__file__))", "data"),
}


def run(code: str, folder: Path, missing: set[str]) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(WITHOUT.format(missing=missing) + code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)


def test_fitting_and_predicting_need_no_plotting_library(tmp_path: Path) -> None:
    missing = {"matplotlib", "jinja2", "pyarrow", "PIL", "pandas", "flwr", "tyro"}
    done = run(FIT, tmp_path, missing)
    assert done.returncode == 0, done.stderr
    heavy, shapes, compiler = done.stdout.splitlines()
    assert shapes == "torch.Size([4]) torch.Size([4])"
    assert heavy == "[]"  # seconds to import, in every process that a site starts for a round
    assert compiler == "False"


IN_TURN = """
from pathlib import Path
for what, code in {codes}.items():
    try:
        exec(code)
        print(what, "worked", file=sys.stderr)
    except ExtraError as error:
        print(error, file=sys.stderr)
    except SystemExit as end:
        print("code", end.code, file=sys.stderr)
    except Exception as error:
        print("raw", repr(error), file=sys.stderr)
    print("----", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each, one after the other in one process."""
    folder, codes = tmp_path_factory.mktemp("extras"), {what: code for what, (code, _) in NEEDS.items()}
    done = run(FIT + IN_TURN.format(codes=codes), folder, EXTRAS)
    assert done.returncode == 0, done.stderr
    assert not list(folder.rglob("report.html"))
    return dict(zip(NEEDS, done.stderr.split("----\n"), strict=False))


@pytest.mark.parametrize("what", NEEDS)
def test_what_needs_an_extra_says_which(told: dict[str, str], what: str) -> None:
    assert f"pip install 'fedpop[{NEEDS[what][1]}]'" in told[what]
    assert "worked" not in told[what]
    assert "code" not in told[what] or "code 2" in told[what]
