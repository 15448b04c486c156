"""Functions of libtagc-plan.so that only tests ask one by one: `tagc plan` asks them together."""

from ctypes import byref, c_int, c_uint32, sizeof

from tagc import _declared_plan as declared
from tagc import _library as lib
from tagc._planner import GATHER_KINDS, _check, _load, options_of


def shape_of(n_params):
    """Returns layers and width of a GPT of about so many parameters."""
    n_layer, width = c_int(), c_int()
    _load().tagc_plan_shape(n_params, byref(n_layer), byref(width))
    return n_layer.value, width.value


def threads_of(cores, ranks):
    """Returns the threads of a codec on a host of so many cores and ranks, as compress() takes them."""
    return _load().tagc_plan_threads(cores, ranks)


def ask_tokens(forward, backward, **numbers):
    """Returns the planner's answer. numbers: the other fields of tagc_tokens_question."""
    question = declared.TokensQuestion(struct_bytes=sizeof(declared.TokensQuestion), block=64)
    formats = {"forward": lib.FORMATS[forward], "backward": lib.FORMATS[backward]}
    for name, value in (formats | numbers).items():
        setattr(question, name, value)
    reply = declared.TokensReply(struct_bytes=sizeof(declared.TokensReply))
    _check(_load().tagc_plan_tokens(byref(question), byref(reply)), reply.why.decode())
    return reply


def ask_mesh(gather, values, forward, backward, **numbers):
    """Returns the plan of one way to train on a mesh: the fields of tagc_mesh_reply. numbers: the other
    fields of tagc_mesh_question and tagc_mesh_model (planning/mesh/mesh.h)."""
    model = declared.MeshModel(**{name: numbers.pop(name) for name, *_ in declared.MeshModel._fields_})
    formats = {name: lib.FORMATS[text] for name, text in (("forward", forward), ("backward", backward))}
    formats |= dict.fromkeys(("token_forward", "token_backward"), lib.FORMATS["bf16"])
    given = {"gather": GATHER_KINDS[gather], "format": lib.FORMATS[values], "block": 64} | formats | numbers
    question = declared.MeshQuestion(struct_bytes=sizeof(declared.MeshQuestion), model=model, **given)
    reply = declared.MeshReply(struct_bytes=sizeof(declared.MeshReply))
    _check(_load().tagc_plan_mesh(byref(question), byref(reply)), reply.why.decode(errors="replace"))
    made = {
        name: getattr(reply, name)
        for name in ("n_params", "n_active_params", "n_data", "fullest", "bubble", "in_flight")
    }
    for where in ("device", "host"):
        made[where] = dict(zip(declared.MESH_KINDS, getattr(reply, where)))
    made["legs"] = {
        leg: {name: getattr(moved, name) for name, *_ in declared.MeshBytes._fields_}
        for leg, moved in zip(declared.MESH_LEGS, reply.legs)
    }
    return made


def _listed(units):
    """Returns options of all parts, their units, and how many they are. units: of each the fields of
    tagc_reducer_options of each part."""
    parts = [part for unit in units for part in unit]
    numbers = [i for i, unit in enumerate(units) for _ in unit]
    return options_of(parts), (c_uint32 * len(parts))(*numbers), len(parts)


def host_memory(units, world_size, n_places=0, n_bytes=4):
    """Returns the bytes that the reducers of a model take on each of world_size ranks, that exchange.
    n_places: ranks of each host, if they are those of a tagc_model, which packs nothing; else 0. n_bytes: of
    a value of the gradient, 2 or 4."""
    memory = declared.HostMemory()
    status = _load().tagc_plan_host_memory(*_listed(units), world_size, n_places, n_bytes, byref(memory))
    _check(status, f"no reducer has options that are among these: {units}")
    return memory


def device_memory(units, world_size, n_bytes=4, n_sampled=8192):
    """Returns the bytes that they take with codec="device", of gradients of n_bytes per value. n_sampled:
    values of the sample that kernels take."""
    memory = declared.DeviceMemory()
    status = _load().tagc_plan_device_memory(*_listed(units), world_size, n_bytes, n_sampled, byref(memory))
    _check(status, f"no reducer has options that are among these: {units}")
    return memory


def pinned_bytes(units, world_size, n_bytes=4):
    """Returns the bytes of pinned memory with codec="host"."""
    return _load().tagc_plan_pinned(*_listed(units), world_size, n_bytes)
