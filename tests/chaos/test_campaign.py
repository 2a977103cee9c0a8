"""All kinds of disturbance together on one job, drawn from a seed (`campaign.py`): nothing may be lost by any of them.

A seed that fails is run again by `python tests/chaos/campaign.py --seed SEED --acts ACTS`, which says what it does. The
plan is the same then; who is struck depends on who is there at that moment.
"""

from __future__ import annotations

import pytest
from campaign import Campaign
from campaign_plan import draw


def test_a_plan_depends_on_its_seed_alone():
    assert draw(3, 10) == draw(3, 10) != draw(4, 10)
    assert draw(3, 10).acts == draw(3, 20).acts[:10]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [20, 123], ids=["one host", "two hosts"])
def test_a_campaign_of_all_disturbances_is_exact(tmp_path, seed):
    Campaign(draw(seed, num_acts=10), tmp_path).run()
