"""Real Megatron trains, we reshape, real Megatron resumes on another layout: every bit of its state is the old run's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mcore_rlhf.convert import Job
from tests.reference.cases import LOSS_TOLERANCE, QUICK, SLOW, Case
from tests.reference.lab import Lab, Trained, layout_options
from tests.reference.merge import differences
from tests.reference.observing import END, LOOK


def params(*, back: bool = False) -> list[object]:
    """The cases as pytest takes them; only those that go back again, if wished."""
    chosen = [(case, ()) for case in QUICK] + [(case, (pytest.mark.slow,)) for case in SLOW]
    return [pytest.param(case, id=case.name, marks=marks) for case, marks in chosen if case.back or not back]


@dataclass(frozen=True)
class Experiment:
    source: Trained
    resumed: Trained
    job: Job


DONE: dict[Case, Experiment] = {}
"""Experiments of this session, since several tests look at each."""


def experiment(case: Case, lab: Lab) -> Experiment:
    if case not in DONE:
        source = lab.train(case.model, case.source, case.training)
        root, job = lab.reshape(source.root, **case.write_options)
        DONE[case] = Experiment(source, lab.resume(root, case.model, case.target, case.resumed_training), job)
    return DONE[case]


@pytest.mark.parametrize("case", params())
def test_megatron_loads_the_same_model_on_another_layout(case: Case, lab: Lab) -> None:
    done = experiment(case, lab)
    expected, found = done.source.models[LOOK], done.resumed.models[LOOK]
    assert {state for state, _ in expected} >= wanted_states(case)
    assert differences(expected, found) == []
    assert done.resumed.groups == done.source.groups
    assert done.resumed.scheduler == done.source.scheduler
    assert done.resumed.scaler[:1] == done.source.scaler[:1]
    assert done.job.lossless


@pytest.mark.parametrize("case", params())
def test_arguments_are_those_of_a_run_on_the_new_layout(case: Case, lab: Lab) -> None:
    wrong = experiment(case, lab).resumed.wrong_arguments
    assert wrong == [{}] * len(wrong)


@pytest.mark.parametrize("case", params())
def test_training_goes_on(case: Case, lab: Lab) -> None:
    done, tolerance = experiment(case, lab), LOSS_TOLERANCE[case.model.dtype]
    differences_seen = [abs(done.resumed.losses[step] / done.source.losses[step] - 1) for step in (3, 4)]
    print(f"relative difference of losses: {max(differences_seen):.1e}")  # pytest -rP shows it
    assert done.resumed.evaluation == pytest.approx(done.source.evaluation, rel=tolerance)
    assert done.resumed.losses == pytest.approx({step: done.source.losses[step] for step in (3, 4)}, rel=tolerance)


@pytest.mark.parametrize("case", params(back=True))
def test_back_again_nothing_can_be_told_from_the_uninterrupted_run(case: Case, lab: Lab) -> None:
    done = experiment(case, lab)
    options = layout_options(case.source, case.model.num_layers)
    root, _ = lab.reshape(done.resumed.root, **options, optimizer=optimizer_of(case))
    returned = lab.resume(root, case.model, case.source, case.training)
    assert differences(done.source.models[LOOK], returned.models[LOOK]) == []
    assert returned.evaluation == done.source.evaluation
    assert returned.losses == {step: done.source.losses[step] for step in (3, 4)}
    assert differences(done.source.models[END], returned.models[END]) == []


def wanted_states(case: Case) -> set[str]:
    return {"param", "master", "exp_avg", "exp_avg_sq"} if optimizer_of(case) else {"param"}


def optimizer_of(case: Case) -> str | None:
    return None if case.training.optimizer == "none" else case.training.optimizer
