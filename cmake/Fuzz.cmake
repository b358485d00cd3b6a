# SPDX-License-Identifier: MIT
# Fuzz targets: tests/fuzz/NAME_fuzz.cpp with the seeds tests/fuzz/seeds/NAME, and the parsers they enter, all of it under ASan + UBSan in every
# build. With Clang they are libFuzzer executables (preset fuzz; run them as long as you like: fuzz_NAME -max_total_time=600 seeds/NAME);
# otherwise tests/fuzz/driver.cpp runs the same entry on the seeds and on mutations of them. Either way ctest runs each for seconds,
# and longer with label slow (scripts/test.sh --slow).
set(fp8flow_fuzz_sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g)
if(FP8FLOW_FAST_COMPILE)
    list(APPEND fp8flow_fuzz_sanitizers -O0)  # half the time to compile; the parsers run for seconds
endif()
if(FP8FLOW_SANITIZE)
    set(fp8flow_fuzz_sanitizers)  # the whole build has its own, which may not go with these
endif()

file(GLOB fuzzed_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/model/safetensors/*.cpp ${PROJECT_SOURCE_DIR}/model/config/*.cpp)
foreach(name report/records checkpoint/manifest data/token_stream data/data data/files data/megatron data/shards)
    list(APPEND fuzzed_sources ${PROJECT_SOURCE_DIR}/model/${name}.cpp)
endforeach()
add_library(fp8flow_fuzzed STATIC EXCLUDE_FROM_ALL ${fuzzed_sources})
if(FP8FLOW_FAST_COMPILE)
    set_target_properties(fp8flow_fuzzed PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)  # as fp8flow_model
endif()
target_include_directories(fp8flow_fuzzed PUBLIC ${PROJECT_SOURCE_DIR})
target_link_libraries(fp8flow_fuzzed PUBLIC fp8flow_flags fp8flow_core ${FP8FLOW_YAML} nlohmann_json::nlohmann_json)
# The configuration asks flows; those are not fuzzed, and compiled as ever.
target_link_libraries(fp8flow_fuzzed INTERFACE $<LINK_ONLY:fp8flow_layers>)
target_compile_options(fp8flow_fuzzed PUBLIC ${fp8flow_fuzz_sanitizers})
target_link_options(fp8flow_fuzzed PUBLIC ${fp8flow_fuzz_sanitizers})

if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    add_library(fp8flow_fuzz_driver STATIC EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/tests/fuzz/driver.cpp)
    target_link_libraries(fp8flow_fuzz_driver PRIVATE fp8flow_flags)
    target_compile_options(fp8flow_fuzz_driver PRIVATE ${fp8flow_fuzz_sanitizers})
endif()
file(GLOB fuzz_targets CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/*_fuzz.cpp)
foreach(source ${fuzz_targets})
    get_filename_component(name ${source} NAME_WE)
    string(REPLACE "_fuzz" "" name ${name})
    set(seeds ${PROJECT_SOURCE_DIR}/tests/fuzz/seeds/${name})
    set(extra_seeds)
    set(runs 50000)
    if(name STREQUAL "config")
        set(extra_seeds ${PROJECT_SOURCE_DIR}/configs)
        set(runs 10000)  # a configuration is read, printed and read again
    endif()
    set(limits)
    add_executable(fuzz_${name} ${source})
    target_link_libraries(fuzz_${name} PRIVATE fp8flow_fuzzed)
    if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
        target_compile_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
        target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
        target_compile_options(fp8flow_fuzzed PRIVATE -fsanitize=fuzzer-no-link)
        set(limits -timeout=5 -rss_limit_mb=512 -artifact_prefix=${PROJECT_BINARY_DIR}/)
    else()
        target_link_libraries(fuzz_${name} PRIVATE fp8flow_fuzz_driver)
    endif()
    set_target_properties(fuzz_${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    # libFuzzer adds what it finds to the first folder, which is not that of the seeds
    set(found ${PROJECT_BINARY_DIR}/fuzz/${name})
    file(MAKE_DIRECTORY ${found})
    # the seeds and the first fifth of the mutations at every change, all of them with the slow tests
    math(EXPR first_runs "${runs} / 5")
    set(inputs -seed=1 -max_len=4096 ${limits} ${found} ${seeds} ${extra_seeds})
    add_test(NAME fuzz_${name} COMMAND fuzz_${name} -runs=${first_runs} ${inputs})
    add_test(NAME fuzz_${name}_long COMMAND fuzz_${name} -runs=${runs} ${inputs})
    set_tests_properties(fuzz_${name} fuzz_${name}_long PROPERTIES LABELS fuzz TIMEOUT 300 WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
    set_property(TEST fuzz_${name}_long APPEND PROPERTY LABELS slow)
endforeach()
