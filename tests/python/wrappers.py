"""The kinds of wrapped models that there are: without the annex of one, its cases are left out."""

from tagc.torch.hooks.kinds import kinds

KINDS = [kind.name for kind in kinds()]
HAS_FSDP1 = "fsdp1" in KINDS


def there(*names):
    """Returns those of these kinds that there are."""
    return [name for name in names if name in KINDS]
