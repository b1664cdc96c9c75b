"""What the turns of updates add to a schedule, each drawn as those of `turns`.

Clipping, updates where states live or where they are brought, and the way home of what these have written.
"""

from __future__ import annotations

from tierplan.hwmodels.names import COMPUTE, DEVICE, HOST, HOST_ADAM, NVME
from tierplan.planner.lowering.sketch import FETCHES, GOES_HOME, STATES, UPDATES, Sketch
from tierplan.planner.lowering.turns import TIER_OF
from tierplan.sim.contents import NORM_BYTES, Clip, Content, Gradients, Params, States, op_key


def clip(s: Sketch) -> None:
    """The coefficient of exact clipping, from the norms of all units."""
    coefficient = s.put("clip", s.buffer(Clip(), HOST, NORM_BYTES, "work"))
    norms = [s.get(cell) for cell in s.cells if cell != "clip"]
    s.op(op_key("clip"), HOST_ADAM, "clip", work={}, reads=norms, writes=[coefficient], rank=FETCHES)


def _coefficient(s: Sketch) -> int | None:
    """What clipping multiplies gradients with; nothing where it does not clip."""
    return s.get("clip") if s.plan.semantics == "exact-clip" else None


def update_here(s: Sketch) -> None:
    """The optimizer step of one unit, or of a part of it, on the device: what it reads is there, or comes, and what it
    writes goes back.

    As on the host, gradients and parameters are whole, and the parts update them one after the other: they come before
    the first part, and parameters go home after the last.
    """
    t, cell, is_last = s.workload.training, f"states{s.flag}", s.flag == s.num_parts - 1
    grads = s.put("due", _brought(s, Gradients(s.unit.name), s.made("due")))
    reads, writes, of_params = [grads, _coefficient(s)], [], op_key(Params(s.unit.name), "update")
    if (states := s.get(cell)) is not None:
        reads.append(brought := _brought(s, _part(s), states))
        writes.append(s.put(cell, s.over(brought)))
    params = s.made("params")
    if s.flag == 0 and t.has_master and s.tiers[params] != DEVICE:  # made from the master copy
        new = s.buffer(Params(s.unit.name), DEVICE, s.unit.num_trained * t.param_bytes, "params")
    else:
        reads.append(before := s.made("new params") if s.flag else _brought(s, of_params, params))
        new = s.over(before)
    writes.append(s.put("new params", new))
    work = t.update_work(s.unit, t.state_parts(s.unit, s.choice.state_shards)[s.flag])
    s.op(_part(s).update_key, COMPUTE, "update", work=work, reads=reads, writes=writes, rank=UPDATES)
    if states is not None:
        _back_home(s, cell, _part(s), writes[0], states)
    if is_last:
        _back_home(s, "params", of_params, new, params)


def _brought(s: Sketch, what: Content | str, home: int) -> int:
    """A buffer on the device, ahead of an update there."""
    if s.tiers[home] == NVME:
        home = s.move(what, home, HOST, rank=FETCHES, lead=STATES)
    return home if s.tiers[home] == DEVICE else s.move(what, home, DEVICE, rank=FETCHES, lead=STATES)


def _back_home(s: Sketch, cell: str, what: Content | str, made: int, home: int) -> None:
    """What an update on the device has written is where it lives, or goes there."""
    if (tier := s.tiers[home]) != DEVICE:
        made = s.move(what, made, HOST, over=home if tier == HOST else None, rank=GOES_HOME)
        made = made if tier == HOST else s.move(what, made, NVME, over=home, rank=GOES_HOME)
    s.put(cell, made)


def _part(s: Sketch) -> States:
    """The states that an update is of; `flag` says which part."""
    return States(s.unit.name, s.flag, s.num_parts)


def arrive(s: Sketch) -> None:
    """What an update reads comes to host memory: gradients, and states."""
    after, lead = [s.get(f"read after {k}") for k in range(3)], STATES + s.num_parts - 1
    grads, states = s.made("due"), s.get(f"states{s.flag}")
    if s.tiers[grads] == NVME:
        s.put("due", s.move(Gradients(s.unit.name), grads, HOST, rank=FETCHES, lead=lead, after=after))
    if states is not None and s.tiers[states] == NVME:
        states = s.move(_part(s), states, HOST, rank=FETCHES, lead=lead, after=after, mark="read")
    if states is not None:
        s.put("old states", states)


def update(s: Sketch) -> None:
    """The optimizer step of one unit, or of a part of it, on the host's cores.

    With states in parts, each part is an update of its own: its states come, are updated and go while those of the
    next come. Gradients and parameters are whole: the parts update them in place, one after the other.
    """
    name, n, t = s.unit.name, s.unit.num_trained, s.workload.training
    reads, writes, states = [s.get("due"), _coefficient(s)], [], s.get("old states")
    if states is not None:
        reads.append(states)
        writes.append(s.put(f"new states{s.flag}", s.over(states)))
    params = s.get("params") if s.choice.params == "host" and s.flag == 0 else s.get("new params")
    if params is None and not t.has_master:
        what, lead = op_key(Params(name), "update"), STATES + s.num_parts - 1
        params = s.move(what, s.made("params"), HOST, rank=FETCHES, lead=lead)
    if params is None:
        new = s.buffer(Params(name), HOST, n * t.param_bytes, "params")
    else:
        reads.append(params)
        new = s.over(params)
    writes.append(s.put("new params", new))
    part = t.state_parts(s.unit, s.choice.state_shards)[s.flag]
    key, work, after = _part(s).update_key, t.host_work(s.unit, part), [s.get(f"update after {k}") for k in range(2)]
    s.op(key, HOST_ADAM, "update", work=work, reads=reads, writes=writes, after=after, rank=UPDATES, mark="compute")


def go_home(s: Sketch) -> None:
    """Sends what an update has written to where it lives between steps."""
    states_home(s)
    if s.flag == s.num_parts - 1:
        params_home(s)


def states_home(s: Sketch) -> None:
    """The states of a part alone."""
    cell, after = f"states{s.flag}", [s.get("home after")]
    if (states := s.get(f"new states{s.flag}")) is not None:
        if s.choice.states == "nvme" and s.flag >= s.choice.host_shards:
            states = s.move(_part(s), states, NVME, over=s.made(cell), rank=GOES_HOME, after=after, mark="home")
        s.put(cell, states)


def params_home(s: Sketch) -> None:
    """The parameters alone, after the last part."""
    params, place = s.made("new params"), s.choice.params
    if place != "host":
        what, old, after = op_key(Params(s.unit.name), "update"), s.made("params"), [s.get("home after")]
        mark = "home" if place == "nvme" else ""
        params = s.move(what, params, TIER_OF[place], over=old, rank=GOES_HOME, after=after, mark=mark)
    s.put("params", params)
