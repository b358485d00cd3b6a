# SPDX-License-Identifier: MIT
# Finds out whether the CUDA toolkit on this machine can build the CUDA backend, by compiling a small program with it.
# Result: fp8flow_nvcc (path) and fp8flow_nvcc_problem (one line; empty when all is well).
# As a script (cmake -P cmake/CudaToolkit.cmake) it prints that line, for scripts/train.sh and scripts/test.sh.
cmake_minimum_required(VERSION 3.25)
set(fp8flow_nvcc_minimum 12.9)

function(fp8flow_find_cuda_toolkit)
    set(fp8flow_nvcc "" PARENT_SCOPE)
    set(problem "")
    find_program(nvcc NAMES nvcc NO_CACHE HINTS "$ENV{CUDACXX}" ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
                 PATHS /usr/local/cuda/bin)
    if(DEFINED ENV{CUDACXX})
        set(nvcc "$ENV{CUDACXX}")
    endif()
    if(NOT nvcc)
        set(fp8flow_nvcc_problem "nvcc not found" PARENT_SCOPE)
        return()
    endif()
    execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
    if(NOT status EQUAL 0 OR NOT text MATCHES "release ([0-9]+\\.[0-9]+)")
        set(fp8flow_nvcc_problem "${nvcc} does not run" PARENT_SCOPE)
        return()
    endif()
    set(version ${CMAKE_MATCH_1})
    if(version VERSION_LESS fp8flow_nvcc_minimum)
        set(fp8flow_nvcc_problem "nvcc is ${version}, older than ${fp8flow_nvcc_minimum}" PARENT_SCOPE)
        return()
    endif()
    # Compile and link: finds a missing header, ptxas, static runtime, or a host compiler that nvcc refuses.
    execute_process(COMMAND mktemp -d OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE)
    file(WRITE ${folder}/probe.cu "#include <cuda.h>\n#include <cuda_bf16.h>\n#include <cuda_fp8.h>\n#include <cuda_runtime.h>\n"
         "__global__ void probe() {}\nint main() { probe<<<1, 1>>>(); return cudaDeviceSynchronize() != cudaSuccess; }\n")
    execute_process(COMMAND ${nvcc} -std=c++20 -arch=sm_90a -o ${folder}/probe ${folder}/probe.cu
                    OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE status)
    file(REMOVE_RECURSE ${folder})
    if(NOT status EQUAL 0)
        string(REGEX MATCH "[^\n]*(error|fatal|cannot|not found)[^\n]*" line "${text}")
        string(REPLACE "${folder}/" "" line "${line}")
        set(fp8flow_nvcc_problem "the CUDA toolkit ${version} is incomplete: ${line}" PARENT_SCOPE)
        return()
    endif()
    set(fp8flow_nvcc "${nvcc}" PARENT_SCOPE)
    set(fp8flow_nvcc_problem "" PARENT_SCOPE)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
    fp8flow_find_cuda_toolkit()
    if(fp8flow_nvcc_problem)
        execute_process(COMMAND ${CMAKE_COMMAND} -E echo "${fp8flow_nvcc_problem}")
    endif()
endif()
