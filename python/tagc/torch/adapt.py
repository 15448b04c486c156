"""An optimizer's parameter groups, split so that what is compressed can go without a first moment.

Error feedback sums gradients over exchanges already. A first moment delays once more what has waited in the residual. A model
that has just begun to learn is worse off without one, so it is switched off when selection begins."""

import torch

from tagc._library import Error
from tagc.torch import internals

_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "base_momentums", "max_momentums", "max_lrs")


def split(optimizer, compressed):
    """In place: each group with compressed parameters (id -> name) and others becomes two, the first at the end. State, betas,
    learning rates and weight decay stay. Returns the place that each new group was split from, for follow(). Changes nothing
    where it raises."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Error("argument", f"optimizer is a {type(optimizer).__name__}, must be a torch.optim.Optimizer")
    groups = optimizer.param_groups
    for i, group in enumerate(groups):
        betas = group.get("betas")
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise Error("unsupported", f"optimizer is a {type(optimizer).__name__}, whose group {i} has no two betas: its first "
                        "moment is not known; give compress() no optimizer, and it does what is safe with a moment")
    missing = compressed.keys() - {id(parameter) for group in groups for parameter in group["params"]}
    if missing:
        what = "has none" if len(missing) == len(compressed) else f"lacks {len(missing)}"
        raise Error("argument", f"the optimizer {what} of the model's compressed parameters, such as "
                    f"{min(compressed[key] for key in missing)}: it must have all of those of the wrapped model")
    fresh = []
    for place, group in enumerate(groups):
        own = [parameter for parameter in group["params"] if id(parameter) in compressed]
        if not own or len(own) == len(group["params"]):
            continue
        fresh.append((place, {**group, "params": own}))
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in compressed]
    groups.extend(group for _, group in fresh)
    return [place for place, _ in fresh]


def switch_off(optimizer, compressed):
    """The first moment of groups that split() has left with compressed parameters only."""
    for group in optimizer.param_groups:
        if group["params"] and all(id(parameter) in compressed for parameter in group["params"]):
            group["betas"] = (0.0, group["betas"][1])


def has_torchs_moment(optimizer):
    """Whether hold_off() can do something for that optimizer."""
    return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))


def hold_off(optimizer, keys):
    """The parameters with these ids, a set that may change, are stepped as without a first moment, whatever their group's betas
    are. Returns a function that ends it.

    Before each step their first moment becomes what it would be if all gradients had been the one that comes now: what the step
    makes of that and divides by its bias correction is this gradient. Groups stay as they are, and with them all that loops,
    schedulers and checkpoints know of them."""
    def before_step(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            if group["betas"][0]:
                for parameter in group["params"]:
                    if id(parameter) in keys and parameter.grad is not None and optimizer.state.get(parameter):
                        _forget(optimizer, group, parameter)

    return optimizer.register_step_pre_hook(before_step).remove


@torch.no_grad()
def _forget(optimizer, group, parameter):
    state = optimizer.state[parameter]
    if (moment := state.get("exp_avg")) is None:
        return
    moment = _local(moment).copy_(_local(parameter.grad))
    if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # a GradScaler leaves that to a fused step, which may skip
        moment.div_(scale).nan_to_num_(0.0, 0.0, 0.0)
    if group.get("maximize"):
        moment.neg_()
    if group["weight_decay"] and not group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)):
        moment.add_(_local(parameter), alpha=group["weight_decay"])
    moment.mul_(1 - float(group["betas"][0]) ** _local(state["step"]))


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def follow(scheduler, places, n_groups):
    """A scheduler made before split() knows the groups by their places: what it has for one it now has for the new one, too."""
    for inner in internals.schedulers_within(scheduler):  # ChainedScheduler, SequentialLR
        follow(inner, places, n_groups)
    for name in _PER_GROUP:
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and len(values) + len(places) == n_groups:
            values.extend([values[place] for place in places])
