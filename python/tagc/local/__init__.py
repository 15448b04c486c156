"""tagc.local: sites that train by themselves for some steps, and then exchange how far they came. steps.py
has LocalSteps, which users call."""

from tagc.local.steps import LocalSteps

__all__ = ["LocalSteps"]
