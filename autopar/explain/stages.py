"""A plan in stages as text."""

from typing import Any


def format_staged(plan: Any) -> str:
    return f"{plan.schedule}: {plan.step_s}"
