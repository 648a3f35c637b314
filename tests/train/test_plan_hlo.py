from __future__ import annotations

from pathlib import Path

import pytest

from effml.train.plan import hlo

TEXTS = Path(__file__).with_name("hlo")


def rows(counts):
    return {(c.kind, c.group): (c.calls, c.bytes, c.ring_bytes) for c in counts.collectives}


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_a_program_of_each_backend_is_counted_as_by_hand(backend):
    # 3 layers: gather f32[256,256] over 2, x = f32[16,256] @ it, then 5 means of x over all 4 devices. At the end x is
    # reduced and scattered, exchanged and passed on, over 2 devices each. The CPU's text holds the trip counts, the
    # TPU's does not.
    counts = hlo.count((TEXTS / f"{backend}.txt").read_text(), 4)
    x = 16 * 256 * 4
    assert rows(counts) == {
        ("all-gather", 2): (3, 3 * 256 * 256 * 4, 3 * 256 * 256 * 4 // 2),
        ("all-reduce", 4): (15, 15 * x, 15 * x * 2 * 3 // 4),
        ("reduce-scatter", 2): (1, x, x // 2),
        ("all-to-all", 2): (1, x, x // 2),
        ("collective-permute", 2): (1, x, x),
    }
    assert counts.matmul_flops == 3 * 2 * 16 * 256 * 256
    assert sorted(loop.trips for loop in counts.loops) == [3, 5]
    assert counts.uncounted == {}


def loop(
    start="s32[] constant(0)", bound="s32[] constant(9)", step="s32[] constant(2)", direction="LT", body=()
):
    """A program with one loop over (counter, f32[64], bound)."""
    state = "(s32[], f32[64]{0}, s32[])"
    return "\n".join(
        [
            "HloModule hand_written",
            f"%body (p: {state}) -> {state} {{",
            f"  %p = {state} parameter(0)",
            "  %i = s32[] get-tuple-element(%p), index=0",
            "  %x = f32[64]{0} get-tuple-element(%p), index=1",
            "  %n = s32[] get-tuple-element(%p), index=2",
            f"  %step = {step}",
            "  %next = s32[] add(%i, %step)",
            *body,
            "  ROOT %out = (s32[], f32[64]{0}, s32[]) tuple(%next, %x, %n)",
            "}",
            f"%condition (p: {state}) -> pred[] {{",
            f"  %p = {state} parameter(0)",
            "  %other = s32[] constant(1000)",
            "  %i = s32[] get-tuple-element(%p), index=0",
            "  %n = s32[] get-tuple-element(%p), index=2",
            f"  %bound = {bound}",
            f"  ROOT %test = pred[] compare(%i, {'%n' if bound.startswith('carried') else '%bound'}), direction={direction}",
            "}",
            "ENTRY %main (x: f32[64]) -> f32[64] {",
            "  %x = f32[64]{0:T(128)S(1)} parameter(0)",
            f"  %start = {start}",
            "  %limit = s32[] constant(7)",
            f"  %init = {state} tuple(%start, %x, %limit)",
            f"  %loop = {state} while(%init), condition=%condition, body=%body",
            "  ROOT %result = f32[64]{0} get-tuple-element(%loop), index=1",
            "}",
        ]
    )


REDUCE = (
    "  %r = f32[64]{0:T(128)S(1)} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add"
)


@pytest.mark.parametrize(
    ("options", "trips"),
    [
        ({}, 5),  # 0 2 4 6 8
        ({"bound": "u32[]{:T(128)} constant(9)", "step": "u32[] constant(3)"}, 3),
        ({"start": "s32[] constant(4)"}, 3),
        ({"direction": "LE", "bound": "s32[] constant(8)"}, 5),
        ({"start": "s32[] constant(9)", "bound": "s32[] constant(0)", "step": "s32[] constant(-1)", "direction": "GT"}, 9),
        ({"bound": "carried s32[] constant(1)"}, 4),  # 7 from outside: 0 2 4 6
        ({"start": "s32[] convert(%x)"}, None),
        ({"step": "s32[] convert(%x)"}, None),
        ({"bound": "s32[] constant(0)"}, None),  # a loop that never runs would not be there: not understood
    ],
)  # fmt: skip
def test_trips_are_read_from_start_bound_and_step(options, trips):
    counts = hlo.count(loop(body=[REDUCE], **options), 4)
    assert [found.trips for found in counts.loops] == [trips]
    times = 1 if trips is None else trips
    assert rows(counts) == {("all-reduce", 2): (times, times * 256, times * 256)}


def entry(*lines, before=()):
    return "\n".join(
        [*before, "ENTRY %main (x: f32[64]) -> f32[64] {", "  %x = f32[64]{0} parameter(0)", *lines, "}"]
    )


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[4,16]<=[64]", 16),
        ("mesh['data'=16,'fsdp'=4] {'fsdp'}", 4),
        ("mesh['data'=16,'fsdp'=4] {'data','fsdp'}", 64),
        ("mesh['a'=1,'b'=16,'c'=4], device_ids=([4,16]T(1,0)) {'c'}", 4),
        ("mesh['a'=64] {'a':(1)8}", 8),
        ("{}", 64),
    ],
)
def test_every_notation_of_groups(groups, size):
    text = entry(
        f"  ROOT %g = f32[640]{{0}} all-gather(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    )
    (row,) = hlo.count(text, 64).collectives
    assert (row.group, row.bytes, row.ring_bytes) == (size, 2560, round(2560 * (size - 1) / size))


def test_results_may_be_tuples_and_starts_hold_their_operands():
    text = entry(
        "  %a = (f32[64]{0}, bf16[2,8]{1,0:T(8,128)(2,1)S(1)}) all-reduce(%x, %x), replica_groups={{0,1}}, to_apply=%add",
        "  %b = ((f32[16]{0}, f32[4]{0}), (f32[64]{0}, f32[16]{0})) all-gather-start(%x, %x), replica_groups={{0,1,2,3}}",
        "  %c = (f32[64]{0}, f32[64]{0}) all-gather-done(%b)",
        "  %d = (f32[64]{0}, f32[16]{0}, u32[]) reduce-scatter-start(%x), replica_groups={{0,1,2,3}}, to_apply=%add",
        "  %e = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}",
        "  %f = (f32[16]{0}, f32[16]{0}, f32[16]{0}, f32[16]{0}) all-to-all(%x, %x, %x, %x), replica_groups={{0,1,2,3}}",
        "  ROOT %g = f32[64]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add",
    )
    assert rows(hlo.count(text, 4)) == {
        ("all-reduce", 2): (1, 288, 288),
        ("all-gather", 4): (1, 320, 240),
        ("reduce-scatter", 4): (1, 256, 192),
        ("collective-permute", 2): (1, 256, 256),
        ("all-to-all", 4): (1, 256, 192),
    }


def test_one_asynchronous_collective_is_counted_once_in_each_loop_body():
    gather = '  %g = f32[256]{0} all-gather(%x), channel_id=5, replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="3"}'
    fusion = lambda name: [
        f"%{name} (x: f32[64]) -> f32[256] {{", "  %x = f32[64]{0} parameter(0)", gather.replace("%g", "ROOT %g"), "}",
    ]  # fmt: skip
    calls = [
        f"  %{name} = f32[256]{{0}} fusion(%x), kind=kCustom, calls=%{name}"
        for name in ("begin", "between", "end")
    ]
    before = [line for name in ("begin", "between", "end") for line in fusion(name)]
    twice = loop(body=calls).replace("ENTRY", "\n".join([*before, "ENTRY"]))
    assert rows(hlo.count(twice, 4)) == {("all-gather", 4): (5, 5 * 1024, 5 * 768)}
    # The same numbers in another loop body are another collective, and so is another channel.
    other = gather.replace("%g", "%h").replace("channel_id=5", "channel_id=6")
    outside = twice.replace("  %init =", f"{gather}\n{other}\n  %init =")
    assert rows(hlo.count(outside, 4))["all-gather", 4][0] == 7


def test_an_async_pair_of_any_operation_runs_its_computation_once():
    inner = ["%wrapped (x: f32[64]) -> f32[256] {", "  %x = f32[64]{0} parameter(0)",
             "  ROOT %g = f32[256]{0} all-gather(%x), replica_groups={{0,1,2,3}}", "}"]  # fmt: skip
    text = entry(
        "  %s = ((f32[64]{0}), f32[256]{0}, u32[]) async-start(%x), calls=%wrapped",
        "  ROOT %d = f32[256]{0} async-done(%s), calls=%wrapped",
        before=inner,
    )
    assert rows(hlo.count(text, 4)) == {("all-gather", 4): (1, 1024, 768)}


def test_an_all_reduce_of_which_a_slice_is_kept_is_a_reduce_scatter():
    inner = ["%all-reduce-scatter.3 (x: f32[64]) -> f32[16] {", "  %x = f32[64]{0} parameter(0)",
             "  ROOT %r = f32[64]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add", "}"]  # fmt: skip
    text = entry("  ROOT %f = f32[16]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3", before=inner)
    assert rows(hlo.count(text, 4)) == {("reduce-scatter", 4): (1, 256, 192)}


def test_of_two_branches_the_one_with_more_traffic_counts():
    branch = lambda name, size: [
        f"%{name} (x: f32[64]) -> f32[64] {{", "  %x = f32[64]{0} parameter(0)",
        f"  ROOT %g = f32[{size}]{{0}} all-gather(%x), replica_groups={{{{0,1}}}}", "}",
    ]  # fmt: skip
    before = branch("yes", 100) + branch("no", 200)
    for attributes in ("branch_computations={%yes, %no}", "true_computation=%yes, false_computation=%no"):
        text = entry(f"  ROOT %c = f32[64]{{0}} conditional(%x, %x, %x), {attributes}", before=before)
        assert rows(hlo.count(text, 2)) == {("all-gather", 2): (1, 800, 400)}


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "flops"),
    [
        ("[8,4]", "[4,6]", "[8,6]", "dim_labels=bf_io->bf", 2 * 8 * 6 * 4),
        ("[8,4]", "[6,4]", "[8,6]", "dim_labels=bf_oi->bf", 2 * 8 * 6 * 4),
        # Batched products, two ways in which the TPU compiler writes them: 3 products of [8,4] and [4,6].
        ("[3,8,4]", "[3,6,4]", "[3,8,6]", "window={size=3 stride=2 lhs_dilate=3}, dim_labels=0bf_0oi->0bf", 2 * 3 * 8 * 6 * 4),
        ("[3,8,4]", "[3,4,6]", "[3,8,6]", "window={size=3 stride=3 pad=2_2 lhs_dilate=2 rhs_reversal=1}, dim_labels=0bf_0io->0bf", 2 * 3 * 8 * 6 * 4),
        # Two axes contracted, one of them as a window.
        ("[5,8,4]", "[5,4,6]", "[1,8,6]", "window={size=5}, dim_labels=0bf_0io->0bf", 2 * 8 * 6 * 4 * 5),
        # A convolution: 3 taps over 10 places with padding; the two outer places have two taps each.
        ("[1,10,4]", "[3,4,6]", "[1,10,6]", "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 2 * 6 * 4 * (3 * 10 - 2)),
    ],
)  # fmt: skip
def test_products_that_are_written_as_convolutions(left, right, result, attributes, flops):
    text = entry(
        f"  %l = f32{left} parameter(1)", f"  %r = f32{right} parameter(2)",
        f"  ROOT %c = f32{result} convolution(%l, %r), {attributes}",
    )  # fmt: skip
    assert hlo.count(text, 1).matmul_flops == flops


def test_products_hidden_in_a_library_are_named():
    text = entry('  ROOT %c = f32[64]{0} custom-call(%x, %x), custom_call_target="__cublas$gemm"')
    assert hlo.count(text, 1).uncounted == {"__cublas$gemm": 1}


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.count("nothing here", 1)
