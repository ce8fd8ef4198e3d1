"""``--decoupled-lr``: Megatron before 0.19 mixes up its own groups on load, so its own resume is what ours has to equal.

It matches stored groups by ``param_group_identifier_keys``, which do not hold ``max_lr``, the only field in which the
embedding's group differs: of two groups with the same key the later one wins. With the plain optimizer it cannot load
its own file at all. Since 0.19 the rates are among the keys.
"""

from __future__ import annotations

import pytest

from mcore_rlhf.demo.configs import Parallel, TinyGPT, Training
from mcore_rlhf.demo.versions import MEGATRON
from mcore_rlhf.demo.workers import WorkerError
from tests.reference.cases import LOSS_TOLERANCE
from tests.reference.lab import Lab
from tests.reference.merge import differences
from tests.reference.observing import END, LOOK

pytestmark = pytest.mark.slow

GPT = TinyGPT(vocab_size=190, dropout=0.0)
MOE = TinyGPT(vocab_size=190, dropout=0.0, num_experts=4)
HERE, THERE = Parallel(tp=2, dp=2), Parallel(pp=2)
TRAINING = Training(decoupled_lr=5e-4)


BEFORE = pytest.mark.skipif(MEGATRON >= (0, 19), reason="0.19 no longer mixes these groups up")


@pytest.mark.skipif(MEGATRON < (0, 19), reason="it mixes these groups up")
@pytest.mark.parametrize("optimizer", ["distributed", "plain"])
def test_groups_with_other_rates_are_found_at_every_layout(lab: Lab, optimizer: str) -> None:
    training = Training(optimizer=optimizer, decoupled_lr=5e-4)
    source = lab.train(MOE, Parallel(pp=2, dp=2), training)
    rates = {group["max_lr"] for group in source.groups.values()}
    assert rates == {TRAINING.lr, 5e-4}
    for there in (Parallel(), Parallel(dp=2, ep=2)):
        root, job = lab.reshape(source.root, tp=there.tp, pp=there.pp, dp=there.dp, ep=there.ep)
        assert not job.account.lost
        resumed = lab.resume(root, MOE, there, training)
        assert {name: group["max_lr"] for name, group in resumed.groups.items()} == {
            name: group["max_lr"] for name, group in source.groups.items()
        }
        assert differences(source.models[LOOK], resumed.models[LOOK]) == []
        assert resumed.losses[END] == pytest.approx(source.losses[END], rel=LOSS_TOLERANCE["bf16"])


@BEFORE
def test_our_checkpoint_is_resumed_as_megatrons_own(lab: Lab) -> None:
    source = lab.train(GPT, HERE, TRAINING)
    own = lab.resume(source.root, GPT, HERE, TRAINING)
    assert own.groups != source.groups  # once Megatron gets it right, this file can go, and become a case like others
    there, _ = lab.reshape(source.root, tp=1, pp=2, dp=1)
    resumed = lab.resume(there, GPT, THERE, TRAINING)
    assert differences(own.models[LOOK], resumed.models[LOOK]) == []
    assert resumed.groups == own.groups
    back, _ = lab.reshape(there, tp=2, pp=1, dp=2)
    returned = lab.resume(back, GPT, HERE, TRAINING)
    assert returned.groups == own.groups
    assert returned.losses == own.losses
    assert differences(own.models[END], returned.models[END]) == []


@BEFORE
def test_megatron_cannot_load_its_own_plain_file(lab: Lab) -> None:
    plain = Training(optimizer="plain", decoupled_lr=5e-4)
    source = lab.train(GPT, Parallel(tp=2), plain)
    with pytest.raises(WorkerError, match="doesn't match the size of optimizer's group"):
        lab.resume(source.root, GPT, Parallel(tp=2), plain)
