"""A vocabulary whose padding depends on TP: rows that both sizes have are kept, new ones repeat the last."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from tests.reference.cases import LOSS_TOLERANCE
from tests.reference.lab import Lab
from tests.reference.merge import VOCABULARY, differences
from tests.reference.observing import LOOK

GPT = TinyGPT(vocab_size=132, dropout=0.0)
ROWS = {1: 144, 2: 160, 4: 192}
SOURCE = Parallel(tp=2)

# Padding rows take part in the softmax: of a nearly uniform one over 160 rows, 32 more change the loss by ln(192/160)
PADDING_TOLERANCE = 0.05


@pytest.mark.parametrize("tp", [1, 4])
def test_rows_follow_tensor_parallelism(tp: int, lab: Lab) -> None:
    source = lab.train(GPT, SOURCE, Training())
    root, job = lab.reshape(source.root, tp=tp, dp=1)
    resumed = lab.resume(root, GPT, Parallel(tp=tp), Training())
    old, new = source.models[LOOK], resumed.models[LOOK]
    assert differences(old, new) == []
    assert resumed.wrong_arguments == [{}] * tp
    assert any("vocabulary rows" in text for _, text in job.report.lines)
    for key in (key for key in old if key[1].endswith(VOCABULARY)):
        assert (len(old[key]), len(new[key])) == (ROWS[2], ROWS[tp])
        repeated = old[key][-1].expand(len(new[key][ROWS[2] :]), -1)
        assert torch.equal(new[key][ROWS[2] :], repeated)
    assert resumed.evaluation == pytest.approx(source.evaluation, rel=PADDING_TOLERANCE)


def test_growing_and_shrinking_again_changes_nothing(lab: Lab) -> None:
    source = lab.train(GPT, SOURCE, Training())
    grown, _ = lab.reshape(source.root, tp=4, dp=1)
    root, _ = lab.reshape(grown, tp=2, dp=1)
    returned = lab.resume(root, GPT, SOURCE, Training())
    assert differences(source.models[LOOK], returned.models[LOOK]) == []
    assert returned.losses == {step: source.losses[step] for step in (3, 4)}


def test_padding_can_be_kept(lab: Lab) -> None:
    """The same rows on another TP give the same loss, within what another order of sums changes."""
    source = lab.train(GPT, SOURCE, Training())
    root, _ = lab.reshape(source.root, tp=1, dp=1, padded_vocab_size=ROWS[2])
    resumed = lab.resume(root, replace(GPT, make_vocab_size_divisible_by=ROWS[2]), Parallel(), Training())
    assert differences(source.models[LOOK], resumed.models[LOOK]) == []
    assert resumed.losses == pytest.approx({step: source.losses[step] for step in (3, 4)}, rel=LOSS_TOLERANCE["bf16"])
