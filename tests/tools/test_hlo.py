"""What `tools.hlo` finds in a module's text."""

import pytest

from tools import hlo

# Experts' weights are (8, 4, 6), rows of x (20, 4), of which slots hold two each.
MODULE = """\
HloModule jit_step, entry_computation_layout={(f32[20,4]{1,0}, f32[8,4,6]{2,1,0})->f32[20,4]{1,0}}

FileNames
1 "step.py"

%fused (param_0: f32[8,4,6]) -> f32[8,6,4] {
  %param_0 = f32[8,4,6]{2,1,0} parameter(0)
  ROOT %transpose.1 = f32[8,6,4]{2,1,0} transpose(%param_0), dimensions={0,2,1}
}

ENTRY %main (x: f32[20,4], w: f32[8,4,6]) -> f32[20,4] {
  %x = f32[20,4]{1,0} parameter(0), metadata={op_name="x"}
  %w = f32[8,4,6]{2,1,0} parameter(1), metadata={op_name="w[\\'up\\']"}
  %wrapped_transpose = f32[8,6,4]{2,1,0} fusion(%w), kind=kLoop, calls=%fused
  %bitcast.1 = f32[8,6,4]{1,2,0} bitcast(%w)
  %copy.1 = f32[8,6,4]{2,1,0} copy(%bitcast.1), backend_config={"a":[]}
  %copy.2 = f32[8,6,4]{2,1,0} copy(%copy.1)
  %copy.3 = f32[4,20]{0,1} copy(%x)
  %call.1 = (f32[40,4]{1,0}, s32[40]{0}) custom-call(%x, %w, /*index=2*/%copy.1), custom_call_target="triton_kernel_call", backend_config="%a = f32[40,4]{1,0} copy(%x)"
  %rows = f32[40,4]{1,0} get-tuple-element(%call.1), index=0
  %bitcast.2 = f32[20,2,4]{2,1,0} bitcast(%rows)
  %call.2 = f32[40,4]{1,0} custom-call(%rows), custom_call_target="triton_kernel_call_ffi"
  %gemm.1 = f32[40,4]{1,0} custom-call(%rows), custom_call_target="__cublas$gemm"
  %gather.1 = (bf16[20,2,4]{2,1,0:T(8,128)}, f32[]) fusion(%x), kind=kCustom, calls=%fused, backend_config={"kind":"__triton_gemm"}
  ROOT %add.1 = f32[20,4]{1,0} add(%x, %x)
}
"""  # noqa: E501


def test_every_instruction_is_read():
    found = {i.name: i for i in hlo.instructions(MODULE)}
    assert len(found) == 16
    assert found["call.1"].opcode == "custom-call"
    assert found["call.1"].sizes == (160, 40)
    assert found["call.1"].layouts == ("1,0", "0")
    assert found["call.1"].operands == ("x", "w", "copy.1")
    assert [name for name, i in found.items() if i.is_ours] == ["call.1", "call.2"]
    assert found["gather.1"].sizes == (160, 1)
    assert found["gather.1"].layouts == ("2,1,0", "")


def test_only_our_kernels_count_as_triton_calls():
    assert hlo.count_triton_calls(MODULE) == 2


def test_producers_write_arrays_of_that_size_and_are_not_our_kernels():
    assert hlo.producers(MODULE, 40 * 4) == ["gemm.1", "gather.1"]
    assert hlo.producers(MODULE, 20 * 4) == ["copy.3", "add.1"]
    assert hlo.producers(MODULE, 41 * 4) == []


@pytest.mark.parametrize(
    ("size", "found"),
    [(8 * 4 * 6, ["transpose.1", "copy.1"]), (20 * 4, ["copy.3"]), (40 * 4, [])],
)
def test_rearrangements_are_transposes_and_copies_into_another_layout(size, found):
    assert hlo.rearrangements(MODULE, size) == found


def test_sizes_are_of_what_is_made():
    """The parameters' 80 and 192 elements are made here, too: by the add and by the copies."""
    assert max(hlo.sizes(MODULE)) == 192
    assert sorted(set(hlo.sizes(MODULE))) == [1, 40, 80, 160, 192]
