"""The tests that `make test` leaves out, with the reasons.

`make test-rest` runs them, `make test-all` runs all tests, and `.ci/run` runs them after the others.
They check at greater length what a test in `make test` checks: more cases, chips, ranks, models or
random calls. Tests that only read files do not belong here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from zlib import crc32

SAMPLE: Final = "triton/test_interpreter.py interprets cases of every op"
FULL: Final[dict[str, dict[str, tuple[int, str]]]] = {
    "tests/triton/test_interpreter.py": {
        "test_one_case_of_each_group_passes[rest": (0, "a third of the groups stays, some of every op"),
    },
    "tests/triton/test_rms_norm.py": {
        "test_interpreted_kernels_pass_their_cases": (0, SAMPLE),
        "test_sampled_kernels_compile_to_the_recorded_machine_code": (0, "compiles 40 kernels; digests of all stay"),
        "test_aligned_operands_do_not_widen_the_row_layout": (4, "each lowers a kernel"),
        "test_division_is_correctly_rounded": (3, "each lowers a kernel"),
        "test_group_occupies_adjacent_lanes": (10, "each lowers a kernel"),
        "test_group_operands_do_not_change_the_row_layout": (10, "each lowers a kernel"),
    },
    "tests/triton/test_other_chips.py": {
        "test_compiles_for_other_chips": (0, "50 CPU-seconds; part of the other families stays"),
    },
    "tests/ops/test_native.py": {
        "test_many_calls_with_changing_shapes_do_not_grow_memory": (0, "250,000 calls; 20,000 stay"),
        "test_paths_agree_over_the_fuzzers_calls[220": (0, "80 calls stay"),
    },
    "tests/triton/test_rms_norm_quant.py": {
        "test_interpreted_kernels_pass_their_cases": (0, SAMPLE),
        "test_tiles_of_layer_norm_give_the_same_codes": (0, SAMPLE),
        "test_codes_of_a_thread_are_one_store": (3, "each compiles a kernel"),
    },
    "tests/triton/test_gemv_norm.py": {
        "test_kernels_sum_in_the_documented_order": (0, "the sums of qk_norm and the pieces of linear stay"),
        "test_interpreted_kernel_passes_its_cases": (0, SAMPLE),
        "test_compiles_for_other_chips[80-": (0, "qk_norm compiles for this chip"),
        "test_compiles_for_other_chips[100-": (0, "each compiles a kernel"),
        "test_compiles_for_other_chips[gfx": (4, "each compiles a kernel"),
        "test_untraced_kernel_has_no_trace_code": (0, "each compiles two kernels"),
        "test_settings_that_affect_bits_do_not_depend_on_rows": (4, "some configurations stay"),
        "test_order_of_summation_does_not_depend_on_layouts": (8, "each compiles a kernel"),
    },
    "tests/triton/test_linear.py": {
        "test_interpreted_kernel_passes_its_cases": (0, SAMPLE),
        "test_tiles_agree_with_float64": (0, SAMPLE),
        "test_compiles_for_other_chips": (6, "each compiles a kernel"),
        "test_tiles_use_asynchronous_loads_and_warp_groups": (4, "each compiles a kernel"),
    },
    "tests/triton/test_codes.py": {
        "test_columns_of_aligned_operands_are_neighbours": (4, "each lowers a kernel"),
        "test_aligned_weights_are_regrouped_in_registers": (9, "each lowers a kernel"),
        "test_masked_and_gated_weights_are_regrouped_in_registers": (4, "each lowers a kernel"),
        "test_weights_of_the_gemv_are_regrouped_in_registers": (3, "each lowers a kernel"),
        "test_unaligned_weights_are_loaded_in_the_order_of_steps": (4, "each lowers a kernel"),
        "test_flat_tiles_are_products_of_warp_groups": (5, "each lowers a kernel"),
    },
    "tests/triton/test_qk_norm.py": {
        "test_compiles_for_other_chips": (4, "one chip stays"),
        "test_sums_need_no_layout_conversions": (5, "each lowers a kernel"),
        "test_hot_kernels_use_wide_accesses_and_few_registers": (4, "each compiles a kernel"),
    },
    "tests/triton/test_mla_cache.py": {
        "test_interpreted_kernel_passes_its_cases": (0, SAMPLE),
        "test_compiles_for_other_chips": (0, "20 CPU-seconds; part of the other families stays"),
        "test_multi_level_search_finds_the_request_of_each_token": (0, SAMPLE),
        "test_cuts_do_not_change_results": (0, "interprets a kernel with every tile size"),
        "test_hot_kernels_use_wide_accesses_and_few_registers": (3, "each compiles a kernel"),
    },
    "tests/triton/test_qk_cache.py": {
        "test_every_reduction_adds_two_numbers": (5, "one kind of norm stays"),
        "test_interpreted_kernel_passes_its_cases": (0, SAMPLE),
        "test_programs_of_any_size_give_the_same_bytes": (0, SAMPLE),
        "test_compiles_for_other_chips": (0, "20 CPU-seconds; part of the other families stays"),
        "test_hot_kernels_use_wide_accesses_and_few_registers": (3, "each compiles a kernel"),
    },
    "tests/triton/test_attention.py": {
        "test_interpreted_kernels_agree_with_the_formula": (0, SAMPLE),
    },
    "tests/triton/test_latent_attention.py": {
        "test_chips_with_less_shared_memory": (1, "each compiles a kernel"),
        "test_hot_kernels_hold_everything_in_registers": (1, "each compiles a kernel"),
    },
    "tests/models/test_latent_kernels.py": {
        "test_one_graph": (0, "test_split_attention.py compiles a step with a kernel"),
    },
    "tests/triton/test_bins.py": {
        "test_every_tile_sums_a_row_as_defined": (0, "interprets 400 tiles"),
    },
    "tests/ops/test_ops.py": {
        "TestEdges::test_smallest_scale": (5, "one way to divide stays"),
        "test_case[rms_norm_fused_quant-large": (0, "rms_norm has a large case"),
        "test_case[rms_norm_fused_fp8-large": (0, "rms_norm has a large case"),
        "test_case[layer_norm-large": (0, "rms_norm has a large case"),
        "test_case": (40, "each group of each op stays"),
        "test_zeros_fail_every_case": (40, "stays for the cases of test_case that stay"),
    },
    "tests/ops/test_rms_norm_quant.py": {
        "test_layouts_hold_the_same_scales": (5, "each compiles kernels"),
        "test_fp8_is_a_form_of_it": (7, "each compiles sixteen kernels"),
        "test_block_formats_by_their_own_decoder[mxfp8-False": (7, "each compiles a kernel"),
        "test_block_formats_by_their_own_decoder[mxfp8-True": (7, "each compiles a kernel"),
        "test_block_formats_by_their_own_decoder[mxfp4-False": (7, "each compiles a kernel"),
        "test_block_formats_by_their_own_decoder[mxfp4-True": (7, "each compiles a kernel"),
        "test_block_formats_by_their_own_decoder[nvfp4-False": (7, "each compiles a kernel"),
        "test_rows_with_nan_infinity_and_zeros": (7, "each compiles a kernel"),
        "test_stored_quantizes_what_rms_norm_stores": (7, "each compiles a kernel"),
    },
    "tests/ops/test_reference.py": {
        "test_check[mla_dtypes": (0, "three seconds"),
        "test_check": (4, "some rows of docs/reference.md stay"),
    },
    "tests/ops/test_compile.py": {
        "test_compile_whole_graph_dynamic[inductor": (0, "aot_eager stays"),
    },
    "tests/ops/test_gammas.py": {
        "test_compat_functions": (5, "each compiles a kernel"),
        "test_bytes_are_those_of_the_same_gamma_in_float32": (16, "test_ops.py has cases of these dtypes"),
    },
    "tests/ops/test_compat.py": {
        "test_flashinfer_fp4": (3, "each compiles kernels"),
        "test_vllm_int8": (3, "each compiles a kernel"),
        "test_vllm_bytes": (8, "each compiles kernels"),
        "test_vllm_bytes_of_other_lengths": (0, "test_vllm_bytes stays"),
    },
    "tests/ops/test_gemv_norm_compile.py": {
        "test_compile_whole_graph": (0, "TestOpcheck stays"),
        "test_first_call_of_a_process_may_be_compiled": (0, "torch.compile in a separate process"),
    },
    "tests/ops/test_gemv_norm_host.py": {
        "test_gpu_backend_checks_the_counter_too": (0, SAMPLE),
    },
    "tests/ops/test_linear_torch.py": {
        "test_compile_whole_graph[inductor": (0, "aot_eager stays"),
    },
    "tests/ops/test_linear.py": {
        "test_fused_is_separate": (60, "each compiles three kernels"),
        "test_bytes_are_those_of_the_gemv": (31, "each compiles three kernels"),
        "TestSpecialValues::test_bad_row_does_not_affect_others": (5, "each compiles a kernel"),
        "test_bytes_of_a_row_are_its_own": (13, "each compiles a kernel"),
        "test_promise[linear: ": (0, "test_fused_is_separate and test_bytes_are_those_of_the_gemv have other sizes"),
        "test_promise": (31, "one size stays"),
    },
    "tests/ops/test_qk_norm.py": {
        "test_compile_whole_graph_dynamic[inductor": (0, "aot_eager stays"),
        "test_opcheck": (4, "four signatures stay"),
    },
    "tests/ops/test_mla_cache.py": {
        "test_compile_whole_graph_dynamic": (0, "compile and opcheck of the other ops stay"),
        "test_zeros_in_the_written_entries_fail": (11, "some cases stay"),
    },
    "tests/ops/test_qk_cache.py": {
        "test_bytes_are_those_of_the_separate_calls": (40, "each compiles kernels"),
        "test_hf_keeps_the_bits_of_transformers": (3, "each compiles a kernel"),
        "test_hf_keeps_the_bits_of_partial_rotations": (3, "each compiles a kernel"),
        "test_promises": (0, "test_determinism.py has its batches, layouts and threads"),
    },
    "tests/ops/test_concurrency.py": {
        "test_threads_do_not_change_results[own order": (0, "the same call from all threads stays"),
        "test_first_calls_from_eight_threads": (0, "threads with a warm cache stay"),
        "test_two_spawned_processes_share_a_cold_cache": (0, "the tests with threads and forks stay"),
        "test_processes_fill_one_cache_concurrently": (0, "the tests with threads and forks stay"),
        "test_process_killed_while_writing": (0, "cpu/test_object_cache.py has damaged files"),
        "test_interrupts": (0, "the tests with threads and forks stay"),
    },
    "tests/cpu/test_rms_norm.py": {
        "test_kernel_agrees_with_float64": (3, "test_case runs the same kernels"),
    },
    "tests/cpu/test_linear.py": {
        "test_bad_numbers_stay_in_their_row_or_column": (4, "ops/test_linear.py has NaN and infinity too"),
        "test_a_row_gives_the_same_bytes_in_any_batch": (4, "tools/test_determinism.py has batches too"),
        "test_bytes_do_not_depend_on_threads": (4, "tools/test_determinism.py has threads too"),
        "test_check_rejects_wrong_outputs": (6, "each compiles a kernel"),
        "test_agrees_with_float64": (8, "test_case runs the same kernels"),
        "test_options_have_the_bytes_of_separate_steps": (3, "each compiles kernels"),
        "test_product_has_the_bytes_of_the_gemv": (16, "each compiles three kernels"),
        "test_other_instruction_sets_give_the_same_bytes": (3, "each compiles two kernels"),
    },
    "tests/cpu/test_gemv_norm.py": {
        "test_check_rejects_wrong_outputs": (4, "each compiles a kernel"),
        "test_agrees_with_float64": (8, "test_case runs the same kernels"),
        "test_other_instruction_sets_give_the_same_bytes": (3, "each compiles two kernels"),
    },
    "tests/cpu/test_half.py": {
        "test_ops_give_the_same_bytes_without_f16c": (0, "compiles every op twice"),
    },
    "tests/unit/test_bad_input.py": {
        "test_bad_calls_name_the_argument_and_write_nothing": (11, "some calls of every op stay"),
    },
    "tests/unit/test_dequantize.py": {
        "test_the_norm_of_an_8_bit_row_has_gammas_dtype": (5, "each compiles a kernel"),
        "test_triton_kernel_decodes_every_code_exactly": (0, SAMPLE),
        "test_compiled_calls_have_the_same_bytes": (0, "test_compile.py compiles calls with a prologue"),
        "test_scale_per_group_equals_scale_per_column": (12, "each compiles kernels"),
    },
    "tests/unit/test_nn_merged.py": {
        "test_compiled": (0, "test_nn_linear.py compiles one of the layers"),
        "test_gate_and_up": (40, "each compiles kernels"),
        "test_residual_without_an_activation": (0, "test_gate_and_up has a residual too"),
    },
    "tests/unit/test_prologue_meaning.py": {
        "test_random_functions_in_the_cpu_kernel": (4, "some functions stay"),
        "test_cpu_kernel_matches_the_function": (3, "some functions stay"),
        "test_triton_source_matches_the_function": (3, "some functions stay"),
    },
    "tests/unit/test_nn_linear.py": {
        "test_float_weights_are_quantized_when_loaded": (5, "each compiles kernels; test_weights.py has all schemes"),
        "test_replaces_torch_linear": (7, "each compiles a kernel"),
        "test_quantized_layers_take_any_float_dtype": (0, "ops/test_linear.py has these dtypes"),
        "test_deepseek_checkpoints_are_loaded": (7, "each compiles kernels"),
        "test_norm_residual_and_addition": (31, "each compiles kernels"),
        "test_compiled": (5, "one kind of weight stays"),
        "test_from_linear_of_transformers": (7, "one kind of weight stays"),
    },
    "tests/tools/test_headlines.py": {
        "test_alternatives_are_in_the_bench_and_do_the_same[linear, fused": (0, "compile; other ops stay"),
    },
    "tests/models/test_architectures.py": {
        "test_patched_models_agree": (9, "some architectures stay"),
        "test_every_class_has_the_form_that_was_recorded": (0, "imports every model of transformers"),
    },
    "tests/models/test_linear_modules.py": {
        "test_checkpoints_of_a_whole_model": (13, "each compiles kernels"),
    },
    "tests/models/test_decode_stale.py": {
        "test_compiled_calls_use_what_refresh_writes": (
            0,
            "test_codes_stay_where_they_are, which compiled calls rely on, stays",
        ),
    },
    "tests/models/test_freed_weights.py": {
        "test_results_are_those_of_kept_weights[Phi-3": (0, "two families stay"),
        "test_conversions_keep_the_codes": (
            0,
            "compiles kernels; test_decode_weights.py converts models that keep weights",
        ),
        "test_captured_decode_and_compiled_calls": (0, "compiles a model; steps that are called stay"),
    },
    "tests/models/test_patch_compile.py": {
        "test_one_graph_for_all_batch_sizes": (16, "one model stays"),
    },
    "tests/models/test_decode.py": {
        "test_a_step_is_a_chain_of_linear": (40, "test_decode_launches.py counts the launches of others"),
        "test_float32_logits_and_tokens_are_the_models_own[once": (0, "each compiles kernels"),
        "test_float32_logits_and_tokens_are_the_models_own[all": (5, "some families stay"),
        "test_float32_logits_and_tokens_are_the_models_own[few": (3, "some families stay"),
        "test_bfloat16_is_as_accurate_as_the_model": (8, "each compiles kernels"),
        "test_one_launch_rotates_and_writes_as_the_model_does": (3, "some models stay"),
        "test_batch_invariance": (11, "each compiles kernels"),
        "test_all_architectures_agree": (0, "test_other_architectures_with_the_same_code has some of them"),
        "test_other_architectures_with_the_same_code": (3, "some architectures stay"),
    },
    "tests/models/test_decode_launches.py": {
        "test_kernels_per_layer_and_per_step": (5, "some families stay"),
    },
    "tests/models/test_decode_compile.py": {
        "test_one_graph_for_all_steps[OLMo-2": (0, "one model stays"),
        "test_hooks_see_the_calls_of_the_model[self_attn-{'": (0, "the same hook without codes stays"),
        "test_hooks_see_the_calls_of_the_model[self_attn.o_proj": (0, "a hook on q_proj stays"),
        "test_hooks_see_the_calls_of_the_model[mlp": (0, "hooks in the attention stay"),
        "test_hooks_see_the_calls_of_the_model[post_attention": (0, "hooks on input_layernorm stay"),
        "test_generate_compiles_one_graph": (0, "test_one_graph_for_all_steps compiles the same step"),
    },
    "tests/dist/test_dist.py": {
        "test_compiled": (0, "ops/test_qk_norm.py compiles the op without ranks"),
        "test_compiling_never_exchanges": (0, "compiles on two ranks, as test_compiled"),
        "test_killed_rank[True": (0, "the other collective stays"),
        "test_deadline_ends_ranks_that_hang": (0, "the ranks of the other tests end"),
        "test_check[1-": (0, "two ranks stay"),
        "test_check[3-": (0, "two ranks stay"),
        "test_check[4-": (0, "two ranks stay"),
        "test_two_hosts_under_torchrun": (0, "starts torchrun twice"),
        "test_olmo2_attention_of_transformers": (0, "test_check has the same norms"),
        "test_times_are_measured": (0, "test_check makes the same calls"),
        "test_command": (0, "test_check makes the same calls"),
        "test_gathering_by_adding_gives_the_same_bytes": (0, "test_check makes the same calls"),
        "test_agreement_is_within_the_bound_and_not_far_below": (0, "needs four ranks, test_check has two"),
    },
    "tests/tools/test_properties.py": {
        "test_random_calls": (0, "500 calls of each op; test_case has chosen ones"),
        "test_random_calls_of_the_gpu_kernels": (0, SAMPLE),
    },
    "tests/tools/test_fuzz.py": {
        "test_driver": (0, "starts processes and compiles kernels; test_crashed_processes_fail_the_run stays"),
        "test_wrong_options_are_detected": (3, "one option stays"),
        "test_wrong_steps_of_linear_are_detected": (0, "test_wrong_options_are_detected stays"),
        "test_zeros_are_detected": (0, "compiles the kernels of test_random_calls"),
    },
    "tests/tools/test_fuzz_transfer.py": {
        "test_a_changed_input_is_detected[tools.fuzz.linear": (0, "two other ops stay"),
        "test_cases_pass": (11, "some ops stay; test_properties.py runs random calls of all"),
    },
    "tests/models/test_generate.py": {
        "test_a_step_reads_nothing_on_the_host": (8, "one case in eight stays"),
        "test_patched_models_generate_the_tokens_of_their_plain_loop": (3, "one case in three stays"),
        "test_tokens_are_those_of_the_plain_loop": (3, "one family in three stays"),
    },
    "tests/tools/test_bench_models.py": {
        "test_compiled_steps_are_compiled_with_and_without_onepass": (0, "the uncompiled steps stay"),
    },
    "tests/tools/test_determinism.py": {
        "test_threads_are_used_where_their_number_is_tested": (5, "some ops stay"),
        "test_promise": (23, "each promise stays, with fewer dtypes and lengths"),
    },
    "tests/tools/test_promises.py": {
        "test_format_promise": (15, "each compiles kernels; one promise in fifteen stays"),
        "test_two_processes_share_promises": (0, "starts two processes"),
    },
    "tests/tools/test_sanitize.py": {
        "test_a_whole_run_with_a_tool_that_finds_nothing": (0, "starts three processes"),
    },
    "tests/cpu/test_launcher.py": {
        "test_too_little_memory_to_compile_raises": (0, "starts a process"),
    },
    "tests/tools/test_sanitize_native.py": {
        "test_a_mistake_ends_the_process": (
            0,
            "compiles the extension; `make sanitize-native` runs one without mistakes",
        ),
    },
    "tests/tools/test_fence.py": {
        "test_every_case_stays_within_its_memory": (0, "all cases of test_case, between guard pages"),
    },
    "tests/tools/test_evidence.py": {
        "TestPublishedModels::test_cases_need_what_calls_of_the_models_need": (
            0,
            "test_every_configuration_ran_on_a_gpu stays",
        ),
        "TestSourceDigests::test_digests_are_the_same_in_every_process": (0, "starts two processes"),
        "TestPublishedModels::test_one_case_of_every_form_passes_and_fails_with_zeros": (
            0,
            "ops/test_ops.py has the same for other cases",
        ),
    },
    "tests/tools/test_growth.py": {
        "test_memory_that_grows_fails": (0, "another measurement that fails stays"),
    },
    "tests/system/test_cli.py": {
        "test_demo_of_local_weights": (0, "test_demo stays"),
        "test_demo_of_each_model": (0, "test_bench_claims.py runs the comparisons of the demo"),
        "test_check_interprets_the_gpu_kernels": (0, SAMPLE),
    },
    "tests/system/test_bench_linear.py": {
        "test_rows_with_the_same_weights_share_the_time_of_their_read": (0, "three timed rows"),
        "test_a_peer_that_refuses_a_row_is_recorded_in_it": (0, "six timed rows"),
    },
    "tests/system/test_examples.py": {
        "test_example_prints_what_it_should[fp8_linear": (0, "ten_lines.py stays"),
        "test_example_prints_what_it_should[tensor_parallel": (0, "the other examples stay"),
        "test_example_prints_what_it_should[prologue": (0, "ten_lines.py stays"),
    },
    "tests/models/test_decode_weights.py": {
        "test_block_scaled_checkpoints_are_used_as_they_are": (0, "test_linear_modules.py has such checkpoints"),
    },
    "tests/system/test_bench.py": {
        "test_bench_command": (0, "test_bench_compares_with_a_baseline runs the command too"),
    },
    "tests/system/test_bench_gpu.py": {
        "test_the_compiled_peer_writes_the_cache_in_place": (5, "one dtype stays"),
    },
    "tests/models/test_patch_hooks.py": {
        "test_hooks_that_change_values": (5, "some models stay"),
        "test_hooks_on_every_module": (5, "some models stay"),
        "test_a_hook_on_one_module": (5, "some models stay"),
    },
    "tests/models/test_patch.py": {
        "test_float32_generates_the_same_tokens": (5, "some models stay"),
    },
    "tests/ops/test_compat_engines.py": {
        "test_vllm_static_codes": (5, "each compiles a kernel"),
        "test_flashinfer_static_codes": (5, "each compiles a kernel"),
        "test_concat_and_cache_mla": (5, "each compiles a kernel"),
    },
    "tests/ops/test_gemv_norm.py": {
        "TestUnfused::test_any_number_of_rows": (5, "some numbers stay"),
        "test_trace_blocks_counts_the_blocks_that_run": (5, "each lowers a kernel"),
    },
    "tests/unit/test_oracle.py": {
        "TestRoundedOnTheWay::test_one_value_of_a_small_cache_write_a_step_off_is_wrong": (4, "some cases stay"),
    },
}
"""By file: a test's name, or the beginning of one with parameters, then a number and the reason.

Number 0 leaves out the whole test. With a number n, about one parameter set in n stays in
`make test`, and at least the first of each group of cases. A case's name is "group: details".
"""


def full(names: Iterable[str]) -> set[str]:
    """The node ids among ``names`` that `make test` leaves out.

    The choice among parameter sets depends on their names and their order alone, so every run on
    every machine makes the same one.
    """
    found, seen = set(), set()
    for name in names:
        entry = entry_of(name)
        if entry is None:
            continue
        one_in, _ = FULL[entry[0]][entry[1]]
        parameters = name.partition("[")[2]
        group = (*entry, parameters.partition(":")[0] * (":" in parameters))
        if not one_in or (group in seen and crc32(parameters.encode()) % one_in):
            found.add(name)
        seen.add(group)
    return found


def entry_of(name: str) -> tuple[str, str] | None:
    """The file and the entry of `FULL` that a node id belongs to."""
    file, _, test = name.partition("::")
    for entry in FULL.get(file, ()):
        if test.partition("[")[0] == entry or ("[" in entry and test.startswith(entry)):
            return file, entry
    return None
