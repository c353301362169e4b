"""The reason of a plan that its server refuses whatever the memory."""

from kvplan.planning.plan import Plan


def reason_of(plan: Plan) -> str:
    assert not plan.fits
    assert plan.refusal is not None
    assert plan.refusal.by == "unsupported"
    return plan.refusal.text
