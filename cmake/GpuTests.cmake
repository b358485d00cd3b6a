# SPDX-License-Identifier: MIT
# Tests and checks that need GPUs; scripts/gpu_check.sh selects them. Labels: gpu (one GPU), multi-gpu (2, 4 or 8), sanitizer (under
# compute-sanitizer), bench (measures: nothing else may use the GPU), faults (ranks that are lost), and gpusN for the N GPUs that it needs. The
# name of a check with MPI ranks ends in their number. Each check gets its GPUs from tests/gpu/on_gpus.sh, which also skips it where they
# are too few.
set(fp8flow_skipped_code 77)
set(gpu_rank_counts 1 2 4 8)

# fp8flow_gpu_test(NAME LABEL GPUS SECONDS COMMAND ... [ENVIRONMENT ...])
function(fp8flow_gpu_test name label gpus seconds)
    cmake_parse_arguments(ARG "" "" "COMMAND;ENVIRONMENT" ${ARGN})
    if(label STREQUAL "gpu" AND gpus GREATER 1)
        set(label multi-gpu)
    endif()
    add_test(NAME ${name} COMMAND ${PROJECT_SOURCE_DIR}/tests/gpu/on_gpus.sh ${gpus} ${ARG_COMMAND})
    set_tests_properties(${name} PROPERTIES LABELS "${label};gpus${gpus}" TIMEOUT ${seconds} PROCESSORS ${gpus}
        RESOURCE_GROUPS "${gpus},gpus:1" SKIP_RETURN_CODE ${fp8flow_skipped_code} SKIP_REGULAR_EXPRESSION "Device not supported|not supported on this"
        FAIL_REGULAR_EXPRESSION "0 tests from 0 test suites ran"  # a filter that selects nothing
        ENVIRONMENT "${fp8flow_test_environment};OMP_NUM_THREADS=2;NCCL_NVLS_ENABLE=0;${ARG_ENVIRONMENT}")
endfunction()
macro(fp8flow_on_ranks out ranks)
    set(${out} ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} --quiet --bind-to none --oversubscribe)
endmacro()

# ---- tests of one GPU: *.cpp use only headers that exist without CUDA, *.cu are built with the CUDA backend
file(GLOB_RECURSE gpu_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/gpu/*_test.cpp)
if(FP8FLOW_CUDA_ENABLED)
    file(GLOB_RECURSE gpu_cuda_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/gpu/*_test.cu)
endif()
add_library(fp8flow_gpu_main STATIC ${PROJECT_SOURCE_DIR}/tests/gpu/gpu_main.cpp)
fp8flow_test_flags(fp8flow_gpu_main)
target_compile_definitions(fp8flow_gpu_main PRIVATE FP8FLOW_SKIPPED_CODE=${fp8flow_skipped_code})
target_link_libraries(fp8flow_gpu_main PUBLIC fp8flow_hopper)
foreach(source ${gpu_sources} ${gpu_cuda_sources})
    fp8flow_test_executable(${source})
    target_link_libraries(${test_name} PRIVATE fp8flow_gpu_main fp8flow_reference fp8flow_hopper)  # both, through tests/support/parity.h
    fp8flow_gpu_test(${test_name} gpu 1 300 COMMAND $<TARGET_FILE:${test_name}>)
    if(test_name MATCHES "norm|permute|quantize|wide_rows|router|gemm")
        set_tests_properties(${test_name} PROPERTIES COST 10)  # the longest start first
    endif()
    list(APPEND gpu_tests ${test_name})
endforeach()

# ---- tests under mpirun, in parts that are tests of their own: each TEST of the golden runs, each kind of exchange
if(FP8FLOW_CUDA_ENABLED)
    file(GLOB gpu_mpi_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/gpu_mpi/*_test.cu)
endif()
foreach(source ${gpu_mpi_sources})
    set(extra_sources ${PROJECT_SOURCE_DIR}/tests/gpu_mpi/gpu_mpi_main.cpp)
    set(filters *)
    if(source MATCHES "/golden_test.cu$")
        list(APPEND extra_sources ${golden_sources})
        file(STRINGS ${source} filters REGEX "^TEST[(]")
        list(TRANSFORM filters REPLACE "^TEST[(]([A-Za-z]+), ([A-Za-z]+)[)].*" "\\1.\\2")
    elseif(source MATCHES "/exchange_gpu_test.cu$")
        file(STRINGS ${PROJECT_SOURCE_DIR}/tests/gpu_mpi/gpu_job.h kinds REGEX "^enum class Kind {")
        string(REGEX REPLACE ".*{ (.*) }.*" "\\1" kinds "${kinds}")
        string(REPLACE ", " ";" filters "${kinds}")
        list(TRANSFORM filters PREPEND "*/")
    endif()
    fp8flow_test_executable(${source} ${extra_sources})
    target_compile_definitions(${test_name} PRIVATE FP8FLOW_SKIPPED_CODE=${fp8flow_skipped_code})
    target_link_libraries(${test_name} PRIVATE fp8flow_mpi fp8flow_reference fp8flow_hopper MPI::MPI_CXX nlohmann_json::nlohmann_json)
    list(APPEND gpu_mpi_tests ${test_name})
    foreach(ranks ${gpu_rank_counts})
        fp8flow_on_ranks(launch ${ranks})
        foreach(filter ${filters})
            string(REGEX REPLACE "[*]/?" "" part "${filter}")
            set(environment "")
            if(filter MATCHES "^[*]/" AND NOT part STREQUAL "window")
                set(environment NCCL_CUMEM_ENABLE=0)  # NCCL starts sooner (tests/gpu_mpi/golden_test.cu); its windows need handles of cuMem
            endif()
            if(part)
                set(part .${part})
            endif()
            if(ranks EQUAL 8 AND part STREQUAL ".Golden.Hopper")
                continue()  # the committed file has jobs of 1, 2 and 4 ranks
            endif()
            fp8flow_gpu_test(${test_name}${part}_${ranks} gpu ${ranks} 600 COMMAND ${launch} $<TARGET_FILE:${test_name}> --gtest_filter=${filter}
                             ENVIRONMENT ${environment})
            if(part STREQUAL ".Golden.Hopper")
                set_tests_properties(${test_name}${part}_${ranks} PROPERTIES RESOURCE_LOCK golden_file)  # with FP8FLOW_GOLDEN=write
            endif()
        endforeach()
    endforeach()
endforeach()

# ---- compute-sanitizer: memcheck runs whole tests, the slow tools the small shapes (tests/support/cases.h). They watch this project's kernels;
# racecheck and initcheck do not follow what libraries write, so they run the cases without libraries.
set(memcheck_options --leak-check no --report-api-errors no)  # NCCL asks for kernels that it does not have; our calls are checked
set(synccheck_options --num-cuda-barriers 4096)  # the tool's default covers C++'s cuda::barrier only
set(racecheck_options --num-cuda-barriers 256)
set(initcheck_options "")
set(synccheck_environment FP8FLOW_SMALL_SHAPES=1)
set(racecheck_environment FP8FLOW_SMALL_SHAPES=1 FP8FLOW_OWN_KERNELS=1)
set(initcheck_environment ${racecheck_environment})
# racecheck (2025.3) does not follow three ways to order accesses, and reports what they order: a release in which one thread arrives for its
# warp (scales of the FP8 GEMMs), an order between two warp roles through a third (rings of column tiles), and stores that complete
# another CTA's barrier (st.async in the cross-entropy). The other tools run these tests. initcheck keeps a shadow of freed memory.
set(racecheck_gpu_gemm_parity_test -GroupedGemmParity.ManyStepsAndTiles:GemmParity.Fp8Layouts)
set(racecheck_gpu_quantize_parity_test -QuantizeParity.*Columns*:QuantizeParity.Dual)
set(racecheck_gpu_token_parity_test -TokenParity.CrossEntropy*)
set(initcheck_gpu_peer_exchange_test -PeerMemory.IsCreatedAndFreedManyTimes)

# fp8flow_watch(OUT TOOL [BARRIERS]): the command line of compute-sanitizer, for a program after it
find_program(FP8FLOW_COMPUTE_SANITIZER compute-sanitizer HINTS ${CUDAToolkit_BIN_DIR})
macro(fp8flow_watch out tool)
    set(${out} ${FP8FLOW_COMPUTE_SANITIZER} --tool ${tool} --error-exitcode 1 --print-limit 20 --kernel-name kns=fp8flow ${${tool}_options})
endmacro()
if(FP8FLOW_CUDA_ENABLED AND FP8FLOW_COMPUTE_SANITIZER)
    foreach(tool memcheck initcheck racecheck synccheck)
        fp8flow_watch(watch ${tool})
        foreach(test ${gpu_tests})
            if(NOT test MATCHES "_parity_test$|_exchange_test$" OR (tool MATCHES "racecheck|initcheck" AND test MATCHES "_step_parity_test"))
                continue()
            endif()
            set(filter "*")
            if(${tool}_${test})
                set(filter ${${tool}_${test}})
            endif()
            if(test MATCHES "_step_parity_test")
                set(filter *_native)
            endif()
            set(command ${watch})
            if(test MATCHES "peer_exchange_test")
                list(TRANSFORM command REPLACE "^4096$" "1024")  # each node of a graph takes memory for its barriers
            endif()
            fp8flow_gpu_test(${tool}_${test} sanitizer 1 400 COMMAND ${command} $<TARGET_FILE:${test}> --gtest_brief=1 --gtest_filter=${filter}
                             ENVIRONMENT ${${tool}_environment})
        endforeach()
    endforeach()
    fp8flow_watch(watch memcheck)
    fp8flow_on_ranks(launch 2)
    foreach(test ${gpu_mpi_tests})
        if(NOT test MATCHES "golden")  # whole trainings, of operations that the other tests watch
            fp8flow_gpu_test(memcheck_${test}_2 sanitizer 2 400 COMMAND ${launch} ${watch} $<TARGET_FILE:${test}> --gtest_brief=1)
        endif()
    endforeach()
endif()

include(GpuRuns)
