"""Cycles, bytes and collectives are read from compiled programs as they run."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import _hlo, _processes
from benchmarks.larger import LARGER

PRICED = """\
HloModule jit_f, is_scheduled=true

%fused (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %inside = f32[8,128]{1,0:T(8,128)} add(%p, %p), backend_config={"estimated_cycles":"999"}
}

%body (arg: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %arg = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)S(1)}) parameter(0)
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %step = f32[8,128]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%fused, \
metadata={op_name="jit(f)/while/body/dot_general"}, backend_config={"estimated_cycles":"100"}
  ROOT %out = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%x, %step)
}

%cheap (q: f32[8,128]) -> f32[8,128] {
  ROOT %c = f32[8,128]{1,0} negate(%q), backend_config={"estimated_cycles":"10"}
}

%dear (q: f32[8,128]) -> f32[8,128] {
  ROOT %d = f32[8,128]{1,0} exponential(%q), backend_config={"estimated_cycles":"40"}
}

%called (q: f32[8,128]) -> f32[8,128] {
  ROOT %e = f32[8,128]{1,0} tanh(%q), backend_config={"estimated_cycles":"3"}
}

ENTRY %main (a: f32[8,128], i: s32[]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %pair = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%i, %a)
  %loop = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%pair), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"7"},"estimated_cycles":"5"}
  %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %z = f32[8,128]{1,0:T(8,128)} conditional(%i, %y, %y), branch_computations={%cheap, %dear}
  %w = f32[8,128]{1,0:T(8,128)} call(%z), to_apply=%called
  ROOT %r = f32[8,128]{1,0:T(8,128)} fusion(%w), kind=kLoop, calls=%fused, \
backend_config={"estimated_cycles":"2000"}
}
"""


def test_cycles_count_loops_by_their_trips_and_conditionals_by_the_dearest_branch():
    assert _hlo.cycles(PRICED) == 7 * 100 + 40 + 3 + 2000  # and nothing inside a fusion


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
    text = PRICED.replace('"known_trip_count":{"n":"7"},', "")
    assert _hlo.cycles(text) == 100 + 40 + 3 + 2000
    assert _hlo.loops(text) == {"loops": 1, "unknown_loops": 1}
    assert _hlo.loops(PRICED) == {"loops": 1, "unknown_loops": 0}


def test_a_kernel_without_a_price_counts_by_the_bytes_that_it_moves():
    assert _hlo.unpriced(PRICED) == {"unpriced_kernels": 0, "unpriced_bytes": 0}
    inside_and_at_the_end = PRICED.replace('"estimated_cycles":"100"', "")
    found = _hlo.unpriced(inside_and_at_the_end)
    assert found == {"unpriced_kernels": 7, "unpriced_bytes": 7 * 2 * 4 * 8 * 128}
    mark = PRICED.replace("call(%z), to_apply=%called", 'custom-call(), target="AllocateBuffer"')
    assert _hlo.unpriced(mark)["unpriced_kernels"] == 0
    kernel = mark.replace("AllocateBuffer", "Cholesky")
    assert _hlo.unpriced(kernel) == {"unpriced_kernels": 1, "unpriced_bytes": 4 * 8 * 128}


COUNTING = """\
%body (arg: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {
  %arg = (s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %x = f32[4]{0} get-tuple-element(%arg), index=1
  %n = s32[]{:T(128)} get-tuple-element(%arg), index=2
  %one = s32[]{:T(128)} constant(STEP)
  %i.copy = s32[]{:T(128)} copy(%i)
  %next = s32[]{:T(128)} add(%i.copy, %one)
  %y = f32[4]{0} tanh(%x), backend_config={"estimated_cycles":"10"}
  ROOT %out = (s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)}) tuple(%next, %y, %n)
}

%condition (arg.1: (s32[], f32[4], s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(64)
  %arg.1 = (s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  %m = s32[]{:T(128)} get-tuple-element(%arg.1), index=2
  ROOT %goes-on = pred[]{:T(512)} compare(%j, LIMIT), direction=DIRECTION
}

ENTRY %main (x0: f32[4]) -> f32[4] {
  %x0 = f32[4]{0} parameter(0)
  %first = s32[]{:T(128)} constant(FIRST)
  %many = s32[]{:T(128)} constant(9)
  %copied = s32[]{:T(128)} copy(%first)
  %start = (s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)}) tuple(%copied, %x0, %many)
  %loop = (s32[]{:T(128)}, f32[4]{0}, s32[]{:T(128)}) while(%start), \
condition=%condition, body=%body
  ROOT %r = f32[4]{0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    ("first", "step", "limit", "direction", "times"),
    [
        (0, 1, "%limit", "LT", 64),  # as XLA:TPU prints a scan
        (0, 1, "%m", "LT", 9),  # the limit is carried along
        (1, 2, "%limit", "LT", 32),
        (0, 1, "%limit", "LE", 65),
        (70, -1, "%limit", "GT", 6),
        (70, -1, "%limit", "GE", 7),
        (80, 1, "%limit", "LT", 0),
    ],
)
def test_a_loop_without_a_trip_count_counts_by_its_condition(first, step, limit, direction, times):
    text = COUNTING.replace("FIRST", str(first)).replace("STEP", str(step))
    text = text.replace("LIMIT", limit).replace("DIRECTION", direction)
    assert _hlo.cycles(text) == 10 * times
    assert _hlo.loops(text) == {"loops": 1, "unknown_loops": 0}


def test_branches_may_have_a_name_each():
    named = "true_computation=%cheap, false_computation=%dear"
    text = PRICED.replace("branch_computations={%cheap, %dear}", named)
    assert _hlo.cycles(text) == _hlo.cycles(PRICED)


def test_the_dearest_instructions_come_with_their_operation_and_all_their_runs():
    first, second, *_ = _hlo.dearest(PRICED)
    assert (first.name, first.cycles, first.times) == ("r", 2000, 1)
    assert (second.cycles, second.times) == (700, 7)
    assert second.op_name == "jit(f)/while/body/dot_general"
    assert len(_hlo.dearest(PRICED, 3)) == 3


def test_a_size_counts_all_arrays_of_a_tuple():
    assert _hlo.size("(f32[8,128]{1,0:T(8,128)S(1)}, bf16[3], pred[], s32[])") == 4096 + 6 + 1 + 4
    assert _hlo.size("token[]") == 0


MOVING = """\
HloModule jit_f

%slicing (stack: f32[10,256], index: s32[]) -> f32[256] {
  %stack = f32[10,256]{1,0} parameter(0)
  %index = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,256]{1,0} dynamic-slice(%stack, %index, %zero), dynamic_slice_sizes={1,256}
  ROOT %flat = f32[256]{0} bitcast(%row)
}

%updating (whole: f32[10,256], new: f32[1,256], at: s32[]) -> f32[10,256] {
  %whole = f32[10,256]{1,0} parameter(0)
  %new = f32[1,256]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %start = s32[] constant(0)
  ROOT %updated = f32[10,256]{1,0} dynamic-update-slice(%whole, %new, %at, %start)
}

%body (arg: (f32[10,256], s32[])) -> (f32[10,256], s32[]) {
  %arg = (f32[10,256]{1,0}, s32[]) parameter(0)
  %in = f32[10,256]{1,0} get-tuple-element(%arg), index=0
  %k = s32[] get-tuple-element(%arg), index=1
  %slice = f32[256]{0} fusion(%in, %k), kind=kLoop, calls=%slicing
  %again = f32[1,256]{1,0} bitcast(%slice)
  %set = f32[10,256]{1,0} fusion(%in, %again, %k), kind=kLoop, calls=%updating
  ROOT %next = (f32[10,256]{1,0}, s32[]) tuple(%set, %k)
}

ENTRY %main (x: f32[10,256], y: f32[256,4], k0: s32[]) -> f32[10,4] {
  %x = f32[10,256]{1,0} parameter(0)
  %y = f32[256,4]{1,0} parameter(1)
  %k0 = s32[] parameter(2)
  %start = (f32[10,256]{1,0}, s32[]) tuple(%x, %k0)
  %loop = (f32[10,256]{1,0}, s32[]) while(%start), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"10"}}
  %done = f32[10,256]{1,0} get-tuple-element(%loop), index=0
  %both = (f32[10,4]{1,0}, s8[4194304]{0}) custom-call(%done, %y), \
custom_call_target="__cublas$gemm"
  ROOT %product = f32[10,4]{1,0} get-tuple-element(%both), index=0
}
"""


def test_kernels_move_their_operands_and_results_but_only_the_slice_of_what_they_slice():
    row, index = 4 * 256, 4
    slicing, updating = row + index + row, row + index + row
    product = 4 * (10 * 256 + 256 * 4 + 10 * 4)
    assert _hlo.traffic(MOVING) == (10 * (slicing + updating) + product, 2 * 10 + 1)


COMMUNICATING = """\
HloModule jit_step

%all-reduce-scatter (p: f32[8,64]) -> f32[2,64] {
  %p = f32[8,64]{1,0} parameter(0)
  %whole = f32[8,64]{1,0} all-reduce(%p), channel_id=3, to_apply=%add
  ROOT %part = f32[2,64]{1,0} dynamic-slice(%whole), dynamic_slice_sizes={2,64}
}

%start (s: f32[2,32]) -> f32[8,32] {
  %s = f32[2,32]{1,0} parameter(0)
  ROOT %begun = f32[8,32]{1,0} all-gather(%s), channel_id=5, dimensions={0}
}

%end (t: f32[2,32]) -> f32[8,32] {
  %t = f32[2,32]{1,0} parameter(0)
  ROOT %ended = f32[8,32]{1,0} all-gather(%t), channel_id=5, dimensions={0}
}

%body (b: f32[16]) -> f32[16] {
  %b = f32[16]{0} parameter(0)
  ROOT %sum = f32[16]{0} all-reduce(%b), channel_id=1, to_apply=%add
}

ENTRY %main (g: f32[8,64], w: f32[2,32], v: f32[16], u: bf16[4]) -> f32[16] {
  %g = f32[8,64]{1,0} parameter(0)
  %w = f32[2,32]{1,0} parameter(1)
  %v = f32[16]{0} parameter(2)
  %u = bf16[4]{0} parameter(3)
  %scattered = f32[2,64]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter
  %first = f32[8,32]{1,0} fusion(%w), kind=kCustom, calls=%start
  %second = f32[8,32]{1,0} fusion(%w), kind=kCustom, calls=%end
  %sent = (bf16[4]{0}, bf16[4]{0}, u32[], u32[]) collective-permute-start(%u), channel_id=1
  %gathered = (f32[2,32]{1,0}, f32[8,32]{1,0}) all-gather-start(%w), channel_id=6
  ROOT %r = f32[16]{0} while(%v), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_a_collective_counts_once_and_with_its_whole_array():
    assert _hlo.collectives(COMMUNICATING) == {
        "reduce-scatter": (1, 4 * 8 * 64, 4 * 8 * 64),
        "all-gather": (2, 2 * 4 * 8 * 32, 4 * 8 * 32),
        "collective-permute": (1, 2 * 4, 2 * 4),
        "all-reduce": (3, 3 * 4 * 16, 4 * 16),
    }


def test_a_real_program_is_read():
    compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(jnp.ones((8, 8))).compile()
    program = _hlo.parse(compiled.as_text())
    assert any(instruction.is_root for instruction in program[_hlo.ENTRY])
    moved = _hlo.traffic(compiled.as_text())
    assert moved.kernels >= 1 and moved.bytes >= 2 * 4 * 64


def test_a_process_that_crashes_or_hangs_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "crash.py").write_text("import os; os._exit(3)")
    (tmp_path / "hang.py").write_text("import time; time.sleep(60)")
    (tmp_path / "fine.py").write_text(
        "import sys; print('noise'); print('{\"x\": ' + sys.argv[1] + '}')"
    )
    assert "exit code 3" in _processes.in_process("crash", [])["error"]
    assert "0.5 seconds" in _processes.in_process("hang", [], seconds=0.5)["error"]
    assert _processes.in_process("fine", ["4"]) == {"x": 4}


@pytest.mark.parametrize("name", list(LARGER))
@jax.numpy_dtype_promotion("standard")  # which Flax needs
def test_larger_models_have_shapes_alone_and_a_scalar_loss(name):
    model = LARGER[name](2)
    leaves = jax.tree.leaves(tuple(model[1:]))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), model.batch)
    value = jax.eval_shape(model.loss, model.params, model.frozen, example)
    assert value.shape == () and value.dtype == jnp.float32
    assert bool(jax.tree.leaves(model.frozen)) == ("LoRA" in name)
