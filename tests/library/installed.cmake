# SPDX-License-Identifier: MIT
# The library as another program meets it: packed from BUILD as a release is, and unpacked into a folder of its own; examples/ copied
# elsewhere, configured with nothing but the prefix, built and run. No header that comes with it names MPI, YAML or CUDA.
#   cmake -DBUILD=build/cpu -DSOURCE=. -DWORK=build/cpu/library_test [-DNVCC=path] -P tests/library/installed.cmake
function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
    if(NOT status EQUAL 0)
        list(JOIN ARGN " " line)
        message(FATAL_ERROR "${line}: status ${status}\n${text}")
    endif()
    message(STATUS "${text}")
endfunction()

file(REMOVE_RECURSE ${WORK})
run(cpack --config ${BUILD}/CPackConfig.cmake -B ${WORK}/package)
file(GLOB archive ${WORK}/package/fp8flow-*.tar.gz)
file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${WORK})
file(GLOB unpacked ${WORK}/fp8flow-*)
file(RENAME ${unpacked} ${WORK}/prefix)
run(${WORK}/prefix/bin/fp8flow --version)
run(${WORK}/prefix/bin/fp8flow plan ${WORK}/prefix/share/fp8flow/configs/quickstart.yaml)

foreach(file README.md docs/usage/new_recipe.md examples/custom_recipe.cpp python/fp8flow/__init__.py python/fp8flow/libfp8flow.so)
    if(NOT EXISTS ${WORK}/prefix/share/fp8flow/${file})
        message(FATAL_ERROR "share/fp8flow/${file} is not in the package")
    endif()
endforeach()

file(GLOB_RECURSE headers ${WORK}/prefix/include/fp8flow/*.h)
list(LENGTH headers count)
if(count LESS 30)
    message(FATAL_ERROR "${count} headers are installed")
endif()
foreach(header ${headers})
    file(STRINGS ${header} lines REGEX "#include [<\"](mpi|yaml-cpp|cuda|cublas|nccl|kernels/|layers/|model/)")
    if(lines)
        message(FATAL_ERROR "${header}: ${lines}")
    endif()
endforeach()

# As pip configures it: CUDA files are not built where no GPU could run them, unless asked for.
file(GLOB gpus /dev/nvidia[0-9]*)
if(NOT gpus)
    execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/pip -DFP8FLOW_TESTS=OFF -DFP8FLOW_DEPS=${DEPS}
                    RESULT_VARIABLE status OUTPUT_VARIABLE text ERROR_VARIABLE text)
    if(NOT status EQUAL 0 OR NOT text MATCHES "CUDA backend: off: no GPU is here [(]FP8FLOW_CUDA=ON")
        message(FATAL_ERROR "without a GPU, FP8FLOW_CUDA=AUTO: status ${status}\n${text}")
    endif()
endif()

file(COPY ${SOURCE}/examples/ DESTINATION ${WORK}/examples)
set(options -S ${WORK}/examples -B ${WORK}/build -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/prefix)
if(NVCC)
    list(APPEND options -DCMAKE_CUDA_COMPILER=${NVCC})
endif()
run(${CMAKE_COMMAND} ${options})
run(${CMAKE_COMMAND} --build ${WORK}/build)
foreach(name moe_layer grouped_gemm)
    if(EXISTS ${WORK}/build/${name})
        run(${WORK}/build/${name})
    endif()
endforeach()
run(${WORK}/prefix/bin/fp8flow train ${WORK}/prefix/share/fp8flow/configs/test.yaml --backend reference
    --plugin ${WORK}/build/libcustom_recipe.so --set training.train_iters=2 --out ${WORK}/recipe)
