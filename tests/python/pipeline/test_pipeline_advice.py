"""advise(stage): its forecast against a simulation of the schedules, and what it says of real messages."""

import contextlib
import io
import itertools

import pytest

torch = pytest.importorskip("torch")
import ranks
import torch.distributed as dist
from oracles import check_error
from torch import nn

from tagc import _planner as planner
from tagc.pipeline import advice as pipelines
from tagc.pipeline import advise_stage, compress_stage

ROWS, WIDTH = 3, 1024


# ---- the oracle: each stage does one thing after the other, and a link carries one message at a time ----


def order_of(schedule, stage, n_stages, n):
    if schedule == "GPipe":
        return [("F", k) for k in range(n)] + [("B", k) for k in range(n)]
    ahead = min(n, n_stages - stage)
    made = [("F", k) for k in range(ahead)]
    for k in range(n):
        made.append(("B", k))
        made += [("F", ahead + k)] if ahead + k < n else []
    return made


def simulated(schedule, n_stages, n, compute_s, forward_s, backward_s):
    todo = [order_of(schedule, i, n_stages, n) for i in range(n_stages)]
    at = {("F", 0, k): 0.0 for k in range(n)} | {("B", n_stages - 1, k): 0.0 for k in range(n)}
    free, links = [0.0] * n_stages, {}
    while any(todo):
        for i in range(n_stages):
            while todo[i] and (todo[i][0][0], i, todo[i][0][1]) in at:
                kind, k = todo[i].pop(0)
                free[i] = max(free[i], at[kind, i, k]) + compute_s * (1 if kind == "F" else 2) / 3
                to, takes = (i + 1, forward_s) if kind == "F" else (i - 1, backward_s)
                if 0 <= to < n_stages:
                    links[i, to] = at[kind, to, k] = max(free[i], links.get((i, to), 0)) + takes
    return max(free)


def test_a_step_takes_what_a_simulation_says():
    times = ((1, 0, 0), (1, 0.1, 0.1), (1, 0.5, 0.3), (1, 2, 1), (0.1, 1, 1), (0.1, 0.5, 2), (0, 1, 0.5))
    for schedule, n_stages, n, each in itertools.product(("1F1B", "GPipe"), (2, 3, 4, 8), (8, 32), times):
        case = (schedule, n_stages, n, *each)
        ours, theirs = planner.pipeline_s(*case), simulated(*case)
        assert abs(ours / theirs - 1) < (0.05 if schedule == "1F1B" else 1e-9), (case, ours, theirs)


# ---- real stages ----


def stage_of(n_stages=None, dtype=torch.float32):
    from torch.distributed.pipelining import PipelineStage

    i, n_stages = dist.get_rank(), n_stages or dist.get_world_size()
    return PipelineStage(nn.Linear(WIDTH, WIDTH).to(dtype), i, n_stages, torch.device("cpu"))


def quietly(*given, **options):
    return advise_stage(*given, **{"verbose": False, "seconds": 2} | options)


def advice_follows_the_link(rank, world_size):
    """Of a link of 1 MB/s, with a codec that takes 1 ms."""

    class Survey(pipelines._Survey):
        def message_s(self, n_bytes, is_forward):
            return n_bytes / 1e6

        def codec_s(self, codec, shape, dtype):
            return 1e-3

    real, pipelines._Survey = pipelines._Survey, Survey
    try:
        n = ROWS * WIDTH
        activations = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16)
        given = dict(hosts=2, micro_batches=8, activations=activations, step_s=0.08 / (1 + rank))
        advice = quietly(stage_of(), **given)
        whole, eight, four = advice["rows"]
        assert [whole["forward_bytes"], whole["backward_bytes"]] == [2 * n, 2 * n]
        assert [eight["backward_bytes"], four["backward_bytes"]] == [
            64 + 2 * n // 64 + n,
            64 + 2 * n // 64 + n // 2,
        ]
        assert whole["forward_s"] == 2 * n / 1e6 and four["backward_s"] == four["backward_bytes"] / 1e6 + 1e-3
        # 10 ms for a micro-batch in the slower stage, and 8 of them
        assert whole["step_s"] == planner.pipeline_s("1F1B", 2, 8, 0.01, 2 * n / 1e6, 2 * n / 1e6)
        assert advice["compute_s"] == 0.08 and advice["gain"] == whole["step_s"] / four["step_s"]
        assert (advice["choice"], advice["verdict"]) == ("compress", "pays")
        assert advice["options"] == {"forward": "int8", "backward": "int4"}
        everyone = [None] * world_size
        dist.all_gather_object(everyone, advice)
        assert everyone[0] == everyone[1]
        # where stages compute for minutes, it makes no difference; fp32 could travel as bf16
        given["activations"] = [activations.float(), torch.empty(ROWS, dtype=torch.int64)]
        advice = quietly(stage_of(), **given | {"step_s": 300.0})
        assert (advice["choice"], advice["verdict"]) == ("off", "makes no difference")
        assert advice["baseline"] == "torch's own, bf16"
        sizes = [(row["forward_bytes"], row["backward_bytes"]) for row in advice["rows"]]
        assert sizes[:2] == [(4 * n + 8 * ROWS, 4 * n), (2 * n + 8 * ROWS, 2 * n)]
        # without step_s, communication alone is compared
        advice = quietly(stage_of(), **given | {"step_s": None, "schedule": "GPipe"})
        assert advice["choice"] == "compress" and advice["rows"][0]["step_s"] is None
        assert "step_s= shows" in advice["reason"] and "if stages took no time to compute" in advice["text"]
    finally:
        pipelines._Survey = real


def real_messages_are_measured(rank, world_size):
    """After a step, what the stage sends is known, as is the dtype; nothing of it is changed."""
    from torch.distributed.pipelining import ScheduleGPipe

    stage, said = stage_of(), io.StringIO()
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    x = torch.ones(2 * ROWS, WIDTH)
    with torch.random.fork_rng():
        schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": x}))
    before = [p.grad.clone() for p in stage.submod.parameters()], torch.get_rng_state()
    with contextlib.redirect_stdout(said):
        advice = quietly(stage, hosts=2, micro_batches=2, verbose=True)
    assert said.getvalue() == (f"{advice['text']}\n" if rank == 0 else "")
    assert len(advice["rows"]) == 4 and advice["rows"][0]["forward_bytes"] == 4 * ROWS * WIDTH
    assert all(row[f"{way}_s"] > 0 for row in advice["rows"] for way in ("forward", "backward"))
    assert all(sum(row["codec_s"]) > 0 for row in advice["rows"][2:])
    assert all(map(torch.equal, before[0], [p.grad for p in stage.submod.parameters()]))
    assert torch.equal(before[1], torch.get_rng_state())
    advice = quietly(stage, micro_batches=2)
    assert advice["choice"] == "off" and "all 2 stages are on one host" in advice["reason"]
    with compress_stage(stage, hosts=2, verbose=False):  # whose hosts it takes
        assert len(quietly(stage, micro_batches=2)["rows"]) == 4
        assert "on one host" in quietly(stage, micro_batches=2, hosts=1)["reason"]
    assert "on one host" in quietly(stage, micro_batches=2)["reason"]


def what_does_not_fit_is_refused(rank, world_size):
    stage, tensor = stage_of(), torch.empty(2, 2)
    good = dict(micro_batches=4, activations=tensor, hosts=2)
    for options, words in (
        (dict(micro_batches=None), "micro_batches is None, must be a whole number from 1 to 1"),
        (dict(micro_batches=0), "micro_batches is 0"),
        (dict(schedule="ZBV"), "schedule is 'ZBV', must be one of '1F1B', 'GPipe'"),
        (dict(activations="x"), "activations has 'x', must be a tensor or a list of tensors"),
        (dict(hosts=3), "hosts is 3, must be a whole number from 1 to 2"),
        (dict(step_s=-1), "step_s is -1, must be a number above 0"),
        (dict(seconds=0), "seconds is 0, must be a number above 0, at most 3600"),
        (dict(micro_batches=4 + rank), "micro_batches is 4 on rank 0 and 5 on rank 1"),
        (dict(schedule="GPipe" if rank else "1F1B"), "schedule is '1F1B' on rank 0 and 'GPipe' on rank 1"),
    ):
        check_error(lambda options=options: quietly(stage, **good | options), words)
    check_error(
        lambda: quietly(stage, micro_batches=4, hosts=2),
        "what the stage sends is not known before its first step: run one, or pass activations=",
    )
    check_error(lambda: quietly(stage_of(4), **good), "this pipeline has 4 stages on 2 ranks")
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    check_error(lambda: quietly(model, micro_batches=4), "stage is a DistributedDataParallel, must be a Pipe")
    with pytest.raises(TypeError, match="every"):  # on this rank alone, before anything is collective
        quietly(stage, every=30, **good)


def test_two_ranks():
    ranks.run_each([advice_follows_the_link, real_messages_are_measured, what_does_not_fit_is_refused], 2)
