# SPDX-License-Identifier: MIT
# One executable per test file, one ctest entry per executable (MPI tests: one per number of ranks). Labels: unit, golden, mpi,
# cli (the
# built program, driven by command lines), slow, and those of cmake/GpuTests.cmake. A test links the libraries that its include lines name, so
# that the tests of one layer build without the others.
find_package(GTest REQUIRED)
include(ProcessorCount)

# What every test runs under: OpenMP threads that sleep when idle (tests run in parallel), and an MPI that works in
# containers, as root, and with more ranks than cores.
set(fp8flow_test_environment
    OMP_WAIT_POLICY=passive
    HWLOC_COMPONENTS=-opencl  # OpenCL's compiler would take the signals of mpirun
    OMPI_ALLOW_RUN_AS_ROOT=1
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    OMPI_MCA_btl_vader_single_copy_mechanism=none
    OMPI_MCA_btl_base_warn_component_unused=0
    OMPI_MCA_hwloc_base_binding_policy=none
    OMPI_MCA_rmaps_base_oversubscribe=1
    OMPI_MCA_mpi_yield_when_idle=1
    OMPI_MCA_ess_singleton_isolated=1  # the program without mpirun starts no daemon, which costs it half a second
    OMPI_MCA_pml=ob1
    OMPI_MCA_btl=self,vader)

# Tests that build many models in one process keep the memory they free: a page fault for every 4 KiB that malloc gives back and
# takes again costs them more than their arithmetic.
set(fp8flow_keep_memory MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4294967296)

# Sets `out` to the libraries of the project headers that `files` include.
function(fp8flow_libraries_of out)
    set(libraries fp8flow_ops)
    foreach(file ${ARGN})
        file(STRINGS ${file} includes REGEX "^#include \"")
        if(includes MATCHES "#include \"model/safetensors/")
            list(APPEND libraries fp8flow_safetensors)
            list(FILTER includes EXCLUDE REGEX "model/safetensors/")  # does not need the rest of model/
        endif()
        foreach(layer core comm reference hopper layers model)
            set(folder ${layer})
            if(layer MATCHES "core|comm|reference|hopper")
                set(folder kernels/${layer})
            endif()
            if(includes MATCHES "#include \"${folder}/")
                list(APPEND libraries fp8flow_${layer})
            endif()
        endforeach()
        set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    endforeach()
    list(REMOVE_DUPLICATES libraries)
    set(${out} ${libraries} PARENT_SCOPE)
endfunction()

function(fp8flow_test_flags target)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${target} PRIVATE fp8flow_flags GTest::gtest)
    target_compile_definitions(${target} PRIVATE
        FP8FLOW_SOURCE_DIR="${PROJECT_SOURCE_DIR}" FP8FLOW_BINARY_DIR="${PROJECT_BINARY_DIR}"
        FP8FLOW_MPIEXEC="${MPIEXEC_EXECUTABLE}")
    # code that runs for milliseconds: two thirds of the time to compile
    target_compile_options(${target} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
    if(TARGET fp8flow)
        target_compile_definitions(${target} PRIVATE FP8FLOW_EXECUTABLE="$<TARGET_FILE:fp8flow>")
    endif()
endfunction()

# Checking builds parse the headers that nearly every test includes once. The other presets parse them for each test: one that lacks an
# include line does not compile there. Tests of command lines compute nothing: without optimisation they compile in half the time.
if(FP8FLOW_FAST_COMPILE)
    set(main_source ${PROJECT_BINARY_DIR}/generated/test_headers.cpp)
    file(CONFIGURE OUTPUT ${main_source} CONTENT "int main() {}\n")
    foreach(target test_headers cli_test_headers)
        add_executable(${target} EXCLUDE_FROM_ALL ${main_source})
        fp8flow_test_flags(${target})
        target_link_libraries(${target} PRIVATE fmt::fmt OpenMP::OpenMP_CXX)
        target_precompile_headers(${target} PRIVATE <gtest/gtest.h> <fmt/format.h> <algorithm> <chrono> <cmath> <cstring> <filesystem>
            <fstream> <functional> <limits> <map> <memory> <numeric> <set> <sstream> <string> <thread> <vector>)
    endforeach()
    target_compile_options(cli_test_headers PRIVATE -O0)
    target_link_libraries(cli_test_headers PRIVATE nlohmann_json::nlohmann_json)
    target_precompile_headers(cli_test_headers PRIVATE <nlohmann/json.hpp>)
endif()

# Helpers that tests of layers and models share and that take long to compile.
file(GLOB support_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/support/layers/*.cpp)
list(TRANSFORM support_sources REPLACE "[.]cpp$" ".h" OUTPUT_VARIABLE support_headers)
fp8flow_libraries_of(support_libraries ${support_headers})
add_library(fp8flow_test_support STATIC ${support_sources})
fp8flow_test_flags(fp8flow_test_support)
target_link_libraries(fp8flow_test_support PUBLIC ${support_libraries})

# fp8flow_test_executable(SOURCE [extra sources]): compiles one test file; sets test_name in the caller. A .cu file without code for
# devices is C++: nvcc takes twice as long for it.
function(fp8flow_test_executable source)
    if(source MATCHES "[.]cu$")
        file(STRINGS ${source} device_code REGEX "__global__|hopper/exchange/peer/|resident_layers.h")
        if(NOT device_code)
            set_source_files_properties(${source} PROPERTIES LANGUAGE CXX)
        endif()
    endif()
    get_filename_component(name ${source} NAME_WE)
    file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR}/tests ${source})
    string(REGEX REPLACE "/.*" "" folder ${folder})  # the kind of test; the folders below mirror the sources
    if(NOT folder STREQUAL "unit")
        set(name ${folder}_${name})
    endif()
    add_executable(${name} ${source} ${ARGN})
    fp8flow_libraries_of(libraries ${source} ${ARGN})
    fp8flow_test_flags(${name})
    if(libraries MATCHES "fp8flow_(layers|model)")
        target_link_libraries(${name} PRIVATE fp8flow_test_support)
    endif()
    target_link_libraries(${name} PRIVATE ${libraries})
    if(TARGET test_headers)
        target_link_libraries(${name} PRIVATE OpenMP::OpenMP_CXX)  # as the headers were read
        if(folder STREQUAL "cli")
            target_compile_options(${name} PRIVATE -O0)
            target_precompile_headers(${name} REUSE_FROM cli_test_headers)
        else()
            target_precompile_headers(${name} REUSE_FROM test_headers)
        endif()
    endif()
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    set(test_name ${name} PARENT_SCOPE)
endfunction()

file(GLOB_RECURSE unit_tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/unit/*_test.cpp)
foreach(source ${unit_tests})
    fp8flow_test_executable(${source})
    target_link_libraries(${test_name} PRIVATE GTest::gtest_main)
    add_test(NAME ${test_name} COMMAND ${test_name})
    set_tests_properties(${test_name} PROPERTIES LABELS unit TIMEOUT 900
        ENVIRONMENT "${fp8flow_test_environment};${fp8flow_keep_memory};OMP_NUM_THREADS=2")
endforeach()

# Golden runs: hashes of whole training runs against a committed file (tests/golden/golden.h). The GPUs' part lies in tests/gpu_mpi.
set(golden_sources ${PROJECT_SOURCE_DIR}/tests/golden/cases.cpp ${PROJECT_SOURCE_DIR}/tests/golden/golden.cpp)
file(GLOB golden_tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/golden/*_test.cpp)
foreach(source ${golden_tests})
    fp8flow_test_executable(${source} ${golden_sources})
    target_link_libraries(${test_name} PRIVATE GTest::gtest_main nlohmann_json::nlohmann_json)
    add_test(NAME ${test_name} COMMAND ${test_name})
    set_tests_properties(${test_name} PROPERTIES LABELS golden TIMEOUT 900 PROCESSORS 2
        ENVIRONMENT "${fp8flow_test_environment};${fp8flow_keep_memory};OMP_NUM_THREADS=1;FP8FLOW_GOLDEN=compare")
endforeach()

file(GLOB slow_tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/slow/*_test.cpp)
ProcessorCount(processors)
foreach(source ${slow_tests})
    fp8flow_test_executable(${source})
    target_link_libraries(${test_name} PRIVATE GTest::gtest_main)
    add_test(NAME ${test_name} COMMAND ${test_name})
    set_tests_properties(${test_name} PROPERTIES LABELS slow TIMEOUT 3600 PROCESSORS ${processors}
        ENVIRONMENT "${fp8flow_test_environment}")
endforeach()

if(FP8FLOW_SANITIZE MATCHES address)
    # Open MPI does not free all it allocates; the library with the faults is loaded before the sanitizer's.
    list(APPEND fp8flow_test_environment ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0)
endif()
file(GLOB mpi_tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/mpi/*_test.cpp)
foreach(source ${mpi_tests})
    fp8flow_test_executable(${source} ${PROJECT_SOURCE_DIR}/tests/mpi/mpi_main.cpp)
    target_link_libraries(${test_name} PRIVATE fp8flow_mpi MPI::MPI_CXX)
    foreach(ranks 1 2 4)
        add_test(NAME ${test_name}_${ranks} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks}
                 --oversubscribe --bind-to none $<TARGET_FILE:${test_name}>)
        set_tests_properties(${test_name}_${ranks} PROPERTIES LABELS mpi TIMEOUT 300 PROCESSORS ${ranks}
            ENVIRONMENT "${fp8flow_test_environment};OMP_NUM_THREADS=1")
    endforeach()
endforeach()

# Four ranks on two hosts, both of them this machine. The daemons and the ranks talk over loopback, so no network is needed.
foreach(name mpi_exchange_test mpi_training_test)
    add_test(NAME ${name}_two_hosts COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} 4 --host nodea:2,nodeb:2
             --mca plm_rsh_agent ${PROJECT_SOURCE_DIR}/tests/mpi/daemon_here.sh --bind-to none $<TARGET_FILE:${name}>)
    set(environment ${fp8flow_test_environment})
    list(REMOVE_ITEM environment OMPI_MCA_btl=self,vader)
    list(APPEND environment OMP_NUM_THREADS=1 FP8FLOW_TEST_HOSTS=2 OMPI_MCA_plm=rsh OMPI_MCA_btl=self,vader,tcp
         OMPI_MCA_btl_tcp_if_include=lo OMPI_MCA_oob_tcp_if_include=lo)
    set_tests_properties(${name}_two_hosts PROPERTIES LABELS mpi TIMEOUT 600 PROCESSORS 4 ENVIRONMENT "${environment}")
endforeach()

file(GLOB cli_tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/cli/*_test.cpp
     ${PROJECT_SOURCE_DIR}/tests/cli/scripts/*_test.cpp)
if(TARGET fp8flow)
    add_library(fp8flow_command STATIC ${PROJECT_SOURCE_DIR}/tests/cli/command.cpp)
    fp8flow_test_flags(fp8flow_command)
    target_link_libraries(fp8flow_command PUBLIC nlohmann_json::nlohmann_json)
    foreach(source ${cli_tests})
        fp8flow_test_executable(${source})
        target_link_libraries(${test_name} PRIVATE fp8flow_command GTest::gtest_main)
        add_dependencies(${test_name} fp8flow)
        add_test(NAME ${test_name} COMMAND ${test_name})
        set_tests_properties(${test_name} PROPERTIES LABELS cli TIMEOUT 600
            ENVIRONMENT "${fp8flow_test_environment};OMP_NUM_THREADS=1")
    endforeach()
    # Preloaded into the program by watchdog_test. Its ranks have a core each: a rank without one is silent, too.
    add_library(fp8flow_faults SHARED ${PROJECT_SOURCE_DIR}/tests/cli/faults/faults.cpp)
    target_link_libraries(fp8flow_faults PRIVATE fp8flow_flags MPI::MPI_CXX ${CMAKE_DL_LIBS})
    set_target_properties(fp8flow_faults PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    enable_language(C)
    add_library(bench_plugin SHARED ${PROJECT_SOURCE_DIR}/examples/bench_plugin.c)
    add_library(wrong_plugin SHARED ${PROJECT_SOURCE_DIR}/tests/cli/plugins/plugins.c)
    foreach(plugin bench_plugin wrong_plugin)
        target_include_directories(${plugin} PRIVATE ${PROJECT_SOURCE_DIR}/include)
        target_compile_options(${plugin} PRIVATE -std=c11 -Wall -Wextra $<$<BOOL:${FP8FLOW_WERROR}>:-Werror>)
        set_target_properties(${plugin} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
        add_dependencies(cli_plugins_test ${plugin})
    endforeach()
    add_library(planted_faults SHARED ${PROJECT_SOURCE_DIR}/examples/planted_faults.cpp)
    target_include_directories(planted_faults PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR})
    set_target_properties(planted_faults PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    add_dependencies(cli_validate_test planted_faults)
    add_dependencies(cli_plugins_test fp8flow_faults)
    add_dependencies(cli_watchdog_test fp8flow_faults)
    add_dependencies(cli_memory_test fp8flow_faults)
    add_dependencies(cli_stop_test fp8flow_faults)
    set_tests_properties(cli_watchdog_test PROPERTIES PROCESSORS 4)
    set_tests_properties(cli_profile_test PROPERTIES RUN_SERIAL ON)  # it compares times
endif()

# The C interface, as C reads it.
if(TARGET fp8flow_shared)
    enable_language(C)
    add_executable(c_interface ${PROJECT_SOURCE_DIR}/tests/library/c_interface.c)
    target_include_directories(c_interface PRIVATE ${PROJECT_SOURCE_DIR}/include)
    target_link_libraries(c_interface PRIVATE fp8flow_shared)
    target_compile_options(c_interface PRIVATE -std=c11 -Wall -Wextra $<$<BOOL:${FP8FLOW_WERROR}>:-Werror>)
    set_target_properties(c_interface PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    add_test(NAME c_interface COMMAND c_interface)
    set_tests_properties(c_interface PROPERTIES LABELS unit TIMEOUT 60 ENVIRONMENT "${fp8flow_test_environment};OMP_NUM_THREADS=2")
endif()

# The installed library, and examples/ built with it in a folder of their own.
if(TARGET fp8flow_shared)
    add_test(NAME installed_library COMMAND ${CMAKE_COMMAND} -DBUILD=${PROJECT_BINARY_DIR} -DSOURCE=${PROJECT_SOURCE_DIR}
             -DWORK=${PROJECT_BINARY_DIR}/library_test -DNVCC=${FP8FLOW_NVCC} -DDEPS=${FP8FLOW_DEPS}
             -P ${PROJECT_SOURCE_DIR}/tests/library/installed.cmake)
    set_tests_properties(installed_library PROPERTIES LABELS cli TIMEOUT 600 ENVIRONMENT "${fp8flow_test_environment};OMP_NUM_THREADS=2"
                         REQUIRED_FILES "$<TARGET_FILE:fp8flow>;$<TARGET_LINKER_FILE:fp8flow_shared_mpi>")
endif()

# Published figures: docs/results says where each comes from, and the documents say what docs/results says.
find_package(Python3 COMPONENTS Interpreter)
if(Python3_Interpreter_FOUND)
    add_test(NAME results_provenance COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/results.py check)
    add_test(NAME results_tables COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/make_documents.py --check)
    # Mistakes that the tests must catch: here only that each can still be planted.
    add_test(NAME planted_bugs_apply COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/planted_bugs.py --check)
    # Rules of the sources and the documents.
    foreach(name include_rules_test documents_test)
        add_test(NAME ${name} COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tests/unit/house/${name}.py ${PROJECT_SOURCE_DIR})
    endforeach()
    set_tests_properties(results_provenance results_tables planted_bugs_apply include_rules_test documents_test PROPERTIES LABELS unit TIMEOUT 60)
    if(TARGET fp8flow)
        add_test(NAME program_documents COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/make_documents.py
                 --check --program $<TARGET_FILE:fp8flow>)
        set_tests_properties(program_documents PROPERTIES LABELS cli TIMEOUT 60)
    endif()
else()
    message(STATUS "python3 is not here: results, their tables, documents and include rules are not checked")
endif()

include(GpuTests)
