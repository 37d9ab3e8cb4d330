"""What README and docs say of the committed results is what the files say."""

import re
from pathlib import Path
from statistics import stdev

import pytest

from fedpop.comparison.tune import REPORT
from fedpop.report.records import Report
from fedpop.report.results import Record, Results, mean
from research import EXPERIMENTS, experiment_named, full_data
from research.seeds import interval95

ROOT = Path(__file__).parents[2]


def records(experiment: str, method: str, **setting: object) -> list[Record]:
    found = Results.open(experiment_named(experiment).folder).of(method=method)
    return [r for r in found if setting.items() <= r["setting"].items()]


TUNED = ("full_data", "small_data")
"""Experiments with a search of settings beside them."""
COMMITTED: dict[str, tuple[Report, Path]] = {
    n: (experiment_named(n), experiment_named(n).folder) for n in EXPERIMENTS
}
COMMITTED |= {f"{n}/tuning": (REPORT, ROOT / "research" / n / "tuning") for n in TUNED}


def per_seed(experiment: str, method: str, metric: str, **setting: object) -> dict[int, float]:
    return {r["seed"]: r["metrics"][metric] for r in records(experiment, method, **setting)}


@pytest.mark.parametrize("name", COMMITTED)
def test_tables_are_made_from_the_records(name: str) -> None:
    report, folder = COMMITTED[name]
    results = Results.open(folder)
    text, made = (folder / "results.md").read_text().rsplit("\n\n", 1)
    assert text + "\n" == report.markdown(results)
    told = " and ".join(sorted({r["version"] for r in results.records}))
    assert made.startswith(f"Made by fedpop {told}.")
    assert made.strip() == report.made(results)


@pytest.mark.parametrize("name", COMMITTED)
def test_pages_can_be_made_again_from_the_records(name: str) -> None:
    """Also where records are of settings that fedpop has no more."""
    report, folder = COMMITTED[name]
    assert report.page(Results.open(folder)).sections


SMALL = [(share, n) for n in (5, 10) for share in (0.1, 0.5, 0.9)]


@pytest.mark.parametrize(("share", "n"), SMALL)
def test_small_image_clients_are_ahead_of_fedrep_and_stay_calibrated(share: float, n: int) -> None:
    """Tuned rivals, three seeds of every setting."""
    cell = {"dataset": "cifar10", "classes_per_client": 5, "share_small": share, "n_small": n}
    ours, theirs = (per_seed("small-data", name, "accuracy", **cell) for name in ("FedSOUL", "FedRep"))
    eces, rival = (per_seed("small-data", name, "ece", **cell) for name in ("FedSOUL", "FedRep"))
    both = ours.keys() & theirs.keys()
    assert len(both) >= 3
    assert all(ours[seed] > theirs[seed] + 0.08 for seed in both)
    assert mean([eces[seed] / rival[seed] for seed in both]) < 0.2
    for other in ("FedAvg-FT", "APFL"):
        scores = per_seed("small-data", other, "accuracy", **cell)
        gains = [ours[seed] - scores[seed] for seed in ours.keys() & scores.keys()]
        assert not gains or (min(gains) > 0 and mean(gains) > 0.02)


@pytest.mark.parametrize("images", ["cifar10", "mnist"])
def test_defaults_stay_calibrated_and_weight_decay_pays_in_every_pair(images: str) -> None:
    eces = per_seed("defaults", "default", "test_ece", images=images)
    assert len(eces) >= 3
    assert all(e < 0.03 for e in eces.values())
    with_it, without = (
        per_seed("defaults", name, "validation_log_score", images=images)
        for name in ("default", "no weight decay")
    )
    assert all(with_it[seed] < without[seed] for seed in with_it)


@pytest.mark.parametrize("prior", ["Mixture", "Energy"])
def test_priors_with_two_clusters_predict_new_clients_better_than_a_normal_one(prior: str) -> None:
    other, normal = (per_seed("clusters", m, "log_likelihood_0") for m in (prior, "Normal"))
    gains = [other[seed] - normal[seed] for seed in normal]
    assert len(gains) >= 10
    assert interval95(gains)[1] > 0


def test_benchmarks_stay_within_their_targets() -> None:
    judged = [r for r in Results.open(ROOT / "benchmarks" / "results").records if "target" in r["metrics"]]
    assert len(judged) >= 12
    for r in judged:
        m = r["metrics"]
        if r["method"] == "LocalSGD":  # a loop over clients, relative to all side by side
            assert m["ratio"] >= m["target"]
        elif "ratio" in m:
            assert m["ratio"] <= m["target"], r["setting"]


@pytest.mark.parametrize("method", ["FedSOUL", "FedSOUL-sampled"])
def test_no_synthetic_run_ends_in_a_local_optimum(method: str) -> None:
    """Ten seeds of each of nine settings."""
    found = [r["metrics"] for r in records("synthetic", method)]
    assert len(found) >= 90
    assert not any(m["local_optimum"] for m in found)


def test_the_readme_has_the_synthetic_table() -> None:
    found = {}
    for line in (ROOT / "research" / "synthetic" / "results" / "results.md").read_text().splitlines():
        setting, method, *numbers = [cell.strip() for cell in line.strip("|").split("|")] + [""]
        found[setting, method] = numbers
    readme = (ROOT / "README.md").read_text()
    for setting in ("100,2,20", "50,2,20", "200,2,20", "100,2,50", "100,2,5", "100,5,20"):
        exact, ours, same, rep, avg = (
            found[setting, m][1] for m in ("Exact", "FedSOUL", "FedRep-spectral", "FedRep", "FedAvg")
        )
        covered, by_exact, theta_too = found[setting, "FedSOUL"][5:8]
        best = float(ours) <= min(float(same), float(rep), float(avg))
        own = f"**{ours}**" if best else ours
        row = f"| ({setting.replace(',', ', ')}) | {exact} | {own} | {same} | {rep} | {avg} | "
        assert row + f"{covered} ({by_exact}) | {theta_too} |" in readme


def in_readme(text: str, page: str = "README.md") -> None:
    assert text in " ".join((ROOT / page).read_text().split()), text


def in_docs(text: str) -> None:
    in_readme(text, "research/README.md")


def short(number: float, digits: int = 3) -> str:
    return f"{number:.{digits}f}".lstrip("0")


def percent(method: str, classes: int, passes: int, dataset: str = "cifar10") -> str:
    cell = {"dataset": dataset, "classes_per_client": classes, "passes": passes}
    return f"{100 * mean(list(per_seed('full-data', method, 'accuracy', **cell).values())):.1f}"


def cell_of(found: list[Record], best: bool = False) -> str:
    """Mean accuracy, its standard deviation over seeds, and mean ECE."""
    if not found:
        return "no model"
    scores = [100 * r["metrics"]["accuracy"] for r in found]
    spread = f" ± {stdev(scores):.1f}" if len(scores) > 1 else ""
    told = f"{mean(scores):.1f}{spread} %"
    return f"{f'**{told}**' if best else told} ({short(mean([r['metrics']['ece'] for r in found]))})"


SMALL_CELL = {"classes_per_client": 5, "share_small": 0.5, "n_small": 5}
COMPARED = (
    ("half with 5 images, half with 25; five classes", "small-data", 60_000, SMALL_CELL),
    ("never seen, no image of their own; five classes", "new-clients", 500_000, {"classes_per_client": 5}),
    (
        "never seen, with five images; five classes",
        "new-clients",
        500_000,
        {"classes_per_client": 5, "examples": 5},
    ),
    (
        "never seen, with five images; two classes",
        "new-clients",
        500_000,
        {"classes_per_client": 2, "examples": 5},
    ),
    ("500 images each; five classes", "full-data", 500_000, {"classes_per_client": 5}),
    ("500 images each; two classes", "full-data", 500_000, {"classes_per_client": 2}),
)
CLEAR = 2.0
"""Points of a lead that the table prints in bold."""


@pytest.mark.parametrize(("clients", "experiment", "passes", "setting"), COMPARED)
def test_the_readmes_table_has_equal_budgets_and_the_records_numbers(
    clients: str, experiment: str, passes: int, setting: dict[str, object]
) -> None:
    whole: dict[str, object] = {"dataset": "cifar10", "passes": passes, **setting}
    if experiment == "new-clients":
        whole = {"examples": 0} | whole
    ours = "FedSOUL-width" if experiment == "new-clients" else "FedSOUL"
    first, *others = (records(experiment, name, **whole) for name in (ours, "FedRep", "FedAvg-FT"))
    assert all(r["cost"].get("backbone_passes", passes) <= passes for r in first)
    means = [100 * mean([r["metrics"]["accuracy"] for r in found]) for found in (first, *others) if found]
    best = means[0] > max(means[1:]) + CLEAR
    cells = " | ".join([cell_of(first, best), *map(cell_of, others)])
    in_readme(f"| {clients} | {passes:,} | {len(first)} | {cells} |")


def test_the_readme_tells_where_fedsoul_ends_and_that_no_rival_was_there() -> None:
    """No number of a longer run stands beside a published one while no rival has had its budget."""
    longest = max(r["setting"]["passes"] for r in Results.open(experiment_named("full-data").folder).records)
    rivals = [
        r["setting"]["passes"]
        for r in Results.open(experiment_named("full-data").folder).records
        if not r["method"].startswith("FedSOUL")
    ]
    assert longest == 3_000_000
    in_readme(f"no rival has had more than {max(rivals):,} passes here yet")
    five, two = (
        [percent("FedSOUL-all", classes, passes) for passes in (1_000_000, 3_000_000)] for classes in (5, 2)
    )
    cell = {"dataset": "cifar10", "classes_per_client": 5, "passes": longest}
    ece = short(per_seed("full-data", "FedSOUL-all", "ece", **cell)[0])
    in_readme(f"{five[0]} % after a million passes and {five[1]} % after three million with five")
    in_readme(f"classes (ECE {ece}), {two[0]} and {two[1]} % with two")
    in_readme(f"told each client's classes, has {percent('pooled', 5, 500_000)} %")
    half = [percent(name, 5, 500_000) for name in ("FedSOUL-all", "FedRep")]
    in_readme(f"the two are level: {half[0]} and {half[1]} %")
    cell |= {"passes": 500_000}
    sent = [
        mean([r["cost"]["bytes_up"] for r in records("full-data", name, **cell)]) / 1e9
        for name in ("FedSOUL", "FedSOUL-all")
    ]
    in_readme(f"{sent[0]:.1f} GB up in 1,000 rounds for {sent[1]:.1f} GB in 100")
    readme = (ROOT / "README.md").read_text()
    known = {f"{v:.1f} %" for v in full_data.PUBLISHED["FedSOUL"]}
    assert not [number for number in known if number in readme]


@pytest.mark.parametrize("name", ["small-data", "full-data"])
def test_pictures_are_those_of_the_records(name: str) -> None:
    experiment = experiment_named(name)
    assert experiment.pictures is not None
    drawn = experiment.pictures(Results.open(experiment.folder))
    assert {path.stem for path in experiment.folder.glob("*.svg")} == set(drawn)
    for picture, svg in drawn.items():
        text = (experiment.folder / f"{picture}.svg").read_text()
        assert len(re.findall("<use ", text)) == len(re.findall("<use ", svg))


def test_the_docs_tell_what_came_out() -> None:
    three = 3_000_000
    half = [[percent(name, classes, 500_000) for classes in (5, 2)] for name in ("FedSOUL", "FedRep")]
    in_docs("{} and {} % after 500,000 passes, where FedRep".format(*half[0]))
    in_docs("has {} and {} %".format(*half[1]))
    in_docs(
        f"{percent('FedSOUL-all', 5, three)} and {percent('FedSOUL-all', 2, three)} % after three million |"
    )
    hundred = [percent("FedSOUL-all", classes, three, "cifar100") for classes in (5, 20)]
    in_docs(f"{hundred[0]} and {hundred[1]} % |")
    in_readme(f"on CIFAR-100 {hundred[0]} % with five classes per client and {hundred[1]} % with 20")
    for method, passes in (("FedSOUL-all", three), ("FedRep", 500_000)):
        cell = {"dataset": "cifar100", "passes": passes}
        eces = [per_seed("full-data", method, "ece", classes_per_client=c, **cell)[0] for c in (5, 20)]
        in_docs(f"{short(eces[0])} and {short(eces[1])})")
    sayings = (
        ("FedRep", "{:.1f} to {:.1f} |"),
        ("FedAvg-FT", "by {:.1f} to {:.1f} and"),
        ("APFL", "and by {:.1f} to {:.1f} points"),
    )
    for rival, told in sayings:
        gains = [mean(list(gains_over(rival, share, n))) for share, n in SMALL]
        in_docs(told.format(100 * min(gains), 100 * max(gains)))
        in_readme(f"{100 * min(gains):.1f} to {100 * max(gains):.1f}")
    for classes, told in ((2, "{} with two classes"), (5, "{} with five |")):
        in_docs(
            told.format(
                short(per_seed("ood", "FedSOUL", "auroc", dataset="mnist", classes_per_client=classes)[0])
            )
        )
    ratios = [mean(ece_ratios(share, n)) for share, n in SMALL]
    in_docs(f"{short(min(ratios), 2)} to {short(max(ratios), 2)} of it")
    rows = [{"dataset": "mnist", "classes_per_client": classes} for classes in (2, 5)]
    rivals = [short(per_seed("ood", "FedRep", "auroc", **row)[0]) for row in rows]
    in_docs(f"above FedRep | {rivals[0]} and {rivals[1]} |")
    digits = [
        f"{100 * per_seed('ood', name, 'accuracy', **rows[1])[0]:.1f}" for name in ("FedSOUL", "FedRep")
    ]
    in_docs(f"{digits[0]} % of digits are right, and {digits[1]} of FedRep's")
    mnist = per_seed("defaults", "default", "test_ece", images="mnist")
    in_docs(f"ECE {short(mean(list(mnist.values())))} for .005")


def ece_ratios(share: float, n: int) -> list[float]:
    cell = {"dataset": "cifar10", "classes_per_client": 5, "share_small": share, "n_small": n}
    ours, theirs = (per_seed("small-data", name, "ece", **cell) for name in ("FedSOUL", "FedRep"))
    return [ours[seed] / theirs[seed] for seed in ours.keys() & theirs.keys()]


def gains_over(rival: str, share: float, n: int) -> list[float]:
    cell = {"dataset": "cifar10", "classes_per_client": 5, "share_small": share, "n_small": n}
    ours, theirs = (per_seed("small-data", name, "accuracy", **cell) for name in ("FedSOUL", rival))
    return [ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]


def test_newcomers_are_calibrated_without_data() -> None:
    """By the width that clients in training were asked for."""
    told: dict[int, list[tuple[str, float]]] = {0: [], 5: []}
    for classes, images in ((5, 0), (2, 0), (5, 5), (2, 5)):
        cell = {"classes_per_client": classes, "examples": images}
        accuracy = per_seed("new-clients", "FedSOUL-width", "accuracy", **cell)[0]
        told[images].append(
            (f"{100 * accuracy:.1f}", per_seed("new-clients", "FedSOUL-width", "ece", **cell)[0])
        )
        rival = per_seed("new-clients", "FedRep", "accuracy", **cell)
        assert not rival or accuracy > rival[0] + 0.1
    (five, ece), (two, other) = told[0]
    assert ece < 0.05
    assert other < 0.05
    in_docs(f"{five} % of ten classes, ECE {short(ece)}, with five classes each;")
    in_docs(f"; {two} %, ECE {short(other)}, with two")
    heads, before = [], []
    for classes in (5, 2):
        cell = {"classes_per_client": classes, "examples": 5}
        heads.append(f"{100 * per_seed('new-clients', 'FedRep', 'accuracy', **cell)[0]:.1f} %")
        cell |= {"examples": 0}
        before.append(short(per_seed("new-clients", "FedSOUL", "ece", **cell)[0]))
    (few, _), (other_few, _) = told[5]
    in_docs(f"{few} against {heads[0]} with five classes, {other_few} against {heads[1]} with two")
    in_docs(f"with the prior as it was learned {before[0]} and {before[1]}")
    in_readme(f"the error is {before[0]} before")


def test_the_readme_tells_of_images_of_another_kind() -> None:
    for classes, told in (
        (2, "an AUROC of {} (two classes per client; FedRep {})"),
        (5, "{} (five; FedRep {})"),
    ):
        cell = {"dataset": "mnist", "classes_per_client": classes}
        both = (per_seed("ood", name, "auroc", **cell)[0] for name in ("FedSOUL", "FedRep"))
        in_readme(told.format(*(f"{auroc:.3f}".lstrip("0") for auroc in both)))
