"""The kinds of wrapped models that there are: without the annex of one, its cases are left out."""

from tagc.torch.hooks.kinds import kinds

KINDS = [kind.name for kind in kinds()]
HAS_FSDP1 = "fsdp1" in KINDS


def present(cases, of=lambda case: case if isinstance(case, str) else case[0]):
    """Returns the cases whose kind there is. of(case): its kind."""
    return [case for case in cases if of(case) in KINDS]
