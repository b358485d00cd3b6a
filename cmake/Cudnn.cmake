# SPDX-License-Identifier: MIT
# Decides whether attention on cuDNN is built into the CUDA backend. Needs cudnn.h and libcudnn (>= 9.5) and the header-only cudnn-frontend
# (1.14 to 1.18), each looked for under FP8FLOW_DEPS, CMAKE_PREFIX_PATH, CUDNN_PATH, next to CUDA and in the system.
# cudnn-frontend 1.19 and later compile kernels of their own at run time: they need nvrtc, which this project does not link.
# Sets FP8FLOW_CUDNN_ENABLED, FP8FLOW_CUDNN_REASON (why it is not built); fp8flow_use_cudnn(TARGET) adds it to a library.
set(FP8FLOW_CUDNN AUTO CACHE STRING "Build attention on cuDNN: ON, OFF, or AUTO (where cuDNN and cudnn-frontend are found)")
set_property(CACHE FP8FLOW_CUDNN PROPERTY STRINGS AUTO ON OFF)
if(NOT FP8FLOW_CUDNN MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "FP8FLOW_CUDNN is '${FP8FLOW_CUDNN}', want AUTO, ON or OFF")
endif()

include(HeaderVersion)

function(fp8flow_find_cudnn)
    set(roots ${FP8FLOW_DEPS} ${CUDNN_PATH} $ENV{CUDNN_PATH} ${CUDAToolkit_LIBRARY_ROOT})
    find_path(FP8FLOW_CUDNN_INCLUDE cudnn.h HINTS ${roots} ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
    find_library(FP8FLOW_CUDNN_LIBRARY NAMES cudnn libcudnn.so.9 NAMES_PER_DIR HINTS ${roots} ${CUDAToolkit_LIBRARY_DIR}
                 PATH_SUFFIXES lib lib64)
    find_path(FP8FLOW_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${roots} PATH_SUFFIXES include)
    mark_as_advanced(FP8FLOW_CUDNN_INCLUDE FP8FLOW_CUDNN_LIBRARY FP8FLOW_CUDNN_FRONTEND_INCLUDE)
    set(problem "" PARENT_SCOPE)
    if(NOT FP8FLOW_CUDNN_INCLUDE OR NOT EXISTS "${FP8FLOW_CUDNN_INCLUDE}/cudnn_version.h")
        set(problem "cudnn.h is not here" PARENT_SCOPE)
        return()
    elseif(NOT FP8FLOW_CUDNN_LIBRARY)
        set(problem "libcudnn.so is not here" PARENT_SCOPE)
        return()
    elseif(NOT FP8FLOW_CUDNN_FRONTEND_INCLUDE)
        set(problem "cudnn_frontend.h is not here (scripts/fetch_deps.sh gets it)" PARENT_SCOPE)
        return()
    endif()
    fp8flow_header_version(cudnn_version ${FP8FLOW_CUDNN_INCLUDE}/cudnn_version.h CUDNN "MAJOR;MINOR")
    fp8flow_header_version(frontend_version ${FP8FLOW_CUDNN_FRONTEND_INCLUDE}/cudnn_frontend_version.h CUDNN_FRONTEND
                           "MAJOR_VERSION;MINOR_VERSION")
    if(cudnn_version VERSION_LESS 9.5)
        set(problem "cuDNN is '${cudnn_version}', older than 9.5" PARENT_SCOPE)
    elseif(frontend_version VERSION_LESS 1.14)
        set(problem "cudnn-frontend is '${frontend_version}', older than 1.14; use 1.18.0 (scripts/fetch_deps.sh gets it)" PARENT_SCOPE)
    elseif(frontend_version VERSION_GREATER_EQUAL 1.19)
        set(problem "cudnn-frontend ${frontend_version} does not link (1.19 and later need nvrtc); use 1.18.0 (scripts/fetch_deps.sh gets it)" PARENT_SCOPE)
    endif()
    set(versions "cuDNN ${cudnn_version}, cudnn-frontend ${frontend_version}" PARENT_SCOPE)
endfunction()

set(FP8FLOW_CUDNN_ENABLED OFF)
if(FP8FLOW_CUDNN STREQUAL "OFF")
    set(FP8FLOW_CUDNN_REASON "switched off (FP8FLOW_CUDNN=OFF)")
elseif(NOT FP8FLOW_CUDA_ENABLED)
    set(FP8FLOW_CUDNN_REASON "the CUDA backend is not built")
else()
    fp8flow_find_cudnn()
    set(FP8FLOW_CUDNN_REASON "${problem}")
endif()
if(FP8FLOW_CUDNN_REASON STREQUAL "")
    set(FP8FLOW_CUDNN_ENABLED ON)
    message(STATUS "Attention on cuDNN: on (${versions}: ${FP8FLOW_CUDNN_LIBRARY})")
elseif(FP8FLOW_CUDNN STREQUAL "ON")
    message(FATAL_ERROR "FP8FLOW_CUDNN=ON, but ${FP8FLOW_CUDNN_REASON}; give a prefix with -DFP8FLOW_DEPS=DIR or -DCUDNN_PATH=DIR")
else()
    message(STATUS "Attention on cuDNN: off: ${FP8FLOW_CUDNN_REASON}")
endif()

function(fp8flow_use_cudnn target)
    # before CUDA's headers, which may include another cuDNN
    target_include_directories(${target} SYSTEM BEFORE PRIVATE ${FP8FLOW_CUDNN_FRONTEND_INCLUDE} ${FP8FLOW_CUDNN_INCLUDE})
    target_link_libraries(${target} PRIVATE ${FP8FLOW_CUDNN_LIBRARY})
    # without its logger, which reads the environment, and its serialiser, which includes a second JSON library
    target_compile_definitions(${target} PRIVATE NV_CUDNN_FRONTEND_DISABLE_LOGGING CUDNN_FRONTEND_SKIP_JSON_LIB)
endfunction()
