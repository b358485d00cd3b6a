# SPDX-License-Identifier: MIT
# Runs of the program on GPUs as checks: training, validation, measurements, the Python package and plugins. Results are in
# build/PRESET/gpu_runs/NAME. Labels and names: cmake/GpuTests.cmake.
if(NOT TARGET fp8flow)
    return()
endif()
set(program $<TARGET_FILE:fp8flow>)
set(configs ${PROJECT_SOURCE_DIR}/configs)
set(gpu_runs ${PROJECT_BINARY_DIR}/gpu_runs)

# fp8flow_gpu_run(NAME LABEL RANKS SECONDS COMMAND CONFIG ARGUMENTS...): the program's COMMAND, under mpirun; the name gets _RANKS at its end
function(fp8flow_gpu_run name label ranks seconds command config)
    fp8flow_on_ranks(launch ${ranks})
    fp8flow_gpu_test(${name}_${ranks} ${label} ${ranks} ${seconds} COMMAND ${launch} ${program} ${command} ${configs}/${config}.yaml
                     --backend hopper --out ${gpu_runs}/${name}_${ranks} --overwrite ${ARGN})
endfunction()
# fp8flow_profile(NAME CONFIG ARGUMENTS...): a measurement on ${ranks} GPUs
macro(fp8flow_profile name config)
    fp8flow_gpu_run(profile_${name} bench ${ranks} 150 profile ${config} ${ARGN})
endmacro()

foreach(ranks ${gpu_rank_counts})
    set(experts --set parallel.expert_model_parallel_size=${ranks})
    math(EXPR rows "16 / ${ranks}")
    set(split ${experts} --set training.micro_batch_size=${rows} --set output.log_interval=50)
    fp8flow_gpu_run(gpu_train gpu ${ranks} 300 train quickstart ${split})
    fp8flow_gpu_run(gpu_validate gpu ${ranks} 300 validate quickstart ${split} --set validate.max_relative_loss_error=0.005
                    --set validate.recipes=[bf16,fp8_tensorwise,fp8_blockwise,fp8_flow,fp8_rowwise,mxfp8])
    fp8flow_on_ranks(launch ${ranks})
    fp8flow_gpu_test(gpu_train_twice_${ranks} gpu ${ranks} 300 COMMAND ${PROJECT_SOURCE_DIR}/tests/gpu/train_twice.sh ${gpu_runs}/twice_${ranks}
                     ${launch} ${program} train ${configs}/quickstart.yaml --backend hopper ${split} --set training.train_iters=1000
                     --set training.eval_iters=0)
    fp8flow_profile(short layer_qwen3_30b_a3b --steps 3 --recipes bf16,fp8_flow ${experts} --set training.global_batch_size=${ranks}
                    --set model.seq_length=1024 --set profile.energy_seconds=0)
endforeach()

# Whole steps with work on several streams under memcheck. (racecheck looks at the shared memory of one kernel.)
if(FP8FLOW_CUDA_ENABLED AND FP8FLOW_COMPUTE_SANITIZER)
    set(streams --set schedule.moe_shared_expert_overlap=true --set schedule.delay_wgrad_compute=true)
    set(micro_batches --set schedule.overlap_moe_expert_parallel_comm=true)
    fp8flow_watch(watch memcheck)
    foreach(ranks 1 2)
        fp8flow_on_ranks(launch ${ranks})
        foreach(schedule streams micro_batches)
            set(name memcheck_train_${schedule}_${ranks})
            fp8flow_gpu_test(${name} sanitizer ${ranks} 240 COMMAND ${launch} ${watch} ${program} train ${configs}/test.yaml --backend hopper
                             --out ${gpu_runs}/${name} --overwrite ${${schedule}} --set schedule.overlap_grad_reduce=true
                             --set parallel.expert_model_parallel_size=${ranks} --set training.train_iters=3 --set training.eval_iters=0
                             --set parallel.peer_deadline_seconds=200)
        endforeach()
    endforeach()
endif()

# ---- plugins, the Python package, the benchmark of a layer
set(exclude "")  # libraries of examples are built where their tests can run
if(NOT FP8FLOW_CUDA_ENABLED OR FP8FLOW_FAST_COMPILE)
    set(exclude EXCLUDE_FROM_ALL)
endif()
add_library(custom_recipe SHARED ${exclude} ${PROJECT_SOURCE_DIR}/examples/custom_recipe.cpp)
set_target_properties(custom_recipe PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
target_include_directories(custom_recipe PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR})
fp8flow_gpu_run(gpu_recipe gpu 1 300 validate test --plugin $<TARGET_FILE:custom_recipe> --set validate.recipes=[bf16,fp8_blockwise]
                --set validate.max_relative_loss_error=0.02)
set_tests_properties(gpu_recipe_1 PROPERTIES PASS_REGULAR_EXPRESSION "rows_of_128 [^\n]* pass")
if(FP8FLOW_CUDA_ENABLED)
    add_library(cuda_bench_plugin SHARED ${exclude} ${PROJECT_SOURCE_DIR}/examples/bench_plugin.cu)
    set_target_properties(cuda_bench_plugin PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    target_include_directories(cuda_bench_plugin PRIVATE ${PROJECT_SOURCE_DIR}/include)
    fp8flow_gpu_test(gpu_bench_plugin gpu 1 120 COMMAND ${program} bench add --backend hopper --plugin $<TARGET_FILE:cuda_bench_plugin>)
    set_tests_properties(gpu_bench_plugin PROPERTIES PASS_REGULAR_EXPRESSION "mine [^\n]*\\(equal\\)")
    add_library(epilogue_plugin SHARED ${exclude} ${PROJECT_SOURCE_DIR}/examples/epilogue_plugin.cu)
    set_target_properties(epilogue_plugin PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    target_include_directories(epilogue_plugin PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR})
    target_link_libraries(epilogue_plugin PRIVATE fp8flow_flags)
    fp8flow_gpu_test(gpu_epilogue_plugin gpu 1 120 COMMAND ${program} bench grouped_gemm --backend hopper --plugin $<TARGET_FILE:epilogue_plugin>
                     --shape type=fp8,M=4096,G=8,N=512,K=1024)
    set_tests_properties(gpu_epilogue_plugin PROPERTIES PASS_REGULAR_EXPRESSION "scaled epilogue [^\n]*\\(equal\\)")
endif()
if(TARGET fp8flow_shared)
    fp8flow_gpu_test(gpu_python gpu 1 300 COMMAND ${PROJECT_SOURCE_DIR}/scripts/test_python.sh --library $<TARGET_FILE:fp8flow_shared>)
endif()
fp8flow_gpu_test(bench_layer bench 1 120 COMMAND ${program} bench --suite layer --samples 5 --idle 0 --sustain 0 --backend hopper
                 --out ${gpu_runs}/bench_layer --overwrite)

# ---- layers of large models, schedules, hosts, divided state and the exchange on every GPU of a machine
set(quiet --set profile.energy_seconds=0)
set(synthetic --set data.data_kind=synthetic --set data.data_path=[])
# fp8flow_deepseek(OUT RANKS): DeepSeek-V3's layer with its experts on so many ranks: 256, but 128 on two ranks, as many per rank as on four
macro(fp8flow_deepseek out expert_ranks)
    set(${out} --set parallel.expert_model_parallel_size=${expert_ranks} --set moe.num_experts=$<IF:$<VERSION_GREATER:${expert_ranks},2>,256,128>
        --recipes fp8_flow)
endmacro()
foreach(ranks 2 4 8)
    math(EXPR half "${ranks} / 2")
    math(EXPR two_each "2 * ${ranks}")
    math(EXPR four_each "4 * ${ranks}")
    math(EXPR eight_each "8 * ${ranks}")
    fp8flow_deepseek(deepseek ${ranks})
    fp8flow_deepseek(deepseek_inside ${half})
    set(batch --set training.global_batch_size=${ranks})
    set(layer layer_deepseek_v3)
    fp8flow_profile(deepseek_v3 ${layer} ${deepseek} ${batch} --schedules)
    fp8flow_profile(deepseek_v3_micro_batches ${layer} --steps 8 ${deepseek} ${quiet} --set training.global_batch_size=${eight_each} --schedules)
    fp8flow_profile(deepseek_v3_graph ${layer} ${deepseek} ${batch} --state-dtypes --set schedule.moe_shared_expert_overlap=true
                    --set schedule.delay_wgrad_compute=true --set schedule.overlap_grad_reduce=true
                    --set schedule.cuda_graph_impl=full_iteration)
    fp8flow_profile(deepseek_v3_8192 ${layer} --steps 20 ${deepseek} ${quiet} --set training.micro_batch_size=2
                    --set training.global_batch_size=${two_each} --schedules)

    set(hosts ${batch} ${quiet} --set parallel.hosts=2x${half})
    fp8flow_profile(hosts_inside ${layer} ${deepseek_inside} ${hosts})
    fp8flow_profile(hosts_across ${layer} ${deepseek} ${hosts})
    fp8flow_profile(hosts_fixed_sizes ${layer} ${deepseek} ${hosts} --set parallel.moe_message_sizes=fixed)
    fp8flow_profile(hosts_two_levels ${layer} --steps 5 ${deepseek} ${hosts} --set parallel.moe_token_dispatcher_type=hierarchical)

    set(state h200_100m --recipes fp8_flow ${quiet} ${synthetic} --set training.micro_batch_size=4 --set training.global_batch_size=${four_each})
    set(replicas ${state} --set parallel.expert_model_parallel_size=${half})
    set(divided ${replicas} --set training.use_distributed_optimizer=true)
    fp8flow_profile(100m ${state} --set parallel.expert_model_parallel_size=${ranks} --schedules)
    fp8flow_profile(state_whole ${replicas})
    fp8flow_profile(state_divided ${divided})
    fp8flow_profile(state_divided_overlapped ${divided} --set schedule.overlap_grad_reduce=true --set schedule.overlap_param_gather=true)
    foreach(model qwen3_235b_a22b qwen3_30b_a3b mixtral_8x7b deepseek_v2_lite)
        fp8flow_profile(${model} layer_${model} --recipes bf16,fp8_blockwise,fp8_flow ${quiet} ${batch}
                        --set parallel.expert_model_parallel_size=${ranks})
    endforeach()

    fp8flow_gpu_run(train_qwen3_30b_a3b bench ${ranks} 300 train qwen3_30b_a3b --set moe.moe_router_force_load_balancing=true
                    --set parallel.expert_model_parallel_size=${ranks} --set training.global_batch_size=${four_each}
                    --set training.main_grads_dtype=bf16 --set training.exp_avg_dtype=bf16 --set training.exp_avg_sq_dtype=bf16
                    --set training.train_iters=8 --set training.lr_warmup_iters=2 --set training.eval_iters=0 --set output.log_interval=1)
    fp8flow_on_ranks(launch ${ranks})
    fp8flow_gpu_test(bench_exchange_${ranks} bench ${ranks} 180 COMMAND ${launch} ${program} bench --suite exchange --backend hopper
                     --out ${gpu_runs}/bench_exchange_${ranks} --overwrite)
    fp8flow_gpu_test(faults_${ranks} faults ${ranks} 400 COMMAND ${PROJECT_SOURCE_DIR}/scripts/reliability.py faults --fp8flow ${program}
                     --backend hopper --ranks ${ranks} --kinds killed,stopped,throwing --start 40 --deadline 10 --budget 320
                     --stages "MPI_Init,set_up,first step,step,checkpoint,exporting,summary" --json ${gpu_runs}/faults_${ranks}.json)
endforeach()
