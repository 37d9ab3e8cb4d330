"""For the page "Constants": what numbers in the code decide that change results, and how that is known.

Values are read from the code (``value_of``), so that the page cannot be wrong about them. A test holds
``TABLES`` and ``OTHERS`` to the code: a constant with a number in it is in one of them, and what they name is
there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1] / "fedpop"
NOT_MEASURED = "not measured"

Rows = Mapping[str, Mapping[str, tuple[str, str]]]
"""By file of fedpop, and there by names: what it decides, and the evidence."""

TABLES: Mapping[str, Rows] = {
    "engine": {
        "methods/fedsoul.py": {
            "LARGEST_EXACT_THETA": (
                'parameters of θ up to which `engine="auto"` takes the exact engine; `engine=` overrides it',
                "messages hold its square, in a few rounds. The number itself is not measured",
            ),
        },
        "methods/marginal_ml.py": {
            "SEARCH_NATS": (
                "nats that a Newton step may still promise where the search is over",
                "derived: 500,000 times below what counts as converged, at the price of one or two more "
                "evaluations, since convergence is superlinear",
            ),
            "STAGE_NATS": (
                "the same for a stage of annealing",
                "a stage only has to find the next one's start; "
                "[tried](decisions.md#numbers-that-were-tried): 1 and .01 end at the same optimum, after "
                "more rounds",
            ),
            "LARGEST_THETA_WITH_HESSIANS": (
                "parameters up to which each stage asks for the Hessian",
                "[tried](decisions.md#numbers-that-were-tried): without Hessians the same optimum after "
                "three times as many rounds; derived from their size, 40 KB each at a hundred",
            ),
            "ANNEALING_STAGES": (
                "noise variances that are gone through before its own",
                "[local optima](limits.md#local-optima) are avoided with them on the README's model "
                "(`tests/statistical/test_anneal_slow.py`); "
                "[tried](decisions.md#numbers-that-were-tried): from 2 to 12 the same optimum, 12 takes "
                "twice the rounds",
            ),
        },
        "server/quasi_newton.py": {
            "ARMIJO, WOLFE": ("when a line search ends", "convention (Nocedal and Wright, chapter 3)"),
            "LONGEST_FIRST_TRIAL": (
                "units of a coordinate that the first trial of a search moves by at most",
                "[tried](decisions.md#numbers-that-were-tried): 1 and 20 end at the same optimum after as "
                "many rounds",
            ),
            "MOST_EVALUATIONS": (
                "evaluations of one search",
                "derived: each bisects at least; 2^-20 of a step moves nothing",
            ),
            "GAUGE_CURVATURE": (
                "curvature, as a share of the largest, below which a direction has none",
                "derived: rounding of sums in double precision, with room",
            ),
            "SADDLE_CURVATURE": (
                "curvature in natural units below which a stationary point is no optimum",
                "derived: a step of one unit gains 5e-4 nats",
            ),
        },
        "server/optimisers.py": {
            "RATE_TRIAL_ROUNDS": (
                "trial rounds behind η₀ of `FedSOUL.paper()`",
                "part of that preset's definition ([two presets](decisions.md#two-presets))",
            ),
        },
    },
    "chains": {
        "kernels/base.py": {
            "LEAST_GAIN": (
                "how fast steps adapt to acceptance after a hundred passes",
                "θ moves, so the gain must not vanish; the number is not measured",
            ),
            "NARROWED": (
                "when steps may grow because the mass matrix has found what held them",
                NOT_MEASURED,
            ),
            "DIVERGED_NATS, SLACK_NATS": (
                "when a transition counts as diverged and is undone",
                "derived: draws of one law differ by some √d nats; nothing but overflow falls by a thousand",
            ),
        },
        "kernels/hmc.py": {
            "HMC.initial_log_step": (
                "logarithm of the first largest step",
                "[tried](decisions.md#numbers-that-were-tried): from a tenth of it on, acceptance is the "
                "same after 40 rounds",
            ),
            "HMC.largest_log_step": (
                "logarithm of the largest step, in units of the mass matrix",
                "measured on softmax heads of 650 dimensions: steps drawn from (.2, .6) have .048, .046, "
                ".017 effective draws of z's norm per gradient at 1, 25, 500 examples, a fixed .6 has "
                ".0005, .0015, .014, since five steps of it are half a period",
            ),
            "HMC.target_acceptance": (
                "acceptance that steps adapt to",
                "convention, as in Stan; not measured",
            ),
        },
        "kernels/mala.py": {
            "MALA.initial_log_step": (
                "logarithm of the first step",
                "[tried](decisions.md#numbers-that-were-tried): from .05 on, acceptance is the same after "
                "40 rounds",
            ),
            "MALA.largest_log_step": (
                "logarithm of the largest step",
                "derived: beyond 2 the drift overshoots where the posterior is as narrow as Q says",
            ),
            "MALA.target_acceptance": (
                "acceptance that steps adapt to",
                "derived: the best in many dimensions (Roberts and Rosenthal, 1998)",
            ),
        },
        "kernels/ula.py": {
            "STABLE": ("range of `step_size`", "derived: in units of 1/L a step of 2 grows without bound"),
        },
        "kernels/mass.py": {
            "LONGEST_MEMORY": (
                "how long old draws count for the mass matrix",
                "derived: 1/(1 - .98), so passes from more than fifty ago are forgotten; not measured",
            ),
            "PRIOR_DRAWS": ("draws that the prior's scale counts as", NOT_MEASURED),
            "LARGEST_DENSE_MASS": (
                "dimensions of z up to which the mass matrix is dense, above which it is diagonal",
                "dense against diagonal is [measured](decisions.md#kernels) at 2 dimensions (spread 3.07 "
                "against 1.28, the truth being 3.18); the threshold is not",
            ),
        },
        "kernels/follow.py": {
            "MODE_TOLERANCE": (
                "how near to its mode a chain is carried",
                "derived: a hundredth of a standard deviation by Q. A looser one leaves the mode behind "
                "where Q is far above the curvature, and the learned scale swings",
            ),
            "MODE_STEPS, FIRST_MODE_STEPS": (
                "steps to the mode at most, from the last one and from the prior's mean",
                "[tried](decisions.md#numbers-that-were-tried): no more than 17 of either were needed",
            ),
        },
        "kernels/target.py": {
            "POWER_ITERATIONS": (
                "products that find the largest curvature, which ULA and SGLD step by on heads that are "
                "not linear",
                "[tried](decisions.md#numbers-that-were-tried): .96 of the largest curvature at worst, "
                "from below; step sizes are a share of it",
            ),
            "NEWTON_STEPS, HALVINGS, NEWTON_ROUNDING": (
                "when the search for a posterior's mode is over",
                "derived: quadratic convergence needs a handful of steps, 2^-20 of one moves nothing, and "
                "single precision leaves 1e-6",
            ),
        },
        "kernels/prior_chains.py": {
            "PRIOR_WARM_UP": ("transitions that take chains on an energy prior to another β", NOT_MEASURED),
            "PRIOR_THINNING": ("transitions for each of their draws that users see", NOT_MEASURED),
            "NORMALISER_TRANSITIONS": (
                "transitions behind the gradient of log Z that `diagnostics()` shows",
                NOT_MEASURED,
            ),
        },
        "client/sampler.py": {
            "FIRST_BURN_IN, SHORT_BURN_IN, DEEP_BURN_IN": (
                "transitions of a client's first round that do not count, on other heads, on linear ones "
                "that start at the mode, and where each gradient is a pass through a network; "
                "`chain=Chain(burn_in=...)` overrides them",
                "without any, Adam stood still for hundreds of rounds "
                "([kernels](decisions.md#kernels)); the numbers are not measured",
            ),
            "LARGEST_MIXED": (
                "dimensions of z up to which I of a full covariance is sent in the mixed form; "
                "`BetaStep(form=...)` overrides it",
                "derived: its covariances are d × d for each draw's client; not measured",
            ),
        },
        "client/final.py": {
            "FINAL_DRAWS, FINAL_DRAWS_OF_WIDE_Z, WIDE_Z": (
                "draws of each chain of the final pass, and entries of z above which they are fewer; "
                "`final=Final(draws=...)` overrides them",
                "derived: 1,000 and 560 in all; where two are worth an independent one, a probability is "
                "known to .022 and .03 at worst",
            ),
            "BURN_IN_FROM_MODE, BURN_IN_FROM_ANYWHERE": (
                "its burn-in, from about the mode and from anywhere; `Final(burn_in=...)` overrides it",
                "R-hat and effective draws are in `population.diagnostics()`; the numbers are not measured",
            ),
            "SHORT": ("the pass of evaluations between rounds", "derived: means over clients need no more"),
            "JUDGING": (
                "the pass of a verdict, and of `for_newcomers`",
                "the verdict's own error is part of it; where it does not suffice the run takes a full pass",
            ),
        },
    },
    "phi": {
        "server/optimisers.py": {
            "NetworkAdam.rate, NetworkAdam.schedule": (
                "the server's step on φ of a network; `phi_step=` overrides it",
                "[measured](defaults.md): .1 costs .112 nats on CIFAR-10 and gains .019 on MNIST; one full "
                "step of .03 tripled the features at first, so the rate rises over ten rounds",
            ),
            "NetworkAdam.worth, NetworkAdam.least": (
                "weight decay: examples that the prior on a network's weights is worth, and how many weights "
                "there must be; `phi_step=AdamW(...)` overrides it",
                "[measured](defaults.md#weight-decay): .035 and .009 nats, in six pairs of six; 150 left "
                "mid-sized federations less sure than they should be. 500 is the verdict's own limit",
            ),
        },
        "client/phi_step.py": {
            "PhiStep.head": (
                "size of a head's weights above which local rates are shortened",
                "derived up to the number: the loss curves in a layer as the square of the weights after it. "
                "Local epochs from a scale of .5 had 72.7 % where the prior's own start had 67.2 %",
            ),
        },
        "client/potential.py": {
            "POWER_STEPS": (
                "products that find the largest curvature of U",
                "[tried](decisions.md#numbers-that-were-tried): .95 of it at worst, from below",
            ),
            "LARGEST_HESSIAN_BY_COLUMNS": (
                "parameters up to which QLSD's and FSGLD's Hessians are exact",
                "derived: a product for each of them; not measured",
            ),
            "HESSIAN_PROBES": (
                "random signs that estimate the diagonal of a larger Hessian",
                "derived: the relative error falls as 1/√32 of what lies off the diagonal",
            ),
        },
        "methods/base.py": {
            "SMALLEST_RATE": (
                "rate of local steps at the very end of a schedule",
                "derived: above 0, as rates are, and nothing moves by it",
            ),
        },
    },
    "prior": {
        "server/beta_step.py": {
            "EM.few, EM.many": (
                "clients in a round below which EM takes less than a full step: at first, and in the end",
                "scales that start five times too small and too large end within a fifth of each other "
                "(`tests/methods/test_scale.py`, `tests/statistical/test_scale_slow.py`); other numbers "
                "are not measured",
            ),
            "EMAdam.scale": (
                "steps on the scale's logarithm where posteriors are not closed-form and features are fixed",
                "the same tests: 650 weights from both starts end within 15 % after 40 visits, 20.4 % with a "
                "longer memory of squares",
            ),
            "STEP_WITHOUT_EM": ("the step on priors that EM cannot move, such as energies", NOT_MEASURED),
        },
        "server/scoring.py": {
            "LONGEST_SCORING_STEP": ("nats of the longest scoring step", NOT_MEASURED),
            "CHANCE_LEFT": (
                "how long a stage of scoring steps is for the share of clients that take part",
                "derived: √((1/p - 1)/K) of how far θ has gone is left; fifteen hundredths is not measured",
            ),
            "MOST_SCORING_STEPS": ("steps of such a stage at most", NOT_MEASURED),
        },
        "priors/base.py": {
            "SCALE_REACH": (
                "how far scales may go from their start; `bounds=` overrides it",
                "runs in other units are the same run with it (`tests/methods/test_scaled_data.py`); bounds "
                "in fixed units ended 130 nats short where times were in microseconds",
            ),
            "NORM_REACH": ("how far norms may go; `ball=` overrides it", "the same tests"),
        },
        "priors/energy.py": {
            "ESCAPED_SCALES": (
                "scales from the centre at which a chain on the prior has escaped, which is an error",
                "derived: a density on a Gaussian base has none there",
            ),
        },
        "priors/normal.py": {
            "FARTHEST_FACTOR": (
                "entries of a factor beyond so many times the upper bound are projected as if there",
                "derived: far below overflow of squares",
            ),
        },
    },
    "start": {
        "federation/cells.py": {
            "SCALE_TOLERANCE": (
                "how many times as large, or as small, a site's column may be as the median site's, unless "
                "`scale_tolerance` says",
                "derived: most pairs of units are a thousand apart or more (grams and kilograms, metres and "
                "millimetres), and medians of one population's sites rarely ten times. Not measured",
            ),
        },
        "questions/scales.py": {
            "SCALE_BINS": (
                "powers of two by which columns of sites are compared",
                "derived: from 2^-64 to 2^63, beyond any unit",
            ),
        },
        "questions/features.py": {
            "SCHWARZ_SLACK": (
                "by what a site's answer may break the Cauchy-Schwarz inequality before it is left out",
                "derived: rounding of sums in single precision, with room",
            ),
            "LEAST_EXAMPLES": (
                "examples that a client must have to add to moments",
                "derived: those of one example are its data",
            ),
            "COLLINEAR": (
                "when columns count as multiples of each other",
                "derived: rounding leaves 1e-15 in double precision, and 1e-14 of columns in single",
            ),
            "FEATURE_ROWS": (
                "examples of a client that the features' scale is found from",
                "all images of a hundred clients took as long as four rounds; one number is wanted, so some "
                "hundreds of rows over all clients are enough. The number is not measured",
            ),
        },
        "questions/least_squares.py": {
            "RIDGE": (
                "share of a coefficient between columns that are multiples of each other",
                "derived: far above rounding, and a bias of a millionth",
            ),
            "SPREAD_SHARE, LEAST_SPREAD_SHARE": (
                "how much of what a pooled fit leaves of y starts as spread of z",
                "sleepstudy ends within .1 nats after 300 rounds, 3,100 nats short from a start at 0 "
                "([starts](decisions.md#starts-in-the-units-of-the-data)); other shares are not measured",
            ),
        },
        "questions/pooled.py": {
            "POOLED_STEPS, DAMPING": (
                "how often everyone is asked for a user's function, and which dampings are tried each time",
                "within .1 nats after 300 rounds (`tests/statistical/test_lmm_slow.py`); other numbers are "
                "not measured",
            ),
            "LARGEST_POOLED_FIT": (
                "dimensions of z up to which this start is looked for",
                "a client sends their square, six times over; the number is not measured",
            ),
        },
        "questions/spectral.py": {
            "LEAST_MOMENT": (
                "how far x is whitened",
                "derived: messages are in single precision, which leaves 6e-8",
            ),
            "SHORTEST_DIRECTION": (
                "length of directions in which the spectral start has found noise",
                NOT_MEASURED,
            ),
        },
        "questions/curvature.py": {
            "STEP": (
                "step of DG-LMC and of the relay in units of one over the curvature; `step=` overrides it",
                "derived: stable below 2, and bias falls with it; a quarter is not measured",
            ),
        },
        "federation/table_format.py": {
            "MINIMUM": (
                "smallest cell of a table that is told of; `minimum=` overrides it",
                "convention of statistical offices; it protects, and changes which levels are known",
            ),
        },
        "models/probe.py": {
            "LARGEST_STEP_SIDE_BY_SIDE": (
                "numbers that a client's step through a small convolutional network keeps for its "
                "backward pass, up to which clients are worked on side by side",
                "measured on one thread with 30 clients: side by side was 2.1, 1.7 and 1.5 times as fast "
                "with 59,000, 118,000 and 95,000 numbers, as fast with 250,000, and slower above",
            ),
        },
        "models/split.py": {
            "LARGEST_SHALLOW": (
                "parameters of a module up to which chains of parameters deep inside it are as long as those "
                "of a head",
                NOT_MEASURED,
            ),
        },
        "methods/pfedfda.py": {
            "ABSENT, SHRINKAGE": (
                "the share of a class that a client does not have; how much of a covariance is its mean "
                "variance before it is inverted",
                "published: those of the authors' code",
            ),
            "GRID, FOLDS": (
                "values of each interpolation weight that pFedFDA tries, and folds it tries them on",
                "two folds: published. The grid stands for their L-BFGS, which found (1, .34) on a problem "
                "where it finds (.9, .3)",
            ),
        },
        "methods/pfedbayes.py": {
            "ADAM": (
                "what Adam keeps of gradients and of their squares in pFedBayes's steps, .9 and .999",
                "published: those of the authors' code, which has torch's",
            ),
        },
        "methods/fedsouk.py": {
            "USUAL_STEPS, STEPS_OF_DEEP": (
                "transitions of a chain in a round; `local_steps` overrides it",
                "ten: draws of a head cost little, and J is quieter with more. One where each gradient is a "
                "pass through the network: with two leapfrog steps and J a round is then four passes "
                "(two transitions took 6.9 bare passes of a small BERT)",
            ),
        },
        "population/saving.py": {
            "SAVED_BYTES, LEAST_SAVED_DRAWS": (
                "bytes up to which `save` keeps all draws of all clients, and how many it keeps of each at "
                "least; `posteriors=` overrides both",
                "16 MiB: 100 clients with heads of 99 numbers have 423 of their 1,000 draws; with 100 a 5 % "
                "quantile is known to .2 posterior standard deviations",
            ),
        },
        "devices.py": {
            "LARGEST_SHARE": (
                "share of a device's free memory that the clients' data may take, to stay there for a run",
                "half: a round keeps as much again for its backward pass",
            ),
        },
        "site/plan.py": {
            "CONVOLVED_AT_ONCE": (
                "bytes that a convolutional network keeps at a time on a CPU for its backward pass, "
                "whatever `memory=` allows",
                "10 clients of 500 images of the paper's CIFAR-10 network: 669 MiB at most in all in the "
                "place of 1,282, in the same processor time (9.4 and 9.2 s for three rounds)",
            ),
        },
        "threads.py": {
            "LEAST_SHARE": (
                "numbers of a step that each of several threads has at least; `threads=` overrides it",
                "half a million: below that two threads gained little on small networks, and on a busy "
                "machine cost up to twenty times what one does",
            ),
            "WATCHED": ("seconds for which idle cores are counted", "derived: twenty ticks of the clock"),
        },
        "models/composition.py": {
            "LARGEST_FULL_COVARIANCE": (
                "weights of a head on fixed columns up to which the prior's covariance is full; "
                '`prior="isotropic"`, `"diagonal"` and `"full"` override it',
                "measured with three weights: isotropic ended 7 to 9 nats short after 300 rounds, full 0.0; "
                "the threshold is not measured",
            ),
        },
    },
    "run": {
        "run/stages.py": {
            "FIRST_STAGE": (
                "rounds of the first stage where `rounds` is left open; each further one is as long as all "
                "before it",
                "derived up to the number: so at most twice the rounds are run that were needed. Exact "
                "optima of the README's model are .66 nats away after 300 rounds "
                "([verdict](decisions.md#when-is-it-finished))",
            ),
            "LONGEST_UNJUDGED_RUN": ("the same for methods that nothing can judge", NOT_MEASURED),
            "JUDGED_FROM": (
                "rounds from which a run is judged, with closed-form posteriors (true) and without",
                "a verdict costs about ten rounds with closed forms, twenty without",
            ),
            "MOST_JUDGED_CLIENTS": (
                "clients above which a verdict is not made from draws",
                "derived: each of them would be worked on by itself; not measured",
            ),
            "WARNED_NATS": (
                "nats short of a local optimum at which a run warns",
                "derived: twice what one standard error of one parameter costs",
            ),
        },
        "evaluation/verdict.py": {
            "CONVERGED_NATS": (
                "nats below a local optimum at which θ has converged",
                "derived: a tenth of the half nat that one standard error of one parameter costs",
            ),
            "SETTLED_SHARE, SETTLED_FALL": (
                "what a network's loss may still fall by, of what it has fallen by in all, at least and at "
                "most",
                "a proxy ([verdict](decisions.md#when-is-it-finished)); not measured",
            ),
        },
        "evaluation/convergence.py": {
            "LARGEST_EXACT_VERDICT": (
                "parameters up to which closed-form posteriors are judged in nats",
                "derived: each client's information is a matrix of that size, two megabytes",
            ),
            "FLAT_CURVATURE": (
                "curvature, of the largest, below which a direction has none",
                "derived: rounding leaves some 1e-13",
            ),
            "UPWARD_CURVATURE": (
                "curvature upwards from which θ is at no maximum",
                "derived: half of it is what a step of a standard error gains",
            ),
            "AT_BOUND_SHARE": ("how near to a bound a parameter has reached it", NOT_MEASURED),
        },
        "evaluation/diagnostics.py": {
            "WORST_RHAT, LEAST_ESS": (
                "when a client's chains count as mixed",
                "convention: 1.05 is between 1.1 (Gelman and Rubin) and 1.01 (Vehtari et al., 2021); 100 "
                "draws know a mean to a tenth of a standard deviation",
            ),
            "RHAT_CUTS, ESS_CUTS": ("where counts of clients are cut", "only what is shown depends on them"),
        },
        "evaluation/louis.py": {
            "NOISE_PARTS, LEAST_PART": (
                "parts of chains that the noise of a verdict's gradient is found from",
                "derived: seven degrees of freedom know a variance to a half; fewer draws would not be "
                "independent of their neighbours",
            ),
        },
    },
    "estimates": {
        "evaluation/information.py": {
            "LARGEST_EXACT_INFORMATION": (
                "parameters up to which `theta_uncertainty` is there with closed-form posteriors",
                "derived: a matrix of 32 MB from everyone",
            ),
            "LARGEST_SAMPLED_INFORMATION": (
                "the same from draws, and up to which models are judged in nats from them",
                "derived: a Hessian and all draws' scores of each client",
            ),
            "THETA_DRAWS": (
                "draws of θ behind predictions that do not take it as known",
                "derived: with `DRAWS_PER_THETA` a 5 % quantile is known to .07 to .2 standard deviations",
            ),
            "NULL_DIRECTION": ("when directions depend on each other", "derived: rounding, with room"),
            "LEAST_INFORMATION": (
                "information, of the largest, below which data do not determine θ, which is an error",
                "derived: rounding, with room",
            ),
        },
        "population/theta.py": {
            "DRAWS_PER_THETA": ("draws of z at each of them", "the same"),
        },
        "evaluation/marginal.py": {
            "PROPOSAL_DEGREES": (
                "degrees of freedom of the importance proposal",
                "[tried](decisions.md#numbers-that-were-tried): from 3 to 30 errors fall from .073 to"
                " .032 nats on a nearly normal posterior; derived: tails that are too thin have "
                "weights without a variance",
            ),
            "PROPOSAL_WIDTH": (
                "how much wider than the draws it is",
                "[tried](decisions.md#numbers-that-were-tried): from .8 to 2 errors rise from .046 to"
                " .118 nats there; derived: a proposal that is too narrow has weights without a "
                "variance",
            ),
            "WORST_PARETO_SHAPE": (
                "shape of the weights' tail at which an estimate is refused",
                "Vehtari, Simpson, Gelman, Yao and Gabry, Pareto smoothed importance sampling",
            ),
            "WORST_STANDARD_ERROR": (
                "a client's standard error, in nats, at which it is refused",
                "derived: a few draws have all the weight, which hides the shape of the tail",
            ),
        },
        "evaluation/newcomers.py": {
            "WIDTH_FACTORS, UNCHANGED": (
                "factors of the prior's width that are tried for new clients",
                "calibration error on CIFAR-10 without examples: .022, and .213 with the prior as it was "
                "learned (`research/new_clients`)",
            ),
            "SCORED_ROWS": ("examples that each client scores for it", NOT_MEASURED),
            "LEAST_DATA_SHARE": (
                "share of z that data decide, on average, below which it is not believed",
                "derived: it is made of draws, and errs by some hundredths",
            ),
            "ERRORS_TO_BE_SURE": (
                "standard errors by which a factor must be better than one",
                "convention: two",
            ),
            "LOWEST_SCORE": ("the score of what cannot be", "derived: finite, and below all others"),
        },
        "evaluation/quadrature.py": {
            "GRID_POINTS": (
                "points in each direction, by dimensions of z, where a prior's constant is not known",
                "derived: a thousand, and 129² of them; leaving out every second one tells the error",
            ),
            "GRID_REACH": ("how far the first grid reaches", "derived: 1e-15 of a Gaussian lies outside"),
            "GRID_PASSES": ("grids, each about what is left", "derived: see there"),
            "NEGLIGIBLE_BELOW": ("when a point adds nothing", "derived: exp(-40) is 4e-18"),
            "QUADRATURE_TOLERANCE": (
                "nats by which half of the points may differ, or the estimate is refused",
                "derived: the error of all points is far smaller",
            ),
        },
        "evaluation/scores.py": {
            "CALIBRATION_BINS": ("bins of a calibration error", "convention (Guo et al., ICML 2017)"),
            "INTERVAL_LEVEL": ("level of the intervals that are scored", "convention"),
            "WORST_SHARE": ("clients in the means over the worst", "convention"),
            "WIDTH_DRAWS": (
                "draws that widths of intervals are computed from",
                "derived: the width of one 90 % interval is known to 6 %, its mean over a hundred "
                "examples to .6 %",
            ),
        },
    },
    "messages": {
        "message/channel.py": {
            "CLIP_SLACK": (
                "share by which a clipped vector may arrive longer than its bound before it is clipped again",
                "derived: rounding of norms in single precision, with room",
            ),
        },
        "message/guard.py": {
            "MESSAGES_FOR_A_MEDIAN": (
                "messages of a round below which the guard is off",
                "derived: of five, two may be absurd and their median is not",
            ),
            "SUM_MADE_AGAIN": (
                "times the usual at which a fused sum is made again, client by client",
                "derived: that costs time, nothing else",
            ),
            "FIRST_SUM": (
                "what is usual of a sum per example before anything is known",
                "not measured: a larger one is made again, which costs time, nothing else",
            ),
            "LOWEST_POWER, HIGHEST_POWER": (
                "powers of two that norms are counted by",
                "derived: what a norm in single precision, per example, and one in double can be",
            ),
        },
        "message/fixed_point.py": {
            "MARGINS": (
                "by bits, powers of two between the longest message of a round and what fits in the next",
                "measured: with 2 a client of a 6-client run did not fit in its second round; with 6 all do, "
                "and the step is still 2^-19 of the longest norm at 64 sites",
            ),
            "FALLS": (
                "powers of two by which that falls in a round of shorter messages",
                NOT_MEASURED,
            ),
            "OUTLIERS": (
                "powers of two above the median from which a norm does not widen what fits",
                "that of the guard, a thousand",
            ),
        },
        "privacy/gaussian.py": {
            "BITS_SHARE, PRIOR_SHARE": (
                "of a round's σ⁻², the parts of adaptive bounds' bits and of I",
                NOT_MEASURED,
            ),
            "BOUND_RATE": ("how fast an adaptive bound follows the norms", "Andrew et al. take 0.2"),
            "SCORE_BOUND": (
                "the bound of a whitened I, in roots of its size",
                "derived: one root is its size under the prior; the factor is not measured",
            ),
            "ROUNDED": (
                "of a bound, what a vector is shortened to",
                "derived: rounding in single precision may not lift it above the bound",
            ),
        },
        "privacy/ledger.py": {
            "RELATIVE_PRECISION": ("to which a multiplier is found for a budget", "convention"),
            "LARGEST_NOISE": ("a multiplier above which a budget is refused", "derived: nothing is learned"),
            "LOSS_STEP": (
                "the grid of privacy losses; a coarser one says a larger ε",
                "derived: an upper bound whatever it is; 1e-4 gives the same three digits",
            ),
            "BY_LOSSES": (
                "ε from which on the bound by Rényi divergences is told",
                "derived: neither promises anything",
            ),
            "ORDERS": ("orders of Rényi divergences", "derived: an upper bound whichever they are"),
        },
        "privacy/site_noise.py": {
            "TAILS": (
                "standard deviations of noise that fit beside the largest sum",
                "derived: what lies beyond has a chance of 1e-32 a number",
            ),
            "COARSE": ("of a bound, what rounding may add to it before a grid is refused", NOT_MEASURED),
            "LEAST_WIDTH": (
                "steps that a site's part of the noise is wide, at least",
                "derived: the correction is then below 1e-15 a number",
            ),
            "ROUNDED_LOSS": ("of ε, what the corrections for whole numbers may take", "convention"),
        },
        "mixed/private.py": {
            "CHAIN_ROUNDS, WARM_ROUNDS, SCORED_ROUNDS, FOUND_IN, SETTLED_IN": (
                "rounds of a private mixed model: with chains, for coordinates and bounds, and scored ones, "
                "of which the first do not count",
                "intervals hold ([coverage](privacy.md#mixed-models)); others were not tried",
            ),
            "SHARES": ("of σ⁻², the parts of scores, information and bits", NOT_MEASURED),
            "FIRST_BOUND, BOUND_QUANTILE, WARM_RATE": (
                "where bounds begin while coordinates are found, and how they follow",
                NOT_MEASURED,
            ),
            "SCORE_REACH, INFORMATION_REACH": (
                "bounds of scores and information once their sizes are known",
                "derived: of a normal score none is beyond, and balanced groups have a third of the other",
            ),
            "LEAST_WHITENED, LONGEST_STEP": (
                "what keeps a noised scoring step from running away",
                "derived: in units in which information is one",
            ),
            "CLIPPED_SHARE": (
                "of groups that were shortened, from which on a fit says that no interval covers it",
                "convention",
            ),
        },
        "run/private.py": {
            "TOO_OFTEN": (
                "the chance that a run with a budget against the server ends sooner than planned",
                "convention",
            ),
            "ANY_LENGTH": ("rounds of a private run without a budget", "derived: more than any run has"),
            "USEFUL": (
                "noise over the largest possible sum from which a run is known to learn little, which warns",
                "measured: at 0.05 the subspace was found in all of six runs, at 0.085 it was lost in one "
                "of three "
                "([table](privacy.md#differential-privacy))",
            ),
        },
        "message/compressors/rand_k.py": {
            "KEPT_SHARE": ("entries that `RandK()` sends; `share=` overrides it", NOT_MEASURED),
        },
        "federation/participation/rules.py": {
            "LARGEST_DRAWN_EACH": (
                "clients up to which each draws a number of its own to join; above it the law is the same, "
                "and the draws are others",
                "derived: a round must cost what its active clients cost",
            ),
        },
        "federation/partitions/dirichlet.py": {
            "SMALLEST_ALPHA": (
                "the smallest α that is told from 0",
                "derived: each class goes to one client by it, and logarithms are finite",
            ),
        },
    },
    "networks": {
        "models/modules.py": {
            "IMAGES_PER_THREAD": (
                "images that go through a convolutional network at a time; to rounding",
                "[measured](performance.md): page faults of larger batches cost up to a quarter of the time",
            ),
            "LEAST_ROUNDED": (
                'parameters from which `precision="auto"` tries bfloat16 without convolutions',
                "for the paper's network bfloat16 was 1.8 to 2.5 times as fast on one processor, a tenth as "
                "fast on another; the threshold is not measured",
            ),
        },
        "models/probe.py": {
            "ORDER_OF_SUMS, ORDER_IN_DOUBLE, ORDER_IN_BFLOAT16": (
                "how much an output may differ in a batch, or the model is refused",
                "derived: far above rounding, far below a layer that mixes examples",
            ),
        },
        "precision.py": {
            "LEAST_SPEED_UP": ("how much faster bfloat16 has to be to be chosen", NOT_MEASURED),
        },
        "precision_probe.py": {
            "ROUNDING_TOLERANCE": (
                "how far bfloat16 may be from float32, or it is not used",
                "measured: .003 in a product, .009 in gradients of a convolution",
            ),
        },
    },
    "mixed": {
        "mixed/engine.py": {
            "SINGULAR_FACTOR": ("entry of the relative factor at which a fit is singular", "lme4's own"),
            "FIT_NATS": ("nats that a Newton step may promise at the end", "as in the exact engine"),
            "LARGEST_NEWTON": (
                "parameters up to which the search takes Newton steps, a Hessian at each evaluation",
                "sleepstudy over two sites: 23 messages per site where quasi-Newton steps took 46",
            ),
            "POLISHING_STEPS, POLISHED_NATS": (
                "Newton steps after the search, and when they are over",
                "derived: rounding",
            ),
        },
        "mixed/contrasts.py": {
            "SAME_SPAN": (
                "residual at which columns of two codings span one space",
                "derived: rounding of a least-squares fit, with room",
            ),
        },
        "mixed/degrees.py": {
            "EQUAL_DEGREES": ("degrees of freedom that are one number", "lmerTest's own"),
            "LEAST_VARIANCE": (
                "share of variance at which rows of a hypothesis are combinations of others",
                "derived: rounding of eigenvalues, with room",
            ),
        },
        "mixed/gaussian.py": {
            "PERFECT_FIT": ("when a fit leaves nothing, which is an error", "derived: rounding of squares"),
            "PROPOSAL_NATS": (
                "how near the maximum proposals for θ are centred",
                "derived: what is drawn from them is weighed exactly",
            ),
            "THETA_PROPOSAL_WIDTH": (
                "width of proposals for θ, in units of its information",
                "[tried](decisions.md#numbers-that-were-tried): 225 and 343 of 400 effective; at 1.6 "
                "proposals reach the factor's mirror image",
            ),
        },
        "mixed/bases.py": {
            "KNOT_BINS, KNOT_REACH": (
                "the grid that knots of a spline are rounded to, in standard deviations about the mean",
                "a quantile that is not rounded is somebody's value; the number of bins is not measured",
            ),
            "WORST_CONDITION": (
                "condition beyond which a polynomial's coefficients say how they differ from R's",
                "derived: half of the digits of double precision",
            ),
        },
        "mixed/families.py": {
            "LARGEST_ETA": (
                "linear predictor beyond which a probability is zero or one",
                "derived: in double precision it is, with room",
            ),
            "UPPER_SDS, UPPER_SCALES": (
                "where a search for a quantile of a count or a gamma begins from above",
                "derived: no more than 3e-22 of either law lies above it, whatever its parameters "
                "(`tests/mixed/test_families.py`)",
            ),
        },
        "mixed/profile.py": {
            "PROFILE_NATS": (
                "nats that a step still promises where a point is found",
                "derived: ζ² is twice the nats lost, so that 1e-9 moves an end by 1e-9 standard errors",
            ),
            "ZETA_TOLERANCE": ("how near zeta comes to its quantile", "derived: five digits of an end"),
            "EDGE_SHARE, FIRST_ENTRY": (
                "where a standard deviation counts as zero, or a correlation as one, and where a way from "
                "there begins",
                NOT_MEASURED,
            ),
            "SADDLE_SHARE": (
                "share of the largest curvature by which a direction has to bend upward",
                "derived: rounding of eigenvalues, with room",
            ),
        },
        "mixed/disclosure.py": {
            "CARRIED": (
                "share of a column's squares that rows beside a few must carry, or a site does not answer",
                NOT_MEASURED,
            ),
            "ZERO_COMBINATION": (
                "a combination of columns that is zero but for rounding",
                "derived: rounding",
            ),
            "SINGLE_SHARE": (
                "share of groups with a single row above which a site does not answer",
                NOT_MEASURED,
            ),
        },
        "mixed/common_key.py": {
            "LEAST_BINS, MOST_BINS": (
                "bins of a table by which names of groups are compared",
                "derived: 18 groups share one by chance in one fit of a hundred, which costs a message; the "
                "largest table is 8 MiB",
            ),
            "BINS_PER_GROUP": ("the same, for each group", "derived: one group of eight shares a bin"),
            "SURE_TABLES": (
                "further tables that part no groups, after which their names are taken to be the same",
                "derived: of different names the chance is one over the square of the bins, below 4e-9",
            ),
            "CHECK_BINS": (
                "by how much sites see that their keys are the same ones",
                "derived: other keys look the same in one case of a million",
            ),
        },
        "mixed/groups.py": {
            "NEW_COLUMN_SHARE": (
                "share of a column that others must leave unexplained, or it is dropped as R does",
                "derived: rounding leaves 1e-15",
            ),
        },
        "mixed/inference.py": {
            "BOUNDARY_VARIANCE": ("a correlation that is at one", NOT_MEASURED),
        },
        "mixed/fit.py": {
            "UNUSUAL_TIMES": (
                "times the median length of effects at which a group is named",
                "of a million groups with one normal effect the largest is about 60",
            ),
            "LEAST_SHARE_LEFT": (
                "share of the largest variance below which a direction of effects is not judged",
                "derived: rounding of eigenvalues, with room",
            ),
            "INTERVAL_THETAS": ("draws of θ behind intervals that include its uncertainty", NOT_MEASURED),
            "THETA_PROPOSALS": ("values that these are chosen from", NOT_MEASURED),
            "EFFECT_DRAWS_PER_THETA": ("draws of a group's effects for each", NOT_MEASURED),
        },
        "mixed/predictions.py": {
            "MEAN_NODES": (
                "nodes of the mean of a new group",
                "derived: of a log link it is exp(variance / 2) to 1e-8 (`tests/mixed/test_tables.py`)",
            ),
            "PREDICTION_PROPOSALS": ("proposals that a group's effects are drawn from", NOT_MEASURED),
        },
        "mixed/quadrature.py": {
            "LARGEST_LOG_DISPERSION": (
                "logarithm of a dispersion beyond which it is none, by family",
                "derived: what it says of rows is lost in rounding soon after",
            ),
            "GRID_NODES": (
                "nodes in each direction that a search begins with",
                "more are taken until the likelihood agrees (`AGREED`), so only time depends on it",
            ),
            "SCATTERED_NODES": ("scattered nodes that a search begins with", "the same"),
            "NODE_SPREAD": (
                "how much further apart these are",
                "derived: the tails of a normal law are thinner than posteriors'; not measured",
            ),
            "GROUP_MODE_STEPS, GROUP_MODE_TOLERANCE": (
                "when a group's mode is found",
                "derived: Newton's steps, to rounding",
            ),
            "SCATTER_WIDTH": ("width of proposals for a group's effects", NOT_MEASURED),
            "UNDETERMINED_ERROR": ("standard error at which data say nothing of a coefficient", NOT_MEASURED),
            "SEPARATED_SD": (
                "spread of groups on the scale of the link that has no bound",
                "derived: at fifteen logits a group is all yes or all no",
            ),
            "NODE_AGREEMENT_NATS": (
                "nats by which more nodes may change the likelihood: of a grid (true), and of scattered ones",
                "derived: the second is how far below a maximum a fit counts as converged",
            ),
            "SCATTERED_SEARCH_NATS, SCATTERED_EVALUATIONS": (
                "when a search by scattered nodes is over",
                "derived: their gradient is no better",
            ),
            "ROUGH_FROM, ROUGH_NODES": (
                "random effects from which a search begins where one by few nodes ended, and these nodes",
                "only time depends on it: a singular fit with four random effects to 1,440 rows took 7 "
                "processor seconds after 14",
            ),
            "WIDE_SEARCH_NATS": (
                "nats that a Newton step may promise where a search on a grid of so many dimensions is over",
                "derived: a hundredth of what its nodes leave unknown",
            ),
            "ROUGH_NATS, ROUGH_EVALUATIONS": ("when that one is over", "only time depends on it"),
            "REFINED_EVALUATIONS": (
                "evaluations of a search by scattered nodes that begins where one by half as many was over",
                NOT_MEASURED,
            ),
        },
        "mixed/sampled.py": {
            "ROUNDS_WITH_CHAINS": (
                "rounds with chains before scoring steps",
                "that of a run without `rounds`",
            ),
            "SCORING_STAGES": ("stages of scoring steps at most", NOT_MEASURED),
            "SCORED_NATS": ("nats at which they are over", "derived: three hundredths of a standard error"),
            "LEAST_CHAIN_SD": (
                "smallest standard deviation that chains work with",
                "derived: nothing in a table's units is as small, and its logarithm is finite",
            ),
        },
        "mixed/table.py": {
            "FEW_BAD_CELLS": (
                "different numbers up to which a column may be meant as levels, which is asked",
                NOT_MEASURED,
            ),
        },
    },
    "comparisons": {
        "comparison/terms.py": {
            "BUDGET_ROUNDS": ("budget of every method; `rounds`, `passes` override it", NOT_MEASURED),
        },
        "comparison/truth.py": {
            "RANDOM_STARTS": (
                "random starts of the search for the exact optimum, beside the truth and what was learned",
                NOT_MEASURED,
            ),
            "METHODS": ("methods of the synthetic comparison, with their rounds", "its protocol"),
        },
        "comparison/demo.py": {
            "COMPARED, DEMO_ROUNDS": ("methods of `fedpop demo`, and their rounds", "its protocol"),
        },
        "comparison/budget.py": {
            "TRIAL_ROUNDS, ROUNDS_WITHOUT_PASS": (
                "trial rounds that the price of a round is known from",
                "derived: the first may differ, two after it agree",
            ),
            "ROUNDING": ("what a budget may be exceeded by", "derived: rounding of sums"),
        },
        "data/image_task.py": {
            "SHIFTS": (
                "how images are shifted and mirrored in training",
                "convention; digits are not mirrored",
            ),
        },
    },
}

OTHERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "formats": (
        "What files, messages and standards fix: others would not be read.",
        {
            "data/byte_cache.py": "CACHE_VERSION",
            "data/formats/cifar.py": "SHAPE",
            "data/formats/idx.py": "_UINT8, MOST_DIMS",
            "data/formats/mat.py": "_HEADER, _MATRIX, _COMPRESSED, _KINDS, _NUMERIC, _COMPLEX",
            "message/words.py": "LOWEST, DIGITS, DIGIT",
            "message/summed.py": "POWERS, COUNT_WIDTH",
            "privacy/secure.py": "WIDTHS, SECRET, NONCE",
            "message/compressors/base.py": "MAGIC, PAYLOAD_VERSION, FLOATS",
            "message/compressors/natural.py": "_MANTISSA, _MAGNITUDE, _LARGEST, _UP, _SUBNORMAL",
            "population/saving.py": "POPULATION_FORMAT, PIECE_BYTES",
            "mixed/saved.py": "FIT_FORMAT",
            "run/checkpoint.py": "CHECKPOINT_FORMAT",
            "files.py": "_UNITS",
            "flower/certificates.py": "CURVE_BITS",
            "flower/commands.py": "OTHERS_MASK",
            "flower/server_commands.py": "FIT_LETTERS, SECURE_BY_DEFAULT",
            "flower/ledger.py": "NOTHING",
            "flower/processes.py": "FAILED_CODE",
            "flower/transport.py": "NODE_GONE",
            "flower/requests.py": "PROTOCOL",
            "flower/server_folder.py": "LAYOUT",
            "flower/site_folder.py": "KEY_LETTERS",
        },
    ),
    "random numbers": (
        "Philox, hashes and the names of streams: other draws of the same laws.",
        {"keys.py": "SERVER, NEWCOMER, _MASK, _MULTIPLIERS, _WEYL, _ROUNDS, _CHUNK, _GOLDEN, PUBLIC"},
    ),
    "refusals": (
        "Beyond them there is an error; within them nothing depends on them.",
        {
            "data/images.py": "LEAST_IMAGES_OF_A_SET, MEAN_PIXEL_TOLERANCE",
            "federation/participation/availability.py": "LONGEST_AVAILABILITY",
            "federation/partitions/base.py": "LARGEST_LABEL, MOST_TABLE_CELLS",
            "kinds.py": "LARGEST_COUNT",
            "message/compressors/qsgd.py": "MOST_LEVELS",
            "mixed/contrasts.py": "LARGEST_REFERENCE_GRID",
            "mixed/formula.py": "MOST_TERMS, DEEPEST, LONGEST_SHOWN",
            "mixed/simulated.py": "LEAST_REPLICATES",
            "mixed/table.py": "LARGEST_VALUE",
            "models/spec.py": "LARGEST_MODEL, MOST_PARAMETERS, LARGEST_ARGUMENT, MOST_LAYERS",
            "priors/mixture.py": "MOST_COMPONENTS",
            "run/checkpoint.py": "MOST_THREADS",
            "comparison/budget.py": "MOST_ROUNDS_TRIED",
        },
    ),
    "limits of a search": (
        "Where one is reached the run or the fit says so (an error, a warning, not converged, no interval).",
        {
            "federation/partitions/dirichlet.py": "PARTITION_ATTEMPTS",
            "mixed/engine.py": "MOST_FIT_EVALUATIONS",
            "mixed/profile.py": "MOST_PROFILE_POINTS, MOST_PROFILE_STEPS",
            "mixed/quadrature.py": "MAX_NODES",
            "run/breakdown.py": "MOST_SILENT_ROUNDS",
            "run/stages.py": "LONGEST_RUN",
        },
    ),
    "memory and speed": (
        "How much is done at once, and how speed is measured: values are the same to the rounding of sums.",
        {
            "flower/ledger.py": "TAIL_BYTES",
            "flower/logs.py": "LOG_BYTES, OLD_LOGS",
            "flower/watch.py": "LOG_END_BYTES",
            "federation/cohort.py": "KEPT_BYTES",
            "blocks.py": "CLIENTS_AT_ONCE, ROWS_AT_ONCE, ENTRIES_AT_ONCE",
            "client/local_sgd.py": "LARGEST_BATCHED",
            "client/phi_step.py": "GRADIENT_NUMBERS_AT_ONCE, LARGEST_PHI_SIDE_BY_SIDE, "
            "LEAST_CLIENTS_FOR_VMAP",
            "message/compressors/base.py": "_BLOCK",
            "message/fixed_point.py": "_ROUNDED_AT_ONCE",
            "mixed/fit.py": "EFFECT_BYTES",
            "mixed/gaussian.py": "PROFILE_NUMBERS_AT_ONCE, PROFILES_BESIDE, EFFECTS_BESIDE, IN_PARTS",
            "mixed/nesting.py": "PRODUCT_ROWS_AT_ONCE",
            "mixed/predictions.py": "PREDICTED_NUMBERS_AT_ONCE",
            "mixed/study.py": "GROUP_BYTES",
            "models/condensed.py": "LEAST_CONDENSED",
            "models/probe.py": "PROBED_ROWS",
            "population/client_models.py": "CACHED_MODEL_BYTES",
            "population/posterior.py": "PREDICTED_ENTRIES_AT_ONCE",
            "server/quasi_newton.py": "ROWS_ONE_BY_ONE, HESSIAN_ROWS_AT_ONCE",
            "precision_probe.py": "PRODUCT_SIZES, PROBED_BATCH, PROBED_CONVOLUTIONS, TIMED_LAPS",
            "site/plan.py": "WHOLE",
        },
    ),
    "pages and pictures": (
        "What reports, tables and progress look like.",
        {
            "comparison/run.py": "EVALUATIONS_ON_THE_WAY, CHECKPOINTS_ON_THE_WAY",
            "federation/cells.py": "SHOWN_VALUES",
            "flower/checks.py": "UNKNOWN_LEVELS, LISTED_VECTORS",
            "flower/rehearsal.py": "REHEARSED_ROUNDS",
            "mixed/design.py": "SHOWN",
            "mixed/figures.py": "MOST_GROUPS_SHOWN, MOST_SLICES, ROWS_OF_A_SLICE, BLUE, GREY",
            "report/features.py": "COUNTED_DRAWS, CLIENTS, EXAMPLES, INPUTS, FEATURES",
            "report/holdings.py": "MOST_NAMED_CLASSES, MOST_BARS, MOST_PIXELS",
            "flower/outcome.py": "SHOWN_ENTRIES",
            "flower/site_folder.py": "FINGERPRINT_LETTERS",
            "flower/watch.py": "SHOWN_POINTS, SHOWN_ROUNDS, SHOWN_LINES",
            "report/style.py": "STYLE",
            "report/counted.py": "COUNTED",
            "report/terminal.py": "WIDTH",
        },
    ),
    "time and the network": (
        "How long others are waited for, and how long certificates are valid.",
        {
            "data/byte_cache.py": "ABANDONED_AFTER",
            "data/download.py": "LONGEST_SILENCE",
            "flower/certificates.py": "AUTHORITY_YEARS, CLOCK_SKEW, CLOCK_AHEAD, BEHIND, MOST_DAYS",
            "flower/transport.py": "GREETINGS_WAITED",
            "flower/door.py": "REQUEST_BYTES, STRANGER_SECONDS, STRANGER_CONNECTIONS, SITE_CONNECTIONS, "
            "REQUESTS_PER_SECOND, REQUESTS_AT_ONCE, REFUSAL_SECONDS, HOLD_SECONDS, SENT_AGAIN",
            "flower/link.py": "ADMISSION_SECONDS",
            "flower/node.py": "QUICK_SECONDS, SLOW_SECONDS, RUN_SECONDS, HELD_SECONDS, RECONNECT_SECONDS, "
            "REFUSED_SECONDS, TAKEN_OVER_SECONDS, REST_SECONDS, GROWN_BYTES",
            "flower/pages.py": "WAIT_SECONDS",
            "flower/processes.py": "RESTART_SECONDS, STEADY_SECONDS",
            "flower/remote.py": "QUIET_SECONDS, GREETED_SECONDS",
            "flower/secure_site.py": "WRITTEN_SECONDS",
            "flower/secure_sums.py": "UNMASK_SECONDS",
            "flower/server_commands.py": "RUN_TRIES",
            "flower/trackers.py": "RETRY_SECONDS",
            "flower/table_form.py": "ROWS_LOOKED_AT",
            "precision.py": "LONGEST_PROBE",
        },
    ),
    "lists of what there is": (
        "Declarations by name, of which the user picks; codes of states.",
        {
            "comparison/tasks.py": "MORE",
            "data/catalogue.py": "_DIGITS, _BATCHES, _CIFAR10, _CIFAR100, DATASETS",
            "message/declared.py": "NUMBERS",
            "questions/forms.py": "KNOWN",
            "models/links.py": "LINKS",
            "models/networks.py": "NETWORKS",
            "server/quasi_newton.py": "CURVATURE, BRACKET, ZOOM, CONVERGED, STALLED, VALUE",
        },
    ),
}
"""Kinds of constants that do not change results: why, and which they are."""


# --- the code ----------------------------------------------------------------------------------------


def names_of(target: ast.expr) -> list[str]:
    """What an assignment gives a name to."""
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return [part.id for part in parts if isinstance(part, ast.Name)]


def assigned(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.expr]]:
    """Names and what they are given, in a module or in the classes of one; of tuples one by one."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not prefix:
            yield from assigned(node.body, f"{node.name}.")
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            names = names_of(target)
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else []
            whole = isinstance(target, ast.Name) or len(parts) != len(names)
            for name, part in zip(names, [node.value] * len(names) if whole else parts, strict=True):
                yield prefix + name, part


def numeric(value: ast.expr) -> bool:
    """There is a number in it."""
    literals = (node.value for node in ast.walk(value) if isinstance(node, ast.Constant))
    return any(isinstance(v, int | float) and not isinstance(v, bool) for v in literals)


@cache
def constants(path: str) -> dict[str, str]:
    """Of a file of fedpop: its constants, and attributes of its classes, as the code has them."""
    body = ast.parse((ROOT / path).read_text()).body
    return {name: ast.unparse(value) for name, value in assigned(body)}


def numbers_in(path: str) -> list[str]:
    """Its constants with a number in them, by name."""
    body = ast.parse((ROOT / path).read_text()).body
    return [n for n, v in assigned(body) if n.strip("_").isupper() and "." not in n and numeric(v)]


def value_of(path: str, names: str) -> str:
    """The values of constants as the code has them; long ones end where a table would."""
    values = [constants(path)[name] for name in names.split(", ")]
    found = ", ".join(values).replace("|", "\\|")
    return found if len(found) <= 60 else f"{found[:57]}..."


def table(area: str) -> str:
    """One area's constants."""
    rows = ["| constant | value | what it decides | evidence | place |", "|---|---|---|---|---|"]
    for path, known in TABLES[area].items():
        for names, (decides, evidence) in known.items():
            shown = ", ".join(f"`{name}`" for name in names.split(", "))
            rows.append(f"| {shown} | `{value_of(path, names)}` | {decides} | {evidence} | `{path}` |")
    return "\n".join(rows)


def others() -> str:
    """The kinds that change no results."""
    rows = ["| kind | why it changes no results | constants |", "|---|---|---|"]
    for kind, (why, known) in OTHERS.items():
        places = "; ".join(f"`{path}`: {names}" for path, names in known.items())
        rows.append(f"| {kind} | {why} | {places} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A line ``<!-- constants: area -->`` becomes that area's table; ``others`` is that of all else."""
    made = lambda m: others() if m[1] == "others" else table(m[1])  # noqa: E731
    return re.sub(r"^<!-- constants: (.+) -->$", made, markdown, flags=re.MULTILINE)
