"""Traces of a GPU: its kernels are in CUDA graphs, which hide the operations. The traces are written
here as text, in the form of one of an H200."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import pytest
from fulgurite_profiler import ProfileSummary, summarize_profile

GEMM = """\
  %{name} = (f32[64,{width}]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %{right}), \
custom_call_target="__cublas$gemm", metadata={{op_name="jit(step)/jvp({layer})/dot_general"}}, \
backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":\
{{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}}}}
"""
PROGRAM = f"""\
HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[64,128], b: f32[128,32], c: f32[128,16]) -> f32[64,16] {{
  %a = f32[64,128]{{1,0}} parameter(0)
  %b = f32[128,32]{{1,0}} parameter(1)
  %c = f32[128,16]{{1,0}} parameter(2)
{GEMM.format(name="cublas-gemm.1", width=32, right="b", layer="encoder")}\
  %loop_add_fusion.2 = f32[64,32]{{1,0}} fusion(%cublas-gemm.1), kind=kLoop, calls=%sum, \
metadata={{op_name="jit(step)/jvp(encoder)/add"}}
{GEMM.format(name="cublas-gemm.2", width=32, right="b", layer="decoder")}\
{GEMM.format(name="cublas-gemm.3", width=16, right="c", layer="head")}\
  ROOT %reduce.7 = f32[] reduce(%cublas-gemm.3), metadata={{op_name="jit(step)/jvp(loss)/reduce_sum"}}
}}
"""
GRAPH = 155 << 32
# By the numbers of their nodes; the last one may come first in time.
KERNELS = {
    98: "nvjet_sm90_NNT",
    99: "loop_add_fusion_2",
    114: "nvjet_sm90_NNT",
    116: "nvjet_sm90_TNT",
    120: "Memset",
}


def write_trace(folder: Path, planes: Mapping[str, Sequence[tuple[str, str, int | None]]]) -> Path:
    """Write a trace.

    Args:
        folder: in which it is written.
        planes: kernel, operation and node of the events of each plane; one lasts a microsecond more
            than the one before.
    """
    texts = []
    for plane, events in planes.items():
        names = {kernel: number for number, (kernel, _, _) in enumerate(events, 1)}
        lines = []
        for index, (kernel, operation, node) in enumerate(events):
            stats = [f'stats {{ metadata_id: 1 str_value: "{operation}" }}']
            stats.append('stats { metadata_id: 2 str_value: "jit_step" }')
            if node is not None:
                stats.append(f"stats {{ metadata_id: 3 uint64_value: {node} }}")
            stats.append('stats { metadata_id: 4 str_value: "XlaModule:" }')
            lines.append(
                f"events {{ metadata_id: {names[kernel]} offset_ps: {index * 10**8} "
                f"duration_ps: {(index + 1) * 10**6} {' '.join(stats)} }}"
            )
        labels = [
            f'event_metadata {{ key: {key} value {{ id: {key} name: "{name}" }} }}'
            for name, key in names.items()
        ]
        labels += [
            f'stat_metadata {{ key: {key} value {{ id: {key} name: "{name}" }} }}'
            for key, name in enumerate(("hlo_op", "hlo_module", "cuda_graph_node_id", "tf_op"), 1)
        ]
        texts.append(
            f'planes {{ name: "{plane}" lines {{ id: 1 name: "Stream #14(Compute)" '
            f"{' '.join(lines)} }} {' '.join(labels)} }}"
        )
    data = jax.profiler.ProfileData.text_proto_to_serialized_xspace(" ".join(texts))
    recording = folder / "plugins" / "profile" / "2026_11_26"
    recording.mkdir(parents=True)
    (recording / "host.xplane.pb").write_bytes(data)
    (folder / "programs").mkdir()
    (folder / "programs" / "01-step.hlo.txt").write_text(PROGRAM)
    return folder


def list_graph(kernels: dict[int, str]) -> list[tuple[str, str, int | None]]:
    """Return two runs of a graph, in another order than that of its nodes."""
    events = [(kernel, "command_buffer_1", GRAPH + node) for node, kernel in kernels.items()]
    return [*reversed(events), *events]


def get_calls(summary: ProfileSummary) -> dict[str, tuple[int, str, float]]:
    return {
        operation.name: (operation.calls, operation.layer, operation.flops)
        for operation in summary.operations
    }


def test_kernels_of_a_graph_are_the_operations_that_they_compute(tmp_path: Path) -> None:
    planes = {"/device:GPU:0": [*list_graph(KERNELS), ("reduce_7", "reduce.7", None)]}
    summary = summarize_profile(write_trace(tmp_path, planes))
    assert get_calls(summary) == {
        "cublas-gemm.1": (2, "encoder", 2 * 2 * 64 * 128 * 32),
        "loop_add_fusion.2": (2, "encoder", 0),
        "cublas-gemm.2": (2, "decoder", 2 * 2 * 64 * 128 * 32),
        "cublas-gemm.3": (2, "head", 2 * 2 * 64 * 128 * 16),
        "Memset": (2, "-", 0),
        "reduce.7": (1, "loss", 0),
    }
    # 1 + 2 + ... + 11 microseconds.
    assert summary.seconds == pytest.approx(66e-6)


@pytest.mark.parametrize(
    "kernels",
    [
        KERNELS | {117: "nvjet_splitK_reduce"},
        KERNELS | {114: "nvjet_sm90_TNT", 116: "nvjet_sm90_NNT"},
    ],
    ids=["more kernels than calls", "equal calls with unlike kernels"],
)
def test_a_kernel_of_a_library_keeps_its_name_where_its_operation_is_not_known(
    kernels: dict[int, str], tmp_path: Path
) -> None:
    summary = summarize_profile(write_trace(tmp_path, {"/device:GPU:0": list_graph(kernels)}))
    calls = get_calls(summary)
    assert calls["loop_add_fusion.2"] == (2, "encoder", 0)
    assert calls["nvjet_sm90_TNT"] == (2, "-", 0)
    assert not any(name.startswith("cublas") for name in calls)


def test_what_the_host_does_for_a_device_does_not_count(tmp_path: Path) -> None:
    planes = {
        "/host:CPU": [("reduce.7", "reduce.7", None)] * 3,
        "/device:GPU:0": [("reduce_7", "reduce.7", None)],
    }
    summary = summarize_profile(write_trace(tmp_path, planes))
    assert get_calls(summary) == {"reduce.7": (1, "loss", 0)}
    assert summary.devices == ["/device:GPU:0"]
